"""What the words of the command line ask for: an experiment, settings, seeds and folders."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import literal, parse_methods, text_of, values, words
from flwr_regs.experiments.cards import card_files, choices
from flwr_regs.experiments.experiment import Experiment, Row, Run, refuse_dead
from flwr_regs.experiments.report.folders import check_writable, new_folder
from flwr_regs.experiments.settings import Values, named, read
from flwr_regs.experiments.space import read_spaces
from flwr_regs.experiments.strategies import with_argument
from flwr_regs.wire.config import nearest

SEEDS = {"bench": "1,2,3,4,5", "sweep": "1,2,3"}
"""Command -> its seeds, where neither the words nor a card say otherwise."""
IDLE_SHARE = (
    "setting 'held-out-share' needs --tune KEY=LOW..HIGH: the test is on the test set; remove it"
)
OF_CARDS = ("setting", "methods", "panels", "smoke")
"""Options of `bench`, with a card alone."""
OPTIONS = (
    *("seeds", "workers", "runner", "gpus-per-client"),
    *("tune", "trials", "tuning-seeds", "resume"),
)
"""Options that are easily taken for settings."""


def experiment_of(args: Namespace) -> tuple[Experiment, str]:
    """Return what the words of ``run``, ``sweep`` or ``bench`` ask for, and the folder for its results.

    Raises ValueError or OSError that says what is wrong.
    """
    card = args.name if args.command == "bench" else ""
    if wrong := [option for option in OF_CARDS if not card and getattr(args, option, None)]:
        example = "flwr-regs bench fedadc-t1 (`flwr-regs protocols` shows all)"
        raise ValueError(f"--{wrong[0]} goes with a card, such as: {example}")
    given = read_words(args.settings)
    out = str(given.pop("out", ""))
    heading, cases = _cases(args, given) if args.command == "sweep" else ("method", {})
    if any("out" in case for case in cases.values()):
        raise ValueError("all rows of a sweep have one folder: give out=FOLDER as a setting of all")
    seeds = args.seeds or ("" if card else SEEDS.get(args.command, ""))
    if (seeds or card) and any("seed" in settings for settings in (given, *cases.values())):
        given_by = f"--seeds ({seeds}): remove it" if seeds else "a card's seeds: give --seeds"
        raise ValueError(f"'seed' is ignored with {given_by}")
    changed: dict[str, Any] = {"seeds": numbers(seeds, "--seeds")}
    if args.command == "bench":
        changed |= {"tune": read_spaces(args.tune, "--tune"), "trials": args.trials}
        if twice := [space.key for space in changed["tune"] if space.key in given]:
            raise ValueError(f"'{twice[0]}' is given twice: by --tune, and as a setting")
        changed["tuning_seeds"] = numbers(args.tuning_seeds, "--tuning-seeds")
    changed = {key: value for key, value in changed.items() if value not in ((), None)}
    if card:
        experiment = _of_card(args, card, {**given}, changed)
    else:
        changed |= {"heading": heading, "baseline": args.command == "bench"}
        experiment = Experiment.of_methods(_here(given), **changed)
    tunes = experiment.tunes
    if idle := [key for key in ("trials", "tuning_seeds") if key in changed and not tunes]:
        option = idle[0].replace("_", "-")
        raise ValueError(f"--{option} needs --tune KEY=LOW..HIGH: nothing is tuned here")
    if args.command == "bench" and "held-out-share" in given and not tunes:
        raise ValueError(IDLE_SHARE)
    if cases:
        rows = [row for label, case in cases.items() for row in _rows(label, case, experiment)]
        experiment = replace(experiment, rows=tuple(rows))
    every = [r.method + r.settings.dataset + r.settings.model for r in experiment.ends]
    if "code-dir" in given and not any(":" in word for word in every):
        needs = "needs code of your own, such as dataset=mine.py:load; it has no effect without"
        raise ValueError(f"setting 'code-dir' {needs}; remove it")
    return experiment, out


def _here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with a folder for a user's code, by default the current one."""
    folder = settings.get("code-dir") or str(Path.cwd())
    return {"code-dir": folder} | {**settings, "code-dir": folder}


def _of_card(args: Namespace, name: str, given: dict[str, Any], changed: Values) -> Experiment:
    """Return the experiment of a card as the words change it."""
    methods = str(given.pop("methods", "")) or args.methods
    card = choices.at(card_files.load(name), args.setting)
    card = replace(card, settings={"code-dir": _here(given)["code-dir"], **card.settings})
    stated = [card.settings, *(r.settings for r in card.rows), *(p.settings for p in card.panels)]
    tunes = not card.baseline or card.tunes or changed.get("tune")
    if not tunes and any("held-out-share" in settings for settings in stated):
        raise ValueError(f"card '{name}': {IDLE_SHARE}")
    refuse_dead(card.ends, but="test-on-clients")  # below, what is not chosen leaves others idle
    if methods:
        asked = choices.panels_of(card, args.panels) if args.panels else ()
        card = choices.with_methods(card, methods)
        if without := [panel.name for panel in asked if panel not in card.panels]:
            panel = f"panel '{without[0]}' of card '{card.name}'"
            raise ValueError(f"{panel} has none of the methods {methods}")
    elif card.metrics and not args.smoke:  # the card of a run's folder has none
        card = choices.with_references(card)
    card = replace(card.only(*choices.panels_of(card, args.panels)), **changed).given(given)
    if not args.smoke:
        return card
    if changed:
        idle = ", ".join("--" + key.replace("_", "-") for key in changed)
        raise ValueError(f"--smoke tunes nothing, and trains one seed: leave out {idle}")
    return choices.smoke(card, given)


