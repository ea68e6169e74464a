"""Draw the folders of the package and their imports into docs/img: ``python docs/figures/house.py``.

The layers are those that import-linter checks (pyproject.toml); each box says the first line of its folder.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import picture  # noqa: E402 (found from there)

LOADS = {  # the libraries that a folder may load
    "experiments": "Flower, torch, …",
    "testing": "Flower, torch",
    "methods": "Flower, torch",
    "flower": "Flower, torch",
    "cohort": "torch",
    "client": "torch",
    "server": "numpy",
    "wire": "numpy; records: Flower's record types",
    "chain": "nothing",
    "hook_checks": "nothing",
    "abilities": "nothing",
    "hook_contexts": "nothing",
    "term": "nothing",
}
PITCH, HEIGHT = 1.36, 1.0
COLOURS = {"Flower": "#f6d9a8", "torch": "#cfe3f5", "numpy": "#d8ecd3", "nothing": "#eeeeee"}


def layers() -> list[list[str]]:
    """Return the folders from top to bottom, those beside each other together."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in tool["contracts"] if c["type"] == "layers")
    rows = [row.replace("flwr_regs.", "").split(" | ") for row in contract["layers"]]
    return [*rows[:-5], [name for row in rows[-5:] for name in row]]  # the seam in one row


def sentence(name: str) -> str:
    """Return the first line of a folder's, or a file's, docstring."""
    path = ROOT / "flwr_regs" / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text())) or ""
    first = doc.split("\n\n")[0].replace("\n", " ").replace("`", "").partition(" (")[0]
    return first.partition(". ")[0].rstrip(".:") + "."


def draw(target: Path) -> None:
    """Write the picture."""
    rows = layers()
    with picture(target, 7.6, 0.78 * len(rows) + 0.3) as figure:
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.set_xlim(0, 10)
        axes.set_ylim(-0.35, PITCH * len(rows))
        for i, row in enumerate(reversed(rows)):
            bottom, width = PITCH * i + 0.2, (9.6 - 0.3 * (len(row) - 1)) / len(row)
            for j, name in enumerate(row):
                box(axes, name, 0.2 + j * (width + 0.3), bottom, width, len(row) > 2)
            if i:
                ends = (5, bottom - 0.02), (5, bottom - 0.33)
                arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=11, color="0.25")
                axes.add_patch(arrow)
        words = (
            "Arrow: a folder may import those below it. Colour: the heaviest library that it loads."
        )
        axes.text(0.2, -0.15, words, va="center")


def box(axes: Axes, name: str, left: float, bottom: float, width: float, narrow: bool) -> None:
    """Draw a folder, or a `narrow` file of the seam, which loads nothing."""
    loads = LOADS[name]
    colour = next(c for library, c in COLOURS.items() if library in loads.partition(";")[0])
    shape = {"boxstyle": "round,pad=0,rounding_size=0.08", "fc": colour, "ec": "0.3"}
    axes.add_patch(FancyBboxPatch((left, bottom), width, HEIGHT, **shape))
    title = f"{name}/" if (ROOT / "flwr_regs" / name).is_dir() else f"{name}.py"
    bold = {"fontsize": 8 if narrow else 10, "weight": "bold", "family": "monospace"}
    axes.text(left + 0.15, bottom + HEIGHT - 0.18, title, va="center", **bold)
    said = sentence(name)
    if narrow:
        said = said.partition(":")[0].rstrip(".") + "."
    else:
        axes.text(
            left + width - 0.15, bottom + HEIGHT - 0.18, f"loads {loads}", ha="right", va="center"
        )
    words = textwrap.fill(said, int(width * (11.9 if narrow else 11.5)))
    size = 7 if narrow else 8
    axes.text(left + 0.15, bottom + HEIGHT - 0.38, words, fontsize=size, va="top", linespacing=1.2)


if __name__ == "__main__":
    draw(ROOT / "docs" / "img" / "house.webp")
