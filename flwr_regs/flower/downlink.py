"""The two ways down: the whole model with the terms' broadcasts, or the last global step alone.

``"model"`` sends ``w_t`` and the broadcasts to everyone. ``"delta"`` sends ``w_t − w_{t−1}`` to a
client that took part in round t − 1 and kept ``w_{t−1}``; such a client rebuilds ``w_t`` to the bit
(checked by a digest) and recovers the broadcasts from the step. Any other client gets the full pair,
in the same round if it finds only then that it has lost its model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord

from flwr_regs.flower import wire
from flwr_regs.method import Slot


class Downlink:
    """What one round sends down; serialised once for the whole cohort.

    Parameters
    ----------
    mode : {"model", "delta"}
    server_round : int
    model : NDArrays
        ``w_t``, parameters and buffers.
    step : NDArrays or None
        ``w_t − w_{t−1}`` in the model's dtypes, as it was added; None in round 1.
    previous_lr : float or None
        The learning rate of the round that made `step`.
    broadcast : callable
        Returns the terms' broadcasts by term name; called only if some client needs them.
    """

    def __init__(
        self,
        mode: str,
        server_round: int,
        model: wire.NDArrays,
        step: wire.NDArrays | None,
        previous_lr: float | None,
        broadcast: Callable[[], Slot],
    ) -> None:
        self._mode = mode
        self._round = server_round
        self._model = model
        self._step = step
        self._previous_lr = previous_lr
        self._broadcast = broadcast

    def content(
        self, held_round: int | None, probe: bool = False
    ) -> tuple[dict[str, ArrayRecord], dict[str, Any]]:
        """Return (records, config entries) for a client that last kept the model of `held_round`.

        A `probe`, the first exchange of a round with two, leaves the broadcasts to the second; a
        client that got ``w_t`` itself in the first gets the broadcasts alone.
        """
        if held_round == self._round:
            return {wire.ARRAYS: ArrayRecord(), **self._broadcasts}, {
                wire.KEEP_KEY: self._mode == "delta",
                wire.DOWNLINK_KEY: "kept",
                wire.BASE_ROUND_KEY: self._round,
            }
        if self._mode == "delta" and self._step is not None and held_round == self._round - 1:
            return self._delta
        whole = {wire.ARRAYS: self._whole} | ({} if probe else self._broadcasts)
        return whole, {wire.KEEP_KEY: self._mode == "delta"}

    @cached_property
    def _whole(self) -> ArrayRecord:
        return wire.to_record(self._model)

    @cached_property
    def _broadcasts(self) -> dict[str, ArrayRecord]:
        slots = self._broadcast()
        return {f"{name}.broadcast": wire.to_record(slot) for name, slot in slots.items() if slot}

    @cached_property
    def _delta(self) -> tuple[dict[str, ArrayRecord], dict[str, Any]]:
        return {wire.ARRAYS: wire.to_record(self._step or {})}, {
            wire.KEEP_KEY: True,
            wire.DOWNLINK_KEY: "delta",
            wire.BASE_ROUND_KEY: self._round - 1,
            wire.PREVIOUS_LR_KEY: self._previous_lr,
            wire.DIGEST_KEY: wire.digest(self._model),
        }


def rebuild(
    base: wire.NDArrays | None, step: wire.NDArrays, expected_digest: str
) -> wire.NDArrays | None:
    """Return ``base + step`` if that is the server's model to the bit, else None (on a client)."""
    if base is None or base.keys() != step.keys():
        return None
    model = {name: wire.add(base[name], step[name]) for name in step}
    return model if wire.digest(model) == expected_digest else None
