"""The tables of docs/data.md, made of the catalogue.

``python -m flwr_regs.experiments.data_table docs/data.md`` makes them anew; a test compares them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flwr_regs.experiments.data.augment import AUGMENTATIONS
from flwr_regs.experiments.data.sources.readers import SOURCES

MARK = re.compile(r"(<!-- (data sets|augmentations) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def data_sets() -> str:
    """Return the data sets as a table: name, meaning, files, group and arguments."""
    lines = [
        "| `dataset` | what | files in `data-dir` | a group is | arguments |",
        "|---|---|---|---|---|",
    ]
    for name, source in SOURCES.items():
        arguments = ", ".join(f"`{key}={value!r}`" for key, value in source.arguments.items())
        cells = (f"`{name}`", source.meaning, source.files, source.groups or "–", arguments or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def augmentations() -> str:
    """Return the augmentations as a table: name and meaning."""
    lines = ["| `augment` | training batches |", "|---|---|"]
    lines += [f"| `{name or chr(34) * 2}` | {one.meaning} |" for name, one in AUGMENTATIONS.items()]
    return "\n".join(lines)


PARTS = {"data sets": data_sets, "augmentations": augmentations}


def filled(text: str) -> str:
    """Return a page with its tables made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n\n", text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(filled(path.read_text()))
