"""A client's end of the ``"delta"`` downlink: the model rebuilt from the last one and what has changed."""

from __future__ import annotations

import json

from flwr_regs.wire.arrays import NDArrays, add, digest, in_code_order, tie, unmask
from flwr_regs.wire.codec import decode


def rebuild(base: NDArrays | None, step: NDArrays, expected_digest: str) -> NDArrays | None:
    """Return ``base + step`` if that is the server's model to the bit, else None."""
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
    """Return (the server's model, or None as :func:`rebuild`; its last step), from coded steps.

    `moved` are the arrays that are not trained and have changed, `buffers` masks all of these; `tied`
    is JSON, other name of a weight -> name under which it is coded.
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
