"""How to install packages that are missing: a command that works for this copy. And TOML files of lists."""

from __future__ import annotations

import importlib
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

NAME = "flwr-regs"


def install_command(package: str, extra: str) -> str:
    """Return the command that installs a package of an extra of this package, such as ``"bench"``.

    It names the package's versions, because this one need not be on an index. A package that the extra does
    not name comes with those that it names. Where this one was not installed at all (the sources are on
    Python's path), the command is one for the clone.
    """
    try:
        requires = distribution(NAME).requires or ()
    except PackageNotFoundError:
        return f'pip install -e ".[{extra}]" in the clone'
    pairs = [requirement.partition(";")[::2] for requirement in requires]
    names = [name.strip() for name, marker in pairs if f"'{extra}'" in marker.replace('"', "'")]
    names = [name for name in names if re.match(rf"{package}\b", name)] or names
    return " ".join(["pip install", *(f'"{name}"' for name in names)])


def table_beside(file: str) -> dict[str, Any]:
    """Return what the TOML file says that lies beside a module and has its name."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


def missing_extra(package: str, purpose: str, extra: str = "bench") -> ImportError:
    """Return the error for a package of an extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: {install_command(package, extra)}")


def needed(module: str, package: str, purpose: str, extra: str = "bench") -> Any:
    """Return a module of a package of an extra; ImportError, with the command, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package, purpose, extra) from error
