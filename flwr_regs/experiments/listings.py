"""What ``flwr-regs list``, ``methods`` and ``protocols`` print: the registry, the cards, and names."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from flwr_regs.experiments import settings
from flwr_regs.experiments.calls import catalogue
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.cards.choices import levels
from flwr_regs.experiments.data import catalogue as data
from flwr_regs.experiments.experiment import Experiment, refuse_dead
from flwr_regs.experiments.report.metrics import METRICS
from flwr_regs.experiments.report.terminal import columns
from flwr_regs.experiments.strategies import light
from flwr_regs.methods.registry import COMPOSITIONS, METHODS, Method

LEGEND = Path(__file__).with_name("methods_legend.txt").read_text(encoding="utf-8")
"""What the columns of the methods' table are."""
HEAD = "method for down up trips state SecAgg DP robust streams stacks"


def listing(args: Namespace) -> str:
    """Return names with their meanings; of methods the registry, or what one of them costs."""
    if args.what == "methods":
        name = getattr(args, "name", None)
        return method(name) if name else methods()
    if args.what == "metrics":
        meanings = {name: metric.meaning for name, metric in METRICS.items()}
    elif args.what == "settings":
        each = ((of, settings.as_word(of.default)) for of in settings.SETTINGS.values())
        meanings = {of.name: of.meaning + f" [{word}]" * bool(word) for of, word in each}
    else:
        meanings = dict(settings.SETTINGS[args.what[:-1]].choices)  # type: ignore[arg-type]
    lines = columns([*meanings.items()])
    if args.what in ("datasets", "models"):
        lines += ["", f"your own: {args.what[:-1]}=mine.py:name, or module:name"]
    if args.what == "partitions":
        lines += ["", "Flower Datasets': partition='fds:DirichletPartitioner(alpha=0.3)'"]
    return "\n".join(lines)


def protocols(args: Namespace) -> str:
    """Return the cards as a table, or one of them."""
    given = dict(text.partition("=")[::2] for text in args.settings)
    folder = given.pop("data-dir", "")
    if given:
        raise ValueError(f"protocols takes data-dir=..., not {next(iter(given))}")
    if not args.name:
        return cards(folder)
    one = card_files.load(args.name)
    refuse_dead(one.ends, but="test-on-clients")
    return card(one, folder, args.name)


def methods() -> str:
    """Return the registry as plain text, at most 80 columns wide."""
    cells = [HEAD.split(), *map(_short, METHODS.values())]
    terms = [name for name in catalogue() if name not in METHODS]
    lines = _wrapped([(name, _plain(light(name)).splitlines()[0]) for name in METHODS])
    lines += ["", *columns(cells), "", LEGEND, "methods, as calls with their own arguments:"]
    lines += [f"  {row.example}" for row in METHODS.values()]
    lines += ["terms, which compose with + (FedADC+SparseTernary(density_up=0.01));"]
    lines += ["`flwr-regs methods SparseTernary` shows the arguments of one:"]
    lines += [f"  {line}" for line in textwrap.wrap(", ".join(terms), 76)]
    return "\n".join(lines)


def method(name: str) -> str:
    """Return what a method costs and goes with, or a term's arguments; ValueError for another name."""
    if name not in METHODS:
        return _documented(name)
    text, refused = composes(row := METHODS[name])
    lines = [_documented(name), "", row.paper, "", *_wrapped(costs(row)), ""]
    lines += textwrap.wrap(text, 80)
    for why, others in refused.items():
        item = f"{', '.join(others)}: {why}"
        lines += textwrap.wrap(item, 80, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _documented(name: str) -> str:
    """Return a class's arguments and its docstring, with those of the terms that it refers to."""
    kind = light(name)
    taken = inspect.signature(kind).parameters.values()
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in taken])
    terms = dict.fromkeys(re.findall(r"See :class:`(\w+)`", inspect.getdoc(kind) or ""))
    return "\n\n".join([f"{name}{bare}\n\n{_plain(kind)}", *map(_documented, terms)])


def _plain(kind: type) -> str:
    """Return a class's docstring without the marks of links."""
    return re.sub(r":\w+:`([\w.]+)`", r"\1", inspect.getdoc(kind) or "")


