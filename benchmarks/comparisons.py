"""The comparisons that the documents show: kept results, tables, pictures, and whether they still hold.

``python -m benchmarks.comparisons keep FOLDER NAME`` keeps what ``flwr-regs bench`` wrote into FOLDER as
``docs/studies/NAME.tar.xz``, without models, the accuracies of single clients and the times of single
rounds. ``... report`` writes tables into the pages, between ``<!-- study: NAME -->`` and ``<!-- end -->``,
and draws the pictures; a mark may name methods, ``<!-- study: NAME: FedAvg; FedFOR -->``. ``... check``
trains one seed of every study again and compares; data sets that are no part of a package need
``--data-dir``.
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import lzma
import re
import shlex
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import write_picture
from flwr_regs import METHODS
from flwr_regs.experiments import cli
from flwr_regs.experiments.calls import parse_methods, text_of
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.commands import places
from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.metrics import per_cent, warnings
from flwr_regs.experiments.report.results import Results, number
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.settings import DEFAULTS

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "docs" / "studies"
ARCHIVE = ".tar.xz"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
MARK = re.compile(r"(<!-- (study|command): ([\w-]+)(?:: (.*?))? -->\n).*?(?=<!-- end -->)", re.S)
MANY = 8
"""With more methods than this, a picture shows the best ones; the table has all."""
SMALL = (4.6, 3.0)
"""The size in inches of a picture of two methods."""
ELSEWHERE = ("out", "code-dir", "data-dir")
"""Settings that are paths of the machine that trained."""


def keep(source: Path, target: Path) -> None:
    """Pack a benchmark's records without what no document needs, and without paths."""
    experiment, made = card_files.of_folder(source)
    if not experiment.name:
        made["command"] = command(experiment)
    texts = {}
    for folder in dict.fromkeys([source, *(place for _, place in places(experiment, source))]):
        if (folder / card_files.FILE).is_file():
            within = "" if folder == source else f"{folder.name}/"
            texts |= {f"{within}{name}": text for name, text in _texts(folder, made).items()}
    pack(texts, target)


def _texts(folder: Path, made: dict[str, Any]) -> dict[str, str]:
    """Return the files of a folder that are kept: its card, its runs and its trials."""
    experiment, own = card_files.of_folder(folder)
    settings = {key: value for key, value in experiment.settings.items() if key not in ELSEWHERE}
    words = [word for word in made["command"] if not word.startswith("out=")]
    own["command"] = ["data-dir=DIR" if word.startswith("data-dir=") else word for word in words]
    texts = {card_files.FILE: card_files.text(replace(experiment, settings=settings), own)}
    for path in sorted(folder.glob("runs/*.jsonl")):
        run = records.read(path)
        lines = [{"run": _head(run)}, *_rounds(run), {"end": _end(run)}]
        texts[f"runs/{path.name}"] = "".join(json.dumps(x) + "\n" for x in lines)
    for path in sorted(folder.glob("tuning/runs/*.jsonl")):  # its cost and its score
        run = records.read(path)
        steps = sum(sum(entry.get("steps", {}).values()) for entry in run.rounds)
        lines = [{"run": _head(run)}, {"round": {"steps": {"all": steps}}}]
        if run.trained:
            mean = {"round": run.trained[-1]["round"], "accuracy": round(metrics.last(run), 6)}
            lines.append({"test": mean})
        lines += [{"end": {**_end(run), "per_client": {}}}]
        texts[f"tuning/runs/{path.name}"] = "".join(json.dumps(x) + "\n" for x in lines)
    return texts


def pack(texts: dict[str, str], target: Path) -> None:
    """Write files into one archive; equal files give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in texts.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    for_text = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}
    target.write_bytes(lzma.compress(packed.getvalue(), filters=[for_text]))


def studies() -> list[str]:
    """Return the names of the kept studies."""
    return sorted(path.name.removesuffix(ARCHIVE) for path in STUDIES.glob(f"*{ARCHIVE}"))


@cache
def unpacked(name: str, where: Path = STUDIES) -> Path:
    """Return a folder with a kept study's files, which goes when the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    with tarfile.open(where / f"{name}{ARCHIVE}") as archive:
        archive.extractall(folder.name, filter="data")
    return Path(folder.name)


