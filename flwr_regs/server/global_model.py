"""The server's half of a method: the global model, the terms' server slots, and their updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from flwr_regs.abilities import Averages, Folds
from flwr_regs.chain import Chain
from flwr_regs.server.aggregate.robust_round import Means
from flwr_regs.server.aggregate.updates import Updates, each_update
from flwr_regs.server.aggregate.weights import restricted
from flwr_regs.server.failures import of_usable
from flwr_regs.server.round import Numbers, Replied, Snapshots
from flwr_regs.term import ServerContext, Slot
from flwr_regs.wire import arrays as wire
from flwr_regs.wire.arrays import NDArrays, check_finite
from flwr_regs.wire.delta import decoded
from flwr_regs.wire.precision import BITS, narrow, widen

MOST_STEPS = 50
"""Coded steps to keep. Each step that a client missed costs it a pass over the whole model."""


_ABILITIES = ("broadcast_to", "weigh", "fold", "answer_in", "recover")
READING = ("broadcast", "update", "release", *_ABILITIES)
"""The hooks and abilities that get a `ServerContext`, or the last step: they may read that step."""
T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A round's step, before the model moves by it.

    Attributes
    ----------
    server : Slot
        The terms' server slots after it.
    step, code : NDArrays, bytes or None
        The step, empty where nothing needs it; its code, if the method has one.
    moved, square : list of str, float
        The arrays that it changes; its squared length over the trained ones.
    model, given : NDArrays
        ``w_{t+1}``, in full and as the clients get it.
    """

    server: Slot
    step: NDArrays
    code: bytes | None
    moved: list[str]
    square: float
    model: NDArrays
    given: NDArrays


