"""Protocol cards: a table or figure of a paper as settings, methods, tuning grids and reported numbers.

A card is a TOML file: one of ``flwr_regs/experiments/cards/``, or a user's own. docs/protocols.md says what
it holds. ``flwr-regs bench CARD`` runs it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from flwr_regs.experiments.data import needs
from flwr_regs.experiments.data.catalogue import DATASETS
from flwr_regs.experiments.models.architectures import MODELS
from flwr_regs.experiments.partition.partitions import PARTITIONS
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.run.tuning import FIXED, Bench, Space
from flwr_regs.experiments.settings import build, settings
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.wire.config import nearest

FOLDER = files("flwr_regs.experiments") / "cards"
LEVELS = ("paper", "reduced", "stand-in")
"""What a card's settings are: the source's, as far as its text says them; smaller ones; or ones with other
data or another model."""
KEYS = {
    "title": "what is compared, in a line",
    "source": "who published it",
    "where": "the table or figure there",
    "setting": "paper, reduced or stand-in: what [settings] are",
    "hashes": "data set = its hash, as results have it in protocol.json; a run on other data says so",
    "departures": "sentences: what the source reports, how the card differs from it, what it leaves open",
    "extends": "the name of a card whose keys this one has too, but for those that it has itself",
    "pick": "with extends: the names of the panels that it takes",
    "metrics": "what the source reports: `flwr-regs list metrics`",
    "trials": "how many settings are tried for each method, at most",
    "seeds": "of the test",
    "tuning-seeds": "of tuning",
    "tune": "what is tried, as bench --tune takes it",
    "settings": "as on the command line",
    "reduced": "settings for two processor cores, in place of those above",
    "methods": "name = a call, or {call, settings, panels}: its own settings, the panels that have it",
    "panels": "the columns of a table, the curves of a figure: {name, settings, reduced, reports}",
}
"""A card's keys -> what they hold."""
NEEDED = ("title", "source", "where", "setting", "metrics", "settings", "methods")
METHOD_KEYS = ("call", "settings", "panels")
PANEL_KEYS = ("name", "settings", "reduced", "reports")
OPEN = {"dataset": DATASETS, "model": MODELS, "partition": PARTITIONS}
"""Settings whose value may be the name of something that this version does not have."""
SMOKE = {
    "rounds": 2,
    "examples": 200,
    "num-classes": 3,
    "num-clients": 2,
    "local-steps": 1,
    "examples-per-client": 8,  # Fisher information is of all of them, one by one
    "held-out-clients": 0,
    "test-examples": 10,
    "straggler-share": 0.0,  # of one step, a slow client takes none
    "drop-out": 0.0,
    "checkpoint-every": 0.0,
}
"""What ``--smoke`` sets."""
SMOKE_MOST = {"batch-size": 4, "classes-per-client": 3, "shards-per-client": 3, "ensemble": 2}
"""The largest values that ``--smoke`` leaves."""


