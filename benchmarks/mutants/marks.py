"""Which tests run which lines: marks in the package's functions, and a pytest plugin that reads them.

The plan (a JSON file that `MUTANTS_PLAN` names) lists marks: a file, a line, and whether the mark stands
before the statement at this line or at the start of the function that begins there. A mark sets one byte
of shared memory, so that processes forked by a test count too. Each worker of pytest-xdist appends to a
file of its own, one line for each test.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

MARKS = "__mutant_marks__"
"""The name of the shared memory, among Python's builtins."""


class Changed(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed syntax tree; its file stays as it is."""

    def __init__(self, name: str, path: str, code: Callable[[], CodeType]) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code()


class Finder:
    """Finds the files whose code is changed; `codes`: what makes the code, by absolute path."""

    def __init__(self, root: Path, codes: Mapping[str, Callable[[], CodeType]]) -> None:
        self.names = {}
        for path, code in codes.items():
            parts = list(Path(path).relative_to(root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.names[name] = (path, code)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        file, code = self.names[name]
        folder = [str(Path(file).parent)] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, file, loader=Changed(name, file, code), submodule_search_locations=folder
        )


def marked(path: str, marks: Sequence[Mapping[str, Any]]) -> CodeType:
    """Compile a file with its marks."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    before: dict[int, list[int]] = {}
    inside: dict[int, list[int]] = {}
    for mark in marks:
        (inside if mark["inside"] else before).setdefault(mark["line"], []).append(mark["index"])

    def setting(index: int, node: ast.AST) -> ast.stmt:
        (statement,) = ast.parse(f"{MARKS}[{index}] = 1").body
        for part in ast.walk(statement):
            ast.copy_location(part, node)
        return statement

    for node in ast.walk(tree):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for child in list(body):
                    for index in before.get(child.lineno, ()):
                        body.insert(body.index(child), setting(index, child))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = int(ast.get_docstring(node, clean=False) is not None)
            for index in inside.get(node.lineno, ()):
                node.body.insert(first, setting(index, node))
    return compile(ast.fix_missing_locations(tree), path, "exec")


class Recorder:
    """Writes, for each test: its seconds, whether it passed, and the marks that it reached.

    A fixture's marks are those of each test that uses it, also where another test came first.
    """

    def __init__(self, memory: mmap.mmap, file: Path) -> None:
        self.memory, self.file = memory, file
        self.of_fixtures: dict[Any, set[int]] = {}
        self.passed = True

    def reached(self) -> set[int]:
        held = self.memory[:]
        return {i for i, byte in enumerate(held) if byte} if any(held) else set()

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        before = self.reached()
        self.clear()
        try:
            return (yield)
        finally:
            reached = self.reached()
            self.of_fixtures.setdefault(fixturedef, set()).update(reached)
            for index in before:
                self.memory[index] = 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.clear()
        self.passed, start = True, time.perf_counter()
        result = yield
        seconds, reached = time.perf_counter() - start, self.reached()
        fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        for definitions in fixtures.values():
            for definition in definitions:
                reached |= self.of_fixtures.get(definition, set())
        row = {"test": item.nodeid, "seconds": seconds, "passed": self.passed}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "marks": sorted(reached)}) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= not report.failed


def pytest_configure(config: pytest.Config) -> None:
    if "MUTANTS_PLAN" in os.environ:
        folder = Path(os.environ["MUTANTS_PLAN"]).parent
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        memory = getattr(builtins, MARKS)
        config.pluginmanager.register(Recorder(memory, folder / f"{worker}.jsonl"))


def install() -> None:
    """Load the files that the plan marks with their marks, from now on."""
    plan = json.loads(Path(os.environ["MUTANTS_PLAN"]).read_text(encoding="utf-8"))
    files: dict[str, list[dict[str, Any]]] = {}
    for mark in plan["marks"]:
        files.setdefault(mark["path"], []).append(mark)
    codes = {path: partial(marked, path, marks) for path, marks in files.items()}
    setattr(builtins, MARKS, mmap.mmap(-1, max(1, len(plan["marks"]))))
    sys.meta_path.insert(0, Finder(Path(plan["root"]), codes))


if "MUTANTS_PLAN" in os.environ:
    install()  # before any conftest.py imports the package