class GlobalModel(Snapshots):
    """The global model and the terms' server slots.

    Parameters
    ----------
    term : Chain
        The method.
    model : NDArrays
        ``w_1``, parameters and buffers.
    half : {"bfloat16", "float16"}, optional
        The precision of float32 arrays when they travel.
    keeps_step : bool
        Whether the last step is needed even if no term reads it: a downlink sends it.

    Attributes
    ----------
    model : NDArrays
        ``w_t``.
    frozen : str or None
        The digest of the frozen parameters that only the clients hold; "" if there are none. None before
        the first replies.
    step : NDArrays or None
        ``w_t − w_{t−1}`` in the model's dtypes, exactly as it was added; None before the first step, and
        where nothing needs it.
    previous_lr : float or None
        The learning rate of the round that made `step`.
    server : Slot
        The terms' server slots.
    buffers : frozenset of str, or None
        Arrays of the model that the clients do not train: buffers, and the other names of tied weights.
        None before the first replies; until then, arrays that cannot be trained and BatchNorm's
        statistics count as buffers.
    tied : mapping of str to str, or None
        Tied weights, other name -> trained name.
    coded_steps : dict of int to bytes
        If the method has a code for its steps: round -> its coded step. The last steps, at most
        `MOST_STEPS` and together at most as large as the model.
    changed : dict of str to int
        Array -> the last round that changed it.

    Raises
    ------
    ValueError
        No arrays, complex ones, or NaN; with `half`, no float32 array, or values beyond its range.
    """

    kept = (
        *("model", "frozen", "step", "previous_lr", "server", "buffers", "tied"),
        *("coded_steps", "changed"),
    )

    def __init__(
        self, term: Chain, model: NDArrays, half: str | None = None, keeps_step: bool = False
    ) -> None:
        if not model:
            why = "it is empty, or the method keeps all of it with the clients"
            raise ValueError(f"clients share nothing of initial_arrays: {why}")
        if unusual := [n for n, a in model.items() if np.iscomplexobj(a)]:
            raise ValueError(f"complex arrays cannot be averaged here, but {unusual} are")
        if unusual := [n for n, a in model.items() if a.dtype.kind == "f" and np.isnan(a).any()]:
            raise ValueError(f"initial_arrays: {unusual} hold NaN")
        dtypes, wrong = sorted({str(a.dtype) for a in model.values()}), ""
        if half and "float32" not in dtypes:
            wrong = f"rounds float32 arrays, but initial_arrays holds only {dtypes}"
        elif half and (taken := [n for n, a in model.items() if a.dtype == (bits := BITS[half])]):
            wrong = f"sends float32 arrays as {bits}, but {taken} are {bits} themselves"
        if wrong:
            hint = "pass flwr_regs.float32_arrays(model) or ArrayRecord(model.float().state_dict())"
            raise ValueError(f"wire_dtype='{half}' {wrong}; {hint}")
        self._term, self._half = term, half
        reading = [t for t in term.terms if any(map(t.acts, READING))]
        self._keeps_step = keeps_step or bool(reading or term.able(Averages))
        self._rounded = model, self._as_given(model)
        self.model = model
        self.frozen: str | None = None
        self.step: NDArrays | None = None
        self.previous_lr: float | None = None
        self.buffers: frozenset[str] | None = None
        self.tied: Mapping[str, str] | None = None
        if not (trained := self._trainable(model)):
            why = "the method holds them still, or they are whole numbers"
            raise ValueError(f"clients train none of initial_arrays, {[*model]}: {why}")
        self.server: Slot = term.init(trained)
        self.coded_steps: dict[int, bytes] = {}
        self.changed = dict.fromkeys(model, 0)

    @property
    def given(self) -> NDArrays:
        """``w_t`` as the clients get it: rounded to the wire's precision, in the model's dtypes."""
        if self._rounded[0] is not self.model:
            self._rounded = (self.model, self._as_given(self.model))
        return self._rounded[1]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; a hook that changes its model in place fails, as after a step."""
        super().restore(state)
        for array in self.model.values():
            array.flags.writeable = False

    def _as_given(self, model: NDArrays) -> NDArrays:
        return model if self._half is None else widen(narrow(model, self._half), self._half)

    def agree(
        self,
        buffers: frozenset[str] | None,
        tied: Mapping[str, str] | None,
        frozen: str | None = None,
    ) -> None:
        """Note what the clients agree on; `init` runs again if it first got arrays that are not trained."""
        if buffers is not None and buffers != self.fixed:
            self.server = self._term.init({n: a for n, a in self.model.items() if n not in buffers})
        self.buffers, self.tied, self.frozen = buffers, tied, frozen

    @property
    def averaged(self) -> NDArrays | None:
        """The model of a term that `Averages`, integers as in ``w_t``; None without one, or a step."""
        term = next(iter(self._term.able(Averages)), None)
        if term is None or self.step is None:
            return None
        floats = {n: a for n, a in self.model.items() if a.dtype.kind == "f"}
        made = term.averaged(floats, self.step, self.server[term.name])
        return self.model | {n: np.asarray(a, self.model[n].dtype) for n, a in made.items()}

    @property
    def fixed(self) -> frozenset[str]:
        """The arrays that are not trained, as far as is known."""
        if self.buffers is not None:
            return self.buffers
        return wire.untrainable(self.model) | self._term.frozen(self.model)

    def context(self, server_round: int, lr: float, population: int, **more: Any) -> ServerContext:
        """Return the context of the terms' server hooks in a round; `more` are its other fields."""
        step = None if self.step is None else self._trainable(self.step)
        params = self._trainable(self.model)
        return ServerContext(server_round, lr, params, step, self.previous_lr, population, **more)

    def adopt(self, model: NDArrays, what: str) -> bool:
        """Continue from `model`; return whether it differs from the current one.

        The caller may have changed it between rounds. The last step then ends at the new model. `what`
        names the arrays in a ProtocolError.
        """
        wire.check_arrays(model, self.model, what)
        model = wire.tie(model, self.tied or {})  # a tied weight has one value under all its names
        if wire.digest(model) == wire.digest(self.model):
            return False
        check_finite(model, what, self.model)
        if self.step is not None:
            floats = {n: s for n, s in self.step.items() if s.dtype.kind == "f"}
            moved = {n: np.asarray(s + (model[n] - self.model[n])) for n, s in floats.items()}
            self.step = self.step | moved
        self.model = model
        return True

    def stepped(self, replies: Replied, ctx: ServerContext, scaled: Numbers, means: Means) -> Step:
        """Average the replies and let the terms make the step of them. Nothing changes.

        `ctx` has the weights ``p_k``, `scaled` are ``ω_k``. `means` averages the replies, and all that is
        summed of their uploads.

        The step is rounded to the model's dtype, and the model moves by exactly this step. So a client
        that adds the same step to the same model gets the same bits.

        With half precision, an update is counted from the rounded ``w_t`` that the client got. It is added
        to the float32 ``w_t``, so that small steps add up.

        Raises UnusableReplies for those that a term cannot fold, and ProtocolError if the new model is not
        finite or beyond the range of the wire's precision; also what `means` raises.
        """
        step = means.delta(Updates(self.given, replies, ctx.weights, scaled, self.fixed))
        server, step, code = self._released(replies, ctx, step, means)
        new = {}
        for name, w in self.model.items():
            step[name] = as_step(w, step[name])
            new[name] = wire.add(w, step[name])
            new[name].flags.writeable = False  # a hook that changes it in place fails
        check_finite(new, "the new global model", self.model)
        square = sum(map(wire.square_sum, self._trainable(step).values()))
        moved = [n for n, s in step.items() if s.any()]
        if not self._keeps_step:
            step = {}  # before another model is made
        return Step(server, step, code, moved, square, new, self._as_given(new))

    def move(self, made: Step, ctx: ServerContext) -> None:
        """Move by a step that was made for the round of `ctx`."""
        if made.code is not None:
            steps, size = self.coded_steps, sum(w.nbytes for w in self.model.values())
            steps[ctx.round] = made.code
            while len(steps) > MOST_STEPS or sum(map(len, steps.values())) > size:
                del steps[min(steps)]
        self.changed |= dict.fromkeys(made.moved, ctx.round)
        self.server, self.step = made.server, made.step if self._keeps_step else None
        self.model, self._rounded = made.model, (made.model, made.given)
        self.previous_lr = ctx.lr

    def _released(
        self, replies: Replied, ctx: ServerContext, delta: NDArrays, means: Means
    ) -> tuple[Slot, NDArrays, bytes | None]:
        """Return (the terms' server slots, the step that they make, its code if it has one).

        Raises UnusableReplies for those that make a term's hook fail. To find these, hooks run again
        without some of the clients: hooks are pure.
        """
        if self._half:
            delta |= self._means(delta)
        mean = self._trainable(delta)

        def update(pids: list[int]) -> tuple[Slot, Any]:
            context = restricted(ctx, pids)
            if means.selected is not None:
                context = replace(context, selected=means.members(pids))
            folded = self._fold({p: replies[p] for p in pids}, context, means)
            uploads = {p: replies[p].uploads for p in means.members(pids)}
            return self._term.update(self.server, mean, uploads, context, folded)

        server, step = of_usable(replies, update, "its upload cannot be used")
        server, step = self._term.release(server, step, ctx)
        code = None
        if (coder := self._term.coder("release")) is not None:  # the clients get the decoded step
            rounded = {n: as_step(self.model[n], s) for n, s in step.items()}
            check_finite(rounded, "the global step")
            code = coder.encode(wire.in_code_order(rounded, rounded))
            like = wire.in_code_order(self.model, rounded)
            step = decoded(coder.decode, code, like, "the global step")
        return server, {**delta, **wire.tie(step, self.tied or {})}, code

    def _fold(self, replies: Replied, ctx: ServerContext, means: Means) -> Slot:
        """Return what the terms that fold made of the uploads, one client's at a time.

        A `robust` aggregator gets what `fold` makes of each client alone.
        """
        folded: defaultdict[int | None, Slot] = defaultdict(dict)
        if not self._term.able(Folds):
            return {}
        given = self.given  # from which the updates count: rounded, if they travel so
        ctx = replace(ctx, params={n: given[n] for n in ctx.params})
        for pid, delta in each_update(replies, given, self.fixed):
            sent = replies[pid].uploads.items()  # copied: a term may change what it gets
            uploads = {t: {k: np.array(a) for k, a in upload.items()} for t, upload in sent}
            acc = folded[pid if means.robust else None]
            self._term.fold(acc, pid, delta, uploads, ctx.weights[pid], ctx)
        return means.sums(self._term, folded) if means.robust else folded[None]

    def _means(self, delta: NDArrays) -> NDArrays:
        """Return the steps of the float32 arrays that are not trained: directly to the clients' mean.

        A step counted from the rounded ``w_t`` would add its rounding error: a variance near zero could
        become negative. Arrays that no client changed, such as frozen parameters, keep the server's values.
        """
        given, w = self.given, self.model
        names = [n for n in self.buffers or () if w[n].dtype == np.float32]
        with np.errstate(invalid="ignore"):  # an infinite constant
            return {n: np.where(delta[n] == 0, 0, delta[n] + (given[n] - w[n])) for n in names}

    def _trainable(self, arrays: Mapping[str, T]) -> dict[str, T]:
        fixed = self.fixed
        return {n: a for n, a in arrays.items() if n not in fixed}


def as_step(base: np.ndarray, delta: Any) -> np.ndarray:
    """Return a step in the dtype of `base`, so that it can be added; rounded for integers."""
    if base.dtype == np.bool_:  # the mean's majority, as a flip
        return np.asarray(base ^ (base + np.asarray(delta) > 0.5))
    rounded = np.rint(delta) if base.dtype.kind in "iu" else delta
    return np.asarray(rounded).astype(base.dtype, copy=False)
