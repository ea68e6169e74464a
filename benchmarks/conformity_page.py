"""What known deviations from the papers cost: the tables and the picture of docs/conformity.md.

``python -m benchmarks.conformity_page measure`` trains what ``docs/studies/conformity.jsonl.gz`` lacks, on
the bundled digits, with the loops of ``benchmarks.conformity``; ``... report`` writes the page's tables and
draws its picture. Nothing is tuned.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from scipy.stats import t as student

from benchmarks.common import (
    BLUE,
    GREY,
    RED,
    filled,
    picture,
    read_lines,
    table,
    write_lines,
)
from benchmarks.conformity.behaviours import BEHAVIOURS, METHODS
from benchmarks.conformity.loops import rounds
from benchmarks.conformity.loops.run import Task
from benchmarks.conformity.model import accuracy, initial
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.partition.partitions import partition
from flwr_regs.experiments.settings import Settings

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "studies" / "conformity.jsonl.gz"
LIBRARIES = ROOT / "docs" / "studies" / "conformity-libraries.json"
PAGE = ROOT / "docs" / "conformity.md"
PICTURE = ROOT / "docs" / "img" / "studies" / "conformity.webp"
CLIENTS, COHORT, ROUNDS, LAST, SEEDS = 20, 4, 40, 5, tuple(range(1, 6))
EPOCHS, BATCH, DIRICHLET, HIDDEN = 2, 16, 0.1, 32
MU, MOMENTUM = 0.1, 0.9
LR = {False: 0.1, True: 0.01}
"""The learning rate without and with momentum."""


@dataclass(frozen=True)
class Row:
    """One implementation: a method, with momentum or BatchNorm or not, and its behaviours."""

    method: str
    behaviours: tuple[str, ...] = ()
    momentum: bool = False
    batch_norm: bool = False

    @property
    def key(self) -> str:
        """The row as a text, in the results."""
        parts = [self.method, "momentum" * self.momentum, "BatchNorm" * self.batch_norm]
        return " ".join([*filter(None, parts), *self.behaviours])

    @property
    def words(self) -> str:
        """The row in the tables."""
        words = [f"`{b}`" for b in self.behaviours]
        if self.momentum:  # the paper has none
            option = "option I" if self.method == "SCAFFOLD-1" else "option II"
            return ", ".join([option, *(words or ["correction in the gradient"])])
        return ", ".join(words) or "as in the paper"


PLAIN = ("one-batch", "from-weights", "wrong-sign", "c-of-cohort", "by-examples", "one-epoch-steps")
GROUPS: dict[str, tuple[Row, ...]] = {
    "FedAvg": (
        Row("FedAvg"),
        *(Row("FedAvg", (b,)) for b in ("one-batch", "drop-last", "run-on", "uniform")),
    ),
    "FedAvg, BatchNorm": (
        Row("FedAvg", (), batch_norm=True),
        Row("FedAvg", ("own-buffers",), batch_norm=True),
    ),
    "FedProx": (
        Row("FedProx"),
        *(Row("FedProx", (b,)) for b in ("no-penalty", "norm", "twice-mu")),
    ),
    "SCAFFOLD, option II": (Row("SCAFFOLD"), *(Row("SCAFFOLD", (b,)) for b in PLAIN)),
    "SCAFFOLD, option I": (
        Row("SCAFFOLD-1"),
        Row("SCAFFOLD-1", ("wrong-sign",)),
        Row("SCAFFOLD-1", ("wrong-sign", "new-at-once")),
    ),
    "SCAFFOLD, momentum": (
        Row("SCAFFOLD-1", (), momentum=True),
        Row("SCAFFOLD-1", ("outside-momentum",), momentum=True),
        Row("SCAFFOLD", (), momentum=True),
        Row("SCAFFOLD", ("outside-momentum",), momentum=True),
        Row("SCAFFOLD", ("outside-momentum", "c-of-cohort"), momentum=True),
        Row("SCAFFOLD", ("by-examples", "outside-momentum", "from-weights"), momentum=True),
    ),
}
"""The first row of a group is what the others are compared with."""


def runs() -> Iterator[tuple[Row, int]]:
    """Yield all rows with all seeds."""
    for seed in SEEDS:
        for rows in GROUPS.values():
            for row in rows:
                yield row, seed


@lru_cache(maxsize=4)
def task(seed: int, momentum: bool, batch_norm: bool) -> tuple[Task, np.ndarray, np.ndarray]:
    """Return a seed's task, the same for all rows but for the optimiser or the BatchNorm, and test data."""
    loaded, rng = data.load("digits"), np.random.default_rng((seed, 41))
    split = {"partition": "dirichlet", "dirichlet-alpha": DIRICHLET, "seed": seed}
    parts = partition(loaded.train_y, Settings.of(split), CLIENTS)
    x, y = loaded.train_x.reshape(len(loaded.train_x), -1).astype(np.float64), loaded.train_y
    clients = tuple((x[p], y[p]) for p in map(rng.permutation, parts))
    cohorts = tuple(
        tuple(int(k) for k in sorted(rng.choice(CLIENTS, COHORT, replace=False)))
        for _ in range(ROUNDS)
    )
    w = initial(x.shape[1], HIDDEN, 10, seed, batch_norm)
    made = Task(w, clients, cohorts, LR[momentum], EPOCHS, BATCH, MU, MOMENTUM if momentum else 0.0)
    return made, loaded.test_x.reshape(len(loaded.test_x), -1).astype(np.float64), loaded.test_y


