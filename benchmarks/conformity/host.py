"""Runs a driver on a task: ``python host.py task.npz driver.py:callable result.npz``, in any environment.

Needs numpy alone, because it runs where this package is not installed. A driver is a callable that takes
the task as a dict and returns one, as :func:`read_task` and :func:`write_result` say. Files are npz
archives without pickled objects.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def write_task(path: Path, task: dict[str, Any]) -> None:
    """Write a task, a dict as :func:`read_task` returns it."""
    arrays = {f"w/{name}": array for name, array in task["parameters"].items()}
    for k, client in enumerate(task["clients"]):
        arrays |= {f"x/{k}": client["x"], f"y/{k}": client["y"]}
    settings = {k: v for k, v in task.items() if k not in ("parameters", "clients")}
    np.savez(path, settings=np.array(json.dumps(settings)), **arrays)


def read_task(path: Path) -> dict[str, Any]:
    """Return a task: what a driver gets.

    ``method``: one of `behaviours.METHODS`; "SCAFFOLD" is option II, "SCAFFOLD-1" option I. ``settings``:
    the method's own, numbers by name. ``parameters``: arrays by name, float64. ``clients``: for each client
    a dict with ``x`` (n, d) float64 and ``y`` (n,) int64. ``cohorts``: for each round the indices of its
    clients. ``lr``, ``epochs``, ``batch_size``, ``momentum``: of a client's SGD, over its data in order;
    after each round, ``lr`` is multiplied by ``lr_decay``. ``mu``: FedProx's and FedNova's. ``weights``:
    "examples" or "uniform", those of the mean over a cohort. The server's learning rate is 1, if it is not
    one of the settings.
    """
    with np.load(path, allow_pickle=False) as file:
        task: dict[str, Any] = json.loads(str(file["settings"]))
        task["parameters"] = {n[2:]: file[n] for n in file.files if n.startswith("w/")}
        count = sum(n.startswith("x/") for n in file.files)
        task["clients"] = [{"x": file[f"x/{k}"], "y": file[f"y/{k}"]} for k in range(count)]
    return task


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write what a driver returned.

    ``models``: for each round the global parameters, arrays by name. Of Ditto, APFL and FedAMP it is those
    of all clients, named ``k.name`` (the first model's for who has not trained), and APFL's ``k.alpha``.
    ``points``, which it may leave out: the global model's parameters before each of a client's steps, a
    list by (round, client), both from 0.
    """
    arrays: dict[str, Any] = {}
    for t, model in enumerate(result["models"]):
        arrays |= {f"model/{t}/{name}": np.asarray(a, np.float64) for name, a in model.items()}
    for (t, k), points in (result.get("points") or {}).items():
        for s, point in enumerate(points):
            for name, a in point.items():
                arrays[f"point/{t}/{k}/{s}/{name}"] = np.asarray(a, np.float64)
    np.savez(path, **arrays)


def read_result(path: Path) -> dict[str, Any]:
    """Return what :func:`write_result` wrote."""
    models: dict[int, dict[str, Any]] = {}
    points: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            kind, *where = key.split("/")
            if kind == "model":
                models.setdefault(int(where[0]), {})[where[1]] = file[key]
            else:
                t, k, s = (int(part) for part in where[:3])
                points.setdefault((t, k), {}).setdefault(s, {})[where[3]] = file[key]
    return {
        "models": [models[t] for t in sorted(models)],
        "points": {at: [p[s] for s in sorted(p)] for at, p in points.items()},
    }


def load(name: str) -> Any:
    """Return the callable of ``path.py:callable``; the file's folder is searched for its imports."""
    path, _, attribute = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"a driver is path.py:callable, got {name!r}")
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


if __name__ == "__main__":
    source, driver, target = sys.argv[1:]
    write_result(Path(target), load(driver)(read_task(Path(source))))
