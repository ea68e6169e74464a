"""``flwr-regs``: the command line over plans, runs and results."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import flwr_regs
from flwr_regs.experiments import calls
from flwr_regs.experiments.engine import PLAN, Plan
from flwr_regs.experiments.job import Job
from flwr_regs.experiments.results import Results, provenance
from flwr_regs.experiments.settings import DEFAULTS

EPILOG = "`flwr-regs list settings` shows every key=value, with its default and meaning."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: a run failed, or `bench` shows a collapse. 2: wrong usage. 130, 143: interrupted.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # settings may stand on either side of an option
    if wrong := [r for r in rest if "=" not in r or r.startswith("-") or "settings" not in args]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if "settings" in args:
        args.settings = [*args.settings, *rest]
    args.words = [*(sys.argv[1:] if argv is None else argv)]
    if getattr(args, "workers", 1) < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(args.do(args))
    except (ValueError, OSError, ImportError) as error:
        print(f"flwr-regs: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"flwr-regs: the run failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("flwr-regs: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flwr-regs",
        description="Compare federated methods on your data, and keep the results.",
    )
    parser.add_argument("--version", action="version", version=f"flwr-regs {flwr_regs.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, epilog=epilog)
        made.set_defaults(do=do)
        return made

    run = command("run", _run, "compare methods, in one process or in Ray", EPILOG)
    run.add_argument("--runner", choices=("process", "ray"), default="process", help="(process)")
    run.add_argument("--gpus-per-client", type=float, default=0.0, help="in Ray, e.g. 0.1 (0)")
    sweep = command("sweep", _run, "try values of one setting or parameter", EPILOG)
    sweep.add_argument(
        "key", nargs="?", help="a setting, such as lr, or a parameter, such as FedFOR.alpha"
    )
    sweep.add_argument("--values", help="separated by commas or semicolons")
    compare = command("compare", _run, "compare settings of any kind", EPILOG)
    compare.add_argument(
        *("--case", "-c"),
        action="append",
        default=[],
        metavar="LABEL: key=value ...",
        help="a row of the table: its label and its settings",
    )
    bench = command(
        *("bench", _bench, "tune each method equally on held-out data, then test it over seeds"),
        "The exit status is 1 if a method diverges or collapses. " + EPILOG,
    )
    bench.add_argument(
        *("--tune", "-t"),
        action="append",
        default=[],
        metavar="KEY=LOW..HIGH",
        help="what is tried: lr=0.02..2, FedFOR.alpha=0.01..1, or values: lr=0.1,0.3",
    )
    bench.add_argument("--trials", type=int, default=8, help="for each method (8)")
    bench.add_argument("--tuning-seeds", default="101", help="separated by commas (101)")
    for made, seeds in ((run, ""), (sweep, "1,2,3"), (compare, "1,2,3"), (bench, "1,2,3,4,5")):
        shown = seeds or "the setting seed"
        made.add_argument("--seeds", default=seeds, help=f"separated by commas ({shown})")
        made.add_argument("--workers", type=int, default=1, help="runs at a time (1)")
        made.add_argument(
            "--resume",
            type=Path,
            metavar="FOLDER",
            help="go on with results: train what is missing",
        )
        made.add_argument(
            "--dry-run", action="store_true", help="say what would run and how long it takes"
        )
        made.add_argument(
            "--app", type=Path, help="take the defaults from the pyproject.toml of this folder"
        )
        made.add_argument("settings", nargs="*", metavar="key=value", help="such as lr=0.1")
    plot = command("plot", _plot, "draw results again, or a partition's labels", EPILOG)
    plot.add_argument("what", help="a results' folder, or the word partition")
    plot.add_argument("settings", nargs="*", metavar="key=value", help="of the partition")
    plot.add_argument("--app", type=Path, help=argparse.SUPPRESS)
    listing = command("list", _list, "list what there is")
    listing.add_argument(
        "what", choices=("methods", "datasets", "models", "partitions", "settings")
    )
    methods = command("methods", _list, "list the methods, and what each costs")
    methods.set_defaults(what="methods")
    for made in (listing, methods):
        made.add_argument("--markdown", action="store_true", help="as a table for a page")
    return parser


def _run(args: argparse.Namespace) -> int:
    """Do ``run``, ``sweep`` or ``compare``."""
    if args.resume:
        plan, folder = Plan.load(_resumed(args)), args.resume
    else:
        plan = _plan(args)
        folder = None
    plan.check()
    if args.dry_run:
        return _dry_run(plan, args.workers)
    folder = folder or out_folder(plan.jobs[0][1])
    if not args.resume:
        plan.save(folder, provenance(_words(args)))
    runner = getattr(args, "runner", "process")
    with _keeping(folder, args.command):
        _train(plan, folder, args.workers, runner, getattr(args, "gpus_per_client", 0.0))
    return _report(plan.results(folder), folder, plan)


def _plan(args: argparse.Namespace) -> Plan:
    """Return the runs that the words ask for."""
    heading, cases = _cases(args)
    several = {label: len(_job(args, own).method_names) > 1 for label, own in cases.items()}
    jobs = []
    for label, own in cases.items():
        job = _job(args, own)
        seeds = numbers(args.seeds, "--seeds") if args.seeds else (job.seed,)
        for method in job.method_names:
            row = method if not label else f"{label}, {method}" if several[label] else label
            for seed in seeds:
                jobs.append((row, replace(job, methods=method, seed=seed)))
    jobs.sort(key=lambda one: seeds.index(one[1].seed))  # whole comparisons first
    ordered = args.command == "sweep" and all(map(_is_number, cases))
    return Plan(jobs, heading, ordered)


def _cases(args: argparse.Namespace) -> tuple[str, dict[str, list[str]]]:
    """Return (what the rows are, label -> its own settings); the label of methods alone is empty."""
    if args.command == "run":
        return "method", {"": []}
    if args.command == "compare":
        pairs = [read_case(text) for text in args.case]
        if not pairs:
            raise ValueError("compare needs a --case 'LABEL: key=value ...' for each row")
        if len(cases := dict(pairs)) < len(pairs):
            raise ValueError(f"each --case needs a label of its own, not {args.case}")
        return "case", cases
    if args.key is not None and "=" in args.key:  # argparse took a setting for it
        args.settings, args.key = [args.key, *args.settings], None
    if not args.key or not args.values:
        raise ValueError("sweep needs a key and --values, such as: sweep lr --values 0.1,0.3")
    target, dot, name = args.key.rpartition(".")
    if not dot or ":" in target:
        return args.key, {v: [f"{args.key}={v}"] for v in calls.values(args.values)}
    given = [s.removeprefix("methods=") for s in args.settings if s.startswith("methods=")]
    from flwr_regs.experiments.build import with_argument

    return args.key, {
        v: [
            "methods="
            + with_argument(
                given[-1] if given else target, target, name, calls.literal(v), os.getcwd()
            )
        ]
        for v in calls.values(args.values)
    }


def _bench(args: argparse.Namespace) -> int:
    """Tune, then test."""
    from flwr_regs.experiments.tuning import Bench

    if args.resume:
        bench, folder = Bench.load(_resumed(args)), args.resume
    else:
        job = _job(args, [])
        changed = {k: v for k, v in job.config.items() if v != DEFAULTS[k]}
        seeds = numbers(args.seeds, "--seeds"), numbers(args.tuning_seeds, "--tuning-seeds")
        bench = Bench(changed, tuple(args.tune), args.trials, *seeds)
    tuning = bench.tuning()
    tuning.check()
    if args.dry_run:
        return _dry_run(tuning, args.workers, bench.test({m: {} for m in bench.methods}))
    if not args.resume:
        folder = out_folder(job)
        bench.save(folder, provenance(_words(args)))
    trials = folder / "tuning"
    if not (trials / PLAN).is_file():
        trials.mkdir(exist_ok=True)
        tuning.save(trials, {})
    with _keeping(folder, "bench"):
        print(f"tuning on held-out data: {trials}", flush=True)
        _train(tuning, trials, args.workers)
        chosen = bench.chosen(tuning.recorded(trials))
        plan = bench.test(chosen)
        plan.save(folder, provenance(_words(args)))
        print(f"test: {folder}", flush=True)
        _train(plan, folder, args.workers)
    results = bench.results(plan, folder, bench.notes(chosen))
    status = _report(results, folder, plan)
    return 1 if results.warnings() else status


def _train(
    plan: Plan, folder: Path, workers: int, runner: str = "process", gpus: float = 0.0
) -> None:
    """Train what a plan lacks, and show it."""
    from flwr_regs.experiments import engine, flower_run
    from flwr_regs.experiments.progress import progress

    missing = plan.missing(folder)
    if not missing:
        return
    job, n = missing[0][1], len({label for label, _ in missing})
    print(
        f"flwr-regs {flwr_regs.__version__}: {len(missing)} runs ({n} x seeds "
        f"{','.join(map(str, plan.seeds))}), {job.rounds} rounds each\n{job.dataset}, partition "
        f"{job.partition} over {job.num_clients} clients; results: {folder}",
        flush=True,
    )
    bars = progress([(label, job.seed, job.rounds) for label, job in missing])
    if runner == "ray":
        flower_run.execute(plan, folder, bars, gpus)
    else:
        engine.execute(plan, folder, bars, workers)


def _report(results: Results, folder: Path, plan: Plan) -> int:
    """Write and print what came out; return the exit status."""
    results.save(folder)
    print(results.text() + f"results: {folder}", flush=True)
    failed = [run for run in results.runs if not run.ended]
    for run in failed:
        print(f"flwr-regs: {run.label}, seed {run.seed}, failed: {run.error}", file=sys.stderr)
    nothing = plan.heading != "method" and all(run.error for run in results.runs)
    return 1 if failed or nothing or plan.missing(folder) else 0


@contextmanager
def _keeping(folder: Path, command: str) -> Iterator[None]:
    """Say where the results so far are, and how to go on, if this is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second press must not cut this short
        print(
            f"\nflwr-regs: interrupted; every round so far is in {folder}\n"
            f"go on with: flwr-regs {command} --resume {shlex.quote(str(folder))}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else error.code) from None


def _dry_run(plan: Plan, workers: int, after: Plan | None = None) -> int:
    from flwr_regs.experiments.estimate import estimate

    print(estimate(plan, workers, after))
    return 0


def _resumed(args: argparse.Namespace) -> Path:
    """Return the folder to go on with; ValueError if the words ask for other settings too."""
    if (
        args.settings
        or getattr(args, "key", None)
        or getattr(args, "case", None)
        or getattr(args, "tune", None)
    ):
        raise ValueError("--resume takes its settings from the folder: leave the others out")
    folder: Path = args.resume
    return folder


def _plot(args: argparse.Namespace) -> int:
    from flwr_regs.experiments import plots

    if args.what != "partition":
        folder = Path(args.what)
        results = Plan.load(folder).results(folder)
        results.save(folder)
        print(results.text() + f"results: {folder}")
        return 0
    job = _job(args, [])
    counts = job.label_counts()
    title = f"{job.dataset}, partition {job.partition}, {job.num_clients} clients, seed {job.seed}"
    folder = Path(job.out) if job.out else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    written = plots.save(plots.labels(counts, title=title), folder / "partition")
    sizes = counts.sum(1)
    kinds = (counts > 0).sum(1)
    print(
        f"{title}\nexamples a client: {sizes.min()} to {sizes.max()}; labels a client: {kinds.min()} to "
        f"{kinds.max()}\n" + "\n".join(map(str, written))
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    from flwr_regs.experiments import data, methods_table, models, partitions, settings

    if args.what == "methods":
        methods_table.show(args.markdown)
        return 0
    if args.what == "settings" and args.markdown:
        print(settings.markdown(), end="")
        return 0
    found: Mapping[str, str] = {
        "datasets": data.DATASETS,
        "models": models.MODELS,
        "partitions": partitions.PARTITIONS,
        "settings": settings.meanings(),
    }[args.what]
    width = max(map(len, found))
    for name, meaning in found.items():
        print(f"{name:<{width}}  {meaning}")
    if args.what in ("datasets", "models"):
        print(f"\nyour own: {args.what[:-1]}=mine.py:name, or module:name")
    return 0


def _job(args: argparse.Namespace, own: Sequence[str]) -> Job:
    return read_settings([*args.settings, *own], args.app)


def read_settings(settings: Sequence[str], app: Path | None = None) -> Job:
    """Return the checked job of words ``key=value``.

    What they leave out has its default: the package's, or that of ``[tool.flwr.app.config]`` in the
    pyproject.toml of the folder `app`. Raises ValueError or OSError that says what is wrong.
    """
    given: dict[str, Any] = {}
    if app is not None:
        pyproject = app.resolve() / "pyproject.toml"
        if not pyproject.is_file():
            raise ValueError(f"{app.resolve()} holds no pyproject.toml (see --app)")
        tool = tomllib.loads(pyproject.read_text()).get("tool", {})
        given |= tool.get("flwr", {}).get("app", {}).get("config", {})
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"'{text}' is not of the form key=value")
        try:
            literal = tomllib.loads(f"v={value}")["v"]
        except tomllib.TOMLDecodeError:
            literal = value
        given[name] = value if isinstance(DEFAULTS.get(name), str) else literal
    if not given.get("code-dir"):
        given["code-dir"] = os.getcwd()
    if given.get("out"):
        given["out"] = str(Path(given["out"]).expanduser().resolve())
    try:
        job = Job.from_run_config(given)
        job.check()
    except TypeError as error:  # an argument of a method
        raise ValueError(str(error)) from error
    return job


def read_case(text: str) -> tuple[str, list[str]]:
    """Return (label, settings) of ``"LABEL: key=value key=value"``; raise ValueError for any other text."""
    label, colon, settings = text.partition(":")
    if not colon or not label.strip():
        raise ValueError(f"--case must look like 'LABEL: key=value ...', not '{text}'")
    return label.strip(), calls.words(settings)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers of an option, separated by commas; ValueError for anything else."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 0 or len({*found}) < len(found):
        raise ValueError(f"{option} must be different whole numbers such as 1,2,3, not '{text}'")
    return found


def out_folder(job: Job) -> Path:
    """Return (and make) the job's ``out``, by default ``results/<time>`` in the current folder.

    Raises ValueError if it holds results already.
    """
    folder = Path(job.out or Path.cwd() / "results" / time.strftime("%Y%m%d-%H%M%S"))
    if not job.out:
        for count in range(2, 1000):  # two runs in one second
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                folder = folder.with_name(f"{folder.name.partition('.')[0]}.{count}")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PLAN).exists() or (folder / "bench.json").exists():
        raise ValueError(
            f"{folder} holds results: go on with --resume {folder}, or give another out="
        )
    return folder


def _words(args: argparse.Namespace) -> list[str]:
    return ["flwr-regs", *args.words]


def _is_number(text: str) -> bool:
    return isinstance(_quietly(text), int | float)


def _quietly(text: str) -> Any:
    try:
        return calls.literal(text)
    except ValueError:
        return None
