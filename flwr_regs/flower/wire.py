"""What travels between a strategy and its clients, and the checks on arrival.

A train message holds the ArrayRecord ``"arrays"``, one ArrayRecord ``"<term>.broadcast"`` for each term
that has one, and the ConfigRecord ``"config"``. ``"arrays"`` is the global model; where the config says
``regs.downlink = "delta"`` it is the last global step, where it says ``"ternary"`` the changed buffers,
beside coded steps in ``regs.steps``, and where it says ``"kept"`` it is empty, the model having come with
the round's probe. Where it says ``regs.wire-dtype``, the float32 arrays that ``regs.halves`` masks, in
either direction, are in 16 bits (half.py). A reply holds ``"arrays"``, ``"<term>.upload"``, ``"metrics"``
(numbers) and ``"config"`` (``regs.method`` and other text); a coded update is in ``regs.update``, beside
only the buffers that changed in ``"arrays"``.

A ``NumPyClient`` sees the same values in its `config` and returns them in fit's metrics, arrays
packed as safetensors bytes. Nothing is pickled. This file imports no torch: it is loaded in every
ClientApp process, before the user's `client_fn` runs.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

NDArrays = dict[str, np.ndarray]

PROTOCOL = 3
"""Version of the layout above; a client refuses any other."""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
IDENTIFY = "query.flwr_regs"
LABELS = "query.flwr_regs_labels"
PREFETCH = "query.flwr_regs_prefetch"
PROBE = "query.flwr_regs_probe"

METHOD_KEY = "regs.method"
PROTOCOL_KEY = "regs.protocol"
START_KEY = "regs.start"
SEED_KEY = "regs.seed"
NAMES_KEY = "regs.names"
BUFFERS_KEY = "regs.not-trainable"
TIED_KEY = "regs.tied"
HALF_KEY = "regs.wire-dtype"
HALVES_KEY = "regs.halves"
SENT_KEY = "regs.sent"
PRIVATE_KEY = "regs.private.client"
FRESH_KEY = "regs.private-anew"
PENDING_KEY = "regs.pending.client"
USED_KEY = "regs.used-round"
BESIDE_KEY = "regs.beside"
UPDATE_KEY = "regs.update"
STEPS_KEY = "regs.steps"
DOWNLINK_KEY = "regs.downlink"
KEEP_KEY = "regs.keep-model"
BASE_ROUND_KEY = "regs.base-round"
DIGEST_KEY = "regs.digest"
PREVIOUS_LR_KEY = "regs.previous-lr"
PROBE_KEY = "regs.probe"
CLIENT_KEY = "regs.partition"
OUT_OF_SYNC_KEY = "regs.out-of-sync"
STEP_KEY = "regs.step"
ROUND_KEY = "server-round"
LABELS_KEY = "regs.label-counts"
FLOWER_KEYS = (ROUND_KEY, "clipping_norm")
"""Keys that Flower itself, or its privacy wrappers, put into a config."""
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


class ProtocolError(ValueError):
    """A message that the receiver cannot act on: wrong method, version, names, shapes or values."""


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Return the arrays (numpy, or torch on the CPU) as safetensors bytes."""
    # order="C": safetensors stores a strided array's buffer as it lies
    return safetensors.numpy.save({k: np.asarray(a, order="C") for k, a in arrays.items()})


