"""What ``flwr-regs run``, ``sweep``, ``bench``, ``plot``, ``reproduce`` and ``resources`` do."""

from __future__ import annotations

import math
import random
import re
import shlex
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr_regs
from flwr_regs.experiments import words
from flwr_regs.experiments.cards import card_files, choices
from flwr_regs.experiments.cards.card_files import places
from flwr_regs.experiments.experiment import Experiment, Panel, Run
from flwr_regs.experiments.extras import needed
from flwr_regs.experiments.report.folders import CannotWrite, check_writable, locked, write
from flwr_regs.experiments.report.metrics import exploded, last
from flwr_regs.experiments.report.results import Results, check_rows, provenance, ranks_over
from flwr_regs.experiments.report.run_records import RunRecord, missing, record_path, recorded
from flwr_regs.experiments.run import tuning
from flwr_regs.experiments.run.process_family import WorkerKilled, on_farewell
from flwr_regs.experiments.run.progress import Heartbeat, counted, progress, rounds_of
from flwr_regs.experiments.settings import PLACES, split_in_words
from flwr_regs.experiments.space import Point
from flwr_regs.experiments.user_code import said

if TYPE_CHECKING:
    from flwr_regs.experiments.report.drawing import Look

BESIDE = {
    "--resume": ("--workers", "--runner", "--gpus-per-client", "--dry-run"),
    "--verify": ("--workers", "--runner", "--panels", "--methods", "--seeds", "--tolerance"),
}
"""An option -> those that count beside it: the folder says the rest."""
MOVED = ("data-dir", "code-dir")
"""The settings that may differ where results are taken up or made again."""
SELDOM = 20.0
"""While runs train, tables are written again after so many times the time that it takes."""


def train(args: Namespace) -> int:
    """Do ``run``, ``sweep`` or ``bench``."""
    for taken in ("--resume", "--verify"):
        if getattr(args, taken[2:], None):
            options = [w.partition("=")[0] for w in args.words if re.match("-[^0-9.]", w)]
            if wrong := [option for option in options if option not in (taken, *BESIDE[taken])]:
                raise ValueError(f"{taken} takes the rest from the folder: leave {wrong[0]} out")
    if getattr(args, "verify", None):
        return _verify(args)
    experiment, out = (_resumed(args), "") if args.resume else words.experiment_of(args)
    words.refuse_results(out)
    if not (args.resume or args.dry_run):
        check_writable(Path(out or "results"), keep=False)
    _check_runner(args, experiment)
    with Heartbeat(_say, "loading models and data"):
        experiment = experiment.checked()
    if args.dry_run:
        with tempfile.TemporaryDirectory(prefix="flwr-regs-") as empty:
            _tell_costs(experiment, args.resume or Path(empty), args.workers)
        return 0
    if not experiment.smoke:
        needed("matplotlib", "matplotlib", "drawing the results")  # before anything is trained
    folder = args.resume or words.out_folder(out)
    for name, seen in experiment.data_hashes.items() if args.resume else ():
        if (kept := experiment.hashes.get(name, seen)) != seen:
            changed = f"the data of '{name}' have changed since {folder} was begun"
            hashes = f"their hash is {seen}, not {kept}"
            raise ValueError(f"{changed}: {hashes}; train on them in a new folder")
    if experiment.metrics and not args.resume:
        experiment = choices.with_notes(experiment)
    _keep_farewell(folder, "bench" if experiment.baseline else "run")
    with ExitStack() as alone:
        alone.enter_context(locked(folder))
        if not args.resume:
            card_files.save(experiment, folder, provenance(["flwr-regs", *args.words]))
        for _, place in places(experiment, folder):
            if place != folder:  # it can be taken up by itself
                alone.enter_context(locked(place))
        if experiment.tunes:  # each stage tells its own costs alone
            with suppress(Exception):  # of a run that would fail: it says so better itself
                _tell_costs(experiment, folder, args.workers, brief=True)
        try:
            trained = [_train_panel(args, experiment, *pair) for pair in places(experiment, folder)]
            if experiment.metrics:
                _report_card(experiment, [results for _, results in trained], folder)
        except (CannotWrite, WorkerKilled) as error:
            raise type(error)(f"{error}: go on with --resume {folder}") from error
    return max(status for status, _ in trained)


