"""One line made wrong: the usual operators of mutation testing (mutmut, cosmic-ray), on syntax trees.

Own code: both tools write each mutant to a file and start the suite anew for it, and neither samples lines
or knows which tests run a line. What no test could see, or what only words show, is not changed:
docstrings, annotations, decorators, messages of errors and logs, `__all__`, blocks for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Div,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
LOGS = {"log", "debug", "info", "warning", "warn", "error", "exception", "warn_once"}
"""Calls whose arguments are words for a reader."""
WORDS = {"__repr__", "__str__"}
UNSEEN = {"strict", "stacklevel"}
"""Keyword arguments that guard against a programmer's error."""


@dataclass
class Place:
    """Where a change stands: its statement, and the functions and classes around it, outermost first."""

    statement: ast.stmt
    around: list[ast.AST] = field(default_factory=list)
    header: bool = False
    """Whether the statement runs when its module is imported."""


@dataclass
class Mutation:
    """One change: `old`, at `slot` of `parent`, becomes `new`."""

    parent: ast.AST
    slot: tuple[str, int | None]
    old: ast.AST
    new: ast.AST
    place: Place

    @property
    def line(self) -> int:
        return int(getattr(self.old, "lineno", self.place.statement.lineno))

    def __str__(self) -> str:
        return f"{brief(self.old)}  ->  {brief(self.new)}"

    def apply(self) -> None:
        """Change the tree that this mutation was found in."""
        name, index = self.slot
        if index is None:
            setattr(self.parent, name, self.new)
        else:
            getattr(self.parent, name)[index] = self.new


def brief(node: ast.AST) -> str:
    """Return the first line of a node's source, at most 90 characters."""
    first, *more = ast.unparse(node).splitlines()
    return first[:90] + (" ..." if more or len(first) > 90 else "")


def mutations(tree: ast.Module) -> list[Mutation]:
    """Return all changes of a file, in the order of its syntax tree."""
    return list(_below(tree, []))


def _below(parent: ast.AST, around: list[ast.AST]) -> Iterator[Mutation]:
    """Find the changes of all statements below a node that holds statements."""
    for name, value in ast.iter_fields(parent):
        if not isinstance(value, list):
            continue
        for index, child in enumerate(value):
            if isinstance(child, ast.stmt):
                yield from _of_statement(parent, (name, index), child, around)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _below(child, around)


def _of_statement(
    parent: ast.AST, slot: tuple[str, int | None], node: ast.stmt, around: list[ast.AST]
) -> Iterator[Mutation]:
    inside = any(isinstance(a, ast.FunctionDef | ast.AsyncFunctionDef) for a in around)
    place = Place(node, around, header=not inside)
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if node.name in WORDS or _is_overload(node):
                return
            defaults = Place(node, [*around, node], header=not inside)
            for name in ("defaults", "kw_defaults"):
                for index, value in enumerate(getattr(node.args, name)):
                    if value is not None:
                        yield from _of_expression(node.args, (name, index), value, defaults)
            yield from _below(node, [*around, node])
            return
        case ast.ClassDef():
            yield from _below(node, [*around, node])
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__" | "__version__")]):
            return
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
            return
        case ast.Expr(value=ast.Constant()):
            return  # a docstring, or ...
        case ast.Expr(value=ast.Call() as call) if _called(call) in LOGS:
            return
        case ast.Assert():
            return
        case ast.Raise():
            yield Mutation(parent, slot, node, ast.Pass(), place)
            return
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield Mutation(parent, slot, node, ast.Return(ast.Constant(None)), place)
        case ast.Break():
            yield Mutation(parent, slot, node, ast.Continue(), place)
        case ast.Continue():
            yield Mutation(parent, slot, node, ast.Break(), place)
        case ast.If() | ast.While():
            yield Mutation(node, ("test", None), node.test, _negated(node.test), place)
        case ast.Assign() if inside:
            yield Mutation(parent, slot, node, ast.Pass(), place)
        case ast.AugAssign():
            yield Mutation(parent, slot, node, ast.Pass(), place)
            if type(node.op) in ARITHMETIC:
                swapped = copy.deepcopy(node)
                swapped.op = ARITHMETIC[type(node.op)]()
                yield Mutation(parent, slot, node, swapped, place)
        case ast.Expr(value=ast.Call()):
            yield Mutation(parent, slot, node, ast.Pass(), place)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "target", "targets", "type_comment"):
            continue
        for child_slot, child in _children(name, value):
            if isinstance(child, ast.expr):
                yield from _of_expression(node, child_slot, child, place)
            elif isinstance(child, ast.withitem):
                yield from _of_expression(child, ("context_expr", None), child.context_expr, place)
    yield from _below(node, around)


def _of_expression(
    parent: ast.AST, slot: tuple[str, int | None], node: ast.expr, place: Place
) -> Iterator[Mutation]:
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call) and _called(node) in (*LOGS, "cast", "TypeVar")
    ):
        return
    for new in _changed(node, place):
        yield Mutation(parent, slot, node, ast.copy_location(new, node), place)
    for name, value in ast.iter_fields(node):
        for child_slot, child in _children(name, value):
            if isinstance(child, ast.expr):
                yield from _of_expression(node, child_slot, child, place)
            elif isinstance(child, ast.keyword) and child.arg not in UNSEEN:
                yield from _of_expression(child, ("value", None), child.value, place)
            elif isinstance(child, ast.comprehension):
                yield from _of_expression(child, ("iter", None), child.iter, place)
                for index, test in enumerate(child.ifs):
                    yield Mutation(child, ("ifs", index), test, _negated(test), place)
                    yield from _of_expression(child, ("ifs", index), test, place)


def _children(name: str, value: object) -> Iterator[tuple[tuple[str, int | None], object]]:
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield (name, index), child
    else:
        yield (name, None), value


def _changed(node: ast.expr, place: Place) -> Iterator[ast.expr]:
    """Return an expression's own changes, those of its parts left out."""
    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(op)](), *rest], node.comparators)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _of_text_or_type(node, place):
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(_negated(node.test), node.body, node.orelse)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            for value in (node.value + 1, node.value - 1):  # type: ignore[operator]
                if value != node.value:  # 1e100 + 1 is 1e100
                    yield ast.Constant(value)


def _of_text_or_type(node: ast.BinOp, place: Place) -> bool:
    """Whether a sum is of texts, or a union is of types (``A | B`` where a module is imported)."""
    parts = [node.left, node.right]
    text = any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in parts
    )
    named = [getattr(part, "id", getattr(part, "attr", "")) for part in parts]
    union = isinstance(node.op, ast.BitOr) and (
        place.header or any(_is_none(part) for part in parts) or any(n[:1].isupper() for n in named)
    )
    return text or union


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("overload" in ast.unparse(d) for d in node.decorator_list)
