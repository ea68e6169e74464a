"""The protocol cards as a table for a terminal, and one card in full."""

from __future__ import annotations

import shlex

from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.cards.choices import levels
from flwr_regs.experiments.data import needs
from flwr_regs.experiments.experiment import Experiment
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
    """Return all that a card holds, and what it needs; `name` is what `bench` finds it by."""
    hashes = {name: needs.expected(name, card.hashes) or "not known" for name in _datasets(card)}
    files = [f"  {name}: {needs.files(name)}" for name in hashes if needs.files(name)]
    known = ", ".join(f"{name} {of_data}" for name, of_data in hashes.items())
    command = f"flwr-regs bench {shlex.quote(name or card.name)}"
    lines = [
        f"needs: {needed(card, data_dir)}",
        *files,
        f"hashes of the data: {known}",
        "",
        command,
    ]
    lines += [f"{command} --setting reduced"] * ("reduced" in levels(card)[1:])
    return "\n".join([*lines, "", card_files.text(card)])
