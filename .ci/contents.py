"""Checks an sdist, its wheel, and a wheel built from the tree: ``contents.py SDIST WHEEL TREE_WHEEL``."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_SDIST = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


def package_files() -> set[str]:
    """The files of the package that belong to the repository: tracked, or new and not ignored."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "flwr_regs"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def contents_of(wheel: str) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def same(what: str, found: set[str], expected: set[str]) -> None:
    """Exit unless two sets are equal, and name the differences."""
    if found != expected:
        more, less = sorted(found - expected), sorted(expected - found)
        sys.exit(f"{what}: not expected {more}, missing {less}")


def check(sdist: str, wheel: str, tree_wheel: str) -> None:
    """Exit with a sentence at the first thing that is wrong."""
    files, held = package_files(), contents_of(wheel)
    if "flwr_regs/py.typed" not in files:
        sys.exit("the tree has no flwr_regs/py.typed")
    info = f"flwr_regs-{PROJECT['version']}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    same("the wheel", set(held), files | about | {f"{info}/licenses/LICENSE"})
    for name in files:
        if held[name] != (ROOT / name).read_bytes():
            sys.exit(f"the wheel's {name} is not the tree's")

    metadata = message_from_bytes(held[f"{info}/METADATA"])
    code = (ROOT / "flwr_regs" / "__init__.py").read_text()
    said = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    for name, value, expected in [
        ("Name", metadata["Name"], "flwr-regs"),
        ("Version", metadata["Version"], said and said[1]),
        ("CITATION.cff's version", cited and cited[1], metadata["Version"]),
        (
            "License",
            metadata["License"].split(),  # a header's lines are indented
            (ROOT / "LICENSE").read_text().split(),
        ),
        ("License-File", metadata["License-File"], "LICENSE"),
        ("Requires-Python", metadata["Requires-Python"], PROJECT["requires-python"]),
        (
            "the description",
            metadata.get_payload(decode=True).decode(),
            (ROOT / "README.md").read_text(),
        ),
    ]:
        if value != expected:
            found = f"{name} is {repr(value)[:80]}, expected {repr(expected)[:80]}"
            sys.exit(f"the wheel's metadata: {found}")
    extras = set(metadata.get_all("Provides-Extra") or ())
    same("the wheel's extras", extras, set(PROJECT["optional-dependencies"]))
    scripts = held[f"{info}/entry_points.txt"].decode()
    for name, target in PROJECT["scripts"].items():
        if f"{name} = {target}" not in scripts:
            sys.exit(f"the wheel has no command {name}: {scripts}")

    with tarfile.open(sdist) as archive:
        inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    same("the sdist", inside - {".gitignore"}, files | IN_SDIST)
    if contents_of(tree_wheel) != held:
        sys.exit("the sdist builds another wheel than the tree")
    print(
        f"sdist: {len(inside)} files; wheel: {len(held)} files, {Path(wheel).stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    check(*sys.argv[1:])