def _head(run: RunRecord) -> dict[str, Any]:
    job = {**run.job, **dict.fromkeys(ELSEWHERE, "")}
    names = ("label", "method", "seed", "clients", "settings", "row", "point", "weighting")
    return {**{name: getattr(run, name) for name in names}, "job": job}


def _rounds(run: RunRecord) -> list[dict[str, Any]]:
    """Return the lines of a run's rounds; each has taken their mean time."""
    lines: list[dict[str, Any]] = [
        {"test": _test(point)} for point in run.test if not point["round"]
    ]
    seconds = round(run.clock[-1] / len(run.rounds), 5) if run.rounds else 0.0
    for entry, point in zip(run.rounds, run.trained, strict=False):
        ways = {
            w: {"all": sum(entry[w].values())} for w in ("bytes_down", "bytes_up") if w in entry
        }
        more = {k: entry[k] for k in ("failures", "epsilon", "delta", "clipped") if entry.get(k)}
        more["turns"] = entry.get("turns", len(entry.get("bytes_down", ())))
        if tests := metrics.on_clients(entry):  # their mean, as one client's
            more["evaluate"] = {"clients": {"all": {"accuracy": round(sum(tests) / len(tests), 5)}}}
        lines.append({"round": {**ways, "seconds": {"all": seconds}, **more}, "test": _test(point)})
    return lines


def _test(point: dict[str, Any]) -> dict[str, Any]:
    return {"round": point["round"], "accuracy": round(point["accuracy"], 5)}


def _end(run: RunRecord) -> dict[str, Any]:
    names = ("error", "warnings", "diverged", "ended")
    ticks = run.processor_seconds
    took = {
        "seconds": round(run.seconds, 3),
        "processor_seconds": None if ticks is None else round(ticks, 3),
    }
    clients = {k: round(run.per_client[k], 5) for k in ("worst", "std") if k in run.per_client}
    return {**took, **{name: getattr(run, name) for name in names}, "per_client": clients}


def command(experiment: Experiment) -> list[str]:
    """Return the command that makes a benchmark's results."""
    methods = "; ".join(text_of(row.calls) for row in experiment.rows)
    words = ["flwr-regs", "bench", f"methods={methods}"]
    for key, value in experiment.settings.items():
        if key == "data-dir":
            words.append("data-dir=DIR")
        elif key not in ELSEWHERE:
            words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    words += [word for space in experiment.tune for word in ("--tune", space.text)]
    words += ["--trials", str(experiment.trials), "--seeds", ",".join(map(str, experiment.seeds))]
    return [*words, "--tuning-seeds", ",".join(map(str, experiment.tuning_seeds))]


def labels(experiment: Experiment) -> list[str]:
    """Return the rows of a benchmark."""
    return [*experiment.rows_of(*experiment.panels)]


def results(name: str) -> Results:
    """Return the results of a kept study, compared with its first method."""
    folder = unpacked(name)
    experiment, _ = card_files.of_folder(folder)
    runs = experiment.tests(*experiment.panels)
    return Results([*records.recorded(runs, folder).values()], baseline=runs[0].label)


