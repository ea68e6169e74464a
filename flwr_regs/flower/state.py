"""The server's half of a method: the global model, the terms' server slots, and how both move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_regs.aggregation import Reply, mean_delta, scaled
from flwr_regs.chain import Chain
from flwr_regs.codec import encode
from flwr_regs.flower import wire
from flwr_regs.method import ServerContext, Slot

if TYPE_CHECKING:  # a client's process loads this file, and has no use for flwr.serverapp
    from flwr_regs.flower.privacy import Mean

MOST_STEPS = 50
"""Coded steps to keep: each one missed costs a client a pass over the whole model."""


class GlobalState:
    """The global model and what the terms keep beside it.

    Parameters
    ----------
    term : Chain
        The method.
    model : NDArrays
        ``w_1``, parameters and buffers.

    Attributes
    ----------
    model : NDArrays
        ``w_t``.
    step : NDArrays or None
        ``w_t − w_{t−1}`` in the model's dtypes, exactly as it was added; None before it moved.
    previous_lr : float or None
        The learning rate of the round that made `step`.
    server : Slot
        The terms' server slots.
    buffers : frozenset of str, or None
        Arrays that the clients do not train: buffers and frozen parameters; None until they said so.
    coded_steps : dict of int to bytes
        If the method's steps are ternary: round -> the step made at its end, as it travels. As many of
        the last ones as are together smaller than the model, and no more than a client decodes quickly.
    changed : dict of str to int
        Array -> the last round that changed it.

    Raises
    ------
    ValueError
        No arrays, complex ones, or NaN.
    """

    def __init__(self, term: Chain, model: wire.NDArrays) -> None:
        if not model:
            raise ValueError("initial_arrays is empty: pass ArrayRecord(model.state_dict())")
        if found := [n for n, a in model.items() if np.iscomplexobj(a)]:
            raise ValueError(f"complex arrays cannot be averaged here, but {found} are")
        if found := [n for n, a in model.items() if np.isnan(a).any()]:
            raise ValueError(f"initial_arrays: {found} hold NaN")
        self._term = term
        self.model = model
        self.step: wire.NDArrays | None = None
        self.previous_lr: float | None = None
        self.server: Slot = term.init(model)
        self.buffers: frozenset[str] | None = None
        self.coded_steps: dict[int, bytes] = {}
        self.changed = dict.fromkeys(model, 0)

    def context(self, server_round: int, lr: float) -> ServerContext:
        """Return what the terms' server hooks may read in a round."""
        step = None if self.step is None else self._trainable(self.step)
        return ServerContext(server_round, lr, self._trainable(self.model), step, self.previous_lr)

    def adopt(self, model: wire.NDArrays) -> bool:
        """Go on from another model than the last one: a wrapper has added noise, say.

        Returns whether it is another. The last step then ends at the new model.
        """
        wire.check_arrays(model, self.model, "the arrays handed to configure_train")
        if wire.digest(model) == wire.digest(self.model):
            return False
        wire.check_finite(model, "the arrays handed to configure_train", self.model)
        if self.step is not None:
            moved = {n: model[n] - w for n, w in self.model.items() if w.dtype.kind == "f"}
            self.step = {
                n: as_step(self.model[n], s + moved[n]) if n in moved else s
                for n, s in self.step.items()
            }
        self.model = model
        return True

    def advance(
        self,
        replies: Mapping[int, Reply],
        weights: Mapping[int, float],
        ctx: ServerContext,
        scale: bool = False,
        mean: Mean = mean_delta,
    ) -> None:
        """Average the replies, let the terms make the step, and move by it.

        `mean` averages them; a private one clips and adds noise, before any term sees the mean.
        With `scale`, incomplete clients weigh more; not their buffers, whose mean must be a mean.

        The step is rounded to the model's dtype first and the model moves by exactly that: a client
        that adds the same step to the same model then holds the same bits.

        Raises ProtocolError, and changes nothing, if the new model would not be finite.
        """
        delta = mean(self.model, replies, weights)
        if scale:
            parameters = self._trainable(self.model)
            delta |= mean_delta(parameters, replies, scaled(weights, replies))
        uploads = {pid: r.uploads for pid, r in replies.items()}
        server, step = self._term.update(self.server, self._trainable(delta), uploads, ctx)
        server, step = self._term.release(server, step, ctx)
        rounded = {n: as_step(w, {**delta, **step}[n]) for n, w in self.model.items()}
        model = {n: wire.add(w, rounded[n]) for n, w in self.model.items()}
        wire.check_finite(model, "the new global model", self.model)
        if self._term.ternary[1]:
            mine = self._trainable(rounded)
            self.coded_steps[ctx.round] = encode(wire.in_code_order(mine, mine))
            size = sum(w.nbytes for w in model.values())
            logged = self.coded_steps
            while len(logged) > MOST_STEPS or sum(map(len, logged.values())) > size:
                del self.coded_steps[min(self.coded_steps)]
        self.server, self.step, self.model = server, rounded, model
        self.previous_lr = ctx.lr
        self.changed |= {n: ctx.round for n, s in rounded.items() if np.any(s)}

    def _trainable(self, arrays: wire.NDArrays) -> wire.NDArrays:
        return {n: a for n, a in arrays.items() if n not in (self.buffers or ())}


def as_step(base: np.ndarray, delta: Any) -> np.ndarray:
    """Round a step to what can be added to `base`: its dtype; whole numbers for integers."""
    if base.dtype == np.bool_:  # the mean's majority, as a flip
        return np.asarray(base ^ (base + np.asarray(delta) > 0.5))
    if np.issubdtype(base.dtype, np.integer):
        return np.asarray(np.rint(delta)).astype(base.dtype)
    return np.asarray(delta).astype(base.dtype)
