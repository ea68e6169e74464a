"""What ``flwr-regs list``, ``methods`` and ``protocols`` print."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from flwr_regs.experiments.report.terminal import columns


def listing(args: argparse.Namespace) -> str:
    """Return names with their meanings; of methods the registry, or what one of them costs."""
    from flwr_regs.experiments import methods_table

    if args.what == "methods":
        name = getattr(args, "name", None)
        return methods_table.one(name) if name else methods_table.text()
    lines = columns([[name, meaning] for name, meaning in _meanings(args.what).items()])
    if args.what in ("datasets", "models"):
        lines += ["", f"your own: {args.what[:-1]}=mine.py:name, or module:name"]
    if args.what == "partitions":
        lines += ["", "Flower Datasets': partition='fds:DirichletPartitioner(alpha=0.3)'"]
    return "\n".join(lines)


def _meanings(what: str) -> Mapping[str, str]:
    from flwr_regs.experiments import settings
    from flwr_regs.experiments.report.metrics import METRICS

    if what == "metrics":
        return {name: metric.meaning for name, metric in METRICS.items()}
    if what == "settings":
        defaults = {name: settings.shown(value) for name, value in settings.DEFAULTS.items()}
        return {
            name: of.meaning + (f" [{defaults[name]}]" if defaults[name] else "")
            for name, of in settings.SETTINGS.items()
        }
    return dict(settings.SETTINGS[what[:-1]].choices)  # type: ignore[arg-type]  # name -> meaning


def protocols(args: argparse.Namespace) -> str:
    """Return the cards as a table, or one of them."""
    from flwr_regs.experiments import cards_table
    from flwr_regs.experiments.cards import card_files

    if args.name and "=" in args.name and not args.name.endswith(".toml"):
        args.name, args.settings = None, [args.name, *args.settings]
    given = dict(text.partition("=")[::2] for text in args.settings)
    if wrong := [name for name in given if name != "data-dir"]:
        raise ValueError(f"protocols takes data-dir=..., not {wrong[0]}")
    folder = given.get("data-dir", "")
    if args.name:
        return cards_table.one(card_files.load(args.name), folder, args.name)
    return cards_table.table(folder)
