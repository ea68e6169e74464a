"""A user's own code, named as ``module:name`` and found from the folder where the command runs."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from flwr_regs.wire.config import nearest


def load(reference: str, folder: str = "") -> Any:
    """Return what ``module:name`` names; the name may have dots.

    Parameters
    ----------
    reference : str
        The module's name, dots for packages, a colon, and the name in the module.
    folder : str
        Where Python looks first, as it does in ``python -m``. It stays on ``sys.path``, for imports that
        the module does later. Empty: only ``sys.path``.

    Raises
    ------
    ValueError
        There is no such folder, module or name (the message has the nearest name), or the module raises
        when it is imported (the message has the file and the line).
    """
    module_name, _, name = reference.partition(":")
    if folder and not Path(folder).is_dir():
        raise ValueError(f"there is no folder '{folder}' on this machine")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if absent is None or not f"{module_name}.".startswith(f"{absent}."):
            raise ValueError(_why(module_name, error)) from error
        looked = f"in {folder}" if folder else "on Python's path (the setting code-dir is empty)"
        raise ValueError(f"there is no module '{absent}' {looked}") from error
    for step in name.split("."):
        if not hasattr(found, step):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise ValueError(f"there is no '{step}' in {module_name}{nearest(step, known)}")
        found = getattr(found, step)
    return found


def _why(module_name: str, error: Exception) -> str:
    """Say what a module raised when it was imported, and where: the last line outside of Python's own."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    mine = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<")]
    where = f" ({mine[-1].filename}, line {mine[-1].lineno})" if mine else ""
    return f"importing {module_name} failed: {type(error).__name__}: {error}{where}"
