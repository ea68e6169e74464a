"""What the words of the command line ask for: settings, rows, seeds and folders."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_regs.experiments.report.folders import check_writable, new_folder
from flwr_regs.experiments.run.engine import PLAN, Plan
from flwr_regs.experiments.settings import calls
from flwr_regs.experiments.settings.build import with_argument
from flwr_regs.experiments.settings.job import Job
from flwr_regs.experiments.settings.settings import read


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the runs that the words ask for."""
    heading, cases = _cases(args)
    check_seeds(args, [word for given in cases.values() for word in given])
    jobs = []
    for label, given in cases.items():
        job = job_of(args, given)
        seeds = numbers(args.seeds, "--seeds") if args.seeds else (job.seed,)
        methods = job.method_names
        for method in methods:
            row = method if not label else f"{label}, {method}" if len(methods) > 1 else label
            jobs += [(row, replace(job, methods=method, seed=seed)) for seed in seeds]
    jobs.sort(key=lambda one: seeds.index(one[1].seed))  # whole comparisons first
    ordered = heading not in ("method", "case") and all(map(_is_number, cases))
    return Plan.fair(jobs, heading, ordered)


def _cases(args: argparse.Namespace) -> tuple[str, dict[str, list[str]]]:
    """Return (what the rows are, label -> its own settings); the label of methods alone is empty."""
    if args.command == "run":
        return "method", {"": []}
    if args.key is not None and "=" in args.key:  # argparse took a setting for it
        args.settings, args.key = [args.key, *args.settings], None
    if args.case:
        pairs = [read_case(text) for text in args.case]
        if args.key or args.values:
            raise ValueError("sweep takes a key and --values, or --case: not both")
        if len(cases := dict(pairs)) < len(pairs):
            raise ValueError(f"each --case needs a label of its own, not {args.case}")
        return "case", cases
    if not args.key or not args.values:
        raise ValueError(
            "sweep needs a key and --values, such as: sweep lr --values 0.1,0.3; or a "
            "--case 'LABEL: key=value ...' for each row"
        )
    target, dot, name = args.key.rpartition(".")
    if not dot:
        return args.key, {v: [f"{args.key}={v}"] for v in calls.values(args.values)}
    given = [s.removeprefix("methods=") for s in args.settings if s.startswith("methods=")]
    methods = given[-1] if given else target

    def called(value: str) -> str:
        return with_argument(methods, target, name, calls.literal(value), os.getcwd())

    return args.key, {v: [f"methods={called(v)}"] for v in calls.values(args.values)}


def card_of(args: argparse.Namespace) -> str:
    """Return (and take out of the settings) the first word that is no setting: a card's name or path."""
    named = [word for word in args.settings if "=" not in word or word.endswith(".toml")]
    if not named:
        return ""
    if len(named) > 1:
        raise ValueError(f"one card at a time, not {' and '.join(named)}; settings are key=value")
    args.settings = [word for word in args.settings if word != named[0]]
    return str(named[0])


def check_seeds(args: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Raise ValueError for the setting ``seed`` where ``--seeds``, or its default, would win."""
    if args.seeds and any(word.startswith("seed=") for word in [*args.settings, *more]):
        raise ValueError(f"'seed' does not count beside --seeds ({args.seeds}): leave it out")


def job_of(args: argparse.Namespace, more: Sequence[str] = ()) -> Job:
    return read_settings([*args.settings, *more], args.app)


def read_settings(settings: Sequence[str], app: Path | None = None) -> Job:
    """Return the checked job of words ``key=value``.

    What they leave out has its default: the package's, or that of ``[tool.flwr.app.config]`` in the
    pyproject.toml of the folder `app`. Raises ValueError or OSError that says what is wrong.
    """
    return Job.checked(given_settings(settings, app))


def given_settings(settings: Sequence[str], app: Path | None = None) -> dict[str, Any]:
    """Return what the words ``key=value`` give, with absolute folders; see :func:`read_settings`."""
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
        given[name] = read(name, value)
    if not given.get("code-dir"):
        given["code-dir"] = os.getcwd()
    for name in ("out", "code-dir", "data-dir"):  # whatever folder the results are taken up in
        if isinstance(given.get(name), str) and given[name]:
            given[name] = str(Path(given[name]).expanduser().resolve())
    return given


def read_case(text: str) -> tuple[str, list[str]]:
    """Return (label, settings) of ``"LABEL: key=value key=value"``; raise ValueError for any other text."""
    label, colon, settings = text.partition(":")
    if not colon or not label.strip():
        raise ValueError(f"--case must look like 'LABEL: key=value ...', not '{text}'")
    return " ".join(label.split()), calls.words(settings)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers of an option, separated by commas; ValueError for anything else."""
    try:
        several = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        several = ()
    if not several or min(several) < 0 or max(several) >= 2**63 or len({*several}) < len(several):
        raise ValueError(f"{option} must be different whole numbers such as 1,2,3, not '{text}'")
    return several


def out_folder(out: str) -> Path:
    """Return (and make) the folder that `out` names, by default ``results/<time>`` in the current one.

    Raises ValueError if it holds results already, or cannot be written.
    """
    if not out:
        return new_folder(Path.cwd() / "results")
    folder = Path(out)
    check_writable(folder)
    if any((folder / name).exists() for name in (PLAN, "bench.json", "protocol.json")):
        raise ValueError(
            f"{folder} holds results: go on with --resume {folder}, or give another out="
        )
    return folder


def _is_number(text: str) -> bool:
    try:
        return isinstance(calls.literal(text), int | float)
    except ValueError:
        return False
