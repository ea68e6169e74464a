"""The protocol cards as a table for a terminal, and one card in full."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from flwr_regs.experiments.cards import protocols
from flwr_regs.experiments.cards.protocols import Card
from flwr_regs.experiments.data import needs
from flwr_regs.experiments.report import metrics


def needed(card: Card, data_dir: str | None = None) -> str:
    """Say in a line what a card needs; and whether it is in `data_dir`, if that is given."""
    if card.lacks:
        return "not in this version: " + ", ".join(card.lacks)
    said = []
    for name in card.datasets:
        if needs.files(name):
            said.append(f"files of {name}")
            if data_dir is not None:
                said[-1] += ": there" if needs.present(name, data_dir) else ": absent"
    return ", ".join(said) or "nothing"


def table(data_dir: str = "") -> str:
    """Return all cards as lines: name, source, setting, and what each needs."""
    lines = [["card", "source", "setting", "needs"]]
    for name in protocols.names():
        card = protocols.load(name)
        source = f"{card.source}, {card.where}"
        lines.append([name, source, "/".join(card.levels), needed(card, data_dir)])
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]])
        for line in lines
    ]
    text += [
        "",
        "flwr-regs protocols NAME says more; flwr-regs bench NAME runs one (--smoke: seconds)",
    ]
    return "\n".join(text) + "\n"


def one(card: Card, data_dir: str = "", name: str = "") -> str:
    """Return all that a card holds, for a terminal; `name` is what `bench` finds it by."""
    lines = [card.title, f"source: {card.source}, {card.where}"]
    lines += [f"setting: {' or '.join(card.levels)}", f"needs: {needed(card, data_dir)}"]
    lines += [f"  {name}: {needs.files(name)}" for name in card.datasets if needs.files(name)]
    hashes = {name: needs.expected(name, card.hashes) for name in card.datasets}
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
        lines.append(f"  {row.name}: {row.call}{settings}{some}")
    seeds = ", ".join(map(str, card.seeds))
    lines += ["", f"seeds: {seeds}"]
    if card.tune:
        lines.append(f"tuned, the best of {card.trials} on held-out data: {'; '.join(card.tune)}")
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
    lines += [f"flwr-regs bench {word} --setting reduced"] * ("reduced" in card.levels[1:])
    return "\n".join(lines) + "\n"


def _words(settings: Any) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return " ".join(f"{key}={text(value)}" for key, value in settings.items())


def _reported(value: Any) -> str:
    several: Sequence[Any] = value if isinstance(value, list) else [value]
    return " ± ".join(f"{v:g}" for v in several)