_say: Callable[[str], None] = partial(print, flush=True)


def _check_runner(args: Namespace, experiment: Experiment) -> None:
    """Raise ValueError for options of a runner that cannot be, or do nothing."""
    gpus, in_ray = args.gpus_per_client, args.runner == "ray"
    if not gpus >= 0:
        raise ValueError(f"--gpus-per-client must be at least 0, not {gpus:g}")
    if gpus and not in_ray:
        raise ValueError("--gpus-per-client goes with --runner ray")
    if in_ray and args.workers > 1:
        raise ValueError("--workers does not go with --runner ray, where Ray decides")
    if in_ray and experiment.heading != "method":
        raise ValueError("--runner ray trains methods, and these rows are others")
    if gpus:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"--gpus-per-client {gpus:g}: torch finds no CUDA GPU; leave it out")


def _resumed(args: Namespace) -> Experiment:
    """Return the experiment to go on with; ValueError if the words ask for other things too."""
    if args.name:
        raise ValueError(f"--resume takes the rest from the folder: leave {args.name} out")
    experiment = _taken_up(args.resume, args.settings)
    if experiment.baseline != (args.command == "bench"):
        what, command = ("a benchmark", "bench") if experiment.baseline else ("a comparison", "run")
        raise ValueError(f"{args.resume} holds {what}: flwr-regs {command} --resume")
    return experiment


def _taken_up(folder: Path, settings: Sequence[str], code_dir: str | None = None) -> Experiment:
    """Return the experiment of a folder, perhaps from another machine, with its files where they are here.

    The settings say where that is; if they do not, and the folder of a user's code is not here, it is
    `code_dir`. Raises ValueError for other settings, and for a damaged record, before anything else is
    loaded but a user's code: which argument is tuned may depend on it.
    """
    here = words.read_words(settings)
    if wrong := [name for name in here if name not in MOVED]:
        raise ValueError(f"only {' and '.join(MOVED)} may change, not {', '.join(wrong)}")
    experiment, _ = card_files.of_folder(folder)
    if code_dir and not Path(experiment.settings.get("code-dir", "")).is_dir():
        here = {"code-dir": code_dir, **here}
    experiment = experiment.given(here)
    for panel, place in places(experiment, folder):
        recorded(experiment.tests(panel), place)
        recorded(experiment.trial_runs(panel), place / "tuning")
    return experiment


def _train_panel(
    args: Namespace, experiment: Experiment, panel: Panel, folder: Path
) -> tuple[int, Results]:
    """Tune and test in a panel's folder, as far as that is not done; return the exit status."""
    if experiment.metrics:
        _say(f"{experiment.name}, {experiment.source}, {experiment.where}: {panel.name}")
        for note in panel.notes:
            _say(f"NOTE: {note}")
    chosen = _tuned(args, experiment, panel, folder)
    if experiment.baseline:
        _say(f"test: {folder}")
    tests = experiment.tests(panel, chosen)
    _train(tests, folder, experiment.heading, args, experiment.ordered)
    results = results_of(experiment, panel, folder)
    with Heartbeat(_say, "drawing the results"):
        results.save(folder, pictures=not experiment.smoke)
        if not experiment.smoke:
            _draw_tuning(experiment, folder, folder)
    _say(results.text() + f"results: {folder}")
    runs = results.runs
    failed = [run for run in runs if not run.ended]
    for run in failed:
        print(f"flwr-regs: {run.label}, seed {run.seed}, failed", file=sys.stderr)
    bad = bool(failed or missing(tests, folder)) or all(run.error for run in runs)
    if not experiment.smoke:
        bad |= any(run.diverged or run.rejected or (run.whole and exploded(run)) for run in runs)
        bad |= experiment.baseline and any(row["collapsed"] for row in results.rows())
    return int(bad), results


