"""Cards: TOML files that hold an experiment, such as a table of a paper with its reported numbers.

They are those of ``flwr_regs/experiments/cards/``, a user's own, and the experiment.toml of a results'
folder. docs/protocols.md says what they hold. ``flwr-regs bench CARD`` runs one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import REFERENCES, Calls, check_name, parse_methods, text_of
from flwr_regs.experiments.experiment import Experiment, Panel, Row
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.folders import write
from flwr_regs.experiments.report.run_records import file_name
from flwr_regs.experiments.settings import named
from flwr_regs.experiments.space import Space, read_spaces
from flwr_regs.wire.config import nearest

FOLDER = Path(__file__).parent
FILE = "experiment.toml"
"""The card in a results' folder."""


def names() -> list[str]:
    """Return the names of the package's cards, in order of source, tables and figures."""
    stems = [path.stem for path in FOLDER.glob("*.toml")]
    return sorted(stems, key=lambda stem: re.sub(r"\d+", lambda number: f"{number[0]:>4}", stem))


def load(name: str) -> Experiment:
    """Return a card of the package by its name, or a user's by its path, which ends in ``.toml``.

    Raises ValueError if there is none, or if it is wrong; the message has the card, the key and what was
    expected.
    """
    path = Path(name).expanduser()
    is_path = path.suffix == ".toml"
    if is_path and not path.is_file():
        raise ValueError(f"there is no card at {name}")
    if not is_path and name not in names():
        of_source = [card for card in names() if card.startswith(name.partition("-")[0] + "-")]
        hint = f"; there are {', '.join(of_source)}" if of_source else nearest(name, names())
        shows = "`flwr-regs protocols` shows all; your own is a path that ends in .toml"
        raise ValueError(f"there is no card '{name}'{hint} ({shows})")
    file = path if is_path else FOLDER / f"{name}.toml"
    try:
        return read(file.read_text(encoding="utf-8"), path.stem if is_path else name)
    except ValueError as error:
        raise ValueError(f"card '{name}': {error}") from error


def of_folder(folder: Path) -> tuple[Experiment, dict[str, Any]]:
    """Return the experiment of a results' folder, and what made it.

    Raises ValueError, with the reason, if there is none or it cannot be read.
    """
    path = folder / FILE
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}")
    if not path.is_file():
        below = sorted(folder.glob(f"*/{FILE}"))
        hint = f", but {below[-1].parent} has one" if below else ""
        raise ValueError(f"{folder} holds no results: it has no {FILE}{hint}")
    try:
        text = path.read_text(encoding="utf-8")
        made = _table(tomllib.loads(text).get("made"), "made")
        for key in ("chosen", "tuning"):
            for label, of in _table(made.get(key, {}), key).items():
                _table(of, f"{key}, {label}")
        return read(text, made.get("card", "")), made
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or of another version: {error}") from error


def read(text: str, name: str) -> Experiment:
    """Return the experiment of a TOML text; ValueError that says which key is wrong."""
    given = tomllib.loads(text)
    values = _fields(given, {key: check for key, (check, _) in KEYS.items()})
    base, picked, made = (values.pop(key, None) for key in ("extends", "pick", "made"))
    if picked and not base:
        raise ValueError("'pick' goes with 'extends' alone: it takes panels of another card")
    for key in () if base else NEEDED if made is None else ("methods",):
        if key not in given:
            raise ValueError(f"it lacks '{key}': {KEYS[key][1]}")
    if "methods" in values:
        values["rows"] = values.pop("methods")
    under = _base(base, picked) if base else Experiment({}, (), baseline=True)
    for key in ("settings", "reduced"):
        values[key] = {**getattr(under, key), **values.get(key, {})}
    card = replace(under, name=name, **values)
    if made is None and not card.metrics:
        raise ValueError("'metrics' is empty: name what is measured (`flwr-regs list metrics`)")
    _check(card, made is not None)
    return card


def _base(name: str, picked: tuple[str, ...] | None) -> Experiment:
    """Return the card that another one extends, with the panels that it picks, or all."""
    _known([name], names(), "'extends'", "there is no card")
    card = load(name)
    return card.only(*(panel_of(card, title) for title in picked)) if picked else card


def text(experiment: Experiment, made: Mapping[str, Any] = {}) -> str:
    """Return an experiment as a TOML text, which :func:`read` takes; `made` is what has made it."""
    import tomli_w

    # all methods are tables, or none: TOML has tables last
    plain = not any(of.settings or of.panels or of.tune for of in experiment.rows)

    def row(of: Row) -> Any:
        table = {**vars(of), "call": text_of(of.calls), "tune": [space.text for space in of.tune]}
        return table["call"] if plain else _filled({key: table[key] for key in ROW_KEYS})

    def panel(of: Panel) -> dict[str, Any]:
        reports = {
            metric: {row.name: values[row.name] for row in experiment.rows if row.name in values}
            for metric, values in of.reports.items()
        }
        return _filled({**{key: getattr(of, key) for key in PANEL_KEYS}, "reports": reports})

    table = {key: getattr(experiment, key.replace("-", "_"), None) for key in KEYS}
    if not experiment.tunes:
        table |= {"trials": None, "tuning-seeds": None}
    table |= {"tune": [space.text for space in experiment.tune], "made": _filled(made)}
    table["methods"] = {one.name: row(one) for one in experiment.rows}
    table["panels"] = [*map(panel, experiment.panels)]
    return tomli_w.dumps(_filled(table))


