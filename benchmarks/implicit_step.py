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

from benchmarks.common import (
    Results,
    Run,
    Setting,
    chosen,
    figure,
    parser,
    percent,
    save,
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
    """Draw accuracy against the strength of the pull, a panel for each sweep."""
    made = figure(9.6, 6.6)
    for panel, sweep in zip(made.subplots(2, 2).flat, SWEEPS, strict=True):
        plain = [100 * (a or 0.0) for a in accuracies(results, sweep, 0, False)]
        panel.axhline(np.mean(plain), color="0.35", lw=1.2, label="FedAvg")
        panel.axhspan(min(plain), max(plain), color="0.35", alpha=0.12, lw=0)
        for (implicit, form), colour, marker in zip(
            FORMS.items(), ("#D55E00", "#0072B2"), "so", strict=True
        ):
            accuracy_of = {x: accuracies(results, sweep, x, implicit) for x in sweep.strengths}
            whole = {
                x: [100 * v for v in a if v is not None]
                for x, a in accuracy_of.items()
                if None not in a
            }
            mean = [np.mean(a) for a in whole.values()]
            panel.plot(list(whole), mean, marker=marker, color=colour, lw=1.8, label=form)
            low, high = ([f(a) for a in whole.values()] for f in (min, max))
            panel.fill_between(list(whole), low, high, color=colour, alpha=0.15, lw=0)
            for x, a in accuracy_of.items():
                if None in a:
                    text = f"diverged\n{a.count(None)} of {len(a)}"
                    at = {"transform": panel.get_xaxis_transform(), "ha": "center", "color": colour}
                    panel.plot(x, 0.035, "x", color=colour, transform=panel.get_xaxis_transform())
                    panel.text(x, 0.07, text, fontsize=7, va="bottom", **at)
        name = "μ" if sweep.method == "FedProx" else "λ"
        title = f"{sweep.method}, {sweep.setting.who} clients a round, {len(sweep.seeds)} seeds"
        panel.set(xscale="log", title=title, xlabel=name, ylabel="test accuracy (%)")
        panel.set_xticks(sweep.strengths, [f"{x:g}" for x in sweep.strengths])
        panel.minorticks_off()
        panel.margins(x=0.09)
        low, high = panel.get_ylim()
        panel.set_ylim(low - 0.25 * (high - low), high)  # room for what diverged
        panel.grid(alpha=0.25)
    made.legend(
        *panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    save(made, path)


def main() -> None:
    """Train what is missing, or report."""
    options = parser(__doc__ or "", OUT).parse_args()
    results = Results(options.out, options.data_dir, 0 if options.report else options.processes)
    settings = chosen((FEW, ALL), options.settings)
    if options.report:
        print("\n\n".join(tables(results).values()))
        draw(results, ROOT / "docs" / "img" / "implicit-step.png")
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
