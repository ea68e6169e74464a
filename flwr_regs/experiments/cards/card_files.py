"""Cards: TOML files that hold an experiment, such as a table of a paper with its reported numbers.

They are those of ``flwr_regs/experiments/cards/``, a user's own, and the experiment.toml of a results'
folder. docs/protocols.md says what they hold. ``flwr-regs bench CARD`` runs one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from flwr_regs.experiments.calls import check_name, parse_methods, text_of
from flwr_regs.experiments.experiment import Experiment, Panel, Row
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.settings import DEFAULTS, FIELDS, Settings
from flwr_regs.experiments.space import Space
from flwr_regs.wire.config import nearest

FOLDER = files("flwr_regs.experiments") / "cards"
FILE = "experiment.toml"
"""The card in a results' folder."""
LEVELS = ("paper", "reduced", "stand-in")
"""What a card's settings are: the source's, as far as its text says them; smaller ones; or ones with other
data or another model."""
KEYS = {
    "title": "what is compared, in a line",
    "source": "who published it",
    "where": "the table or figure there",
    "setting": "paper, reduced or stand-in: what [settings] are",
    "hashes": "data set = its hash; a run on other data says so",
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
    "panels": "columns of a table, curves of a figure: {name, settings, reduced, reports, notes}",
    "heading": "what the rows are: method; case, or a setting, where their names are the labels",
    "baseline": "whether rows are compared with the first one, after tuning",
    "smoke": "whether this is a trial of a few seconds, whose figures say nothing",
    "made": "in a results' folder: the command, the versions and the partitions that made it",
}
"""A card's keys -> what they hold."""
NEEDED = ("title", "source", "where", "setting", "metrics", "settings", "methods")
"""The keys that a card has, unless a command has made it."""
METHOD_KEYS = ("call", "settings", "panels")
PANEL_KEYS = ("name", "settings", "reduced", "reports", "notes")
OPEN = ("dataset", "model", "partition")
"""Settings whose value may be the name of something that this version does not have."""


def names() -> list[str]:
    """Return the names of the package's cards, in order of source, tables and figures."""
    stems = [p.name.removesuffix(".toml") for p in FOLDER.iterdir() if p.name.endswith(".toml")]
    return sorted(
        stems, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)]
    )


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
        raise ValueError(
            f"there is no card '{name}'{nearest(name, names())} (`flwr-regs protocols` shows all; your own "
            "is a path that ends in .toml)"
        )
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
    if not path.is_file():
        raise ValueError(f"{folder} holds no results: it has no {FILE}")
    try:
        text = path.read_text(encoding="utf-8")
        made = _table(tomllib.loads(text).get("made"), "made")
        return read(text, made.get("card", "")), made
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or of another version: {error}") from error


def read(text: str, name: str) -> Experiment:
    """Return the experiment of a TOML text; ValueError that says which key is wrong."""
    given = tomllib.loads(text)
    _known(given, KEYS)
    if base := given.get("extends"):
        given = _extended(given, _text(base, "extends"))
    elif "pick" in given:
        raise ValueError("'pick' goes with 'extends' alone: it takes panels of another card")
    by_hand = "made" not in given
    for key in NEEDED if by_hand else ("settings", "methods"):
        if key not in given:
            raise ValueError(f"it lacks '{key}': {KEYS[key]}")
    if by_hand and given["setting"] not in LEVELS:
        raise ValueError(f"'setting' must be one of {', '.join(LEVELS)}, not {given['setting']!r}")
    trials = given.get("trials", 8)
    if type(trials) is not int or trials < 1:
        raise ValueError(f"'trials' must be a whole number of at least 1, not {trials!r}")
    for key in ("baseline", "smoke"):
        if type(given.get(key, True)) is not bool:
            raise ValueError(f"'{key}' must be true or false, not {given[key]!r}")
    hashes = _table(given.get("hashes", {}), "hashes")
    said = {k: _text(given[k], k) for k in ("title", "source", "where", "setting") if k in given}
    card = Experiment(
        name=name,
        **said,
        metrics=_texts(given.get("metrics", []), "metrics"),
        settings=_settings(given["settings"], "settings"),
        rows=tuple(_row(n, m) for n, m in _table(given["methods"], "methods").items()),
        panels=tuple(_panel(p, i) for i, p in enumerate(given.get("panels", [{}]), 1)),
        reduced=_settings(given.get("reduced", {}), "reduced"),
        tune=tuple(map(Space.read, _texts(given.get("tune", []), "tune"))),
        trials=trials,
        seeds=_numbers(given.get("seeds", [1, 2, 3]), "seeds"),
        tuning_seeds=_numbers(given.get("tuning-seeds", [101]), "tuning-seeds"),
        departures=_texts(given.get("departures", []), "departures"),
        hashes={dataset: _text(value, dataset) for dataset, value in hashes.items()},
        heading=_text(given.get("heading", "method"), "heading"),
        baseline=given.get("baseline", True),
        smoke=given.get("smoke", False),
    )
    if by_hand and not card.metrics:
        raise ValueError("'metrics' is empty: name what is measured (`flwr-regs list metrics`)")
    _check(card)
    return card


