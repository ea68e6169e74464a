"""CONTRIBUTING.md's example of a new method: its patch applies, and meets the laws."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PATCH = ROOT / "docs" / "examples" / "new-method" / "perfedavg.patch"


def test_the_patch_applies() -> None:
    done = subprocess.run(["git", "apply", "--check", str(PATCH)], cwd=ROOT, capture_output=True)
    assert not done.returncode, done.stderr.decode()


@pytest.mark.full
def test_the_example_meets_the_laws(tmp_path: Path) -> None:
    """In a clone of what is committed."""
    for command in (["git", "clone", "--quiet", ROOT, "."], ["git", "apply", PATCH]):
        subprocess.run(command, cwd=tmp_path, check=True)
    files = ("tests/methods/test_laws.py", "tests/methods/test_registry.py")
    laws = ("-m", "pytest", *files, "-k", "PerFedAvg or registry", "-n", "0", "-q")
    done = subprocess.run(
        [sys.executable, *laws, "-m", "not flower"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100
