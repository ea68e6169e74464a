"""EFL's, FedCurv's and FedProx's pull, explicit and implicit, over its strength: docs/implicit-step.md.

``python -m benchmarks.implicit_step --data-dir DIR`` trains what the results file lacks;
``python -m benchmarks.implicit_step --report`` prints the page's tables and draws its picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.common import (
    BLUE,
    RED,
    Results,
    Run,
    Setting,
    chosen,
    parser,
    percent,
    picture,
    table,
)

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "studies" / "implicit-step.jsonl.gz"
FISHER = 100
"""The samples of a client over which the Fisher information is computed."""
ALL = Setting("MNIST, K 20, all", "mnist", 20, 0.1, rounds=15)
FEW = Setting("MNIST, K 20", "mnist", 20, 0.1, cohort=4, rounds=40)
FORMS = {False: "explicit", True: "implicit"}


@dataclass(frozen=True)
class Sweep:
    """The strengths of one method's pull in one setting."""

    setting: Setting
    method: str
    strengths: tuple[float, ...]
    seeds: tuple[int, ...]

    def run(self, strength: float, implicit: bool, seed: int, lr: float) -> Run:
        """Return one training; without a pull it is FedAvg."""
        if strength == 0:
            return Run(self.setting, "FedAvg", {}, seed, lr)
        arguments: dict[str, Any] = {"mu" if self.method == "FedProx" else "lam": strength}
        if self.method != "FedProx":
            arguments["fisher_samples"] = FISHER
        return Run(self.setting, self.method, arguments | {"implicit": implicit}, seed, lr)


SWEEPS = (
    Sweep(FEW, "EFL", (1, 3, 10, 30, 100, 300), (1, 2, 3)),
    Sweep(ALL, "EFL", (1, 3, 10, 30, 100, 300), (1, 2)),
    Sweep(FEW, "FedCurv", (1, 10, 100), (1, 2)),
    Sweep(FEW, "FedProx", (0.1, 1, 10, 100), (1, 2)),
)


def accuracies(
    results: Results, sweep: Sweep, strength: float, implicit: bool
) -> list[float | None]:
    """Return a pull's accuracies, seed by seed; None where it diverged."""
    lr = results.tuned(sweep.setting)[0]
    return [results[sweep.run(strength, implicit, seed, lr)]["accuracy"] for seed in sweep.seeds]


def tables(results: Results) -> dict[str, str]:
    """Return the page's tables, one for each method."""
    made = {}
    for method in ("EFL", "FedCurv", "FedProx"):
        sweeps = [sweep for sweep in SWEEPS if sweep.method == method]
        strengths = (0.0, *sweeps[0].strengths)
        rows = [
            [
                f"{sweep.setting.who}, {form}",
                *(percent(accuracies(results, sweep, x, implicit)) for x in strengths),
            ]
            for sweep in sweeps
            for implicit, form in FORMS.items()
        ]
        name = "μ" if method == "FedProx" else "λ"
        made[method] = table([f"{method}, {name}", *(f"{x:g}" for x in strengths)], rows)
    return made


def draw(results: Results, path: Path) -> None:
    """Draw accuracy against the strength of the pull, a panel for each sweep.

    Below each panel's axis, a strip has a cross for each strength at which a training diverged.
    """
    with picture(path, 7.2, 5.4) as made:
        for panel, sweep in zip(made.subplots(2, 2).flat, SWEEPS, strict=True):
            _draw_sweep(results, sweep, panel)
        handles, labels = panel.get_legend_handles_labels()
        handles += [
            Patch(color="0.35", alpha=0.15, lw=0),
            Line2D([], [], color=RED, marker="x", ls="", ms=5),
        ]
        labels += ["worst to best seed", "diverged (of the seeds)"]
        made.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)


def _draw_sweep(results: Results, sweep: Sweep, panel: Axes) -> None:
    """Draw one panel."""
    plain = [100 * (a or 0.0) for a in accuracies(results, sweep, 0, False)]
    panel.axhline(np.mean(plain), color="0.35", lw=1, label="FedAvg (no pull)")
    panel.axhspan(min(plain), max(plain), color="0.35", alpha=0.12, lw=0)
    looks = ((RED, "s", "--", 0.95), (BLUE, "o", "-", 1.05))  # beside each other
    ends = [*plain]
    for (implicit, form), (colour, marker, dashes, aside) in zip(FORMS.items(), looks, strict=True):
        whole = {
            aside * x: [100 * v for v in a if v is not None]
            for x in sweep.strengths
            if None not in (a := accuracies(results, sweep, x, implicit))
        }
        mean, low, high = ([f(a) for a in whole.values()] for f in (np.mean, min, max))
        line = {"marker": marker, "ls": dashes, "lw": 1.3, "ms": 4.5, "label": form}
        panel.plot([*whole], mean, color=colour, **line)
        panel.fill_between([*whole], low, high, color=colour, alpha=0.15, lw=0)
        ends += [*low, *high]
    bottom, top = max(min(ends), 0), max(ends)
    room = 0.05 * (top - bottom)
    strip = {"transform": panel.get_xaxis_transform(), "color": RED}
    for x in sweep.strengths:
        reached = accuracies(results, sweep, x, False)
        if gone := reached.count(None):
            panel.plot(x, 0.05, "x", ms=5, **strip)
            panel.text(x, 0.09, f"{gone} of {len(reached)}", ha="center", fontsize=7, **strip)
    name = "μ" if sweep.method == "FedProx" else "λ"
    title = f"{sweep.method}, {sweep.setting.who} clients a round, {len(sweep.seeds)} seeds"
    panel.set(xscale="log", xlabel=f"strength of the pull, {name}", ylabel="test accuracy (%)")
    panel.set_title(title)
    panel.set_xticks(sweep.strengths, [f"{x:g}" for x in sweep.strengths])
    panel.minorticks_off()
    panel.margins(x=0.09)
    panel.set_ylim(bottom - room - 0.2 * (top - bottom), top + room)
    panel.set_yticks([y for y in panel.get_yticks() if bottom - room <= y <= top + room])
    panel.axhspan(panel.get_ylim()[0], bottom - room, color="white", zorder=1)
    panel.axhline(bottom - room, color="0.7", lw=0.6)


def main() -> None:
    """Train what is missing, or report."""
    options = parser(__doc__ or "", OUT).parse_args()
    results = Results(options.out, options.data_dir, 0 if options.report else options.processes)
    settings = chosen((FEW, ALL), options.settings)
    if options.report:
        print("\n\n".join(tables(results).values()))
        draw(results, ROOT / "docs" / "img" / "implicit-step.webp")
        return
    rates = {s: results.tuned(s)[0] for s in settings}
    wanted = [int(s) for s in options.seeds.split(",") if s]

    def runs() -> Iterator[Run]:
        for seed in wanted or (1, 2, 3):
            for sweep in (s for s in SWEEPS if s.setting in rates and seed in s.seeds):
                for strength in (0, *sweep.strengths):
                    for implicit in FORMS:
                        yield sweep.run(strength, implicit, seed, rates[sweep.setting])

    results.finish(runs())


if __name__ == "__main__":
    main()
