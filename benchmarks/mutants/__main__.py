"""``python -m benchmarks.mutants``: breaks one line at a time, and runs the tests that can see it.

    python -m benchmarks.mutants --sample 200 --seed 1 --json mutants.json

One run of the suite says which tests reach which of the sampled lines. Then each mutant meets the tests
that reach its line, in a process of its own, until one fails. No file of the tree is written. A mutant that
no test reaches has survived. `--root` is the tree whose package and tests are meant, by default this one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

from benchmarks.mutants.marks import Finder
from benchmarks.mutants.operators import Mutation, mutations

HERE = Path(__file__).resolve().parents[2]
FOLDERS = ["server", "client", "cohort", "wire", "methods"]
WARM = [
    *("numpy", "torch", "torch.func", "safetensors", "flwr", "flwr.app", "flwr.client"),
    *("flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation"),
    *("pytest", "hypothesis", "scipy.stats", "pandas", "matplotlib.figure", "rich.console"),
]
"""What the tests import and the mutants do not change: loaded once, before the processes fork."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FIRST = 15
"""So many tests are tried before the others are collected."""


@dataclass
class Mutant:
    """One wrong line, and what the tests said of it."""

    path: str
    number: int
    """Which of its file's mutations it is."""
    line: int
    change: str
    marks: list[int] = field(default_factory=list)
    """The marks of the tests that can see it, the nearest first."""
    fate: str = ""
    """caught, survived, not reached, or too slow (caught)."""
    tests: int = 0
    seconds: float = 0.0
    said: str = ""

    @property
    def caught(self) -> bool:
        return self.fate in ("caught", "too slow")


