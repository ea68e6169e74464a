"""The configs of training and evaluation: their keys, and checks of the values."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr_regs.wire.keys import ROUND_KEY

FLOWER_KEYS = (ROUND_KEY, "clipping_norm")
"""Keys of Flower's own: its round number, and the norm for its clipping mods."""
OPTIMIZER_KEYS = ("optimizer", "momentum", "weight-decay")
"""Keys that say which optimiser a client makes; a client with an optimiser of its own refuses them."""
TRAIN_KEYS = ("lr", "local-epochs", "local-steps", *OPTIMIZER_KEYS, "clip-norm")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    # a class of torch.optim that trains dense parameters of any shape: the keys that it takes
    "SGD": ("momentum", "weight-decay"),
    "Adam": ("weight-decay",),
    "AdamW": ("weight-decay",),
    "NAdam": ("weight-decay",),
    "RAdam": ("weight-decay",),
    "Adamax": ("weight-decay",),
    "Adagrad": ("weight-decay",),
    "Adadelta": ("weight-decay",),
    "Adafactor": ("weight-decay",),
    "ASGD": ("weight-decay",),
    "RMSprop": ("momentum", "weight-decay"),
    "Rprop": (),
    "LBFGS": (),
}
EVALUATE_KEYS = (
    "personalise",
    "personal-part",
    "personal-lr",
    "personal-epochs",
    "personal-mu",
    "personal-lam",
    "personal-temperature",
)
PERSONALISE = ("plain", "proximal", "distil", "both")
PARTS = ("head", "body", "all")
PERSONAL: dict[str, tuple[str, Callable[[Any], bool], tuple[str, ...]]] = {
    # numbers of personalisation: what they must be, and the kinds of it that read them
    "personal-lr": ("a positive number", lambda v: 0 < v < math.inf, PERSONALISE),
    "personal-epochs": ("a positive integer", lambda v: isinstance(v, int) and v >= 1, PERSONALISE),
    "personal-mu": (
        "a number of at least 0",
        lambda v: 0 <= v < math.inf,
        ("proximal", "both"),
    ),
    "personal-lam": ("a number from 0 to 1", lambda v: 0 <= v <= 1, ("distil", "both")),
    "personal-temperature": (
        "a positive number",
        lambda v: 0 < v < math.inf,
        ("distil", "both"),
    ),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean '…'?"`` with the most similar of `known`, or "" if none is similar.

    Case, hyphens and underscores do not count. Similar are also initials (``lr`` for ``learning-rate``),
    and a name that holds all words of `name` (``dirichlet-alpha`` for ``alpha``).
    """

    def words(text: str) -> list[str]:
        return re.findall(r"[^\W_]+", text.lower())

    def initials(parts: list[str]) -> str:
        return "".join(part[0] for part in parts) if len(parts) > 1 else ""

    given, others = words(name), {k: words(k) for k in known}
    if not given:
        return ""
    plain = {"-".join(parts): k for k, parts in others.items()}
    near = [plain[p] for p in difflib.get_close_matches("-".join(given), plain, n=1)]
    short = [k for k, parts in others.items() if name.lower() == initials(parts)]
    short += [k for k in others if k.lower() == initials(given)]
    longer = [k for k, parts in others.items() if set(given) <= set(parts)]
    similar = [*short, *near, *longer]
    return f"; did you mean '{similar[0]}'?" if similar else ""


NEEDS = {"lr": "the clients' learning rate", "duration": "for how long the clients train"}
"""What a client needs of a train config, with what it is."""


def check_config_keys(config: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError for a key of `config` that is not `known`, and suggest the nearest known one.

    Keys that begin with ``"user."`` are the user's own.
    """
    known = sorted(known)
    for key in config:
        if key not in known and not key.startswith("user."):
            hint = nearest(key, known) or f"; for a key of your own, write 'user.{key}'"
            raise ValueError(f"unknown {where} key '{key}' (known: {', '.join(known)}){hint}")


def check_train_config(
    config: Mapping[str, Any],
    where: str = "train_config",
    also: Iterable[str] = (),
    noise: bool = True,
    needs: Mapping[str, str] = NEEDS,
) -> None:
    """Raise ValueError for an unknown key, or unless lr is positive and exactly one duration is set.

    The optimiser's keys are checked by :func:`check_optimizer`.

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
    _check_number(config, where, "lr", "a positive number", lambda v: 0 < v < math.inf)
    given = [k for k in ("local-epochs", "local-steps") if k in config]
    if len(given) > 1 or (not given and needs["duration"]):
        raise ValueError(
            f"{where} needs exactly one of the keys 'local-epochs' and 'local-steps', "
            f"not {given or 'neither'}" + (f"; {needs['duration']}" if not given else "")
        )
    whole = "a positive integer"
    for key in given:
        _check_number(config, where, key, whole, lambda v: isinstance(v, int) and v >= 1)
    check_optimizer(config, where)


def check_optimizer(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a wrong optimiser, momentum, weight decay or norm to clip to.

    Keys of other things are passed over.
    """
    name = config.get("optimizer", "SGD")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ValueError(
            f"{where} key 'optimizer' must be one of {', '.join(OPTIMIZERS)} (classes of torch.optim), "
            f"not {name!r}{nearest(str(name), OPTIMIZERS)}"
        )
    _check_number(config, where, "momentum", "a number from 0 to below 1", lambda v: 0 <= v < 1)
    _check_number(
        config, where, "weight-decay", "a number of at least 0", lambda v: 0 <= v < math.inf
    )
    _check_number(config, where, "clip-norm", "a positive number", lambda v: 0 < v < math.inf)
    for key in ("momentum", "weight-decay"):
        if key in config and key not in OPTIMIZERS[name]:
            others = ", ".join(o for o, takes in OPTIMIZERS.items() if key in takes)
            raise ValueError(
                f"{where} has the key '{key}', but torch's {name} takes none: leave it out, or set "
                f"'optimizer' to one of {others}"
            )


def _check_number(
    config: Mapping[str, Any], where: str, key: str, expected: str, good: Callable[[Any], bool]
) -> None:
    """Raise ValueError if the key is there and its value is no number, or not a `good` one."""
    if key not in config:
        return
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not good(value):
        raise ValueError(f"{where} key '{key}' must be {expected}, not {value!r}")


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
    if (part := config.get("personal-part", "head")) not in PARTS:
        raise ValueError(f"{where} key 'personal-part' must be one of {PARTS}, not {part!r}")
    for key, (expected, good, kinds) in PERSONAL.items():
        _check_number({"personal-lr": None, **config}, where, key, expected, good)
        if key in config and kind not in kinds:
            raise ValueError(f"{where} key '{key}' has no meaning for personalise = '{kind}'")
