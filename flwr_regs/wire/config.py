"""The configs of training and evaluation: their keys, and checks of the values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Set
from inspect import signature
from typing import TYPE_CHECKING, Any

from flwr_regs.term import DECAY, NOT_NEGATIVE, POSITIVE, SHARE, Range
from flwr_regs.wire.keys import ROUND_KEY

FLOWER_KEYS = (ROUND_KEY, "clipping_norm")
"""Keys of Flower's own: its round number, and the norm for its clipping mods."""
OPTIMIZER_KEYS = ("optimizer", "momentum", "weight-decay")
"""Keys that say which optimiser a client makes; a client with an optimiser of its own refuses them."""
TRAIN_KEYS = ("lr", "local-epochs", "local-steps", *OPTIMIZER_KEYS, "clip-norm")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    # a class of torch.optim that trains dense parameters of any shape: the keys that it takes
    "SGD": ("momentum", "weight-decay"),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad"), ("weight-decay",)),
    **dict.fromkeys(("Adadelta", "Adafactor", "ASGD"), ("weight-decay",)),
    "RMSprop": ("momentum", "weight-decay"),
    **dict.fromkeys(("Rprop", "LBFGS"), ()),
}
PERSONALISE = ("plain", "proximal", "distil", "both")
PARTS = ("head", "body", "all")
WHOLE = Range("a positive integer", lambda v: v >= 1, int)
PERSONAL = {
    # numbers of personalisation: their range, and the kinds of it that read them
    "personal-lr": (POSITIVE, PERSONALISE),
    "personal-epochs": (WHOLE, PERSONALISE),
    "personal-mu": (NOT_NEGATIVE, ("proximal", "both")),
    "personal-lam": (SHARE, ("distil", "both")),
    "personal-temperature": (POSITIVE, ("distil", "both")),
}
EVALUATE_KEYS = ("personalise", "personal-part", *PERSONAL)
NUMBERS = {
    **dict.fromkeys(("lr", "clip-norm"), POSITIVE),
    **dict.fromkeys(("local-epochs", "local-steps"), WHOLE),
    "momentum": DECAY,
    "weight-decay": NOT_NEGATIVE,
    **{key: good for key, (good, _) in PERSONAL.items()},
}
CHOICES = {"optimizer": (*OPTIMIZERS,), "personalise": PERSONALISE, "personal-part": PARTS}


