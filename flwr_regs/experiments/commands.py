"""What ``flwr-regs run``, ``sweep``, ``bench``, ``reproduce`` and ``resources`` do."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import flwr_regs
from flwr_regs.experiments.report.folders import locked
from flwr_regs.experiments.report.results import Results, provenance
from flwr_regs.experiments.report.rows import last
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.run.engine import PLAN, Plan
from flwr_regs.experiments.run.tuning import Bench
from flwr_regs.experiments.settings.job import Job
from flwr_regs.experiments.settings.settings import DEFAULTS
from flwr_regs.experiments.words import check_seeds, job_of, numbers, out_folder, plan_of

SEEDS, TUNING_SEEDS, TRIALS = "1,2,3,4,5", "101", 8
"""Of `bench`, where neither the words nor a card say otherwise."""
BESIDE_RESUME = ("--resume", "--workers", "--runner", "--gpus-per-client", "--dry-run")
"""The options that count beside ``--resume``."""


def run(args: argparse.Namespace) -> int:
    """Do ``run`` or ``sweep``."""
    if args.resume and (args.resume / "bench.json").exists():
        raise ValueError(f"{args.resume} holds a benchmark: flwr-regs bench --resume")
    folder = args.resume
    plan = Plan.load(resumed(args)) if folder else plan_of(args)
    plan.check()
    runner = getattr(args, "runner", "process")
    if runner == "ray" and any([label] != job.method_names for label, job in plan.jobs):
        raise ValueError(f"--runner ray trains methods, and the rows of {folder} are others")
    if args.dry_run:
        return _dry_run(replace(plan, jobs=plan.missing(folder)) if folder else plan, args.workers)
    folder = folder or out_folder(plan.jobs[0][1].out)
    if not args.resume:
        plan.save(folder, provenance(["flwr-regs", *args.words]))
    with locked(folder), keeping(folder, args.command):
        _train(plan, folder, args.workers, runner, getattr(args, "gpus_per_client", 0.0))
        return _report(plan.results(folder), folder, plan)


def resources(args: argparse.Namespace) -> int:
    """Train one client, and print what it takes."""
    from flwr_regs.experiments.run.resources import measure

    job = job_of(args)
    print(measure(job).text(job.num_clients))
    return 0


def bench(args: argparse.Namespace) -> int:
    """Tune, then test."""
    if args.resume:
        bench, folder = Bench.load(resumed(args)), args.resume
        came = bench.provenance(folder)  # it may be resumed by another version
    else:
        args.seeds, args.tuning_seeds = args.seeds or SEEDS, args.tuning_seeds or TUNING_SEEDS
        check_seeds(args)
        job = job_of(args)
        changed = {k: v for k, v in job.config.items() if v != DEFAULTS[k]}
        seeds = numbers(args.seeds, "--seeds"), numbers(args.tuning_seeds, "--tuning-seeds")
        trials = TRIALS if args.trials is None else args.trials
        bench = Bench(changed, tuple(args.tune), trials, *seeds)
    bench.check()
    if args.dry_run:
        return dry_bench(bench, args.workers, folder if args.resume else None)
    if not args.resume:
        folder = out_folder(job.out)
        came = provenance(["flwr-regs", *args.words])
        bench.save(folder, came)
    results, status = train_bench(bench, folder, came, args.workers)
    return 1 if went_wrong(results) else status


def train_bench(
    bench: Bench,
    folder: Path,
    came: Mapping[str, Any],
    workers: int,
    pictures: bool = True,
    whole: Path | None = None,
) -> tuple[Results, int]:
    """Tune and test in a folder, as far as that is not done; return the results and the exit status.

    `whole` is the folder to go on with, if this one is a part of it.
    """
    trials = folder / "tuning"
    with locked(folder), keeping(folder, "bench", whole):
        chosen = bench.untuned
        if bench.spaces:
            tuning = bench.tuning()
            if not (trials / PLAN).is_file():
                trials.mkdir(exist_ok=True)
                tuning.save(trials, {})
            print(f"tuning on held-out data: {trials}", flush=True)
            _train(tuning, trials, workers)
            chosen = bench.chosen(tuning.recorded(trials))
        plan = bench.test(chosen)
        plan.save(folder, came)
        print(f"test: {folder}", flush=True)
        _train(plan, folder, workers)
        results = plan.results(folder, bench.notes(chosen), baseline=True)
        return results, _report(results, folder, plan, pictures)


def went_wrong(results: Results) -> bool:
    """Return whether a method of a benchmark diverged, failed, collapsed, or had replies rejected."""
    wrong = ("diverged", "failed", "collapsed", "failures")
    return any(row[what] for row in results.rows() for what in wrong)


def dry_bench(bench: Bench, workers: int, folder: Path | None) -> int:
    """Say what a benchmark would run, or what is missing in its folder."""
    test = bench.test(bench.untuned)
    tuning = bench.tuning() if bench.spaces else replace(test, jobs=[])
    if folder is not None:  # the chosen settings of the test are not known before tuning ends
        tuning = replace(tuning, jobs=tuning.missing(folder / "tuning"))
        test = replace(test, jobs=test.missing(folder))
    return _dry_run(tuning, workers, test)


def _train(
    plan: Plan, folder: Path, workers: int, runner: str = "process", gpus: float = 0.0
) -> None:
    """Train what a plan lacks, and show it."""
    from flwr_regs.experiments.run import engine, flower_run
    from flwr_regs.experiments.run.progress import progress

    missing = plan.missing(folder)
    if not missing:
        return
    job, n = missing[0][1], len({label for label, _ in missing})
    rows = plan.heading if plan.heading in ("method", "case", "trial") else "value"
    print(
        f"flwr-regs {flwr_regs.__version__}: {n} {rows}{'s' * (n > 1)}, "
        f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}, {job.rounds} rounds; "
        f"{job.dataset}, partition {job.partition} over {job.num_clients} clients\nresults: {folder}",
        flush=True,
    )
    bars = progress([(label, job.seed, job.rounds) for label, job in missing])
    if runner == "ray":
        flower_run.execute(plan, folder, bars, gpus)
    else:
        engine.execute(plan, folder, bars, workers, runner == "stacked")


def _report(results: Results, folder: Path, plan: Plan, pictures: bool = True) -> int:
    """Write and print what came out; return the exit status."""
    results.save(folder, pictures)
    print(results.text() + f"results: {folder}", flush=True)
    failed = [run for run in results.runs if not run.ended]
    for run in failed:
        print(f"flwr-regs: {run.label}, seed {run.seed}, failed: {run.error}", file=sys.stderr)
    nothing = plan.heading != "method" and all(run.error for run in results.runs)
    return 1 if failed or nothing or plan.missing(folder) else 0


@contextmanager
def keeping(folder: Path, command: str, whole: Path | None = None) -> Iterator[None]:
    """Say where the results so far are, and how to go on, if this is interrupted.

    `whole` is as in :func:`train_bench`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second press must not cut this short
        print(
            f"\nflwr-regs: interrupted; every round so far is in {folder}\n"
            f"go on with: flwr-regs {command} --resume {shlex.quote(str(whole or folder))}",
            file=sys.stderr,
            flush=True,
        )
        for results in (folder, folder / "tuning"):
            with suppress(ValueError):  # no plan there, or no run yet
                Plan.load(results).results(results).save(results, pictures=False)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else error.code) from None


