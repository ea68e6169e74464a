"""The ways down: the whole model with the terms' broadcasts, or what changed since a client last had it.

``"model"`` sends ``w_t`` and the broadcasts to everyone. ``"delta"`` sends ``w_t − w_{t−1}`` to a
client that took part in round t − 1 and kept ``w_{t−1}``; such a client rebuilds ``w_t`` to the bit
(checked by a digest) and recovers the broadcasts from the step, as far as terms can; others are sent.
Where steps are ternary, it sends coded steps, and a client that missed rounds gets the missed ones too.
Any other client gets the full pair, in the same round if it finds only then that it has lost its model;
so does one for which that is smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, add, digest, in_code_order, mask, tie, unmask
from flwr_regs.wire.codec import decode
from flwr_regs.wire.precision import to_half
from flwr_regs.wire.records import content_bytes, to_record

if TYPE_CHECKING:
    from flwr_regs.server.model import GlobalState

Content = tuple[dict[str, ArrayRecord], dict[str, Any]]


class Downlink:
    """What one round sends down; serialised once for the whole cohort.

    Parameters
    ----------
    mode : {"model", "delta"}
    server_round : int
    state : GlobalState
        Holds ``w_t`` and the last steps.
    coded : bool
        Whether steps are ternary.
    broadcast : callable
        Returns the terms' broadcasts by term name; called only if some client needs them.
    recovered : set of str
        The terms whose broadcast follows from the last step.
    half : {"bfloat16", "float16"}, optional
        What whole models are rounded to.
    """

    def __init__(
        self,
        mode: str,
        server_round: int,
        state: GlobalState,
        coded: bool,
        broadcast: Callable[[], Slot],
        recovered: set[str],
        half: str | None = None,
    ) -> None:
        self._mode = mode
        self._round = server_round
        self._state = state
        self._coded = coded
        self._broadcast = broadcast
        self._recovered = recovered
        self._half = half
        self._since: dict[tuple[int, bool], Content] = {}

    def content(self, held_round: int | None, probe: bool = False) -> Content:
        """Return (records, config entries) for a client that last kept the model of `held_round`.

        A `probe`, the first exchange of a round with two, leaves the broadcasts to the second; a
        client that got ``w_t`` itself in the first gets the broadcasts alone.
        """
        if held_round == self._round:
            return {keys.ARRAYS: ArrayRecord(), **self._broadcasts}, {
                keys.KEEP_KEY: self._mode == "delta",
                keys.DOWNLINK_KEY: "kept",
                keys.BASE_ROUND_KEY: self._round,
            }
        whole: Content = (
            {keys.ARRAYS: self._whole[0]} | ({} if probe else self._broadcasts),
            {keys.KEEP_KEY: self._mode == "delta", **self._whole[1]},
        )
        if self._mode == "model" or held_round is None or self._state.step is None:
            return whole
        if self._coded:
            steps = self._state.coded_steps
            if any(r not in steps for r in range(held_round, self._round)):
                return whole
            key = (held_round, probe)
            if key not in self._since:
                update = self._coded_since(held_round, probe)
                self._since[key] = update if _bytes(update) < _bytes(whole) else whole
            return self._since[key]
        if held_round != self._round - 1:
            return whole
        step, config = self._delta
        return {keys.ARRAYS: step} | ({} if probe else self._explicit), config

    @cached_property
    def _whole(self) -> tuple[ArrayRecord, dict[str, Any]]:
        arrays, told = to_half(self._state.model, self._half)
        return to_record(arrays), told

    @cached_property
    def _broadcasts(self) -> dict[str, ArrayRecord]:
        slots = self._broadcast()
        return {f"{name}.broadcast": to_record(slot) for name, slot in slots.items() if slot}

    @cached_property
    def _explicit(self) -> dict[str, ArrayRecord]:
        """The broadcasts that do not follow from the last step."""
        known = {f"{name}.broadcast" for name in self._recovered}
        return {key: record for key, record in self._broadcasts.items() if key not in known}

    def _base(self, held_round: int, kind: str) -> dict[str, Any]:
        return {
            keys.KEEP_KEY: True,
            keys.DOWNLINK_KEY: kind,
            keys.BASE_ROUND_KEY: held_round,
            keys.PREVIOUS_LR_KEY: self._state.previous_lr,
            keys.DIGEST_KEY: self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return digest(self._state.model)

    @cached_property
    def _delta(self) -> tuple[ArrayRecord, dict[str, Any]]:
        step = to_record(self._state.step or {})
        return step, self._base(self._round - 1, "delta")

    def _coded_since(self, held_round: int, probe: bool) -> Content:
        state = self._state
        buffers = state.buffers or frozenset()
        tied = state.tied or {}
        moved = {
            n: state.model[n] for n in buffers if state.changed[n] >= held_round and n not in tied
        }
        return {keys.ARRAYS: to_record(moved)} | ({} if probe else self._explicit), {
            **self._base(held_round, "ternary"),
            keys.STEPS_KEY: [state.coded_steps[r] for r in range(held_round, self._round)],
            keys.BUFFERS_KEY: mask(buffers, state.model),
            **({keys.TIED_KEY: json.dumps(dict(tied))} if tied else {}),
        }


def _bytes(content: Content) -> int:
    records, config = content
    return content_bytes(RecordDict({**records, keys.CONFIG: ConfigRecord(config)}))


def rebuild(base: NDArrays | None, step: NDArrays, expected_digest: str) -> NDArrays | None:
    """Return ``base + step`` if that is the server's model to the bit, else None (on a client)."""
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