def draw(root: Path, package: str, folders: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    """Draw lines of the folders, without repetition, and one change of each."""
    by_line: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    for folder in folders:
        for path in sorted((root / package / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for number, mutation in enumerate(mutations(tree)):
                by_line[str(path), mutation.line].append((number, str(mutation)))
    chance = random.Random(seed)
    lines = chance.sample(sorted(by_line), min(sample, len(by_line)))
    mutants = []
    for file, line in lines:
        number, change = chance.choice(by_line[file, line])
        mutants.append(Mutant(file, number, line, change))
    return mutants


def mark(mutants: Sequence[Mutant], root: Path, package: str) -> list[dict[str, Any]]:
    """Give each mutant its marks: before its statement, or in the functions that read what it sets.

    What runs at import (a constant, a field's default) is seen by the tests that call a function which
    names it.
    """
    marks: dict[tuple[str, int, bool], int] = {}

    def index(path: str, line: int, inside: bool) -> int:
        return marks.setdefault((path, line, inside), len(marks))

    functions = [
        (
            str(path),
            node,
            {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)},
        )
        for path in sorted((root / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FUNCTIONS)
    ]
    for mutant in mutants:
        mutation = of_file(mutant)[1]
        place = mutation.place
        if not place.header:
            mutant.marks = [index(mutant.path, place.statement.lineno, False)]
        elif isinstance(place.statement, FUNCTIONS):
            mutant.marks = [index(mutant.path, place.statement.lineno, True)]
        else:
            names = {
                node.id
                for node in ast.walk(place.statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            readers = [(path, node) for path, node, used in functions if names & used]
            readers = readers or [(p, node) for p, node, _ in functions if p == mutant.path]
            readers.sort(key=lambda reader: reader[0] != mutant.path)
            mutant.marks = [index(path, node.lineno, True) for path, node in readers]
    return [
        {"index": number, "path": path, "line": line, "inside": inside}
        for (path, line, inside), number in marks.items()
    ]


def of_file(mutant: Mutant) -> tuple[ast.Module, Mutation]:
    tree = ast.parse(Path(mutant.path).read_text(encoding="utf-8"))
    return tree, mutations(tree)[mutant.number]


def compiled(mutant: Mutant) -> CodeType:
    """Compile a mutant's file, with its one change."""
    tree, mutation = of_file(mutant)
    ast.copy_location(mutation.new, mutation.old)
    mutation.apply()
    return compile(ast.fix_missing_locations(tree), mutant.path, "exec")


@dataclass
class Test:
    """What the run with marks said of a test."""

    name: str
    seconds: float
    marks: set[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def record(marks: Sequence[Mapping[str, Any]], root: Path, paths: Sequence[str]) -> list[Test]:
    """Run the default suite once with marks; tests that fail do so again without them, or are kept."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"root": str(root), "marks": marks}), encoding="utf-8")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        with_marks = [*pytest, "-p", "benchmarks.mutants.marks", "-o", "timeout=900", *paths]
        tell(f"one run of the tests with {len(marks)} marks")
        done = subprocess.run(
            with_marks,
            env={**os.environ, "MUTANTS_PLAN": str(plan)},
            stdout=subprocess.PIPE,
            text=True,
        )
        tell(f"... {done.stdout.splitlines()[-1] if done.stdout else 'said nothing'}")
        rows = {
            row["test"]: row
            for file in Path(folder).glob("*.jsonl")
            for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        }
        if not rows:
            sys.exit(f"no test ran:\n{done.stdout[-3000:]}")
        failed = [name for name, row in rows.items() if not row["passed"]]
        if failed:
            tell(f"{len(failed)} of them fail with marks: they run again without")
            again = subprocess.run(
                [*pytest, "-rfE", "--tb=no", *failed], stdout=subprocess.PIPE, text=True
            )
            broken = {
                line.split(" - ")[0].split(" ", 1)[1]
                for line in again.stdout.splitlines()
                if line.startswith(("FAILED ", "ERROR "))
            }
            for name in broken & rows.keys():
                tell(f"left out, as it fails on the tree as it is: {name}")
                del rows[name]
    return [
        Test(name, row["seconds"], set(row["marks"]))
        for name, row in rows.items()
        if "\\" not in name  # pytest does not find it by its name
    ]


def chosen(mutant: Mutant, tests: Sequence[Test], most: int, seconds: float) -> list[Test]:
    """Return the tests for a mutant: of each file in turn the shortest, then others of these files.

    Files that mirror its folders come first. The others of a file may judge a training that another test of
    their file ran, and that is kept.
    """
    folders = {*Path(mutant.path).parts}
    near = mutant.marks
    reaching = [test for test in tests if not test.marks.isdisjoint(near)]
    if not reaching:
        return []
    files = {test.file for test in reaching}
    beside = [test for test in tests if test.file in files and test.marks.isdisjoint(near)]
    picked: list[Test] = []
    spent = 0.0
    for group in (reaching, beside):
        by_file: dict[str, list[Test]] = defaultdict(list)
        for test in sorted(group, key=lambda test: test.seconds):
            by_file[test.file].append(test)
        rows = sorted(by_file.values(), key=lambda row: row[0].seconds)
        by_turns = filter(None, itertools.chain(*itertools.zip_longest(*rows)))
        for test in sorted(by_turns, key=lambda t: -len(folders & {*Path(t.file).parts})):
            if len(picked) < most and (spent + test.seconds <= seconds or not picked):
                picked.append(test)
                spent += test.seconds
    return picked


def judge(mutant: Mutant, tests: Sequence[str], root: Path, log: int) -> NoReturn:
    """Run tests on a mutant, in a process that ends here; its status is 0 where all pass."""
    status = 70
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.meta_path.insert(0, Finder(root, {mutant.path: lambda: compiled(mutant)}))
        import pytest

        plain = ["-x", "-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider"]
        plain += ["-o", "addopts=--strict-markers", "--no-header", "-W", "ignore"]
        for part in (tests[:FIRST], tests[FIRST:]):
            if part:
                status = int(pytest.main([*plain, *part]))
                if status:
                    break
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        status = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)


def try_all(
    mutants: Sequence[Mutant],
    tests: Sequence[Test],
    root: Path,
    most: int,
    seconds: float,
    jobs: int,
) -> None:
    """Judge the mutants, `jobs` at a time, and write what became of them into them."""
    waiting = list(mutants)
    running: dict[int, tuple[Mutant, float, float, Any]] = {}
    begun = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            picked = chosen(mutant, tests, most, seconds)
            mutant.tests = len(picked)
            if not picked:
                mutant.fate = "not reached"
                continue
            log = tempfile.TemporaryFile()  # noqa: SIM115 (open until the process has ended)
            child = os.fork()
            if child == 0:
                judge(mutant, [test.name for test in picked], root, log.fileno())
            limit = 60 + 4 * sum(test.seconds for test in picked)
            running[child] = (mutant, time.monotonic(), limit, log)
        time.sleep(0.05)
        for child, (mutant, start, limit, log) in list(running.items()):
            over = time.monotonic() - start > limit
            if over:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if over else os.WNOHANG)
            if not ended:
                continue
            del running[child]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what the tests left running
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
            log.close()
            mutant.seconds = time.monotonic() - start
            code = os.waitstatus_to_exitcode(status)
            mutant.fate = "too slow" if over else "caught" if code else "survived"
            if mutant.fate == "caught":
                mutant.said = f"status {code}: " + said[-600:]
            done = sum(bool(m.fate) for m in mutants)
            left = (time.monotonic() - begun) / done * (len(mutants) - done)
            where = f"{Path(mutant.path).relative_to(root)}:{mutant.line}"
            tell(f"{done}/{len(mutants)}, {left / 60:.0f} min left: {mutant.fate:11} {where}")


def table(mutants: Sequence[Mutant], root: Path, package: str) -> str:
    """Return what was caught, by folder, and the survivors."""
    folders = {m.path: Path(m.path).relative_to(root / package).parts[0] for m in mutants}
    caught = Counter(folders[m.path] for m in mutants if m.caught)
    total = Counter(folders[m.path] for m in mutants)
    rows = ["| folder | mutants | caught | survived | share |", "|---|---|---|---|---|"]
    for name in [*sorted(total), "all"]:
        of_all = len(mutants) if name == "all" else total[name]
        hit = sum(caught.values()) if name == "all" else caught[name]
        rows.append(f"| {name} | {of_all} | {hit} | {of_all - hit} | {hit / of_all:.0%} |")
    survivors = sorted((m for m in mutants if not m.caught), key=lambda m: (m.path, m.line))
    lines = [
        f"{Path(m.path).relative_to(root)}:{m.line}: {m.change}  ({m.fate}, {m.tests} tests)"
        for m in survivors
    ]
    return "\n".join([*rows, "", "Survivors:", *lines])


def tell(words: str) -> None:
    print(time.strftime("%H:%M:%S"), words, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the mutants, record the tests, judge, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, default=200, help="lines to break (200)")
    parser.add_argument("--seed", type=int, default=1, help="draws the lines and changes (1)")
    parser.add_argument("--root", type=Path, default=HERE, help="the tree (this one)")
    parser.add_argument("--package", default="flwr_regs", help="the package's folder (flwr_regs)")
    parser.add_argument("--folders", nargs="*", default=FOLDERS, help="of the package")
    parser.add_argument("--tests", nargs="*", default=[], help="paths for pytest (all)")
    parser.add_argument("--most", type=int, default=120, help="tests for a mutant (120)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a mutant (60)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--json", type=Path, help="write each mutant's fate to this file")
    parser.add_argument("--warm", nargs="*", default=WARM, help="modules to load once, before")
    given = parser.parse_args(argv)
    root = given.root.resolve()
    paths = os.pathsep.join(dict.fromkeys([str(root), str(HERE)]))
    if os.environ.get("PYTHONPATH") != paths or Path.cwd() != root:
        # the tree's package and tests come first on the path of this process and of pytest's
        words = list(sys.argv[1:] if argv is None else argv)
        if given.json:
            words += ["--json", str(given.json.resolve())]
        once = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
        environment = {**os.environ, **once, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "benchmarks.mutants", *words, "--root", str(root)]
        sys.exit(subprocess.run(command, cwd=root, env=environment).returncode)
    folders = [f for f in given.folders if (root / given.package / f).is_dir()]
    mutants = draw(root, given.package, folders, given.sample, given.seed)
    if not mutants:
        sys.exit(f"no line to break in {', '.join(given.folders)} of {root / given.package}")
    tests = record(mark(mutants, root, given.package), root, given.tests)
    for name in given.warm:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try_all(mutants, tests, root, given.most, given.seconds, given.jobs)
    print(table(mutants, root, given.package))
    if given.json:
        rows = [{**asdict(m), "path": str(Path(m.path).relative_to(root))} for m in mutants]
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