def save(experiment: Experiment, folder: Path, made: Mapping[str, Any]) -> None:
    """Write experiment.toml into the results' folder, and of each panel into its own.

    Each has the hashes of the data, which ``--resume`` compares.
    """
    made = {**made, "card": experiment.name}
    experiment = replace(experiment, hashes={**experiment.hashes, **experiment.data_hashes})
    for panel, place in places(experiment, folder):
        place.mkdir(exist_ok=True)
        tests = experiment.tests(panel)
        hashes = {str(run.seed): client_data_of(run.settings).hash for run in tests}
        write(place / FILE, text(experiment.only(panel), {**made, "partitions": hashes}))
    if len(experiment.panels) > 1:  # last: what it says is there then
        write(folder / FILE, text(experiment, made))


def places(experiment: Experiment, folder: Path) -> list[tuple[Panel, Path]]:
    """Return each panel, and the folder of its results in the experiment's."""
    alone = len(experiment.panels) == 1
    return [(p, folder if alone else folder / file_name(p.name)) for p in experiment.panels]


def _filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table says: no None, and nothing empty."""
    return {key: value for key, value in table.items() if value not in (None, "", (), [], {})}


def _check(card: Experiment, made: bool) -> None:
    """Raise ValueError for what does not fit together in a card.

    In one that a command has `made`, what was chosen may have left the rest without a use.
    """
    titles = [panel.name for panel in card.panels]
    if len({*titles}) < len(titles):
        raise ValueError(f"'panels': two have one name: {', '.join(titles)}")
    for name in [name for row in card.rows for name in row.panels]:
        panel_of(card, name)
    for panel in card.panels:
        allowed = [r.name for r in card.rows if not r.panels or panel.name in r.panels]
        where = f"panel '{panel.name}', 'methods' (there are {'; '.join(allowed)})"
        _known(() if made else panel.methods, (*allowed, *REFERENCES), where, "no method")
        if not (rows := card.rows_of(panel)):
            raise ValueError(f"panel '{panel.name}' has no method")
        known, where = [row.name for row in rows.values()], f"panel '{panel.name}', 'reports'"
        _known(panel.reports, card.metrics, where, "'metrics' does not list")
        for values in panel.reports.values():
            _known(values, known, where, "no method")
    for space in card.tune:
        if not any(space.applies(row.calls) for row in card.rows):
            raise ValueError(f"'tune': no method of the card has {space.key}")
    for row in card.rows:
        for space in row.tune:
            if not space.applies(row.calls):
                raise ValueError(f"method '{row.name}', 'tune': it has no {space.key}")
            if space.key in row.settings:
                both = f"method '{row.name}': '{space.key}' is in its 'settings' and its 'tune'"
                raise ValueError(f"{both}: leave one out")


def panel_of(card: Experiment, name: str) -> Panel:
    """Return a panel; ValueError with the nearest name if there is none."""
    panels = {panel.name: panel for panel in card.panels}
    if name not in panels:
        there = f"{nearest(name, panels)}; it has {'; '.join(panels)}"
        whose = f"card '{card.name}'" if card.name else "the experiment"
        raise ValueError(f"{whose} has no panel '{name}'{there}")
    return panels[name]


Check = Callable[[Any, str], Any]
"""Returns a key's value; ValueError, with where the key stands, for a wrong one."""


def _known(given: Iterable[str], known: Iterable[str], where: str, no: str = "unknown key") -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where}{': ' * bool(where)}{no} '{key}'{nearest(key, known)}")


def _kind(is_good: Callable[[Any], bool], words: str, make: Any = None) -> Check:
    """Return a function that checks a key's value, and says what it must be."""

    def checked(value: Any, where: str) -> Any:
        if not is_good(value):
            raise ValueError(f"'{where}' must be {words}, not {value!r}")
        return make(value) if make else value

    return checked


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


LEVELS = ("paper", "reduced", "stand-in")
"""What a card's settings are: the source's, as far as its text says them; smaller ones; or ones with other
data or another model."""
_text = _kind(_is_text, "text")
_flag = _kind(lambda value: isinstance(value, bool), "true or false")
_level = _kind(lambda value: value in LEVELS, f"one of {', '.join(LEVELS)}")
_count = _kind(lambda n: type(n) is int and n >= 1, "a whole number of at least 1")
_texts = _kind(lambda v: isinstance(v, list) and all(map(_is_text, v)), "a list of texts", tuple)


def _are_seeds(value: Any) -> bool:
    whole = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    return whole and 0 < len({*value}) == len(value)


