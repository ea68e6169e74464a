"""Tables of plain text for a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flwr_regs.experiments.extras import needed

_OFF = ("force_terminal", "force_jupyter", "highlight", "markup", "emoji")
PLAIN: Any = dict.fromkeys(_OFF, False)
"""The same whatever the terminal: notebooks set FORCE_COLOR, which would colour files too."""


def columns(lines: Iterable[Sequence[str]], right: bool = False, width: int = 0) -> list[str]:
    """Return lines of cells in columns, all but the first one to the right if asked.

    With a `width`, the first line is a heading, and what is too long for the width is folded.
    """
    needed("rich", "rich", "the table")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    head, *rows = lines
    if width:
        others = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)][1:]
        rows = [[folded(row[0], width - 2 - sum(others)), *row[1:]] for row in rows]
    rule, gap = (box.SIMPLE_HEAD, 1) if width else (None, 2)
    grid = Table(box=rule, padding=(0, gap, 0, 0), pad_edge=False)
    for number, name in enumerate(head):
        side: Any = "right" if right and number else "left"
        grid.add_column(name, justify=side, no_wrap=bool(number or not width), overflow="fold")
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width or 10_000, color_system=None, **PLAIN).print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def folded(text: str, most: int) -> str:
    """Return a text in lines of at most so many characters.

    It breaks after a space or one of ``,;+/``, or a bracket of a call; if there is none, after ``=``, and
    only as a last resort anywhere.
    """
    gap = r"(?:(?<=[ ,;+/])|(?<=\w\()|$)"
    ends = (rf"\S.{{0,{max(most, 8) - 1}}}{end}" for end in (gap, "(?<==)", ""))
    return "\n".join(line.strip() for line in re.findall("|".join(ends), text))