class Spelled:
    """Refuses a keyword argument that ``__init__`` does not take, and suggests the one that was meant."""

    if not TYPE_CHECKING:  # type checkers read __init__

        def __new__(cls, *_: Any, **given: Any) -> Any:
            """Make an instance; TypeError for an unknown argument."""
            taken = signature(cls.__init__).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
                check_arguments(cls.__name__, given, taken.keys())
            return super().__new__(cls)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean '…'?"`` with the most similar of `known`, or "" if none is similar.

    Case, hyphens and underscores do not count. Similar are also swapped letters (``rl`` for ``lr``),
    initials (``lr`` for ``learning-rate``), and a name that holds all words of `name` (``dirichlet-alpha``
    for ``alpha``).
    """

    def words(text: str) -> list[str]:
        return re.findall(r"[^\W_]+", text.lower())

    def initials(parts: list[str]) -> str:
        return "".join(part[0] for part in parts) if len(parts) > 1 else ""

    given, others = words(name), {k: words(k) for k in known if k}
    if not given:
        return ""
    plain = {"-".join(parts): k for k, parts in others.items()}
    near = [plain[p] for p in difflib.get_close_matches("-".join(given), plain, n=1)]
    swapped = [k for k in others if sorted(k.lower()) == sorted(name.lower())]
    short = [k for k, parts in others.items() if name.lower() == initials(parts)]
    short += [k for k in others if k.lower() == initials(given)]
    longer = [k for k, parts in others.items() if set(given) <= set(parts)]
    similar = [*swapped, *short, *near, *longer]
    return f"; did you mean '{similar[0]}'?" if similar else ""


HERE = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "on_fit_config_fn": "start(train_config=...)",
    "on_evaluate_config_fn": "start(evaluate_config=...)",
    "evaluate_fn": "start(evaluate_fn=...)",
    "initial_parameters": "start(initial_arrays=...)",
    "eta": "server_lr",
    "server_learning_rate": "server_lr",
    "server_momentum": "momentum",
    "proximal_mu": "mu",
    "eta_l": "start(train_config={'lr': ...})",
    "client_learning_rate": "start(train_config={'lr': ...})",
}
"""Names of parameters of Flower's strategies, older ones too -> those of this package's."""


def check_arguments(
    owner: str, given: Iterable[str], known: Set[str], own: Set[str] = frozenset()
) -> None:
    """Raise TypeError naming an argument that is none of the `known`.

    The name that was probably meant is one of these, or of the owner's `own` parameters.
    """
    for name in set(given) - known:
        hint = nearest(name, known | own)
        here = HERE.get(name, "")
        if here in known | own or here.startswith("start("):
            hint = f": here it is {here}"
        raise TypeError(f"{owner} takes no argument '{name}'{hint}")


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
        why = "for Flower's clipping mods on the clients, but nobody would add the noise"
        remedy = "use privacy=CentralDP(...) on the strategy, or leave it out"
        raise ValueError(f"{where} key 'clipping_norm' is {why}: {remedy}")
    if "lr" not in config and needs["lr"]:
        raise ValueError(f"{where} lacks the key 'lr', {needs['lr']}")
    given = [k for k in ("local-epochs", "local-steps") if k in config]
    if len(given) > 1 or (not given and needs["duration"]):
        but = "not both" if given else f"{needs['duration']}; neither is set"
        raise ValueError(f"{where} must set either 'local-epochs' or 'local-steps', {but}")
    _check_values(config, where, "lr", *given)
    check_optimizer(config, where)


def check_optimizer(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a wrong optimiser, momentum, weight decay or norm to clip to.

    Keys of other things are passed over.
    """
    _check_values(config, where, *OPTIMIZER_KEYS, "clip-norm")
    name = config.get("optimizer", "SGD")
    for key in ("momentum", "weight-decay"):
        if key in config and key not in OPTIMIZERS[name]:
            others = ", ".join(o for o, takes in OPTIMIZERS.items() if key in takes)
            remedy = f"leave it out, or set 'optimizer' to one of {others}"
            raise ValueError(f"{where} has '{key}', but torch's {name} takes none: {remedy}")


def _check_values(config: Mapping[str, Any], where: str, *keys: str) -> None:
    """Raise ValueError if a key is there, and its value is none of its `NUMBERS` or `CHOICES`."""
    for key in keys:
        value, choices = config.get(key), CHOICES.get(key, ())
        if key not in config or (value in choices if choices else NUMBERS[key].fits(value)):
            continue
        must = f"one of {', '.join(choices)}" if choices else NUMBERS[key].expected
        hint = nearest(str(value), choices)
        raise ValueError(f"{where} key '{key}' must be {must}, not {value!r}{hint}")


def check_evaluate_config(config: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise ValueError for an unknown key, or for missing or wrong keys of personalisation.

    `also` holds known keys in addition to the package's and Flower's own.
    """
    where = "evaluate_config"
    check_config_keys(config, [*EVALUATE_KEYS, *FLOWER_KEYS, *also], where)
    kind = config.get("personalise")
    if kind is None:
        if given := [k for k in EVALUATE_KEYS if k in config]:
            raise ValueError(f"{where} has {given}, but not 'personalise' (one of {PERSONALISE})")
        return
    _check_values({"personal-lr": None, **config}, where, *EVALUATE_KEYS)
    for key, (_, kinds) in PERSONAL.items():
        if key in config and kind not in kinds:
            raise ValueError(f"{where} key '{key}' has no meaning for personalise = '{kind}'")


def with_plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics in which arrays and tensors of up to one axis are Python's numbers and lists."""
    return {n: v.tolist() if getattr(v, "ndim", 2) < 2 else v for n, v in metrics.items()}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what the protocol sends as bytes; the user's own bytes stay."""
    return {k: v for k, v in config.items() if not isinstance(v, bytes) or k.startswith("user.")}
