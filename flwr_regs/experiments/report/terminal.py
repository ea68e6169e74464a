"""Tables of plain text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from flwr_regs.experiments.extras import missing_extra


def columns(lines: Iterable[Sequence[str]], right: bool = False) -> list[str]:
    """Return lines of cells in columns, all but the first one to the right if asked."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise missing_extra("rich", "the table") from error
    rows = [*lines]
    out = io.StringIO()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for number in range(len(rows[0])):
        grid.add_column(justify="right" if right and number else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    Console(file=out, width=10_000, highlight=False, markup=False, emoji=False).print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]