def _draw_tuning(experiment: Experiment, folder: Path, out: Path, look: Look | None = None) -> None:
    """Draw into `out` what tuning tried in a panel's folder, if it tried several points."""
    from flwr_regs.experiments.report import drawing, tried

    chosen = chosen_of(experiment, folder)
    if several := tuning.trials(folder, chosen)[0]:
        for name, picture in tried.pictures(several, chosen, look or drawing.Look()).items():
            drawing.save(picture, out / name)


def _draw_ranks(title: str, of: Sequence[Results], folder: Path, look: Look | None = None) -> None:
    """Draw the methods' ranks over the panels that have the same ones, if there are enough."""
    from flwr_regs.experiments.report import drawing, plots

    drawing.remove(folder, "ranks-*")
    for number, ranks in enumerate(ranks_over(of), 1):
        picture = plots.over_panels(ranks, title=title, look=look)
        drawing.save(picture, folder / f"ranks-{number}")


def _tuned(args: Namespace, experiment: Experiment, panel: Panel, folder: Path) -> dict[str, Point]:
    """Return what tuning chooses, which experiment.toml keeps; train the trials that it needs.

    Of methods that were written into experiment.toml since, too.
    """
    _, made = card_files.of_folder(folder)
    before = made.get("chosen", {})
    new = [label for label in experiment.rows_of(panel) if label not in before]
    if experiment.tunes and new:
        _say(f"tuning on held-out data: {folder / 'tuning'}")
        (folder / "tuning").mkdir(exist_ok=True)
        train = partial(_train, folder=folder / "tuning", heading="trial", args=args)
        outcomes = tuning.tuned(experiment, panel, new, train)
        chosen = {label: outcome.pop("point") for label, outcome in outcomes.items()}
        made["chosen"], made["tuning"] = before | chosen, made.get("tuning", {}) | outcomes
        write(folder / card_files.FILE, card_files.text(experiment.only(panel), made))
    return chosen_of(experiment, folder)


def chosen_of(experiment: Experiment, folder: Path) -> dict[str, Point]:
    """Return what tuning has chosen in a panel's folder: label -> point; nothing without tuning.

    Raises ValueError if it has not chosen yet.
    """
    _, made = card_files.of_folder(folder)
    if experiment.tunes and "chosen" not in made:
        raise ValueError(f"{folder} is still tuning: go on with flwr-regs bench --resume {folder}")
    return {**made.get("chosen", {})}


def check_records(runs: Sequence[Run], folder: Path, others: Collection[Path] = ()) -> list[str]:
    """Return a note on `others`, and records of none of the runs; ValueError for one of other settings."""
    settings = {run.key: run.settings.config for run in runs}
    for key, record in recorded(runs, folder).items():
        wanted = settings[key]
        if other := [k for k in wanted if k not in PLACES and record.job.get(k) != wanted[k]]:
            path = record_path(folder, *key)
            raise ValueError(f"{path} is of another experiment: it differs in {', '.join(other)}")
    ours = {record_path(folder, *key) for key in settings}
    foreign = sorted({*others, *(folder / "runs").glob("*")} - ours)
    names = ", ".join(str(path.relative_to(folder)) for path in foreign)
    return [f"no run of {card_files.FILE}: {names}"] if foreign else []


def results_of(experiment: Experiment, panel: Panel, folder: Path) -> Results:
    """Return the results so far in a panel's folder; ValueError without any."""
    chosen = chosen_of(experiment, folder)
    tests = experiment.tests(panel, chosen)
    _, made = card_files.of_folder(folder)
    several, others = tuning.trials(folder, chosen)
    notes = [*tuning.notes(chosen, made.get("tuning", {})), *check_records(tests, folder, others)]
    if several:
        notes.append(tuning.cost(several))
    if not (records := recorded(tests, folder)):
        raise ValueError(f"{folder} has no runs yet")
    done = {key for key, record in records.items() if record.status != "unfinished"}
    lacking = [f"{run.label}, seed {run.seed}" for run in tests if run.key not in done]
    runs = [*records.values()]
    first = runs[0].label if experiment.baseline else made.get("baseline", "")
    first *= any(run.label == first for run in runs)  # its runs may be to come
    return Results(runs, notes, experiment.heading, experiment.ordered, first, lacking)


