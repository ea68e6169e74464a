"""A client's end of the ``"delta"`` downlink: rebuilds the model from its last one and the changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, add, check_arrays, digest, tie
from flwr_regs.wire.precision import widen
from flwr_regs.wire.text import one_line

Config = Mapping[str, Any]
Decode = Callable[..., Mapping[str, np.ndarray]]
WHOLE = "model"
"""``regs.downlink`` of a message that holds the whole model; the others build on an earlier one."""


class OutOfSync(Exception):
    """The client lacks the model that the message builds on; the server then sends it."""


def model_from(
    config: Config, arrays: NDArrays, base: NDArrays | None
) -> tuple[NDArrays, NDArrays | None]:
    """Return (the server's model in its own precision, the last step) from what a message holds.

    `base` is the model that this client kept, or None. Of a ``"coded"`` message, the model still lacks the
    coded steps, which only the method can decode: :func:`decoded_model`. The step is None if the message
    has none. Raises OutOfSync.
    """
    if keys.HALF_KEY in config:
        arrays = widen(arrays, str(config[keys.HALF_KEY]))
    if (kind := config.get(keys.DOWNLINK_KEY, WHOLE)) == WHOLE:
        return arrays, None
    if base is None:
        raise OutOfSync
    if kind == "coded":
        return {**base, **arrays}, None
    if kind == "kept":
        return _confirmed(base, config), None
    if base.keys() != arrays.keys():
        raise OutOfSync
    model = {name: add(base[name], arrays[name]) for name in arrays}
    return _confirmed(model, config), arrays


def decoded_model(
    config: Config, model: NDArrays, like: NDArrays, tied: Mapping[str, str], decode: Decode
) -> tuple[NDArrays, NDArrays]:
    """Return (the server's model, its last step): `model` and the coded steps of a ``"coded"`` message.

    The steps hold arrays `like` the trained ones; `tied` weights, other name -> trained name, follow.
    Raises OutOfSync, and ProtocolError for a step that does not decode.
    """
    step: NDArrays = {}
    for coded in config[keys.STEPS_KEY]:
        step = decoded(decode, coded, like, "the coded global step")
        model = model | {n: add(model[n], s) for n, s in step.items()}
    return _confirmed(tie(model, tied), config), step


def decoded(decode: Decode, data: bytes, like: NDArrays, what: str) -> NDArrays:
    """Return a decoded update with the names, shapes and dtypes of `like`; else raise ProtocolError."""
    try:
        update = {n: np.asarray(a) for n, a in decode(data, like).items()}
    except Exception as error:  # whatever the bytes make a method's decoder raise
        why = f"{what} cannot be decoded: {one_line(str(error)) or type(error).__name__}"
        raise ProtocolError(why) from error
    check_arrays(update, like, what)
    return update


def _confirmed(model: NDArrays, config: Config) -> NDArrays:
    """Return the model if it equals the server's to the bit; else raise OutOfSync."""
    if digest(model) != str(config[keys.DIGEST_KEY]):
        raise OutOfSync
    return model