def unpack(data: bytes) -> NDArrays:
    """Return what :func:`pack` packed, as writable arrays."""
    return {k: a.copy() for k, a in safetensors.numpy.load(data).items()}


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return an ArrayRecord under the same names; numpy scalars become 0-d arrays."""
    return ArrayRecord({k: Array(np.asarray(a)) for k, a in arrays.items()})


def from_record(record: ArrayRecord) -> NDArrays:
    """Return the arrays of a record by name."""
    return {k: a.numpy() for k, a in record.items()}


def sorted_answer(
    answer: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Part what a client answers into (its uploads as records, numbers, all that a config carries)."""
    records: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for key, value in answer.items():
        if isinstance(value, bytes) and key.endswith(".upload"):
            records[key] = to_record(unpack(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[key] = value
        else:
            texts[key] = value
    return records, numbers, texts


def add(base: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return ``base + step`` in base's dtype; both ends use it, so both get the same bits."""
    return np.asarray(base ^ step if base.dtype == np.bool_ else base + step).astype(base.dtype)


def digest(model: Mapping[str, np.ndarray]) -> str:
    """Return a fingerprint of names, shapes, dtypes and values."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(model):
        a = np.asarray(model[name], order="C")
        h.update(f"{name}{a.dtype}{a.shape}".encode())
        h.update(a.tobytes())
    return h.hexdigest()


def in_code_order(arrays: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named arrays in the order in which both ends code them as one vector."""
    return {name: arrays[name] for name in sorted(names)}


def statistics(names: Iterable[str]) -> list[str]:
    """Return the names of BatchNorm's statistics among `names`."""
    return sorted(n for n in names if n.rpartition(".")[2] in ("running_mean", "running_var"))


def mask(chosen: Iterable[str], names: Iterable[str]) -> bytes:
    """Return which of `names` are chosen, one bit a name in sorted order."""
    chosen = set(chosen)
    return np.packbits([name in chosen for name in sorted(names)]).tobytes()


def unmask(data: bytes, names: Iterable[str]) -> frozenset[str]:
    """Return the names that :func:`mask` chose; raise ProtocolError if there are more or fewer bits."""
    names = sorted(names)
    if not isinstance(data, bytes) or len(data) != (len(names) + 7) // 8:
        raise ProtocolError(f"expected a mask of {len(names)} bits, not {data!r:.40}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if bits[len(names) :].any():
        raise ProtocolError(f"a mask of {len(names)} bits has more of them set")
    return frozenset(name for name, bit in zip(names, bits, strict=False) if bit)


def tie(arrays: NDArrays, tied: Mapping[str, str]) -> NDArrays:
    """Return `arrays` with what is there of tied weights under their other names too.

    `tied` maps such a name to the one under which the weight is trained and coded.
    """
    return {**arrays, **{n: arrays[first] for n, first in tied.items() if first in arrays}}


def check_tied(
    value: Any, model: Mapping[str, np.ndarray], buffers: Collection[str]
) -> dict[str, str]:
    """Return what a message says of tied weights (JSON) as other name -> name that is trained.

    Raises ProtocolError unless the former are in `buffers`, the latter not, and their shapes and dtypes
    equal.
    """
    try:
        tied: dict[str, str] = dict(json.loads(value))
        good = all(
            other in buffers
            and first in model
            and first not in buffers
            and (model[other].shape, model[other].dtype) == (model[first].shape, model[first].dtype)
            for other, first in tied.items()
        )
    except (TypeError, ValueError, KeyError):
        good = False
    if not good:
        raise ProtocolError(
            f"'{TIED_KEY}' must map names of the model's arrays to others of the same shape that are "
            f"trained, but is {value!r:.200}"
        )
    return tied


def content_bytes(content: RecordDict) -> int:
    """Return the payload of a message in bytes: arrays as serialised, names, and config scalars.

    Framing is left out (Flower's own adds some 10 bytes an entry).
    """
    total = 0
    for record in content.values():
        for key, value in record.items():
            total += len(key)
            if isinstance(value, Array):
                total += len(value.data)
            else:
                for item in value if isinstance(value, list) else [value]:
                    total += len(item) if isinstance(item, str | bytes) else 8
    return total


def check_names(names: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raise ProtocolError naming the arrays that are missing from `what` or unknown to it."""
    names, expected = set(names), set(expected)
    if names != expected:
        raise ProtocolError(
            f"{what}: arrays do not match the model by name: missing "
            f"{sorted(expected - names)}, unexpected {sorted(names - expected)}"
        )


def check_arrays(arrays: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raise ProtocolError naming the first array whose name, shape or dtype is not as expected.

    Arrays are numpy or torch; both sides of a comparison must be of the same kind.
    """
    check_names(arrays, expected, what)
    for name, want in expected.items():
        got = arrays[name]
        if tuple(got.shape) != tuple(want.shape):
            raise ProtocolError(
                f"{what}: array '{name}' has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            )
        if got.dtype != want.dtype:
            raise ProtocolError(
                f"{what}: array '{name}' has dtype {got.dtype}, expected {want.dtype}"
            )


def check_finite(
    arrays: Mapping[str, np.ndarray], what: str, base: Mapping[str, np.ndarray] | None = None
) -> None:
    """Raise ProtocolError naming the first array that holds NaN, or infinity where `base` does not.

    An infinite constant in `base`, such as an attention mask kept as a buffer, may stay what it is.
    """
    for name, a in arrays.items():
        good = np.isfinite(a)
        if base is not None and name in base:
            good |= a == base[name]
        if not np.all(good):
            raise ProtocolError(f"{what}: array '{name}' holds NaN or infinity")


def check_config_keys(config: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError naming each key of `config` that is not `known`, with the nearest known one."""
    known = sorted(known)
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"unknown {where} key '{key}' (known: {', '.join(known)}){hint}")


def check_train_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless lr is positive and exactly one of the two durations is set."""
    if "lr" not in config:
        raise ValueError(f"{where} lacks the key 'lr', the clients' learning rate")
    lr = config["lr"]
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < float("inf"):
        raise ValueError(f"{where} key 'lr' must be a positive number, not {lr!r}")
    given = [k for k in ("local-epochs", "local-steps") if k in config]
    if len(given) != 1:
        raise ValueError(
            f"{where} needs exactly one of the keys 'local-epochs' and 'local-steps', "
            f"not {given or 'neither'}"
        )
    value = config[given[0]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} key '{given[0]}' must be a positive integer, not {value!r}")


def check_evaluate_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if the keys for personalisation are there in part or have wrong values."""
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


def identity_reply(node_config: Mapping[str, Any]) -> RecordDict:
    """Return the answer to the IDENTIFY query: who a node is, for the seeded cohorts."""
    answer: dict[str, int | float | str | bytes | bool] = {PROTOCOL_KEY: PROTOCOL}
    for key in ("partition-id", "num-partitions"):
        if key in node_config:
            answer[key] = int(node_config[key])
    return RecordDict({CONFIG: ConfigRecord({**answer})})
