"""The protocol cards as a table for a terminal, and one card in full."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from flwr_regs.experiments.calls import text_of
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.cards.choices import levels
from flwr_regs.experiments.data import needs
from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.terminal import columns
from flwr_regs.experiments.settings import DEFAULTS


def _datasets(card: Experiment) -> list[str]:
    """Return the data sets of all panels, at the card's own setting, without their arguments."""
    merged = [{**DEFAULTS, **card.settings, **panel.settings} for panel in card.panels]
    return list(dict.fromkeys(str(s["dataset"]).partition("(")[0] for s in merged))


def needed(card: Experiment, data_dir: str | None = None) -> str:
    """Say in a line what a card needs; and whether it is in `data_dir`, if that is given."""
    if absent := card_files.lacks(card):
        return "not in this version: " + ", ".join(absent)
    said = []
    for name in _datasets(card):
        if needs.files(name):
            said.append(f"files of {name}")
            if data_dir is not None:
                said[-1] += ": there" if needs.present(name, data_dir) else ": absent"
    return ", ".join(said) or "nothing"


def table(data_dir: str = "") -> str:
    """Return all cards as lines: name, source, setting, and what each needs."""
    lines = [["card", "source", "setting", "needs"]]
    for name in card_files.names():
        card = card_files.load(name)
        source = f"{card.source}, {card.where}"
        lines.append([name, source, "/".join(levels(card)), needed(card, data_dir)])
    text = columns(lines)
    text += [
        "",
        "flwr-regs protocols NAME says more; flwr-regs bench NAME runs one (--smoke: seconds)",
    ]
    return "\n".join(text)


def one(card: Experiment, data_dir: str = "", name: str = "") -> str:
    """Return all that a card holds, for a terminal; `name` is what `bench` finds it by."""
    lines = [card.title, f"source: {card.source}, {card.where}"]
    lines += [f"setting: {' or '.join(levels(card))}", f"needs: {needed(card, data_dir)}"]
    lines += [f"  {name}: {needs.files(name)}" for name in _datasets(card) if needs.files(name)]
    hashes = {name: needs.expected(name, card.hashes) for name in _datasets(card)}
    lines += [
        "hashes of the data: " + ", ".join(f"{n} {h or 'not known'}" for n, h in hashes.items())
    ]
    lines += ["", "settings: " + _words(card.settings)]
    if card.reduced:
        lines.append("reduced: " + _words(card.reduced))
    lines += ["", "methods:"]
    for row in card.rows:
        settings = f"  with {_words(row.settings)}" if row.settings else ""
        some = f"  (in {', '.join(row.panels)})" if row.panels else ""
        lines.append(f"  {row.name}: {text_of(row.calls)}{settings}{some}")
    seeds = ", ".join(map(str, card.seeds))
    lines += ["", f"seeds: {seeds}"]
    if card.tune:
        texts = "; ".join(space.text for space in card.tune)
        lines.append(f"tuned, the best of {card.trials} on held-out data: {texts}")
    lines += ["metrics:", *(f"  {m}: {metrics.METRICS[m].meaning}" for m in card.metrics)]
    lines += ["", "panels:"]
    for panel in card.panels:
        lines.append(f"  {panel.name}: {_words(panel.settings) or 'as above'}")
        for metric, values in panel.reports.items():
            shown = "; ".join(f"{name} {_reported(value)}" for name, value in values.items())
            lines.append(f"    the source's {metric}: {shown}")
    if card.departures:
        lines += ["", "what the source says, where the card is not as it, and what it leaves open:"]
        lines += [f"  - {text}" for text in card.departures]
    word = shlex.quote(name or card.name)
    lines += ["", f"flwr-regs bench {word}"]
    lines += [f"flwr-regs bench {word} --setting reduced"] * ("reduced" in levels(card)[1:])
    return "\n".join(lines)


def _words(settings: Any) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return " ".join(f"{key}={text(value)}" for key, value in settings.items())


def _reported(value: Any) -> str:
    several: Sequence[Any] = value if isinstance(value, list) else [value]
    return " ± ".join(f"{v:g}" for v in several)