def train(row: Row, seed: int) -> float | None:
    """Return the mean accuracy after each of the last rounds, or None for weights that are not finite."""
    made, x, y = task(seed, row.momentum, row.batch_norm)
    with np.errstate(all="ignore"):  # a diverging run overflows
        models = [model for model, _ in rounds(made, row.method, row.behaviours)]
        reached = float(np.mean([accuracy(w, x, y) for w in models[-LAST:]]))
    return round(reached, 6) if np.isfinite(reached) else None


def read(path: Path = OUT) -> dict[tuple[str, int], float | None]:
    """Return the accuracies of finished runs, by row and seed."""
    return {(line["row"], line["seed"]): line["accuracy"] for line in read_lines(path)}


def measure(path: Path = OUT) -> None:
    """Train what the results lack."""
    lines = read_lines(path)
    done = {(line["row"], line["seed"]) for line in lines}
    for row, seed in runs():
        if (row.key, seed) in done:
            continue
        began = time.process_time()
        line = {"row": row.key, "seed": seed, "accuracy": train(row, seed)}
        line["cpu-seconds"] = round(time.process_time() - began, 2)
        lines.append(line)
        write_lines(path, lines)
        print(line, flush=True)


def difference(
    results: Mapping[tuple[str, int], float | None], row: Row, first: Row
) -> tuple[float, float] | None:
    """Return the mean paired difference to a group's first row and half its 95 % interval, in points.

    None if a run of either diverged.
    """
    pairs = [(results[row.key, seed], results[first.key, seed]) for seed in SEEDS]
    d = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(d) < len(pairs):
        return None
    n = len(d)
    half = float(student.ppf(0.975, n - 1) * np.std(d, ddof=1) / n**0.5)
    return float(np.mean(d)), half


