"""How to install packages that are missing: a command that works for this copy of flwr-regs."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

NAME = "flwr-regs"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, such as ``"bench"``.

    It names the packages of the extra, because the package itself need not be on an index. Where it was not
    installed at all (the sources are on Python's path), it is one for the clone.
    """
    try:
        requires = distribution(NAME).requires or ()
    except PackageNotFoundError:
        return f'pip install -e ".[{extra}]" in the clone'
    names = []
    for requirement in requires:
        name, _, marker = requirement.partition(";")
        others, of_extra = re.subn(rf"(\s*and\s*)?extra == ['\"]{extra}['\"]", "", marker)
        if of_extra:
            needed = ";".join(part for part in (name.strip(), others.rstrip()) if part)
            names.append(f'"{needed}"' if re.search(r"[^\w.-]", needed) else needed)
    return " ".join(["pip install", *sorted(names, key=lambda name: name.strip('"').lower())])


def missing_extra(package: str, purpose: str, extra: str = "bench") -> ImportError:
    """Return the error for a package of an extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: {install_command(extra)}")


def needed(module: str, package: str, purpose: str, extra: str = "bench") -> Any:
    """Return a module of a package of an extra; ImportError, with the command, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package, purpose, extra) from error