def table(name: str, only: str = "") -> str:
    """Return a study's table as Markdown, and what went wrong; `only` are its rows, else all."""
    found, (experiment, made) = results(name), card_files.of_folder(unpacked(name))
    target = f"to {found.target:.0%}"
    head = ["method", "last 5 rounds", f"against {found.baseline}", target, "worst client"]
    head += ["MB", f"MB {target}", "processor s", "tuned"]
    private = any(row.get("epsilon") is not None for row in found.rows())
    head += ["epsilon"] * private
    lines = [head, ["---"] * len(head)]
    wanted = only.split("; ") if only else [row["method"] for row in found.rows()]
    by_label = {row["method"]: row for row in found.rows()}
    for row in (by_label[label] for label in wanted):
        reached = "–"
        if row["rounds_to_target"] is not None:
            reached = f"{row['rounds_to_target']:.0f} ({row['reached']} of {row['n']})"
        point = made["chosen"][row["method"]]
        names = {key: key.rpartition(".")[2] for key in point}
        once = {k: n if [*names.values()].count(n) == 1 else k for k, n in names.items()}
        tuned = ", ".join(f"{once[key]} {value}" for key, value in point.items())
        cells = [f"`{row['method']}`", per_cent(row["last5"], row["last5_interval"])]
        difference = per_cent(row["difference"], row["difference_interval"])
        if row["difference"] is not None and not row["decided"]:
            difference += " (not decided)"
        cells += [difference, reached]
        cells += [per_cent(row["worst_client"]), number(row["mb"]), number(row["mb_to_target"])]
        cells.append(number(row["processor_seconds"]))
        epsilon = [number(row.get("epsilon"))] * private
        lines.append([*cells, tuned or "–", *epsilon])
    text = [f"| {' | '.join(line)} |" for line in lines]
    seeds = ", ".join(map(str, found.seeds))
    below = (
        f"Test accuracy in per cent, mean and 95 % interval over the seeds {seeds} (Student's t); "
        "differences are paired by seed, and decided if Holm's adjusted p-value is below 0.05. Tuned: the "
        f"best of {experiment.trials} trials on held-out data, or of a few more where a range was widened. "
        f"Trained on {made['platform']}, torch {made['versions']['torch']}; on another processor, rounding "
        "differs and so do single figures."
    )
    text += ["", textwrap.fill(below, 120)]
    shown = Results([run for run in found.runs if run.label in wanted])
    text += [f"\n**{warning}**" for warning in warnings(shown.runs)]
    return "\n".join(text)


def filled(text: str) -> str:
    """Return a page with the tables and commands of its studies made anew."""

    def part(match: re.Match[str]) -> str:
        if match[2] == "command":
            line = shlex.join(command(card_files.of_folder(unpacked(match[3]))[0]))
            return f"{match[1]}\n```bash\n{line}\n```\n\n"
        return f"{match[1]}\n{table(match[3], match[4] or '')}\n\n"

    return MARK.sub(part, text)


def draw() -> None:
    """Draw the pictures that pages show, and each method beside FedAvg in the first study that has it."""
    images = ROOT / "docs" / "img"
    pages = "".join(page.read_text() for page in PAGES)
    for name in studies():
        found = results(name)
        rows = sorted(found.rows(), key=lambda row: -(row["last5"] or 0))
        best = {row["method"] for row in rows[: MANY - 1]} | {found.baseline}
        shown = Results([r for r in found.runs if r.label in best], baseline=found.baseline)
        for x in ("round", "megabytes"):
            if f"img/studies/{name}-{x}.webp" in pages:
                write_picture(shown.plot(x), images / "studies" / f"{name}-{x}.webp")
    drawn = set[str]()
    for found in map(results, ("digits", "fedopt", "domains")):
        for label in dict.fromkeys(run.label for run in found.runs):
            (parts,) = parse_methods(label).values()
            target = parts[0].target
            if len(parts) == 1 and target in METHODS and target not in drawn:
                drawn.add(target)
                runs = [r for r in found.runs if r.label in (found.baseline, label)]
                pair = Results(runs, baseline=found.baseline)
                write_picture(pair.plot(size=SMALL), images / "methods" / f"{target.lower()}.webp")


def check(data_dir: str, tolerance: float, workers: int) -> int:
    """Train the first seed of every study again; return 1 if one comes out otherwise."""
    worst = 0
    for name in studies():
        experiment, _ = card_files.of_folder(unpacked(name))
        words = ["reproduce", str(unpacked(name)), "--seeds", str(experiment.seeds[0])]
        words += ["--tolerance", str(tolerance), "--workers", str(workers)]
        if str(experiment.settings.get("dataset", DEFAULTS["dataset"])).startswith("mnist"):
            if not data_dir:
                print(f"{name}: skipped, since it needs --data-dir")
                continue
            words.append(f"data-dir={data_dir}")
        worst = max(worst, cli.main(words))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Keep, report or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    keeping = verbs.add_parser("keep")
    keeping.add_argument("folder", type=Path)
    keeping.add_argument("name")
    verbs.add_parser("report")
    checking = verbs.add_parser("check")
    checking.add_argument("--data-dir", default="")
    checking.add_argument("--tolerance", type=float, default=3.0)
    checking.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(argv)
    if given.verb == "keep":
        keep(given.folder, STUDIES / f"{given.name}{ARCHIVE}")
    elif given.verb == "check":
        return check(given.data_dir, given.tolerance, given.workers)
    else:
        draw()
        for page in PAGES:
            page.write_text(filled(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