def text(experiment: Experiment, made: Mapping[str, Any]) -> str:
    """Return an experiment as a TOML text, which :func:`read` takes; `made` is what has made it."""
    import tomli_w

    def row(of: Row) -> Any:
        more = {"settings": dict(of.settings), "panels": [*of.panels]}
        more = {key: value for key, value in more.items() if value}
        return {"call": text_of(of.calls), **more} if more else text_of(of.calls)

    titles = [one.name for one in experiment.rows]

    def panel(of: Panel) -> dict[str, Any]:
        fields = {key: getattr(of, key) for key in PANEL_KEYS}
        fields["reports"] = {
            metric: {name: value for name, value in values.items() if name in titles}
            for metric, values in of.reports.items()
        }
        return {key: value for key, value in fields.items() if value}

    of = experiment
    given = {
        **{key: getattr(of, key) for key in ("title", "source", "where", "setting", "heading")},
        **{key: [*getattr(of, key)] for key in ("metrics", "departures", "seeds")},
        "tune": [space.text for space in of.tune],
        **({"trials": of.trials, "tuning-seeds": [*of.tuning_seeds]} if of.tune else {}),
        **{key: dict(getattr(of, key)) for key in ("hashes", "reduced")},
    }
    whole = {key: value for key, value in given.items() if value}
    whole |= {"baseline": of.baseline, "smoke": of.smoke, "settings": dict(of.settings)}
    whole["methods"] = {one.name: row(one) for one in of.rows}
    whole["panels"] = [*map(panel, of.panels)]
    whole["made"] = {key: value for key, value in made.items() if value is not None}
    return tomli_w.dumps(whole)


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


def _check(card: Experiment) -> None:
    """Raise ValueError for what does not fit together in a card."""
    for key in card.metrics:
        if key not in metrics.METRICS:
            raise ValueError(f"'metrics': there is no '{key}'{nearest(key, metrics.METRICS)}")
    titles = [panel.name for panel in card.panels]
    if len({*titles}) < len(titles):
        raise ValueError(f"'panels': two have one name: {', '.join(titles)}")
    for row in card.rows:
        for name in row.panels:
            panel_of(card, name)
    for panel in card.panels:
        where = f"panel '{panel.name}'"
        if not (rows := card.rows_of(panel)):
            raise ValueError(f"{where} has no method")
        known = [row.name for row in rows.values()]
        for metric, values in panel.reports.items():
            if metric not in metrics.METRICS:
                raise ValueError(
                    f"{where}, 'reports': no metric '{metric}'{nearest(metric, metrics.METRICS)}"
                )
            for name, value in values.items():
                if name not in known:
                    raise ValueError(
                        f"{where}, 'reports': no method '{name}'{nearest(name, known)}"
                    )
                numbers = value if isinstance(value, list) else [value]
                if len(numbers) not in (1, 2) or not all(
                    type(v) in (int, float) and isfinite(v) for v in numbers
                ):
                    raise ValueError(
                        f"{where}, 'reports', {metric}, {name}: expected a number, or [mean, deviation], "
                        f"not {value!r}"
                    )
    for space in card.tune:
        if not any(space.applies(row.calls) for row in card.rows):
            raise ValueError(f"'tune': no method of the card has {space.key}")


def panel_of(card: Experiment, name: str) -> Panel:
    """Return a panel; ValueError with the nearest name if there is none."""
    panels = {panel.name: panel for panel in card.panels}
    if name not in panels:
        raise ValueError(
            f"card '{card.name}' has no panel '{name}'{nearest(name, panels)}; it has "
            f"{'; '.join(panels)}"
        )
    return panels[name]


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
    return Panel(name, settings, reduced, reports, _texts(given.get("notes", []), "notes"))


def _row(name: str, given: Any) -> Row:
    where = f"method '{name}'"
    table = {"call": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("call"), str):
        raise ValueError(f"{where} must be a call, or a table with a call, not {given!r}")
    _known(table, METHOD_KEYS, f"{where}: ")
    methods = [*parse_methods(table["call"]).values()]
    if len(methods) != 1:
        raise ValueError(f"{where} must be one call, not {table['call']!r}")
    for call in methods[0]:
        check_name(call)
    settings = _settings(table.get("settings", {}), f"{where}, settings")
    return Row(name, methods[0], settings, _texts(table.get("panels", []), f"{where}, panels"))


def _settings(given: Any, where: str) -> dict[str, Any]:
    """Return settings, checked; names that this version does not have stand in :data:`OPEN`'s alone."""
    table = _table(given, where)
    if wrong := [key for key in table if key in ("methods", "seed", "out")]:
        raise ValueError(f"{where}: '{wrong[0]}' is no setting of a card")
    plain = {
        key: value
        for key, value in table.items()
        if not (key in OPEN and isinstance(value, str) and re.fullmatch(r"[\w().,=-]+", value))
    }
    try:
        Settings.of(plain)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return table


def lacks(card: Experiment) -> list[str]:
    """Return what a card names and this version does not have, such as ``dataset gld-23k``."""
    absent: dict[str, None] = {}
    for panel in card.panels:
        whole = {**DEFAULTS, **card.settings, **panel.settings}
        for settings in (whole, {**whole, **card.reduced, **panel.reduced}):
            for key in OPEN:
                value, known = settings[key], FIELDS[key].metadata["choices"]
                name = value.partition("(")[0]
                if name not in known and ":" not in name:
                    absent[f"{key} '{value}'{nearest(name, known)}"] = None
    return list(absent)


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
