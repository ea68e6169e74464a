"""FedFOR's default α = 2(1−m)/K against FedAvg, and other strengths αK/(1−m): docs/fedfor-alpha.md.

``python -m benchmarks.fedfor_alpha --data-dir DIR`` trains what the results file lacks;
``python -m benchmarks.fedfor_alpha --report`` prints the page's tables and draws its pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from benchmarks.common import (
    BLUE,
    GREY,
    RED,
    Results,
    Run,
    Setting,
    bounds,
    chosen,
    parser,
    percent,
    picture,
    table,
)
from flwr_regs.experiments.report.drawing import head, line

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "studies" / "fedfor-alpha.jsonl.gz"
MULTIPLES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The values of αK/(1−m): 0 is FedAvg, 2 the default."""
DEFAULT = 2.0
SEEDS = {"digits": (5, 2), "mnist": (5, 2), "cifar10": (3, 2)}
"""How many seeds FedAvg and the default have, and how many the other strengths."""
ADAM = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Further values of αK with Adam, tried after the others had been seen."""
NAMES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
CHANCE = 0.1
"""What a run that diverged counts as in a difference: ten classes."""

FEW = {"cohort": 4}  # of 20 clients
DIGITS = {"dirichlet": 0.0, "batch_size": 16}
SETTINGS = (
    Setting("digits, K 2", "digits", 2, 0.1, **FEW, rounds=60, **DIGITS),
    Setting("digits, K 5, all", "digits", 5, 0.1, rounds=30, **DIGITS),
    Setting("digits, K 25", "digits", 25, 0.1, **FEW, rounds=60, **DIGITS),
    Setting("digits, K 25, m 0.9", "digits", 25, 0.01, **FEW, rounds=60, **DIGITS, momentum=0.9),
    Setting("MNIST, K 5", "mnist", 5, 0.1, **FEW, rounds=40),
    Setting("MNIST, K 20", "mnist", 20, 0.1, **FEW, rounds=40),
    Setting("MNIST, K 20, all", "mnist", 20, 0.1, rounds=15),
    Setting("MNIST, K 20, 100 clients", "mnist", 20, 0.1, 100, 10, dirichlet=0.3, rounds=20),
    Setting("MNIST, K 60", "mnist", 60, 0.1, **FEW, rounds=20),
    Setting("MNIST, K 100", "mnist", 100, 0.1, **FEW, rounds=15),
    Setting("MNIST, K 20, m 0.5", "mnist", 20, 0.05, **FEW, rounds=30, momentum=0.5),
    Setting("MNIST, K 20, m 0.9", "mnist", 20, 0.01, **FEW, rounds=30, momentum=0.9),
    Setting("MNIST, K 20, decay", "mnist", 20, 0.1, **FEW, rounds=30, weight_decay=1e-3),
    Setting("MNIST, K 20, Adam", "mnist", 20, 0.001, **FEW, rounds=30, adam=True),
    Setting("CIFAR-10, K 20", "cifar10", 20, 0.09, **FEW, dirichlet=0.3),
    Setting("CIFAR-10, K 20, m 0.9", "cifar10", 20, 0.01, **FEW, dirichlet=0.3, momentum=0.9),
)


def run(setting: Setting, multiple: float, seed: int, lr: float) -> Run:
    """Return the training at one αK/(1−m); the default is run as the default."""
    if multiple == 0:
        return Run(setting, "FedAvg", {}, seed, lr)
    if multiple == DEFAULT:
        return Run(setting, "FedFOR", {}, seed, lr)
    alpha = multiple * (1 - setting.momentum) / setting.steps
    return Run(setting, "FedFOR", {"alpha": round(alpha, 6)}, seed, lr)


@dataclass(frozen=True)
class Row:
    """A setting's results: accuracies (None: diverged) by αK/(1−m), seed by seed."""

    setting: Setting
    lr: float
    accuracies: Mapping[float, Mapping[int, float | None]]

    def gains(self, multiple: float) -> list[float]:
        """Return the points gained on FedAvg with the same seed; a run that diverged counts as chance."""
        plain, other = self.accuracies[0.0], self.accuracies[multiple]
        return [
            100 * ((CHANCE if other[s] is None else other[s]) - (plain[s] or CHANCE))  # type: ignore[operator]
            for s in other
        ]


