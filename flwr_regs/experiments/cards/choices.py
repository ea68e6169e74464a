"""What can be chosen of a card: its level, some of its panels and methods, a smoke test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr_regs.experiments.calls import REFERENCES, check_name, parse_methods, pieces, text_of
from flwr_regs.experiments.cards.card_files import panel_of
from flwr_regs.experiments.data import catalogue, datasets
from flwr_regs.experiments.experiment import Experiment, Panel, Row
from flwr_regs.experiments.partition.partitions import BY_GROUP
from flwr_regs.experiments.settings import DEFAULTS, SETTINGS

SMOKE = {name: of.smoke for name, of in SETTINGS.items() if of.smoke is not None}
"""What ``--smoke`` sets."""


def levels(card: Experiment) -> list[str]:
    """Return what a card can be run at: its setting, and ``reduced`` if it has settings for that."""
    small = card.reduced or any(panel.reduced for panel in card.panels)
    return list(dict.fromkeys([card.setting, *(["reduced"] if small else [])]))


def at(card: Experiment, level: str = "") -> Experiment:
    """Return a card at a level alone, by default at its setting; ValueError if it has no such level."""
    level, known = level or card.setting, levels(card)
    if level not in known:
        raise ValueError(f"card '{card.name}' has no setting '{level}', only {' and '.join(known)}")

    def settled(panel: Panel) -> Panel:
        small = {} if level == card.setting else {**card.reduced, **panel.reduced}
        return replace(panel, settings={**panel.settings, **small}, reduced={})

    return replace(card, panels=tuple(map(settled, card.panels)), reduced={}, setting=level)


def panels_of(card: Experiment, text: str) -> tuple[Panel, ...]:
    """Return the panels of names that commas or semicolons separate; a name may have them itself."""
    titles = [panel.name for panel in card.panels]
    asked = rejoined(re.split("[,;]", text), titles)
    return tuple(panel_of(card, name) for name in asked) or card.panels


def with_methods(card: Experiment, text: str) -> Experiment:
    """Return the card with these methods alone: its own by their names there, any other as a call."""
    rows: list[Row] = []
    titles = [row.name for row in card.rows]
    for piece in rejoined([piece for _, piece in pieces(text, ",;")], titles) or [text]:
        methods = {piece: ()} if piece in titles else parse_methods(piece)
        for label, calls in methods.items():
            named = [row for row in card.rows if row.name == label]
            own = named or [row for row in card.rows if text_of(row.calls) == label]
            for call in () if own else calls:
                check_name(call, titles)
            meant = own or [Row(label, calls)]
            if any(row in rows for row in meant):
                raise ValueError(f"'{label}' appears twice in {text!r}: name each method once")
            rows += meant
    panels = [panel for panel in card.panels if any(map(panel.has, rows))]
    return replace(card, rows=tuple(rows)).only(*panels)


def with_references(card: Experiment) -> Experiment:
    """Return the card with clients that train alone, and one model on all their data, as last rows."""
    there = [row.calls for row in card.rows]
    rows = [Row(name, parse_methods(name)[name]) for name in REFERENCES]
    return replace(card, rows=(*card.rows, *(row for row in rows if row.calls not in there)))


def rejoined(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the parts of a list; parts that together are one of `names` are one.

    What has separated them, commas or semicolons, may also be in a name.

    >>> rejoined(["MNIST", " sim 0%", "all"], ["MNIST, sim 0%", "all"])
    ['MNIST, sim 0%', 'all']
    """
    left = [part.strip() for part in parts if part.strip()]
    split = {name: [part.strip() for part in re.split("[,;]", name)] for name in names}
    whole = {tuple(part for part in parts if part): name for name, parts in split.items()}
    rejoined_parts = []
    while left:
        most = next((k for k in range(len(left), 1, -1) if tuple(left[:k]) in whole), 1)
        rejoined_parts.append(whole.get(tuple(left[:most]), left[0]))
        del left[:most]
    return rejoined_parts


def smoke(card: Experiment, given: Mapping[str, Any]) -> Experiment:
    """Return a comparison that takes seconds: see :data:`SMOKE`; the first panel's first and last method.

    All methods of the panel are checked. What is `given` wins. Where the files of the data are absent,
    random records stand in for them.
    """
    first = card.panels[0]
    whole = {**DEFAULTS, **card.settings, **first.settings, **given}
    small = {n: min(whole[n], of.smoke_most) for n, of in SETTINGS.items() if of.smoke_most}
    if whole["partition"] in BY_GROUP:
        small["examples"] = 0  # few examples of all groups are none of a client's
    if whole["fraction-train"] < 1:
        small["fraction-train"] = 0.5
    if not catalogue.present(str(whole["dataset"]), str(whole["data-dir"])):
        small["synthetic"] = True
    tried = replace(card.only(first), seeds=card.seeds[:1], smoke=True)
    tried = tried.given({**SMOKE, **small, **given})
    tried.checked(data=False)
    first_row, *others = tried.rows_of(first).values()
    rows = tuple(replace(row, tune=()) for row in (first_row, *others[-1:]))
    return replace(tried, rows=rows, tune=())


def with_notes(card: Experiment) -> Experiment:
    """Return a card whose panels have notes: what the reader must know of their data."""
    hashes, panels = card.data_hashes, []
    for panel in card.panels:
        notes = list(panel.notes)
        sets = {run.settings.dataset: run.settings for run in card.tests(panel)}
        for name, settings in sets.items():
            known = catalogue.expected(name, card.hashes)
            if settings.synthetic:
                drawn = f"this run is on {datasets.RECORDS} random records of their shape"
                drawn += ", and its accuracies say nothing"
                notes = [f"the files of {name} are not here: {drawn}"]
            elif card.smoke:
                notes = ["a smoke test: its accuracies say nothing"]
            elif known and hashes[name] != known:
                is_other = f"is {hashes[name]}, not {known} as the card says: these are other data"
                notes.append(f"the hash of {name} {is_other}")
        panels.append(replace(panel, notes=tuple(dict.fromkeys(notes))))
    return replace(card, panels=tuple(panels))
