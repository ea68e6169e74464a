"""A user's own code by its reference: ``mine.py:Net``, ``package.module:Net`` or ``here:Net``.

The first names a file, the second a module, the third an object that this process offered.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr_regs.wire.config import nearest
from flwr_regs.wire.errors import OURS, described, place

HERE = "here"
TERMINATED = 143
"""The exit status of a process that SIGTERM ends."""
_OFFERED: dict[str, Any] = {}  # name -> object, for references such as here:Net
_LOADED: dict[Path, list[bytes]] = {}  # file -> its content when loaded, and others warned of


def load(reference: str, folder: str = "") -> Any:
    """Return what a reference names; the name behind the colon may have dots.

    A file is loaded once per process, under a module name of its own, which is in ``sys.modules``; a
    warning says so if it has changed since. Two files of one name in different folders are two modules.

    Parameters
    ----------
    reference : str
        A file's path that ends in ``.py``, or a module's name with dots for packages; a colon; and the
        name in it. Or ``here:`` and a name that :func:`offer` returned in this process.
    folder : str
        Where a relative path begins (empty: the current folder), and where Python looks for modules
        first, as in ``python -m``. It stays on ``sys.path``, for imports that the module does later; so
        does the folder of a file.

    Raises
    ------
    ValueError
        There is no such folder, file, module or name (the message has the nearest name), or the module
        raises when it is imported (the message has the file and the line).
    """
    source, _, name = reference.rpartition(":")
    if folder and not Path(folder).is_dir():
        raise ValueError(f"there is no folder '{folder}' on this machine")
    if source == HERE:
        if name not in _OFFERED:
            hint = "with workers or Ray, name a file, such as mine.py:Net"
            raise ValueError(f"'{reference}' is an object of another process: {hint}")
        return _OFFERED[name]
    if folder:
        _importable(folder)
    if source.endswith(".py"):
        path = (Path(folder) / Path(source).expanduser()).resolve()
        where, thing = f"'{path}'", _file(path)
    else:
        where, thing = source, _module(source, folder)
    for step in name.split("."):
        if not hasattr(thing, step):
            known = [n for n in dir(thing) if not n.startswith("_")]
            raise ValueError(f"there is no '{step}' in {where}{nearest(step, known)}")
        thing = getattr(thing, step)
    return thing


def offer(thing: Any) -> str:
    """Return a reference, such as ``here:Net``, with which :func:`load` finds an object in this process.

    The same object has one reference; another object of the same name has another reference.
    """
    parts = thing if isinstance(thing, list | tuple) else [thing]
    plain = "_".join(getattr(part, "__name__", type(part).__name__) for part in parts)
    name = plain = re.sub(r"^(?=\d)|\W+", "_", plain)  # a lambda's name is no identifier
    number = 1
    while _OFFERED.setdefault(name, thing) is not thing:
        number += 1
        name = f"{plain}_{number}"
    return f"{HERE}:{name}"


def call(reference: str, folder: str, seed: int) -> Any:
    """Return what the class or function of a reference returns when it is called without arguments.

    Python's, numpy's and torch's global random states begin at `seed`, and are afterwards as they were.

    Raises
    ------
    ValueError
        As :func:`load` does; or it cannot be called without arguments, or it raises (the message has the
        user's file and line).
    """
    thing = load(reference, folder)
    if not callable(thing):
        kind = type(thing).__name__
        raise ValueError(f"'{reference}' is of type {kind}; expected a function or a class")
    try:
        with suppress(ValueError):  # a builtin without a signature
            inspect.signature(thing).bind()
    except TypeError as error:
        raise ValueError(f"'{reference}' is called without arguments, but: {error}") from error
    with seeded(seed), blaming(f"'{reference}' failed"):
        return thing()


@contextmanager
def blaming(
    what: str, kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)
) -> Iterator[None]:
    """Raise ValueError, with the user's file and line, where a user's code raises one of the `kinds`."""
    try:
        yield
    except kinds as error:
        if getattr(error, "code", None) == TERMINATED:
            raise
        raise ValueError(f"{what}: {said(error)}") from error


def staying() -> AbstractContextManager[None]:
    """Raise ValueError, with the user's file and line, where a user's code ends the process."""
    return blaming("your code ends the process", (SystemExit,))


def said(error: BaseException) -> str:
    """Return an error's type, its text in one line, and the user's file and line that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    told, where = described(error), place(error)
    return told.removesuffix(where) if OURS in where else told


def _module(name: str, folder: str) -> ModuleType:
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    with blaming(f"importing {name} failed"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            absent = error.name
            if absent is None or not f"{name}.".startswith(f"{absent}."):
                raise
    looked = f"in {folder}" if folder else "on Python's path (the setting code-dir is empty)"
    raise ValueError(f"there is no module '{absent}' {looked}")


def _file(path: Path) -> ModuleType:
    """Return the module of a file, given by its resolved path."""
    if not path.is_file():
        hint = nearest(path.stem, [other.stem for other in path.parent.glob("*.py")])
        raise ValueError(f"there is no file '{path}'" + hint.replace("'?", ".py'?"))
    with blaming(f"importing '{path}' failed"):
        content = path.read_bytes()
    for module in list(sys.modules.values()):  # loaded before, or the script that runs
        if getattr(module, "__dict__", {}).get("__file__") == str(path):
            if content not in (known := _LOADED.setdefault(path, [content])):
                known.append(content)  # one warning is enough
                hint = (
                    "the code of before runs: begin a new process, or restart the notebook's kernel"
                )
                warnings.warn(f"'{path}' has changed since it was loaded; {hint}", stacklevel=2)
            return module
    _LOADED[path] = [content]
    _importable(str(path.parent))
    name = re.sub(r"\W", "_", path.stem)
    importlib.invalidate_caches()
    plain = PathFinder.find_spec(name)
    # its own name, so that a file beside it that imports it gets this module, if another has not got it
    if name in sys.modules or plain is None or plain.origin != str(path):
        name += f"_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec: Any = importlib.util.spec_from_file_location(name, path)  # .py files have a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with blaming(f"importing '{path}' failed"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    return module


def _importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin the global random states at `seed`, Python's, numpy's and torch's; at the end put them back."""
    import numpy as np
    import torch

    from flwr_regs.client.train.batches import undisturbed

    with undisturbed():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # users' code may draw from it
        torch.manual_seed(seed)
        yield
