"""What comes of a decoder, and of bytes that a method's decoder cannot read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.delta import decoded

LIKE = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


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