def _wrapped(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return rows of two cells in columns, at most 80 characters wide."""
    width = 78 - max(len(left) for left, _ in rows)
    return columns([(a, textwrap.fill(b, width, break_on_hyphens=False)) for a, b in rows])


def costs(row: Method) -> list[tuple[str, str]]:
    """Return what a method costs and goes with, as rows; the first one is the head."""
    down = f"{_models(row.down)} to each client"
    if row.down_delta is not None:
        down += f'; {_models(row.down_delta)} with `downlink="delta"`, if it is in sync'
    goes: dict[bool, list[str]] = {True: [], False: []}
    goes[row.secure_aggregation].append("secure aggregation")
    goes[row.central_dp].append("central differential privacy")
    goes[row.robust].append("robust aggregators")
    settings = ("device", "silo") if row.setting == "both" else (row.setting,)
    return [
        (row.example, "cost"),
        ("down in a round", down),
        ("up in a round", f"{_models(row.up)} from each client"),
        ("small extras", row.beside or "nothing"),
        ("exchanges with a client in a round", str(row.exchanges)),
        ("a client keeps between rounds", row.state or "nothing"),
        ("the server keeps of each client", row.server or "nothing"),
        ("extra computation on a client", row.gradients or "nothing"),
        ("made for", ", ".join(f"cross-{one}" for one in settings)),
        ("goes with", ", ".join(goes[True]) or "–"),
        ("does not go with", ", ".join(goes[False]) or "–"),
    ]


def composes(row: Method) -> tuple[str, dict[str, list[str]]]:
    """Return what a method goes with, in a sentence, and a reason -> what it refuses for that."""
    every = tomllib.loads(COMPOSITIONS.read_text(encoding="utf-8"))
    refused: dict[str, list[str]] = every[row.name]
    goes = f"Joined by `+`, {row.name} goes with every other method and term of the package"
    takes = "it takes the settings `privacy=CentralDP(...)`, `wire_dtype` and `overlap=True`"
    return f"{goes}, and {takes}{', except these:' if refused else '.'}", refused


def _short(row: Method) -> tuple[str, ...]:
    small = "+" if row.beside else ""
    goes = row.secure_aggregation, row.central_dp, row.robust, row.streams, row.stacks
    up, marks = f"{row.up:g}{small}", ("yes" if yes else "–" for yes in (row.state, *goes))
    return (row.name, row.setting, down(row) + small, up, str(row.exchanges), *marks)


def _models(size: float) -> str:
    return f"{size:g} model" + "s" * (size != 1)


def down(row: Method) -> str:
    """Return what a client receives in a round, in models; in brackets: with ``downlink="delta"``."""
    delta = "" if row.down_delta is None else f" ({row.down_delta:g})"
    return f"{row.down:g}{delta}"


def _datasets(card: Experiment) -> list[str]:
    """Return the data sets of all panels, at the card's own setting, without their arguments."""
    merged = [{**settings.DEFAULTS, **card.settings, **panel.settings} for panel in card.panels]
    return list(dict.fromkeys(str(s["dataset"]).partition("(")[0] for s in merged))


def needed(card: Experiment, data_dir: str | None = None) -> str:
    """Say in a line what a card needs; and whether it is in `data_dir`, if that is given."""
    there = {None: "", True: ": there", False: ": absent"}
    files = filter(data.files, _datasets(card))
    present = {name: None if data_dir is None else data.present(name, data_dir) for name in files}
    return ", ".join(f"files of {name}{there[of]}" for name, of in present.items()) or "nothing"


def cards(data_dir: str = "") -> str:
    """Return all cards as lines: name, source, setting, and what each needs."""
    lines = [["card", "source", "setting", "needs"]]
    for one in map(card_files.load, card_files.names()):
        sets = filter(data.files, _datasets(one))
        there = [of if data.present(of, data_dir) else f"[{of}]" for of in sets]
        cells = one.name, f"{one.source}, {one.where}", "/".join(levels(one))
        lines.append([*cells, ", ".join(there) or "nothing"])
    text = [*columns(lines), ""]
    text += ["needs: data sets that are files; [those] are absent, data-dir=DIR says where to look"]
    text += ["flwr-regs protocols NAME says more; flwr-regs bench NAME runs one (--smoke: seconds)"]
    return "\n".join(text)


def card(experiment: Experiment, data_dir: str = "", name: str = "") -> str:
    """Return all that a card holds, and what it needs; `name` is what `bench` finds it by."""
    names = _datasets(experiment)
    hashes = [f"{of} {data.expected(of, experiment.hashes) or 'not known'}" for of in names]
    command = f"flwr-regs bench {shlex.quote(name or experiment.name)}"
    lines = [f"needs: {needed(experiment, data_dir)}"]
    lines += [f"  {of}: {data.files(of)}" for of in names if data.files(of)]
    lines += [f"hashes of the data: {', '.join(hashes)}", "", command]
    lines += [f"{command} --setting reduced"] * ("reduced" in levels(experiment)[1:])
    return "\n".join([*lines, "", card_files.text(experiment)])