def _train(
    runs: Sequence[Run], folder: Path, heading: str, args: Namespace, ordered: bool = False
) -> dict[Any, RunRecord]:
    """Train what is missing of some runs, show it, and return the records of all.

    Raises ValueError as :func:`check_records` does.
    """
    from flwr_regs.experiments.run import engine

    check_records(runs, folder)
    if not (lacking := missing(runs, folder)):
        return recorded(runs, folder)
    settings, several = lacking[0].settings, len({run.label for run in lacking})
    rows = heading if heading in ("method", "case", "trial") else "value"
    seeds = list(dict.fromkeys(run.seed for run in runs))
    _say(
        f"flwr-regs {flwr_regs.__version__}: {counted(several, rows)}, "
        f"{rounds_of(lacking)}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; "
        f"{settings.dataset}, partition "
        f"{split_in_words(settings.config)} over {counted(settings.num_clients, 'client')}\n"
        f"results: {folder}"
    )

    next_at = 0.0

    def tables(records: Sequence[RunRecord]) -> None:
        nonlocal next_at
        if len(records) == len(runs) or time.monotonic() > next_at:  # many runs have long tables
            began = time.monotonic()
            Results(records, (), heading, ordered).save_tables(folder)
            next_at = time.monotonic() + SELDOM * (time.monotonic() - began)

    how = args.workers, args.runner, tables
    engine.execute(runs, folder, progress(lacking), *how, gpus=args.gpus_per_client, keep=True)
    return recorded(runs, folder)


def _keep_farewell(folder: Path, command: str) -> None:
    """Note what an interruption will say: where the results so far are, and how to go on."""
    name = shlex.quote(str(folder))
    once = ", once tuning has ended" * (command == "bench")
    on_farewell(
        f"\nflwr-regs: interrupted; the rounds that have ended, if any, are in {folder}\n"
        f"tables may lack the last runs, and pictures were not written; to make them{once}: "
        f"flwr-regs plot {name}\n"
        f"to resume: flwr-regs {command} --resume {name}"
    )


def _tell_costs(experiment: Experiment, folder: Path, workers: int, brief: bool = False) -> None:
    """Say what would run, or what is missing in a folder; if `brief`, in a line for each panel."""
    from flwr_regs.experiments.run import trainer
    from flwr_regs.experiments.run.costs import Timed, estimate

    known: dict[Any, Timed] = {}
    for panel, place in places(experiment, folder):
        name = f"{experiment.name}, {panel.name}" if experiment.metrics else ""
        begun = (place / card_files.FILE).is_file()
        chosen = begun and "chosen" in card_files.of_folder(place)[1]
        lacking = [] if chosen else missing(experiment.trial_runs(panel), place / "tuning")
        lacking += missing(experiment.tests(panel), place)
        rounds = {**trainer.begun(lacking, place / "tuning"), **trainer.begun(lacking, place)}
        if not lacking and not brief:
            _say(f"{name}{': ' * bool(name)}nothing is missing")
        with Heartbeat(_say, "timing a step and a test batch"):
            lines = estimate(lacking, workers, known, rounds, name) if lacking else ()
            for line in [*lines][-1:] if brief else lines:
                _say(line)


def _report_card(experiment: Experiment, results: Sequence[Results], folder: Path) -> None:
    """Write and print what a card's experiment gave beside what its source reports."""
    import pandas as pd

    from flwr_regs.experiments.cards import card_report

    rows = card_report.report_rows(experiment, results)
    write(folder / "protocol.csv", pd.DataFrame(rows).to_csv(index=False))
    write(folder / "protocol.txt", text := card_report.as_text(experiment, rows))
    if not experiment.smoke:
        _draw_ranks(experiment.title, results, folder)
    _say(text + f"results: {folder}")