_seeds = _kind(_are_seeds, "different whole numbers", tuple)


def _metrics(value: Any, where: str) -> tuple[str, ...]:
    _known(_texts(value, where), metrics.METRICS, f"'{where}'", "there is no")
    if len({*value}) < len(value):
        raise ValueError(f"'{where}' names one twice: {', '.join(value)}")
    return tuple(value)


def _spaces(value: Any, where: str) -> tuple[Space, ...]:
    return read_spaces(_texts(value, where), f"'{where}'")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a table, not {value!r}")
    return dict(value)


def _hashes(value: Any, where: str) -> dict[str, str]:
    return {dataset: _text(one, dataset) for dataset, one in _table(value, where).items()}


def _settings(given: Any, where: str) -> dict[str, Any]:
    table = _table(given, where)
    if wrong := [key for key in table if key in ("methods", "seed", "out")]:
        raise ValueError(f"{where}: '{wrong[0]}' is no setting of a card")
    try:
        return named(table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _reports(given: Any, where: str) -> dict[str, Any]:
    reports = _table(given, where)
    _known(reports, metrics.METRICS, where, "no metric")
    for metric, values in reports.items():
        for name, value in _table(values, f"{where}, {metric}").items():
            numbers = value if isinstance(value, list) else [value]
            good = [type(v) in (int, float) and isfinite(v) for v in numbers]
            if len(good) not in (1, 2) or not all(good):
                at = f"{where}, {metric}, {name}"
                raise ValueError(f"{at}: expected a number, or [mean, deviation], not {value!r}")
    return reports


def _panels(given: Any, where: str) -> tuple[Panel, ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"'{where}' must be tables [[panels]], not {given!r}")
    return tuple(
        Panel(**_fields(panel, PANEL_KEYS, f"panel '{_table(panel, where).get('name', number)}'"))
        for number, panel in enumerate(given, 1)
    )


def _rows(given: Any, where: str) -> tuple[Row, ...]:
    rows = []
    for name, one in _table(given, where).items():
        table = {"call": one} if isinstance(one, str) else one
        fields = _fields(table, ROW_KEYS, f"method '{name}'")
        if "call" not in fields:
            raise ValueError(f"method '{name}' must be a call, or a table with a call, not {one!r}")
        rows.append(Row(name, fields.pop("call"), **fields))
    return tuple(rows)


def _call(value: Any, where: str) -> Calls:
    methods = [*parse_methods(_text(value, where)).values()]
    if len(methods) != 1:
        raise ValueError(f"{where} must be one call, not {value!r}")
    for call in methods[0]:
        check_name(call)
    return methods[0]


def _fields(given: Any, checks: Mapping[str, Check], where: str = "") -> dict[str, Any]:
    """Return what the keys of a table hold, checked, by the names of fields."""
    _known(_table(given, where), checks, where)
    begin = f"{where}, " if where else ""
    return {key.replace("-", "_"): checks[key](of, begin + key) for key, of in given.items()}


KEYS: dict[str, tuple[Check, str]] = {
    "title": (_text, "what is compared, in a line"),
    "source": (_text, "who published it"),
    "where": (_text, "the table or figure there"),
    "setting": (_level, "paper, reduced or stand-in: what [settings] are"),
    "hashes": (_hashes, "data set = its hash; a run on other data says so"),
    "departures": (_texts, "what the source reports, how the card differs, what it leaves open"),
    "extends": (_text, "a card of the package to begin from; keys set here replace its keys"),
    "pick": (_texts, "with extends: the names of the panels to keep"),
    "metrics": (_metrics, "what the source reports: `flwr-regs list metrics`"),
    "trials": (_count, "how many settings are tried for each method, at most"),
    "seeds": (_seeds, "of the test"),
    "tuning-seeds": (_seeds, "of tuning"),
    "tune": (_spaces, "what is tried, as bench --tune takes it"),
    "settings": (_settings, "as on the command line"),
    "reduced": (_settings, "settings for two processor cores, in place of those above"),
    "methods": (_rows, "name = a call, or {call, settings, panels, tune}: its own of these"),
    "panels": (_panels, "columns of a table: {name, settings, reduced, reports, notes, methods}"),
    "heading": (_text, "what the rows are: method; or case, a setting: their names are labels"),
    "baseline": (_flag, "whether rows are compared with the first one, after tuning"),
    "smoke": (_flag, "whether this is a trial of a few seconds, whose figures say nothing"),
    "made": (_table, "in a results' folder: the command, the versions, what tuning chose"),
}
"""A card's keys -> what checks them, and what they hold."""
NEEDED = ("title", "source", "where", "setting", "metrics", "settings", "methods")
"""The keys that a card has, unless a command has made it."""
ROW_KEYS = {"call": _call, "settings": _settings, "panels": _texts, "tune": _spaces}
PANEL_KEYS = {"name": _text, "settings": _settings, "reduced": _settings}
PANEL_KEYS |= {"reports": _reports, "notes": _texts, "methods": _texts}