def _dry_run(plan: Plan, workers: int, after: Plan | None = None) -> int:
    from flwr_regs.experiments.run.estimate import estimate

    if not plan.jobs and after:
        plan, after = after, None
    if not plan.jobs:
        print("nothing is missing")
        return 0
    print(estimate(plan, workers, after))
    return 0


def resumed(args: argparse.Namespace) -> Path:
    """Return the folder to go on with; ValueError if the words ask for other settings too."""
    if args.settings or any(getattr(args, name, None) for name in ("key", "case", "tune")):
        raise ValueError("--resume takes its settings from the folder: leave the others out")
    for word in args.words:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in BESIDE_RESUME):
            raise ValueError(f"--resume takes what {name} says from the folder: leave it out")
    folder: Path = args.resume
    return folder


def reproduce(args: argparse.Namespace) -> int:
    """Train runs of a folder again, in a temporary one; return 1 if one of them comes out otherwise."""
    here = dict(text.partition("=")[::2] for text in args.settings)
    if wrong := [name for name in here if name not in ("data-dir", "code-dir")]:
        raise ValueError(f"only data-dir and code-dir may change, not {', '.join(wrong)}")
    kept = Plan.load(args.folder)
    seeds = numbers(args.seeds, "--seeds") if args.seeds else kept.seeds
    changed = {"out": "", "code-dir": os.getcwd(), **here}
    jobs = [
        (label, Job.from_run_config({**job.config, **changed}))
        for label, job in kept.jobs
        if job.seed in seeds
    ]
    if not jobs:
        raise ValueError(f"{args.folder} has no run of the seeds {args.seeds}, only {kept.seeds}")
    old = {(run.label, run.seed): run for run in kept.recorded(args.folder)}
    plan = replace(kept, jobs=jobs)
    plan.check()
    equal = 0
    with tempfile.TemporaryDirectory(prefix="flwr-regs-") as temporary:
        _train(plan, Path(temporary), args.workers)
        for run in plan.recorded(Path(temporary)):
            said, accuracy = _outcome(old.get((run.label, run.seed)))
            said_here, accuracy_here = _outcome(run)
            same = said == said_here != "missing"
            if accuracy is not None and accuracy_here is not None:
                same = abs(accuracy - accuracy_here) <= args.tolerance
            equal += same
            print(
                f"{run.label}, seed {run.seed}: {said} there, {said_here} here"
                + ("" if same else "  DIFFERS")
            )
    print(f"{equal} of {len(jobs)} runs are equal within {args.tolerance:g} points")
    return 0 if equal == len(jobs) else 1


def _outcome(run: Run | None) -> tuple[str, float | None]:
    """Return a run's last five rounds in per cent, as text and as a number, or why it has none."""
    if run is None or not run.ended:
        return "missing", None
    return ("diverged", None) if run.diverged else (f"{100 * last(run):.2f} %", 100 * last(run))