def _cases(args: Namespace, given: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return (what a sweep's rows are, label -> its own settings, or the value of a method's parameter).

    A method whose parameter is varied comes into the `given` settings.
    """
    if args.case:
        cases = {}
        for text in args.case:
            label, colon, settings = text.partition(":")
            if not colon or not label.strip():
                raise ValueError(f"--case must look like 'LABEL: key=value ...', not '{text}'")
            cases[" ".join(label.split())] = read_words(words(settings))
        if args.name or args.values:
            raise ValueError("sweep takes a key and --values, or --case: not both")
        if len(cases) < len(args.case):
            raise ValueError(f"each --case needs a label of its own, not {args.case}")
        return "case", cases
    if not args.name or not args.values:
        needs = "sweep needs a key and --values, such as: sweep lr --values 0.1,0.3; or a"
        raise ValueError(f"{needs} --case 'LABEL: key=value ...' for each row")
    several = values(args.values)
    if len({*several}) < len(several):
        raise ValueError(f"--values has a value twice: {args.values}")
    if args.name.replace("_", "-") in given:
        raise ValueError(f"'{args.name}' is given twice: by --values, and as a setting")
    target, dot, _ = args.name.rpartition(".")
    if dot:
        given.setdefault("methods", target)
        return args.name, {value: {args.name: literal(value)} for value in several}
    return args.name, {value: read_words([f"{args.name}={value}"]) for value in several}


def _rows(label: str, case: Mapping[str, Any], experiment: Experiment) -> list[Row]:
    """Return the rows of a sweep's case: one for each method."""
    methods = [row.calls for row in experiment.rows]
    if "methods" in case:
        methods = [*parse_methods(str(case["methods"])).values()]
    settings = {key: value for key, value in case.items() if "." not in key and key != "methods"}
    for key in (key for key in case if "." in key):
        target, every = key.rpartition(".")[0], [call.target for of in methods for call in of]
        if target not in every:
            raise ValueError(f"'{target}' is none of the methods {every}{nearest(target, every)}")
        folder = str(experiment.settings.get("code-dir", ""))
        methods = [with_argument(calls, key, case[key], folder) for calls in methods]
    several = len(methods) > 1
    names = [f"{label}, {text_of(calls)}" if several else label for calls in methods]
    return [Row(name, calls, settings) for name, calls in zip(names, methods, strict=True)]


def first_run(args: Namespace) -> tuple[Run, str]:
    """Return the first run of the settings, checked, and the folder that they name."""
    given = _here(read_words(args.settings))
    out = str(given.pop("out", ""))
    experiment = Experiment.of_methods(given).checked()
    return experiment.tests(experiment.panel)[0], out


def read_words(settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings of words ``key=value``, checked one by one: see :func:`.settings.named`."""
    given: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.replace("_", "-")
        if not equals:
            raise ValueError(f"'{text}' is not of the form key=value, such as lr=0.1")
        if name in OPTIONS:
            shows = "`flwr-regs COMMAND --help` shows which command has it"
            raise ValueError(f"'{name}' is an option, not a setting: --{name} {value} ({shows})")
        if name in given:
            raise ValueError(f"'{name}' is given twice: give it once")
        given[name] = read(name, value)
    return named(given)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers of an option, separated by commas; ValueError for anything else.

    An option that is not given has none.
    """
    if not text:
        return ()
    with suppress(ValueError):  # also where there is none
        several = tuple(int(part) for part in text.split(",") if part.strip())
        if 0 <= min(several) <= max(several) < 2**63 and len({*several}) == len(several):
            return several
    raise ValueError(f"{option} must be different whole numbers such as 1,2,3, not '{text}'")


def out_folder(out: str) -> Path:
    """Return (and make) the folder that `out` names, by default ``results/<time>`` in the current one.

    Raises ValueError if it holds results already, or cannot be written.
    """
    if not out:
        return new_folder(Path.cwd() / "results")
    check_writable(Path(out))
    refuse_results(out)
    return Path(out)


def refuse_results(out: str) -> None:
    """Raise ValueError if the folder that `out` names holds results already."""
    if out and (Path(out) / card_files.FILE).exists():
        raise ValueError(f"{out} holds results: go on with --resume {out}, or give another out=")
