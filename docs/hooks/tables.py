"""The tables of the pages that come from the package: methods, data sets, models, settings, cards.

They stand between a mark, such as ``<!-- costs: FedFOR -->``, and ``<!-- end -->``. The site has them as
the package is. ``python docs/hooks/tables.py README.md docs/*.md docs/*/*.md`` writes them into the files,
for whoever reads these.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from flwr_regs.experiments import listings  # noqa: E402
from flwr_regs.experiments.cards import card_files  # noqa: E402
from flwr_regs.experiments.cards.choices import levels  # noqa: E402
from flwr_regs.experiments.data.augment import AUGMENTATIONS  # noqa: E402
from flwr_regs.experiments.data.catalogue import SOURCES  # noqa: E402
from flwr_regs.experiments.models import layers  # noqa: E402
from flwr_regs.experiments.models.architectures import NETS  # noqa: E402
from flwr_regs.experiments.report.metrics import METRICS  # noqa: E402
from flwr_regs.experiments.settings import SETTINGS, legal  # noqa: E402
from flwr_regs.methods.registry import METHODS, Method  # noqa: E402

FAMILIES: dict[str, str] = {
    "server": "a baseline, and optimisers on the server",
    "drift": "less client drift, and clients keep nothing",
    "memory": "less client drift, by what clients keep",
    "loss": "a modified local loss: features, missing classes, distillation",
    "flat": "flat minima",
    "fair": "similar accuracy for all clients",
    "personal": "a model for each client",
}
"""What a method is for, as its page has it in a mark, -> in words, in the order of README's table."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def methods() -> str:
    """Return every column of the registry, and what a method goes with."""
    head = (
        *("method", "paper", "for", "client keeps", "down", "up", "and, small", "exchanges"),
        "extra computation per step",
        *("secure aggregation", "central DP", "robust", "streams", "stacks"),
    )
    rows = []
    for row in METHODS.values():
        goes = (row.secure_aggregation, row.central_dp, row.robust, row.streams, row.stacks)
        cells = (
            *(f"`{row.example}`", row.paper),
            row.setting if row.setting == "both" else f"cross-{row.setting}",
            row.state or "–",
            *(listings.down(row), f"{row.up:g}", row.beside or "–"),
            *(str(row.exchanges), row.gradients or "–"),
        )
        rows.append([*cells, *("yes" if yes else "–" for yes in goes)])
    return table(head, rows)


def page(row: Method) -> str:
    """Return the path of a method's page, from docs/methods.md."""
    return f"methods/{row.name.lower()}.md"


def said(row: Method, pattern: str) -> str:
    """Return what a method's page says where it matches; raise ValueError if it does nowhere."""
    text = (ROOT / "docs" / page(row)).read_text()
    if (match := re.search(pattern, text, re.S)) is None:
        raise ValueError(f"docs/{page(row)}: nothing matches {pattern!r}")
    return " ".join(match[1].split())


def uses() -> str:
    """Return links to the methods' pages, with what each is for, by family."""
    when = r"\*\*Use it when\*\* (.+?)[.:]\s"
    lines: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for row in METHODS.values():
        family = said(row, r"<!-- family: (\w+) -->")
        lines[family].append(f"- [{row.name}]({page(row)}): use it when {said(row, when)}.")
    return "\n\n".join(
        "\n".join([f"**{FAMILIES[family].capitalize()}**", "", *of]) for family, of in lines.items()
    )


def data_sets() -> str:
    """Return the data sets: name, meaning, files, group and arguments."""
    rows = []
    for name, source in SOURCES.items():
        arguments = ", ".join(f"`{key}={value!r}`" for key, value in source.arguments.items())
        cells = source.meaning, source.files, source.groups or "–", arguments or "–"
        rows.append((f"`{name}`", *cells))
    head = ("`dataset`", "what", "files in `data-dir`", "a group is", "arguments")
    return table(head, rows)


def augmentations() -> str:
    """Return the augmentations: name and meaning."""
    rows = [(f"`{name or chr(34) * 2}`", one.meaning) for name, one in AUGMENTATIONS.items()]
    return table(("`augment`", "training batches"), rows)


def models() -> str:
    """Return the models: layers, source, smallest input, and parameters on an example."""
    rows = []
    for name, net in NETS.items():
        least = f"{net.smallest} x {net.smallest}" if net.smallest else "any"
        least = "integers" if net.words else least
        on = "" if net.words else " x ".join(map(str, net.example)) + ", "
        size: Any = net.example
        if net.words:
            size = 10_000 if name == "sentiment-lstm" else net.classes
        with torch.device("meta"):
            made = layers.model(net.make(size), net.classes)
        count = sum(p.numel() for p in made.parameters())
        cells = net.meaning, net.source, least, f"{count:,} ({on}{net.classes} classes)"
        rows.append((f"`{name}`", *cells))
    return table(("`model`", "layers", "source", "smallest input", "parameters"), rows)