@dataclass(frozen=True)
class Row:
    """A method of a card: its name there, its call, its own settings, and the panels that have it (all)."""

    name: str
    call: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    panels: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The call as tables write it."""
        (label,) = parse_methods(self.call)
        return label


@dataclass(frozen=True)
class Panel:
    """A column of a table or a curve's setting.

    Attributes
    ----------
    name : str
    settings, reduced : dict
        In place of the card's.
    reports : dict
        Metric -> method's name -> what the source reports: a number, or (mean, standard deviation);
        accuracies in per cent.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reduced: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """A protocol; see :data:`KEYS`."""

    name: str
    title: str
    source: str
    where: str
    setting: str
    metrics: tuple[str, ...]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    reduced: Mapping[str, Any]
    tune: tuple[str, ...]
    trials: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    departures: tuple[str, ...]
    hashes: Mapping[str, str]

    @property
    def levels(self) -> list[str]:
        """What the card can be run at: its setting, and ``reduced`` if it has settings for that."""
        small = self.reduced or any(panel.reduced for panel in self.panels)
        return list(dict.fromkeys([self.setting, *(["reduced"] if small else [])]))

    def panel(self, name: str) -> Panel:
        """Return a panel; ValueError with the nearest name if there is none."""
        names = [panel.name for panel in self.panels]
        if name not in names:
            raise ValueError(
                f"card '{self.name}' has no panel '{name}'{nearest(name, names)}; it has "
                f"{'; '.join(names)}"
            )
        return self.panels[names.index(name)]

    def rows_of(self, panel: Panel) -> list[Row]:
        """Return the methods of a panel, in order."""
        return [row for row in self.rows if not row.panels or panel.name in row.panels]

    def settings_of(self, panel: Panel, level: str = "") -> dict[str, Any]:
        """Return the settings of a panel, without its methods; ValueError for a level that there is not."""
        level = level or self.setting
        if level not in self.levels:
            raise ValueError(
                f"card '{self.name}' has no setting '{level}', only {' and '.join(self.levels)}"
            )
        paper = {**self.settings, **panel.settings}
        return paper if level == self.setting else {**paper, **self.reduced, **panel.reduced}

    def bench(self, panel: Panel, level: str = "", given: Mapping[str, Any] | None = None) -> Bench:
        """Return the tuned comparison of a panel.

        Parameters
        ----------
        panel : Panel
        level : str
            One of `levels`; empty: the card's setting.
        given : dict, optional
            Settings that win over the card's and the methods' own; they are not tuned.
        """
        given = dict(given or {})
        rows = self.rows_of(panel)
        merged = {**self.settings_of(panel, level), **given}
        merged["methods"] = "; ".join(row.label for row in rows)
        own = {r.label: {k: v for k, v in r.settings.items() if k not in given} for r in rows}
        tune = [
            text
            for text, space in zip(self.tune, map(Space.read, self.tune), strict=True)
            if space.key not in given and any(space.applies(row.label) for row in rows)
        ]
        return Bench(
            *(merged, tuple(tune), self.trials, self.seeds, self.tuning_seeds),
            own={label: settings for label, settings in own.items() if settings},
        )

    def smoke(self, panel: Panel, level: str, given: Mapping[str, Any]) -> Bench:
        """Return a comparison that takes seconds: see :data:`SMOKE`; the first and the last method train.

        All methods of the panel are checked. What is `given` wins. Where the files of the data are absent,
        random records stand in for them.
        """
        checked = self.bench(panel, level, {**given, "rounds": SMOKE["rounds"]})
        whole = {**settings.DEFAULTS, **checked.settings}
        small = {k: min(whole[k], most) for k, most in SMOKE_MOST.items()}
        if whole["fraction-train"] < 1:
            small["fraction-train"] = 0.5
        if not needs.present(str(whole["dataset"]), str(whole["data-dir"])):
            small["synthetic"] = True
        small = {**SMOKE, **small, **given}
        rows = self.rows_of(panel)
        ends = replace(self, rows=(rows[0], *rows[1:][-1:]), tune=())
        bench = replace(ends.bench(panel, level, small), seeds=self.seeds[:1])
        every = replace(bench, own=checked.own)
        for row in rows:
            # with what tuning would try first: a wrong parameter in `tune` is found too
            point = checked.trials_of(row.label)[0]
            every.job(row.label, point, self.seeds[0], tuning=False)
        return bench

    @cached_property
    def lacks(self) -> list[str]:
        """What the card names and this version does not have, such as ``dataset gld-23k``."""
        absent: dict[str, None] = {}
        for panel in self.panels:
            for level in self.levels:
                merged = {**settings.DEFAULTS, **self.settings_of(panel, level)}
                for what, known in OPEN.items():
                    name = merged[what].partition("(")[0]
                    if name not in known and ":" not in name:
                        absent[f"{what} '{merged[what]}'{nearest(name, known)}"] = None
        return list(absent)

    @property
    def datasets(self) -> list[str]:
        """The data sets of all panels, at the card's own setting, without their arguments."""
        each = [
            {**settings.DEFAULTS, **self.settings_of(panel)}["dataset"] for panel in self.panels
        ]
        return list(dict.fromkeys(name.partition("(")[0] for name in each))


