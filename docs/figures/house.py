"""Draw the folders of the package and their imports: ``python docs/figures/house.py`` (docs/img/house.png).

The layers are those that import-linter checks (pyproject.toml); each box says the first line of its folder.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import save  # noqa: E402 (found from there)

LOADS = {  # the libraries that a folder may load
    "experiments": "Flower, torch, …",
    "testing": "Flower, torch",
    "methods": "Flower, torch",
    "flower": "Flower, torch",
    "cohort": "torch",
    "client": "torch",
    "server": "numpy",
    "wire": "numpy; `records`: Flower's record types",
    "chain": "nothing",
    "abilities": "nothing",
    "hook_contexts": "nothing",
    "term": "nothing",
}
COLOURS = {"Flower": "#f6d9a8", "torch": "#cfe3f5", "numpy": "#d8ecd3", "nothing": "#eeeeee"}


def layers() -> list[list[str]]:
    """Return the folders from top to bottom, those beside each other together."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in tool["contracts"] if c["type"] == "layers")
    rows = [row.replace("flwr_regs.", "").split(" | ") for row in contract["layers"]]
    return [*rows[:-4], rows[-4] + rows[-3] + rows[-2] + rows[-1]]  # the seam in one row


def sentence(name: str) -> str:
    """Return the first line of a folder's, or a file's, docstring."""
    path = ROOT / "flwr_regs" / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text())) or ""
    first = doc.split("\n\n")[0].replace("\n", " ").replace("`", "").partition(" (")[0]
    return first.partition(". ")[0].rstrip(".:") + "."


def draw(target: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(9.2, 8.2), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    rows = layers()
    axes.set_ylim(0, 1.55 * len(rows))
    for i, row in enumerate(reversed(rows)):
        bottom, width = 1.55 * i + 0.2, (9.6 - 0.3 * (len(row) - 1)) / len(row)
        for j, name in enumerate(row):
            left = 0.2 + j * (width + 0.3)
            colour = next(
                c for library, c in COLOURS.items() if library in LOADS[name].split("`")[0]
            )
            box = FancyBboxPatch(
                (left, bottom),
                width,
                1.1,
                boxstyle="round,pad=0,rounding_size=0.08",
                fc=colour,
                ec="#444444",
            )
            axes.add_patch(box)
            path = ROOT / "flwr_regs" / name
            title = f"{name}/" if path.is_dir() else f"{name}.py"
            narrow = len(row) > 2  # the seam, which loads nothing
            size = 10 if narrow else 12
            axes.text(
                left + 0.15, bottom + 0.82, title, fontsize=size, weight="bold", family="monospace"
            )
            if not narrow:
                loads = f"loads {LOADS[name]}"
                axes.text(left + width - 0.15, bottom + 0.84, loads, fontsize=8, ha="right")
            said = sentence(name)
            said = said.partition(":")[0].rstrip(".") + "." if narrow else said
            words = textwrap.fill(said, int(width * (14 if narrow else 12.5)))
            axes.text(
                left + 0.15,
                bottom + 0.63,
                words,
                fontsize=size - 2 if narrow else 9,
                va="top",
                linespacing=1.3,
            )
        if i:
            arrow = FancyArrowPatch(
                (5, bottom - 0.02), (5, bottom - 0.43), arrowstyle="-|>", mutation_scale=14
            )
            axes.add_patch(arrow)
    save(figure, target)


if __name__ == "__main__":
    draw(ROOT / "docs" / "img" / "house.png")