def plot(args: Namespace) -> int:
    """Do ``plot``: draw results again, or a partition."""
    from flwr_regs.experiments.report.drawing import Look

    look = Look(args.title, args.size, args.font_size, accuracy=args.accuracy)
    if args.what == "partition":
        if args.methods or args.accuracy:
            raise ValueError("--methods and --accuracy go with results: flwr-regs plot FOLDER")
        run, out = words.first_run(args)
        from flwr_regs.experiments.report import partition_plot

        print(partition_plot.draw(run.settings, Path(out).absolute(), look, args.export))
        return 0
    if args.export:
        raise ValueError("--export goes with a partition: flwr-regs plot partition --export")
    if wrong := [w for w in args.settings if not w.startswith(("out=", "code-dir="))]:
        raise ValueError(f"results are drawn as they are: leave out {wrong[0]}")
    folder, given = Path(args.what), words.read_words(args.settings)
    target = Path(given.pop("out", folder))
    experiment, _ = card_files.of_folder(folder)
    if given:  # else none of the user's code is loaded: it may be gone
        experiment = experiment.given(given)
    every = places(experiment, folder)
    begun = [(panel, place) for panel, place in every if (place / "runs").is_dir()]
    each = {place: results_of(experiment, panel, place) for panel, place in begun or every[:1]}
    labels = list(dict.fromkeys(run.label for of in each.values() for run in of.runs))
    look = replace(look, methods=choices.rejoined(re.split("[,;]", args.methods), labels))
    check_rows(look.methods, labels)
    for place, results in each.items():
        check_writable(there := target / place.relative_to(folder))
        results.save(there, look=look)
        _draw_tuning(experiment, place, there, replace(look, accuracy=None))
        print(results.text() + f"results: {there}")
    whole = replace(look, methods=(), accuracy=None)
    _draw_ranks(experiment.title, [*each.values()], target, whole)
    if (look.methods or look.accuracy) and target == folder:
        print(f"they show a part now: flwr-regs plot {shlex.quote(str(folder))} draws all again")
    return 0


def resources(args: Namespace) -> int:
    """Train one client, and print what it takes."""
    with Heartbeat(_say, "training a client, and a cohort in a stack"):
        run, _ = words.first_run(args)
        from flwr_regs.experiments.run.costs import measure

        print(measure(run))
    return 0


def _verify(args: Namespace) -> int:
    """Train one run of results again; return 1 if it does not come out the same."""
    with tempfile.TemporaryDirectory(prefix="flwr-regs-") as temporary:
        folder = args.verify
        if folder.is_file():
            folder = Path(temporary)
            try:
                with tarfile.open(args.verify) as archive:
                    archive.extractall(folder, filter="data")
            except Exception as error:  # each compression has errors of its own
                no = f"{args.verify} is no folder or whole archive of results"
                raise ValueError(f"{no} ({said(error)})") from error
        kept, again = _kept(args, folder)
        panels = choices.panels_of(kept, args.panels)
        wanted = choices.with_methods(kept, args.methods).rows if args.methods else kept.rows
        ended = [
            (panel, record, card_files.of_folder(place)[1], run)
            for panel, place in places(kept, folder)
            if panel in panels and (place / "runs").is_dir()
            for run in again.tests(panel, chosen_of(kept, place))
            if kept.rows_of(panel)[run.label] in wanted or run.label == args.methods
            for record in recorded([run], place).values()
            if record.ended
        ]
    if not ended:
        raise ValueError(f"{args.verify} has no such run that ended")
    panel, old, made, run = random.choice(ended)
    where = f"{panel.name}: " * (len(kept.panels) > 1)
    _say(f"{where}{old.label}, seed {old.seed}; one of {len(ended)} runs")
    args.runner = old.runner.rpartition(", ")[2] or args.runner  # another one rounds otherwise
    (new,) = _again([run], kept, args).values()
    present, made = {**provenance([]), "runner": new.runner}, {**made, "runner": old.runner or "?"}
    # what a stack rounds may change with its code
    must = ("versions", "platform", "runner", *["commit"] * (args.runner == "stacked"))
    if other := [what for what in must if present[what] != made.get(what)]:
        there = ", ".join(f"{what} {made.get(what)} there, {present[what]} here" for what in other)
        _say(f"{there}: the last five rounds must agree within {args.tolerance:g} points")
        return int(not _is_equal(old, new, args.tolerance))
    _say("machine and versions are those of the results: all rounds must be equal")
    for one, two in zip_longest(old.test, new.test):
        if not one or not two or not all(_is_same(one[key], two.get(key)) for key in one):
            print(f"{new.label}, seed {new.seed}: {one} there, {two} here  DIFFERS")
            print(f"commit {made.get('commit')} there, {present['commit']} here")
            return 1
    print(f"{new.label}, seed {new.seed}: all {len(new.trained)} rounds are the same")
    return 0


