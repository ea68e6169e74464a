"""Of broken lines, those that a test judges are caught; those that no test judges, or reaches, survive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = {
    "package/__init__.py": "",
    "package/wire/__init__.py": "",
    "package/wire/sums.py": '''
        """The file's words."""
        STEP = 2


        def judged(a: int, b: int) -> int:
            """The function's words."""
            return a + b


        def ran(a: int) -> bool:
            return a < 3


        def never(a: int) -> int:
            return a * 2


        def stepped() -> int:
            return STEP


        def refused(a: int) -> None:
            if a:
                raise ValueError(f"{a + 1} is too much")
        ''',
    "tests/test_sums.py": """
        import pytest

        from package.wire import sums


        @pytest.fixture(scope="module")
        def total():
            return sums.judged(2, 3)


        def test_first(total):
            assert sums.stepped() == 2


        def test_judged(total):
            assert total == 5


        def test_ran():
            sums.ran(2)


        def test_refused():
            sums.refused(0)
            with pytest.raises(ValueError):
                sums.refused(1)
        """,
}


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the command says of each line of the small package."""
    root = tmp_path_factory.mktemp("tree")
    for name, source in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [line.removeprefix("        ") for line in source.splitlines()]
        (root / name).write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")
    before = {path: path.read_bytes() for path in root.rglob("*.py")}
    result = root / "mutants.json"
    command = [sys.executable, "-m", "benchmarks.mutants", "--package", "package"]
    command += ["--root", str(root), "--folders", "wire", "--warm", "pytest"]
    command += ["--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert before == {path: path.read_bytes() for path in root.rglob("*.py")}
    sums = Path(root, "package/wire/sums.py").read_text(encoding="utf-8").splitlines()
    rows = json.loads(result.read_text(encoding="utf-8"))
    return {sums[row["line"] - 1].strip(): row["fate"] for row in rows}


def test_fates_of_lines(fates: dict[str, str]) -> None:
    assert fates == {
        "STEP = 2": "caught",
        "return a + b": "caught",
        "return a < 3": "survived",
        "return a * 2": "not reached",
        "return STEP": "caught",
        "if a:": "caught",
        'raise ValueError(f"{a + 1} is too much")': "caught",
    }