def rows(results: Results) -> list[Row]:
    """Return the results of all settings, as far as they are there."""
    out = []
    for s in SETTINGS:
        lr = results.tuned(s)[0]
        reached = {}
        for multiple in (*MULTIPLES, *(ADAM if s.adam else ())):
            seeds = range(1, 1 + SEEDS[s.data][multiple not in (0, DEFAULT)])
            reached[multiple] = {
                seed: results[r]["accuracy"] for seed in seeds for r in [run(s, multiple, seed, lr)]
            }
        out.append(Row(s, lr, reached))
    return out


def clients(s: Setting) -> str:
    """Return what a setting's clients run, in words."""
    if s.adam:
        return "Adam"
    parts = [f"momentum {s.momentum:g}"] * (s.momentum > 0)
    parts += [f"weight decay {s.weight_decay:g}"] * (s.weight_decay > 0)
    return "SGD" + "".join(f", {part}" for part in parts)


def label(s: Setting) -> str:
    """Return what tells a setting from the others of its data set."""
    what = clients(s)
    return f"K {s.steps}, {s.who}" + (f", {what.removeprefix('SGD, ')}" if what != "SGD" else "")


def tables(results: Results) -> dict[str, str]:
    """Return the page's tables."""
    made = rows(results)
    where = [
        [NAMES[s.data], s.who, str(s.steps), clients(s)] for s in (row.setting for row in made)
    ]
    head = ["data", "clients", "K", "optimiser"]
    verdicts = []
    for row in made:
        gains = row.gains(DEFAULT)
        mean, low, _ = bounds(gains)
        verdicts.append(
            [
                *(percent(list(row.accuracies[m].values())) for m in (0.0, DEFAULT)),
                *(f"{x:+.2f}".replace("-", "−") for x in (mean, low, min(gains))),
                f"{sum(g > 0 for g in gains)} of {len(gains)}",
                "yes" if low >= -1 else "**no**",
            ]
        )
    return {
        "default": table(
            [
                *head,
                "FedAvg",
                "default",
                "difference",
                "95 % bound below",
                "worst seed",
                "seeds above",
                "bound ≥ −1",
            ],
            (w + v for w, v in zip(where, verdicts, strict=True)),
        ),
        "strengths": table(
            [*head, *("FedAvg" if m == 0 else f"{m:g}" for m in MULTIPLES)],
            (
                w
                + [percent([row.accuracies[m][s] for s in row.accuracies[1.0]]) for m in MULTIPLES]
                for w, row in zip(where, made, strict=True)
            ),
        ),
        "adam": table(
            ["αK", "FedAvg", *(f"{m:g}" for m in (*ADAM, *MULTIPLES[1:]))],
            (
                ["accuracy"]
                + [
                    percent([row.accuracies[m][s] for s in row.accuracies[1.0]])
                    for m in sorted(row.accuracies)
                ]
                for row in made
                if row.setting.adam
            ),
        ),
        "settings": table(
            ["setting", "rounds", "batch size", "learning rates tried: held-out accuracy"],
            (
                [
                    f"{NAMES[row.setting.data]}, {label(row.setting)}",
                    str(row.setting.rounds),
                    str(row.setting.batch_size),
                    ", ".join(
                        f"{'**' * (lr == row.lr)}{lr:g}{'**' * (lr == row.lr)}: {100 * a:.1f}"
                        for lr, a in results.tuned(row.setting)[1].items()
                    ),
                ]
                for row in made
            ),
        ),
    }