def settings() -> str:
    """Return the settings: default, meaning and legal values."""
    rows = []
    for name, of in SETTINGS.items():
        default = f"`{json.dumps(of.default)}`" if of.default != "" else "–"
        rows.append((f"`{name}`", default, of.meaning, legal(of)))
    return table(("setting", "default", "meaning", "values"), rows)


def cards() -> str:
    """Return the protocol cards, and what each needs."""
    rows = []
    for name in card_files.names():
        card = card_files.load(name)
        where = f"{card.source}, {card.where}"
        rows.append(
            (f"`{name}`", card.title, where, ", ".join(levels(card)), listings.needed(card))
        )
    return table(("card", "what", "source", "setting", "needs"), rows)


def metrics() -> str:
    """Return the metrics that a card can name."""
    rows = [(f"`{name}`", metric.meaning, metric.unit) for name, metric in METRICS.items()]
    return table(("metric", "meaning", "unit"), rows)


def study(name: str) -> Any:
    """Return a study's figures."""
    data = (ROOT / "docs" / "studies" / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def source(row: dict[str, str], name: str) -> str:
    """Return who wrote the code, with a link."""
    return f"[{name}]({row['repository']})" if row["repository"] else name


def equal() -> str:
    """Return the methods beside published code, and whether they are equal."""
    rows = []
    for row in study("fidelity.json.gz")["equal"]:
        commit = row["commit"] or (f"({row['copy']})" if row["copy"] else "")
        cells = (row[name] for name in ("setting", "rounds", "error", "edited", "verdict"))
        words = (row["method"], source(row, row["code"]), commit, *cells)
        rows.append([text or "–" for text in words])
    head = ("method", "whose code", "commit", "setting", "rounds", "error", "edited", "verdict")
    return table(head, rows)


def divergences() -> str:
    """Return where published code leaves its paper, or its name."""
    rows = []
    for row in study("fidelity.json.gz")["divergences"]:
        at = " ".join(f"`{text}`" for text in (row["file"], row["commit"]) if text)
        where = ", ".join(text for text in (source(row, row["code"]), at) if text)
        names = ", ".join(f"`{name}`" for name in row["behaviours"])
        apart = "; ".join(text for text in (row["outside"], row["note"]) if text) or "–"
        rows.append(
            [row["method"], where, row["paper"], row["does"], names, row["difference"], apart]
        )
    head = ("method", "whose code", "the paper's line", "what the code has", "name")
    return table((*head, "difference, here", "outside"), rows)


def driven() -> str:
    """Return what the conformity kit found where it drove others' code."""
    rows = []
    for row in study("conformity-libraries.json"):
        names = ", ".join(f"`{name}`" for name in row["behaviours"][0]) or "as in the paper"
        rows.append([row["library"], row["method"], f"{row['largest']:.1e}", names])
    return table(("library", "method", "largest difference", "equals"), rows)


def costs(row: Method) -> str:
    """Return the table of a method's page on what it costs and goes with."""
    (call, head), *rows = listings.costs(row)
    return table((f"`{call}`", head), rows)


def composes(row: Method) -> str:
    """Return what of the package a method does not go with, and the reason that the package gives."""
    text, refused = listings.composes(row)
    text = textwrap.fill(text, 118)
    if not refused:
        return text
    rows = [(", ".join(f"`{name}`" for name in names), why) for why, names in refused.items()]
    head = "refused", "the package's reason"
    return f"{text}\n\n{table(head, rows)}"


PARTS: dict[str, Callable[[], str]] = {
    "uses": uses,
    "table": methods,
    "data sets": data_sets,
    "augmentations": augmentations,
    "models": models,
    "settings": settings,
    "cards": cards,
    "metrics": metrics,
    "fidelity equal": equal,
    "fidelity divergences": divergences,
    "fidelity driven": driven,
}
"""What a mark names -> its table."""
OF_A_METHOD = {"costs": costs, "composes": composes}
"""What a mark with a method's name names -> its text."""
MARK = re.compile(
    rf"(<!-- ({'|'.join([*PARTS, *OF_A_METHOD])})(?:: (\w+))? -->\n).*?(?=<!-- end -->)", re.S
)


def filled(text: str) -> str:
    """Return a page with the parts that come from the package made anew."""

    def part(match: re.Match[str]) -> str:
        made = OF_A_METHOD[match[2]](METHODS[match[3]]) if match[3] else PARTS[match[2]]()
        return f"{match[1]}\n{made}\n\n"

    return MARK.sub(part, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill a page of the site."""
    return filled(markdown)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        before = path.read_text()
        if (after := filled(before)) != before:
            path.write_text(after)
