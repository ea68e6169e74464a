"""What each published divergence changes: the figures of docs/fidelity.md that can be measured here.

``python -m benchmarks.fidelity`` runs the conformity kit's loops with each divergence of
``docs/studies/fidelity.json.gz`` and writes the difference from the paper beside it. It needs nobody's
code.
``python -m benchmarks.conformity --library NAME`` fetches some of that code, and drives it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.conformity.behaviours import BEHAVIOURS
from benchmarks.conformity.loops import federate
from benchmarks.conformity.task import small_task

DATA = Path(__file__).parents[1] / "docs" / "studies" / "fidelity.json.gz"
MOMENTUM, LR_DECAY = 0.7, 0.9
"""Of the task on which a behaviour shows only with momentum, or with a learning rate that falls."""


def difference(method: str, behaviours: list[str]) -> float:
    """Return ``max |paper - theirs| / max |theirs - first model|`` after the task's last round."""
    needs = {BEHAVIOURS[name].shows_with for name in behaviours}
    task = small_task(
        MOMENTUM if "momentum" in needs else 0.0, LR_DECAY if "lr_decay" in needs else 1.0
    )
    paper, theirs = (federate(task, method, b, points=False).models[-1] for b in ([], behaviours))
    start = task.parameters
    moved = max(
        abs(array - start[first]).max()
        for name, array in theirs.items()
        if (first := name if name in start else name.partition(".")[2]) in start
    )
    return float(max(abs(paper[name] - theirs[name]).max() for name in theirs) / moved)


def kept() -> dict[str, Any]:
    """Return the data of the page."""
    data: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
    return data


def measured(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with each divergence's difference, to two digits."""
    rows = [
        {**row, "difference": f"{difference(row['method'], row['behaviours']):.2g}"}
        for row in data["divergences"]
    ]
    return {**data, "divergences": rows}


if __name__ == "__main__":
    text = json.dumps(measured(kept()), indent=1, ensure_ascii=False)
    DATA.write_bytes(gzip.compress(f"{text}\n".encode(), mtime=0))
