"""A client's end of the ``"delta"`` downlink: rebuilds the model from its last one and the changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, add, digest, in_code_order, tie, unmask
from flwr_regs.wire.codec import decode

KINDS = ("delta", "ternary", "kept")
"""Values of ``regs.downlink``: what a message holds instead of the model."""


def model_from(
    config: Mapping[str, Any], arrays: NDArrays, base: NDArrays | None
) -> tuple[NDArrays | None, NDArrays | None]:
    """Return (the server's model, the last step) from a message of one of the `KINDS`.

    `base` is the model that this client kept, or None. The returned model is None if it cannot be rebuilt;
    the step is None if the message has none.
    """
    kind = config[keys.DOWNLINK_KEY]
    if kind == "kept":
        return base, None
    if kind == "delta":
        return rebuild(base, arrays, str(config[keys.DIGEST_KEY])), arrays
    return rebuild_coded(
        base,
        config[keys.STEPS_KEY],
        arrays,
        config[keys.BUFFERS_KEY],
        str(config[keys.DIGEST_KEY]),
        str(config.get(keys.TIED_KEY, "{}")),
    )


def rebuild(base: NDArrays | None, step: NDArrays, expected_digest: str) -> NDArrays | None:
    """Return ``base + step`` if it equals the server's model to the bit, else None."""
    if base is None or base.keys() != step.keys():
        return None
    model = {name: add(base[name], step[name]) for name in step}
    return model if digest(model) == expected_digest else None


def rebuild_coded(
    base: NDArrays | None,
    steps: list[bytes],
    moved: NDArrays,
    buffers: bytes,
    expected_digest: str,
    tied: str = "{}",
) -> tuple[NDArrays | None, NDArrays]:
    """Return (the server's model, or None as in :func:`rebuild`; its last step), from coded steps.

    `buffers` is the mask of the arrays that are not trained, `moved` are those of them that changed.
    `tied` is JSON: other name of a tied weight -> the name under which it is coded.
    """
    if base is None:
        return None, {}
    model = {**base, **moved}
    trained = in_code_order(model, set(model) - unmask(buffers, model))
    step: NDArrays = {}
    for coded in steps:
        step = decode(coded, trained)
        model |= {n: add(model[n], s) for n, s in step.items()}
    model = tie(model, json.loads(tied))
    return (model if digest(model) == expected_digest else None), step