def names() -> list[str]:
    """Return the names of the package's cards, in order of source, tables and figures."""
    stems = [p.name.removesuffix(".toml") for p in FOLDER.iterdir() if p.name.endswith(".toml")]
    return sorted(
        stems, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)]
    )


def load(name: str) -> Card:
    """Return a card of the package by its name, or a user's by its path, which ends in ``.toml``.

    Raises ValueError if there is none, or if it is wrong; the message has the card, the key and what was
    expected.
    """
    path = Path(name).expanduser()
    is_path = path.suffix == ".toml"
    if is_path and not path.is_file():
        raise ValueError(f"there is no card at {name}")
    if not is_path and name not in names():
        raise ValueError(
            f"there is no card '{name}'{nearest(name, names())} (`flwr-regs protocols` shows all; your own "
            "is a path that ends in .toml)"
        )
    file = path if is_path else FOLDER / f"{name}.toml"
    try:
        return read(file.read_text(encoding="utf-8"), path.stem if is_path else name)
    except ValueError as error:
        raise ValueError(f"card '{name}': {error}") from error


def read(text: str, name: str) -> Card:
    """Return the card of a TOML text; ValueError that says which key is wrong."""
    given = tomllib.loads(text)
    _known(given, KEYS)
    if base := given.get("extends"):
        given = _extended(given, _text(base, "extends"))
    elif "pick" in given:
        raise ValueError("'pick' goes with 'extends' alone: it takes panels of another card")
    for key in NEEDED:
        if key not in given:
            raise ValueError(f"it lacks '{key}': {KEYS[key]}")
    if given["setting"] not in LEVELS:
        raise ValueError(f"'setting' must be one of {', '.join(LEVELS)}, not {given['setting']!r}")
    trials = given.get("trials", 8)
    if type(trials) is not int or trials < 1:
        raise ValueError(f"'trials' must be a whole number of at least 1, not {trials!r}")
    hashes = _table(given.get("hashes", {}), "hashes")
    card = Card(
        name=name,
        **{key: _text(given[key], key) for key in ("title", "source", "where", "setting")},
        metrics=_texts(given["metrics"], "metrics"),
        settings=_settings(given["settings"], "settings"),
        rows=tuple(_row(n, method) for n, method in given["methods"].items()),
        panels=tuple(_panel(p, i) for i, p in enumerate(given.get("panels", [{}]), 1)),
        reduced=_settings(given.get("reduced", {}), "reduced"),
        tune=_texts(given.get("tune", []), "tune"),
        trials=trials,
        seeds=_numbers(given.get("seeds", [1, 2, 3]), "seeds"),
        tuning_seeds=_numbers(given.get("tuning-seeds", [101]), "tuning-seeds"),
        departures=_texts(given.get("departures", []), "departures"),
        hashes={dataset: _text(value, dataset) for dataset, value in hashes.items()},
    )
    _check(card)
    return card


