"""Resolves ``uv.lock``, and leaves out what none of its environments can use: ``python .ci/lock.py``.

uv keeps the wheels of each Python from the lowest on, those of other C libraries, sources beside a wheel
that fits everywhere, how large each file is and when it was uploaded: half a megabyte. Arguments go to
``uv lock``, such as ``--upgrade``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "uv.lock"
PYTHONS = ("cp311", "cp312", "cp313")
"""Those of ``tool.uv.environments`` in pyproject.toml."""
SOURCE = re.compile(r'^sdist = .*\n(?=wheels = \[\n    .*-none-any\.whl")', re.M)
WHEEL = re.compile(r'^    \{ url = ".*-([^-]+)-([^-]+)-([^-]+)\.whl".*\n', re.M)


def used(wheel: re.Match[str]) -> bool:
    """Whether an environment can use a wheel, by its tags: Python, ABI and platforms."""
    python, abi, platforms = wheel.groups()
    fits = abi == "none" or abi == "abi3" or (python in PYTHONS and abi == python)
    return fits and not re.match(r"musllinux|ios|pyemscripten|win_ia64", platforms)


if __name__ == "__main__":
    subprocess.run(["uv", "lock", *sys.argv[1:]], cwd=FILE.parent, check=True)
    wheels = WHEEL.sub(lambda m: m[0] if used(m) else "", FILE.read_text())
    unused = r', size = \d+|, upload-time = "[^"]*"'
    FILE.write_text(re.sub(unused, "", SOURCE.sub("", wheels)))
    subprocess.run(["uv", "lock", "--check"], cwd=FILE.parent, check=True)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")
