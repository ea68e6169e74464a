"""How to install packages that are missing: a command that works for this copy of flwr-regs."""

from __future__ import annotations

import importlib
import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

NAME = "flwr-regs"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, such as ``"bench"``.

    In a clone that was installed as editable, ``pip install -e "<the clone>[bench]"``; from a wheel,
    the packages of the extra by name, because the package itself need not be on an index. Where it was not
    installed at all (the sources are on Python's path), what to call in the clone.
    """
    try:
        installed = distribution(NAME)
    except PackageNotFoundError:
        return f'pip install -e ".[{extra}]" in the clone'
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        clone = url2pathname(urlparse(origin["url"]).path)
        return f'pip install -e "{clone}[{extra}]"'
    return " ".join(["pip install", *packages_of(extra, installed)])


def packages_of(extra: str, installed: Distribution) -> list[str]:
    """Return the packages of an extra, as `pip install` takes them; ValueError without such an extra."""
    names = []
    for requirement in installed.requires or ():
        name, _, marker = requirement.partition(";")
        others, of_extra = re.subn(
            rf"(\s*and\s*)?extra == ['\"]{re.escape(extra)}['\"]", "", marker
        )
        if of_extra:
            needed = ";".join(part for part in (name.strip(), others.rstrip()) if part)
            names.append(f'"{needed}"' if re.search(r"[^\w.-]", needed) else needed)
    if not names:
        raise ValueError(f"{NAME} has no extra '{extra}'")
    return sorted(names, key=lambda name: name.strip('"').lower())


def missing_extra(package: str, purpose: str, extra: str = "bench") -> ImportError:
    """Return the error for a package of an extra that is not installed."""
    return ImportError(f"{purpose} needs {package}: {install_command(extra)}")


def needed(module: str, package: str, purpose: str, extra: str = "bench") -> Any:
    """Return a module of a package of an extra; ImportError, with the command, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package, purpose, extra) from error