def _extended(given: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Return a card's keys with those of the card that it extends."""
    if base not in names():
        raise ValueError(f"'extends': there is no card '{base}'{nearest(base, names())}")
    under = tomllib.loads((FOLDER / f"{base}.toml").read_text(encoding="utf-8"))
    if "extends" in under:
        raise ValueError(f"'extends': card '{base}' extends another one itself")
    if "pick" in given:
        panels = {panel["name"]: panel for panel in under["panels"]}
        picked = _texts(given["pick"], "pick")
        for name in picked:
            if name not in panels:
                raise ValueError(
                    f"'pick': card '{base}' has no panel '{name}'{nearest(name, panels)}"
                )
        under["panels"] = [panels[name] for name in picked]
        for name, method in [*under["methods"].items()]:
            if not isinstance(method, str) and "panels" in method:
                method["panels"] = [panel for panel in method["panels"] if panel in picked]
                if not method["panels"]:
                    del under["methods"][name]
    merged = {**under, **given}
    for key in ("settings", "reduced"):
        merged[key] = {**under.get(key, {}), **given.get(key, {})}
    return merged


def _check(card: Card) -> None:
    """Raise ValueError for what does not fit together in a card."""
    if not card.metrics:
        raise ValueError("'metrics' is empty: name what is measured (`flwr-regs list metrics`)")
    for key in card.metrics:
        if key not in metrics.METRICS:
            raise ValueError(f"'metrics': there is no '{key}'{nearest(key, metrics.METRICS)}")
    titles = [panel.name for panel in card.panels]
    if len({*titles}) < len(titles):
        raise ValueError(f"'panels': two have one name: {', '.join(titles)}")
    labels: dict[str, str] = {}
    for row in card.rows:
        for name in row.panels:
            card.panel(name)
        if not row.panels and labels.setdefault(row.label, row.name) != row.name:
            raise ValueError(f"'methods': {row.name} and {labels[row.label]} are one call")
    for panel in card.panels:
        if not (known := [row.name for row in card.rows_of(panel)]):
            raise ValueError(f"panel '{panel.name}' has no method")
        for metric, values in panel.reports.items():
            where = f"panel '{panel.name}', 'reports'"
            if metric not in metrics.METRICS:
                raise ValueError(f"{where}: no metric '{metric}'{nearest(metric, metrics.METRICS)}")
            for name, value in values.items():
                if name not in known:
                    raise ValueError(f"{where}: no method '{name}'{nearest(name, known)}")
                numbers = value if isinstance(value, list) else [value]
                if len(numbers) not in (1, 2) or not all(
                    type(v) in (int, float) and isfinite(v) for v in numbers
                ):
                    raise ValueError(
                        f"{where}, {metric}, {name}: expected a number, or [mean, deviation], not {value!r}"
                    )
    for space in map(Space.read, card.tune):
        if not any(space.applies(row.label) for row in card.rows):
            raise ValueError(f"'tune': no method of the card has {space.key}")


def _panel(given: Any, number: int) -> Panel:
    if not isinstance(given, Mapping):
        raise ValueError(f"'panels' must be tables [[panels]], not {given!r}")
    _known(given, PANEL_KEYS, f"panel {number}: ")
    name = _text(given.get("name", "all"), f"name of panel {number}")
    settings, reduced = (
        _settings(given.get(key, {}), f"panel '{name}', {key}") for key in ("settings", "reduced")
    )
    where = f"panel '{name}', reports"
    reports = _table(given.get("reports", {}), where)
    for metric, values in reports.items():
        _table(values, f"{where}, {metric}")
    return Panel(name, settings, reduced, reports)


def _row(name: str, given: Any) -> Row:
    where = f"method '{name}'"
    table = {"call": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("call"), str):
        raise ValueError(f"{where} must be a call, or a table with a call, not {given!r}")
    _known(table, METHOD_KEYS, f"{where}: ")
    methods = parse_methods(table["call"])
    if len(methods) != 1:
        raise ValueError(f"{where} must be one call, not {table['call']!r}")
    for call in next(iter(methods.values())):
        if ":" not in call.target:  # a user's own is looked up when the card runs
            build.find(call)
    settings = _settings(table.get("settings", {}), f"{where}, settings")
    return Row(name, table["call"], settings, _texts(table.get("panels", []), f"{where}, panels"))


def _settings(given: Any, where: str) -> dict[str, Any]:
    """Return settings, checked; names that this version does not have stand in :data:`OPEN`'s alone."""
    table = _table(given, where)
    if wrong := [key for key in table if key in FIXED and key != "held-out-share"]:
        raise ValueError(f"{where}: '{wrong[0]}' is no setting of a card")
    plain = {
        key: value
        for key, value in table.items()
        if not (key in OPEN and isinstance(value, str) and re.fullmatch(r"[\w().,=-]+", value))
    }
    try:
        settings.checked(plain)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return table


def _known(given: Iterable[str], known: Iterable[str], where: str = "") -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where}unknown key '{key}'{nearest(key, known)}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a table, not {value!r}")
    return dict(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"'{where}' must be text, not {value!r}")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"'{where}' must be a list of texts, not {value!r}")
    return tuple(value)


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    good = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if not good or not value or len({*value}) < len(value):
        raise ValueError(f"'{where}' must be different whole numbers, not {value!r}")
    return tuple(value)
