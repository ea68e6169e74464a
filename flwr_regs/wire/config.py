"""The configs of training and evaluation: their keys, and checks of the values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr_regs.wire.keys import ROUND_KEY

FLOWER_KEYS = (ROUND_KEY, "clipping_norm")
"""Keys of Flower's own: its round number, and the norm for its clipping mods."""
TRAIN_KEYS = ("lr", "local-epochs", "local-steps")
EVALUATE_KEYS = (
    "personalise",
    "personal-lr",
    "personal-epochs",
    "personal-mu",
    "personal-lam",
    "personal-temperature",
)
PERSONALISE = ("plain", "proximal", "distil", "both")


NEEDS = {"lr": "the clients' learning rate", "duration": "for how long the clients train"}
"""What a client needs of a train config, with what it is."""


def check_config_keys(config: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError for a key of `config` that is not `known`, and suggest the nearest known one.

    Keys that begin with ``"user."`` are the user's own.
    """
    known = sorted(known)
    for key in config:
        if key not in known and not key.startswith("user."):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            own = f"; for a key of your own, write 'user.{key}'" if not hint else ""
            raise ValueError(f"unknown {where} key '{key}' (known: {', '.join(known)}){hint}{own}")


def check_train_config(
    config: Mapping[str, Any],
    where: str = "train_config",
    also: Iterable[str] = (),
    noise: bool = True,
    needs: Mapping[str, str] = NEEDS,
) -> None:
    """Raise ValueError for an unknown key, or unless lr is positive and exactly one duration is set.

    `also` holds known keys in addition to the package's and Flower's own. Without `noise` on the server,
    a norm to clip to is refused. `needs` says why "lr" and "duration" must be there; with "" instead, each
    may be missing.
    """
    check_config_keys(config, [*TRAIN_KEYS, *FLOWER_KEYS, *also], where)
    if "clipping_norm" in config and not noise:
        raise ValueError(
            f"{where} key 'clipping_norm' is for Flower's clipping mods on the clients, but nobody would "
            "add the noise: use privacy=CentralDP(...) on the strategy, or leave it out"
        )
    if "lr" not in config and needs["lr"]:
        raise ValueError(f"{where} lacks the key 'lr', {needs['lr']}")
    lr = config.get("lr", 1.0)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < float("inf"):
        raise ValueError(f"{where} key 'lr' must be a positive number, not {lr!r}")
    given = [k for k in ("local-epochs", "local-steps") if k in config]
    if len(given) > 1 or (not given and needs["duration"]):
        raise ValueError(
            f"{where} needs exactly one of the keys 'local-epochs' and 'local-steps', "
            f"not {given or 'neither'}" + (f"; {needs['duration']}" if not given else "")
        )
    value = config[given[0]] if given else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} key '{given[0]}' must be a positive integer, not {value!r}")


def check_evaluate_config(
    config: Mapping[str, Any], where: str = "evaluate_config", also: Iterable[str] = ()
) -> None:
    """Raise ValueError for an unknown key, or for missing or wrong keys of personalisation.

    `also` holds known keys in addition to the package's and Flower's own.
    """
    check_config_keys(config, [*EVALUATE_KEYS, *FLOWER_KEYS, *also], where)
    kind = config.get("personalise")
    if kind is None:
        if given := [k for k in EVALUATE_KEYS if k in config]:
            raise ValueError(f"{where} has {given}, but not 'personalise' (one of {PERSONALISE})")
        return
    if kind not in PERSONALISE:
        raise ValueError(f"{where} key 'personalise' must be one of {PERSONALISE}, not {kind!r}")
    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "personal-lr": ("a positive number", lambda v: 0 < v < float("inf")),
        "personal-epochs": ("a positive integer", lambda v: isinstance(v, int) and v >= 1),
        "personal-mu": ("a number of at least 0", lambda v: 0 <= v < float("inf")),
        "personal-lam": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
        "personal-temperature": ("a positive number", lambda v: 0 < v < float("inf")),
    }
    used: dict[str, tuple[str, ...]] = {
        "plain": (),
        "proximal": ("mu",),
        "distil": ("lam", "temperature"),
    }
    used["both"] = (*used["proximal"], *used["distil"])
    mine = {"personal-lr", "personal-epochs", *(f"personal-{k}" for k in used[kind])}
    for key, (expected, good) in rules.items():
        value = config.get(key)
        if value is None and key != "personal-lr":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not good(value):
            raise ValueError(f"{where} key '{key}' must be {expected}, not {value!r}")
        if key not in mine:
            raise ValueError(f"{where} key '{key}' has no meaning for personalise = '{kind}'")