def _again(runs: Sequence[Run], kept: Experiment, args: Namespace) -> dict[Any, RunRecord]:
    """Train runs in a temporary folder, and return their records."""
    with tempfile.TemporaryDirectory(prefix="flwr-regs-") as temporary:
        return _train(runs, Path(temporary), kept.heading, args)


def _is_same(kept: float | None, new: float | None) -> bool:
    """Return whether a figure is one that was kept, perhaps with five digits."""
    return kept == new or (kept is not None and new is not None and kept == round(new, 5))


def _kept(args: Namespace, folder: Path) -> tuple[Experiment, Experiment]:
    """Return the experiment of a folder, and what of it is trained again: its seeds that are asked for.

    Both have their files where they are here, the only settings that may differ; a user's code in the
    current folder, unless the words say otherwise or the results' own folder for it is here.
    """
    kept = _taken_up(folder, args.settings, str(Path.cwd()))
    seeds = words.numbers(args.seeds, "--seeds") or kept.seeds
    if gone := [seed for seed in seeds if seed not in kept.seeds]:
        raise ValueError(f"{folder} has no run of seed {gone[0]}, only of {[*kept.seeds]}")
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must be a number of at least 0, not {args.tolerance:g}")
    return kept, replace(kept, seeds=tuple(s for s in kept.seeds if s in seeds))


def reproduce(args: Namespace) -> int:
    """Train runs of a folder again, in a temporary one; return 1 if one of them comes out otherwise."""
    kept, again = _kept(args, args.folder)
    _check_runner(args, again.checked())
    equal: list[bool] = []
    for panel, place in places(kept, args.folder):
        chosen = chosen_of(kept, place)
        check_records(kept.tests(panel, chosen), place)
        runs = again.tests(panel, chosen)
        old, new = recorded(runs, place), _again(runs, kept, args)
        equal += [_is_equal(old.get(key), new[key], args.tolerance) for key in new]
    print(f"{sum(equal)} of {len(equal)} runs are equal within {args.tolerance:g} points")
    return int(not all(equal))


def _is_equal(old: RunRecord | None, new: RunRecord, tolerance: float) -> bool:
    """Say what a run gave there and here; return whether that is the same within a tolerance."""
    (there, accuracy), (here, accuracy_here) = _outcome(old), _outcome(new)
    same = there == here in ("diverged", "failed") or abs(accuracy - accuracy_here) <= tolerance
    print(f"{new.label}, seed {new.seed}: {there} there, {here} here{'' if same else '  DIFFERS'}")
    return same


def _outcome(run: RunRecord | None) -> tuple[str, float]:
    """Return a run's last five rounds in per cent, as text and as a number, or why it has none (NaN)."""
    if run is None or not run.whole:
        return ("missing" if run is None else run.status), math.nan
    return f"{100 * last(run):.2f} %", 100 * last(run)
