"""The pictures of docs/gallery.md: ``python -m benchmarks.gallery`` runs its commands and shrinks them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.common import small_webp

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
PART = re.compile(r"```bash\n(.*?)\n```|!\[[^\]]*\]\((\S+)\)", re.S)
"""A command, or a picture that the last command has written."""
OTHERS = ("partition-rounds", "partition", "accuracy")
"""What a picture is in the results, the first that is there, if it has another name on the page."""
WIDEST = 720
"""Pixels; a wider picture is halved."""


def main() -> int:
    """Make the pictures again; return 1 if a command wrote none of those that follow it."""
    missing = 0
    program = Path(sys.executable).with_name("flwr-regs")
    with tempfile.TemporaryDirectory() as folder:
        written: dict[str, Path] = {}
        for command, shown in PART.findall(PAGE.read_text()):
            if command:
                before = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.png")}
                words = command.replace("flwr-regs", str(program), 1)
                subprocess.run(words, shell=True, cwd=folder, check=False)  # one is to diverge
                now = Path(folder).rglob("*.png")
                new = [path for path in now if path.stat().st_mtime_ns != before.get(path)]
                written = {path.stem: path for path in new}
                continue
            target = PAGE.parent / shown
            source = next((written[n] for n in (target.stem, *OTHERS) if n in written), None)
            if source is None:
                print(f"{shown}: the command above it wrote no picture", file=sys.stderr)
                missing = 1
                continue
            image = Image.open(source).convert("RGB")
            target.write_bytes(small_webp(image.reduce(2) if image.width > WIDEST else image))
    return missing


if __name__ == "__main__":
    sys.exit(main())
