"""Of broken lines, those that a test judges are caught; those that no test judges, or reaches, survive."""

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SUMS = '''
"""The file's words."""

def judged(a: int, b: int) -> int:
    """The function's words."""
    return a + b


def ran(a: int) -> bool:
    return a < 3


def never(a: int) -> int:
    return a * 2
'''
TESTS = """
from package.wire import sums


def test_judged():
    assert sums.judged(2, 3) == 5


def test_ran():
    sums.ran(2)
"""
FILES = {
    "package/__init__.py": "",
    "package/wire/__init__.py": "",
    "package/wire/sums.py": SUMS.lstrip(),
    "tests/test_sums.py": TESTS.lstrip(),
}


def test_fates_of_lines(tmp_path: Path) -> None:
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    result = tmp_path / "mutants.json"
    options = f"--package package --root {tmp_path} --folders wire --warm pytest --json {result}"
    command = [sys.executable, "-m", "benchmarks.mutants", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for name, source in FILES.items():  # as before
        assert (tmp_path / name).read_text(encoding="utf-8") == source
    lines = SUMS.lstrip().splitlines()
    rows = json.loads(result.read_text(encoding="utf-8"))
    assert {lines[row["line"] - 1].strip(): row["fate"] for row in rows} == {
        "return a + b": "caught",
        "return a < 3": "survived",
        "return a * 2": "not reached",
    }
