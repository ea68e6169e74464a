"""The package's strategies and terms without torch and Flower, which take seconds to load.

A light class is made from the source of the real one. What needs torch or Flower is left out, so that it
cannot train; but it takes the same arguments, and refuses what the real one refuses.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_regs import term
from flwr_regs.experiments.calls import catalogue
from flwr_regs.methods.registry import HOMES, METHODS
from flwr_regs.wire.config import nearest

PACKAGE = Path(__file__).parents[1]
HEAVY = re.compile(r"torch|flwr(?!_)|flwr_regs\.(client|cohort|flower|wire\.records)\b")
"""Modules that load torch or Flower; a light class knows nothing of them."""
LIGHT = re.compile(r"flwr_regs\.(methods\.(?!registry)|flower\.strategy)")
"""Modules whose classes have a light form."""


def light(name: str) -> Any:
    """Return the light form of a strategy or a term; ValueError for another name."""
    if name == "RegStrategy":
        return _defined("flwr_regs.flower.strategy")[name]
    if name not in catalogue():
        raise ValueError(f"there is no method '{name}'{nearest(name, catalogue())}")
    file = METHODS[name].module if name in METHODS else HOMES[name]
    return _defined(f"flwr_regs.methods.{file}")[name]


@lru_cache
def _defined(module: str) -> dict[str, Any]:
    """Return what a module defines, as far as that needs neither torch nor Flower."""
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    known: dict[str, Any] = {"__name__": term.__name__}  # where a dataclass finds its ClassVar
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        imported = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = getattr(node, "module", "") or node.names[0].name
        if isinstance(node, ast.ImportFrom) and LIGHT.match(imported):
            given = _defined(imported)
            known |= {alias.name: given[alias.name] for alias in node.names if alias.name in given}
        elif not HEAVY.match(imported):
            if isinstance(node, ast.ClassDef):
                node.bases = [base for base in node.bases if ast.unparse(base) in known]
            with suppress(NameError):  # it needs torch
                exec(compile(ast.Module([node], []), str(path), "exec"), known)
    return known
