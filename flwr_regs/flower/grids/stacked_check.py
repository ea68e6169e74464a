"""The check of a stack by its result: two of its clients train alone as well, and must end the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flwr_regs.client.loading import load
from flwr_regs.client.local_training import local_round
from flwr_regs.client.round_message import first_exchange, seeded
from flwr_regs.cohort.batch_plan import Plan, draw
from flwr_regs.cohort.member_view import joined
from flwr_regs.cohort.stacked_training import Stack, StackedResult
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.grids.stacked_group import Candidate, Group
from flwr_regs.term import Slot

ROUNDING = 1e-3
"""What rounding may change, of the norm of the update, in 50 steps of plain SGD."""
COARSE = 5e-2
"""The same where rounding grows: Adam divides by gradients, and a code takes what is above a threshold."""

Entries = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What came of a client's round: entries of its model, its update, and slots by ``<term>.<key>``."""

    state: Mapping[str, Tensor]
    delta: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]


class Quiet(TorchFunctionMode):
    """In its block dropout is off, and any other draw gives the same numbers each time.

    So a stack whose members draw the same numbers can be compared with a client alone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return what the function returns."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if "dropout" in name:
            return args[0]
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"):
            args = tuple(0.0 if type(a) is float else a for a in args)  # their dropout
        if "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        with seeded(0, self._device):
            return func(*args, **kwargs)


def difference(group: Group, result: StackedResult, make: Callable[[Candidate], RegClient]) -> str:
    """Return where a stack's result is not that of its clients alone, and by how much; "" if nowhere.

    Two clients train alone, from the same seed and state. If the stack drew random numbers, or ran in
    less precision, the two train in a stack of their own once more, without either.

    Parameters
    ----------
    group : Group
    result : StackedResult
        Of all its clients.
    make : callable
        Makes a candidate's client anew.

    torch's, numpy's and Python's random states, the models and the clients' states stay as they are.
    """
    shared, rows = group.shared, _two(group.candidates)
    pair = [group.candidates[row] for row in rows]
    coded = shared.term.coder("finish") is not None
    tolerance = ROUNDING if result.optimizer == "SGD" and not coded else COARSE
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    with _undisturbed(shared.device):
        if result.drew or shared.precision is not None:
            mode = partial(Quiet, shared.device)
            with mode():
                members = [replace(c.member, plan=_drawn_anew(c)) for c in pair]
                quiet = replace(shared, precision=None, randomness="same")
                result, rows = group.run(Stack(quiet, members, pair[0].seed)), (0, 1)
        for row, candidate in zip(rows, pair, strict=True):
            client = make(candidate)
            with mode():
                alone = _alone(group, candidate, client)
            growth = max(1.0, len(candidate.member.plan) / 50)
            if why := _compared(_of(result, row), alone, min(tolerance * growth, 2 * COARSE)):
                return why
    return ""


def _two(candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Return the first client, and the next whose batches are of other sizes, or else the second."""
    first = candidates[0].member.plan.forms
    others = [k for k, c in enumerate(candidates) if c.member.plan.forms != first]
    return 0, others[0] if others else 1


def _drawn_anew(c: Candidate) -> Plan:
    """Return a client's batches as its loader yields them."""
    return draw(c.member.plan.data, c.seed, len(c.member.plan), indexed=False)


def _alone(group: Group, c: Candidate, client: RegClient) -> Outcome:
    """Train a client alone, from the round's start; its model stays as it is."""
    shared, config, model = group.shared, group.recipe.config, client.model
    slots = {t: dict(own) for t, own in c.member.client.items()}
    given: dict[str, Any] = {
        "lr": shared.lr,
        "device": shared.device,
        "classifier": shared.classifier,
        "client": slots,
        "client_id": c.member.client_id,
        "config": shared.config,
    }
    with _kept(model), seeded(c.seed, shared.device):
        load(model, shared.term, group.arrays, config)
        entries = model.state_dict()
        for name, value in c.member.own.items():
            entries[name].copy_(value)
        if group.recipe.probes:
            data = client.train_data
            upload, kept = first_exchange(model, shared.term, data, client._task, **given)
            return Outcome({}, {}, _flat(upload, kept))
        result = local_round(
            model,
            shared.term,
            client.train_data,
            optimizer=client.optimizer,
            epochs=config.get("local-epochs"),
            steps=config.get("local-steps"),
            max_steps=client.step_budget,
            broadcast=joined(shared.broadcast, c.member.broadcast),
            **vars(client._task),
            **given,
        )
    return Outcome(result.state, result.delta, _flat(result.upload, result.client))


def _of(result: StackedResult, row: int) -> Outcome:
    """Return one member's outcome."""
    upload, kept = (
        slots[row] if isinstance(slots, list) else {t: _row(own, row) for t, own in slots.items()}
        for slots in (result.upload, result.client)
    )
    return Outcome(_row(result.state, row), _row(result.delta, row), _flat(upload, kept))


def _row(stacked: Mapping[str, Tensor], row: int) -> Entries:
    return {n: t[row] for n, t in stacked.items()}


def _flat(upload: Slot, client: Slot) -> Entries:
    return {
        f"{t}.{k}": a
        for slots in (upload, client)
        for t, own in slots.items()
        for k, a in own.items()
    }


def _compared(stacked: Outcome, alone: Outcome, tolerance: float) -> str:
    """Return the first entry that differs, and by how much; "" if all are equal up to rounding."""
    update = sum(float(d.double().square().sum()) for d in alone.delta.values()) ** 0.5
    for name, expected in {**alone.state, **alone.slots}.items():
        if (value := {**stacked.state, **stacked.slots}.get(name)) is None:
            continue
        if not expected.is_floating_point():
            if not torch.equal(value, expected):
                return f"'{name}' differs"
            continue
        off = (value.double() - expected.double()).nan_to_num().norm().item()
        size = expected.double().nan_to_num().norm().item()
        scale = update if name in alone.delta else size
        noise = 8 * torch.finfo(expected.dtype).eps * size
        if off > tolerance * scale + noise + 1e-12:
            part = "update" if name in alone.delta else "entry"
            return f"'{name}' differs by {off / max(scale, 1e-300):.2g} of the {part}'s norm"
    return ""


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Leave the process's random states as they were."""
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Leave a model's parameters and buffers as they were, those too that its ``state_dict`` lacks."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    held = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in held]
    try:
        yield
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