def panels(by_setting: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the settings of each panel: its data set, with MNIST in two."""
    made: dict[str, list[Row]] = {}
    for row in by_setting:
        s = row.setting
        what = ", plain SGD" if clients(s) == "SGD" else ", other optimisers"
        made.setdefault(NAMES[s.data] + what * (s.data == "mnist"), []).append(row)
    return made


def draw_strengths(by_setting: Sequence[Row], path: Path) -> None:
    """Draw the gain on FedAvg against αK/(1−m), a line for each setting.

    A triangle at the bottom stands for a mean below the panel.
    """
    x, bottom = MULTIPLES[1:], -5.0
    with picture(path, 7.2, 7.2) as made:
        grid = made.subplots(2, 2, sharex=True, sharey=True)
        for panel, (name, of_panel) in zip(grid.flat, panels(by_setting).items(), strict=True):
            panel.axvspan(DEFAULT / 1.12, DEFAULT * 1.12, color="0.9", lw=0)
            panel.axhline(0, color="0.35", lw=0.8)
            lost = 0
            for i, row in enumerate(of_panel):
                gains = [row.gains(m)[: len(row.accuracies[1.0])] for m in x]
                mean, low, high = ([f(g) for g in gains] for f in (np.mean, min, max))
                look = {**line(i, len(of_panel)), "markevery": None}
                panel.plot(x, mean, label=label(row.setting), **look)
                panel.fill_between(x, low, high, color=look["color"], alpha=0.08, lw=0)
                below = [m * 1.06**lost for m, g in zip(x, mean, strict=True) if g < bottom]
                triangles = {
                    "color": look["color"],
                    "ls": "",
                    "ms": 6,
                    "clip_on": False,
                    "zorder": 9,
                }
                if below:
                    lost += 1
                    panel.plot(below, [bottom + 0.25] * len(below), marker="v", **triangles)
            panel.set(xscale="log", title=name, ylim=(bottom, 8))
            panel.set_xticks(x, [f"{m:g}" for m in x])
            panel.minorticks_off()
            panel.tick_params(labelbottom=True)
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
        for panel in grid.flat:
            panel.set_xlabel("strength αK/(1−m)")
        made.supylabel("test accuracy above FedAvg's (points)", fontsize="medium")
        head(
            made,
            "",
            "Lines: K local steps, the clients of a round; mean over the seeds, and from the worst to the "
            "best. Grey: FedFOR's default. "
            f"Triangle: a mean below {bottom:g} points.".replace("-", "−"),
        )


def draw_default(by_setting: Sequence[Row], path: Path) -> None:
    """Draw the default's gain on FedAvg in each setting: the seeds, their mean and the interval."""
    left = -4.0
    with picture(path, 7.2, 0.24 * len(by_setting) + 1.0) as made:
        axes = made.subplots()
        axes.axvline(0, color="black", lw=0.8, zorder=1)
        axes.axvline(-1, color="0.35", lw=0.8, ls=":", zorder=1)
        for y, row in enumerate(reversed(by_setting)):
            gains = row.gains(DEFAULT)
            mean, low, high = bounds(gains)
            colour, marker = (BLUE, "o") if low >= -1 else (RED, "s")
            if mean < left:
                text = f"◄ {mean:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axes.text(left + 0.1, y, text, color=colour, va="center", bbox=box)
                continue
            axes.plot(gains, [y] * len(gains), "|", color=colour, ms=7, alpha=0.6)
            axes.plot([low, high], [y, y], color=colour, ls="-", lw=1.4)
            axes.plot(mean, y, marker, color=colour, ms=5)
        labels = [f"{NAMES[r.setting.data]}, {label(r.setting)}" for r in reversed(by_setting)]
        axes.set_yticks(range(len(by_setting)), labels)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=left)
        axes.set_ylim(-0.6, len(by_setting) - 0.4)
        axes.set_xlabel("test accuracy of FedFOR's default minus FedAvg's (points)")
        sides = (
            (BLUE, "o", "mean and one-sided 95 % bounds"),
            (RED, "s", "the lower one is below −1"),
        )
        key = [
            *(
                Line2D([], [], color=c, marker=m, ms=5, ls="-", lw=1.4, label=t)
                for c, m, t in sides
            ),
            Line2D([], [], color=GREY, marker="|", ms=7, ls="", label="a seed"),
        ]
        made.legend(handles=key, loc="outside upper center", ncols=3, frameon=False)


def main() -> None:
    """Train what is missing, or report."""
    arguments = parser(__doc__ or "", OUT)
    arguments.add_argument("--only-default", action="store_true", help="no other strengths")
    options = arguments.parse_args()
    results = Results(options.out, options.data_dir, 0 if options.report else options.processes)
    settings = chosen(SETTINGS, options.settings)
    if options.report:
        print("\n\n".join(tables(results).values()))
        by_setting = rows(results)
        draw_strengths(by_setting, ROOT / "docs" / "img" / "fedfor-alpha.webp")
        draw_default(by_setting, ROOT / "docs" / "img" / "fedfor-default.webp")
        return
    rates = {s: results.tuned(s)[0] for s in settings}
    wanted = [int(s) for s in options.seeds.split(",") if s]

    def runs(multiples: Iterable[float], column: int) -> Iterator[Run]:
        for seed in wanted or range(1, 6):
            for s in settings:
                if seed <= SEEDS[s.data][column]:
                    yield from (run(s, multiple, seed, rates[s]) for multiple in multiples)

    main_question = (0.0, DEFAULT)
    results.finish(runs(main_question, 0))
    if not options.only_default:
        results.finish(runs([m for m in MULTIPLES if m not in main_question], 1))
        results.finish(r for r in runs(ADAM, 1) if r.setting.adam)


if __name__ == "__main__":
    main()