def tables(results: Mapping[tuple[str, int], float | None]) -> dict[str, str]:
    """Return the page's tables by name."""
    rows = []
    for group, members in GROUPS.items():
        for row in members:
            values = [results[row.key, seed] for seed in SEEDS]
            finite = [100 * v for v in values if v is not None]
            gone = len(values) - len(finite)
            level = f"diverged ({gone} of {len(values)})" if gone else f"{np.mean(finite):.1f}"
            apart = None if row is members[0] else difference(results, row, members[0])
            rows.append([group, row.words, level, "" if apart is None else interval(*apart)])
    made = {"accuracy": table(["method", "implementation", "accuracy", "difference"], rows)}
    made["behaviours"] = table(
        ["name", "what the implementation does", "methods"],
        [
            [f"`{name}`", b.says, "all" if b.methods == METHODS else ", ".join(b.methods)]
            for name, b in BEHAVIOURS.items()
        ],
    )
    verdicts = json.loads(LIBRARIES.read_text())
    made["libraries"] = table(
        ["library", "method", "finding"], [[v["library"], v["method"], v["text"]] for v in verdicts]
    )
    made["oracles"] = table(["method", "paper", "oracle", "cases"], oracles())
    return made


def oracles() -> list[list[str]]:
    """Return each method that has an oracle of its own, its paper, the oracle's file and its cases."""
    from flwr_regs.methods.registry import METHODS as ROWS
    from tests.laws import CASES  # the repository's tests, not the package

    files_of: dict[str, list[str]] = {}
    for case in CASES:
        oracle = getattr(case.oracle, "func", case.oracle)  # a partial's function
        files_of.setdefault(case.strategy.__name__, []).append(oracle.__module__.replace(".", "/"))
    return [
        [name, ROWS[name].paper, f"`{files[0]}.py`", f"{len(files)}"]
        for name, files in files_of.items()
    ]


def interval(mean: float, half: float) -> str:
    """Return a difference with its interval, as text."""
    return f"{mean:+.1f} ± {half:.1f}".replace("-", "−")


def draw(results: Mapping[tuple[str, int], float | None], path: Path) -> None:
    """Draw the differences, with their intervals, below each group's name and its first row."""
    key = {
        RED: ("s", "less accurate"),
        BLUE: ("D", "more accurate"),
        GREY: ("o", "the interval holds 0"),
        "black": ("o", "what the group's others are compared with"),
    }
    with picture(path, 7.2, 6.8) as made:
        axes, at, marks = made.subplots(), 0.0, []
        for group, members in GROUPS.items():
            marks.append((at, group, "bold"))
            for row in members:
                at -= 1
                marks.append((at, row.words.replace("`", ""), "normal"))
                apart = (0.0, 0.0) if row is members[0] else difference(results, row, members[0])
                if apart is None:
                    axes.text(1, at, "diverged", va="center", color=RED)
                    continue
                mean, half = apart
                colour = RED if mean + half < 0 else BLUE if mean - half > 0 else GREY
                if row is members[0]:
                    colour = "black"
                else:
                    beside = {"transform": axes.get_yaxis_transform(), "va": "center"}
                    axes.text(1.02, at, interval(mean, half), **beside)
                bar = {"capsize": 2.5, "ms": 4.5, "lw": 1.3, "mfc": "white" if not half else colour}
                axes.errorbar(mean, at, xerr=half, fmt=key[colour][0], color=colour, **bar)
            at -= 1.3
        axes.axvline(0, color="black", lw=0.8, zorder=1)
        axes.set_yticks([y for y, *_ in marks], [text for _, text, _ in marks])
        for label, (_, _, weight) in zip(axes.get_yticklabels(), marks, strict=True):
            label.set_fontweight(weight)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("difference in test accuracy, with its 95 % interval (points)")
        axes.set_ylim(at + 0.5, 0.8)
        axes.grid(visible=False, axis="y")
        dots = [
            Line2D(
                [],
                [],
                color=colour,
                marker=marker,
                ls="",
                ms=4.5,
                mfc="white" if colour == "black" else colour,
                label=said,
            )
            for colour, (marker, said) in key.items()
        ]
        made.legend(handles=dots, loc="outside upper center", ncols=4, frameon=False)


def main() -> None:
    """Train, or write the page's tables and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "report"])
    options: Any = parser.parse_args()
    if options.what == "measure":
        measure()
        return
    results = read()
    PAGE.write_text(filled(PAGE.read_text(), "conformity", tables(results)))
    draw(results, PICTURE)


if __name__ == "__main__":
    main()
