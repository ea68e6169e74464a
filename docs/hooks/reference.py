"""The API reference: a page for each group of public names; a name without a docstring stops the build."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ALSO = {
    "flwr_regs.chain.chain": "flwr_regs.chain.chain",
    "flwr_regs.testing.check_method": "flwr_regs.testing.check.check_method",
    "flwr_regs.client.local_round": "flwr_regs.client.local_training.local_round",
    "flwr_regs.client.LocalTraining": "flwr_regs.client.local_training.LocalTraining",
}
"""Public names that are not in ``flwr_regs.__all__`` -> where they are defined."""
PAGES = {
    "api-methods": (
        "Strategies and clients",
        "A strategy, a client and the terms for each method.",
    ),
    "api-flower": (
        "Flower",
        "What every strategy and client has: apps, grids, loops of your own, privacy, aggregators, "
        "callbacks, checkpoints.",
    ),
    "api-terms": ("Your own method", "Terms, their contexts, composition, laws, the registry."),
}


def public() -> dict[str, str]:
    """Return public name -> where it is defined; methods in the order of the registry.

    The package's names are lazy, so nothing heavy loads. pages.py has put the repository on the path.
    """
    package = importlib.import_module("flwr_regs")
    methods = [n for row in package.METHODS.values() for n in row.names if n in package.__all__]
    names = dict.fromkeys([*methods, *package.__all__])
    return {name: f"flwr_regs.{package._HOME[name]}.{name}" for name in names} | ALSO


def page_of(path: str) -> str:
    """Return the page on which a name stands."""
    if path.startswith("flwr_regs.methods.") and ".registry." not in path:
        return "api-methods"
    if path.startswith("flwr_regs.client.memory."):  # what a client's `save_private` left
        return "api-flower"
    terms = ("term", "abilities", "chain", "testing", "client", "methods")
    return "api-terms" if path.split(".")[1] in terms else "api-flower"


def undocumented(names: dict[str, str]) -> Iterator[str]:
    """Yield where each public name is defined that has no docstring of its own, or is not there."""
    package = griffe.load("flwr_regs", search_paths=[str(ROOT)])
    for path in names.values():
        try:
            found = package[path.removeprefix("flwr_regs.")]
        except KeyError:
            yield f"{path} (not found)"
            continue
        if not (found.docstring and found.docstring.value.strip()):
            yield path


def on_files(files: Any, config: Any) -> Any:
    """Write the pages, or stop with the public names that have no docstring."""
    names = public()
    if bad := sorted(undocumented(names)):
        raise PluginError(f"public names without a docstring: {', '.join(bad)}")
    overview = ["# API", ""]
    for page, (title, what) in PAGES.items():
        here = {n: p for n, p in names.items() if page_of(p) == page}
        links = ", ".join(f"[`{n}`]({page}.md#{p})" for n, p in here.items())
        overview += [f"**[{title}]({page}.md).** {what}", "", links, ""]
        text = "\n\n".join([f"# {title}", what, *(f"::: {p}" for p in here.values())])
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    overview.append("Import a name without a dot from `flwr_regs` itself.")
    files.append(File.generated(config, "reference/api.md", content="\n".join(overview)))
    return files


def on_post_build(config: Any) -> None:
    """Stop if a public name has no entry in what was built."""
    built = {p: (Path(config.site_dir) / f"reference/{p}.html").read_text() for p in PAGES}
    names = public().values()
    if lost := sorted(p for p in names if f'id="{p}"' not in built[page_of(p)]):
        raise PluginError(f"public names without an entry in the API reference: {', '.join(lost)}")
