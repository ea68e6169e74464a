"""The pages of the methods: their examples run, and their commands are methods."""

import doctest
import re
import runpy
from typing import Any

import pytest
import yaml

from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.strategies import build
from flwr_regs.methods.registry import COMPOSITIONS, METHODS
from tests.conftest import ROOT
from tests.docs.test_tutorials import blocks

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs/methods").glob("*.md"))}


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name: str) -> None:
    examples = blocks(ROOT / "docs/methods" / name, "pycon")
    assert examples
    names: dict[str, Any] = {}
    for block in examples:
        test = doctest.DocTestParser().get_doctest(block, names, name, name, 0)
        report: list[str] = []
        doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
        assert not report, "".join(report)
        names = test.globs


def test_what_a_method_refuses_is_what_the_package_refuses() -> None:
    """``python docs/hooks/compositions.py`` writes it anew."""
    made = runpy.run_path(str(ROOT / "docs/hooks/compositions.py"))["text"]()
    assert COMPOSITIONS.read_text(encoding="utf-8") == made
    assert "=the other" not in made  # a term's name, never a setting's value


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_and_compositions_of_a_page_are_methods(name: str) -> None:
    commands = re.findall(r'flwr-regs run [^`"]*methods="([^"]*)"', PAGES[name])
    assert commands
    for methods in commands + re.findall(r"`(\w+(?:\([^`]*\))?\+[^`]*)`", PAGES[name]):
        for calls in parse_methods(methods).values():
            build(calls)


def test_the_paper_of_each_method_is_in_the_citation_file() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    for name, row in METHODS.items():
        page = " ".join(PAGES[f"{name.lower()}.md"].split()).casefold()
        for paper in row.paper.split("; "):
            found = re.match(r"(.+?)(?: et al\.)? (\d{4})", paper)
            assert found, paper
            authors = found[1].split(", ")
            assert any(
                [author["family-names"] for author in entry["authors"]][: len(authors)] == authors
                and entry["year"] == int(found[2])
                and entry["title"].casefold() in page
                for entry in cited
            ), f"{name}: {paper}"
