"""What comes of a decoder, and of bytes that a method's decoder cannot read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError, digest
from flwr_regs.wire.delta import OutOfSync, decoded, model_from

LIKE = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def test_a_model_of_other_arrays_than_the_step_is_out_of_sync() -> None:
    """A step of the arrays in common would be taken for the whole."""
    entries = {keys.DOWNLINK_KEY: "delta", keys.DIGEST_KEY: digest(LIKE)}
    model, _ = model_from(entries, LIKE, LIKE)
    assert model.keys() == LIKE.keys()
    for base in (None, {"w": LIKE["w"]}, {**LIKE, "more": LIKE["b"]}):
        with pytest.raises(OutOfSync):
            model_from(entries, LIKE, base)


DECODERS: list[Callable[..., Any]] = [
    lambda data, like: 1 / 0,
    lambda data, like: None,
    lambda data, like: {"w": like["w"]},
    lambda data, like: {**like, "b": like["b"][:2]},
    lambda data, like: {**like, "b": like["b"].astype(np.complex128)},
]


def test_whatever_a_decoder_does_is_named() -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError, match="the update"):
            decoded(decode, b"code", LIKE, "the update")
