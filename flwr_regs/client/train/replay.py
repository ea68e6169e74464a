"""The batches of a client's steps, which can be drawn a second time in the same order. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from flwr_regs.client.train.batches import Pairs, cycle, to_device

State = list[Tensor]


class Replay:
    """The batches of one round.

    What a loader draws (shuffling, augmentation) depends on the state of torch's random generators before
    each batch. So these states are kept instead of the batches: some 5 kB a step that draws anything.

    Parameters
    ----------
    data : Pairs
    device : torch.device
    batches, forwards : bool
        Whether the batches may be drawn again, and whether a step's forward pass may be run again.
    """

    def __init__(
        self, data: Pairs, device: torch.device, batches: bool = False, forwards: bool = False
    ) -> None:
        self._data, self._device = data, device
        self._batches, self.forwards = batches, forwards
        loader = data.source
        sampler = getattr(loader, "sampler", None)
        sampler = getattr(sampler, "sampler", sampler)  # that shuffles, inside a batch sampler
        of_loader = (getattr(loader, "generator", None), getattr(sampler, "generator", None))
        self._generators = [torch.default_generator]
        for generator in of_loader:
            if isinstance(generator, Generator) and generator not in self._generators:
                self._generators.append(generator)
        self._before: list[State] = []  # the generators before each batch
        self._at_forward: tuple[State, Tensor | None] | None = None

    def draw(self, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches on the device."""
        drawn = cycle(self._data)
        for _ in range(steps):
            if self._batches:
                states = self._states()
                same = self._before and all(map(torch.equal, states, self._before[-1]))
                self._before.append(self._before[-1] if same else states)
            inputs, targets = next(drawn)
            batch = to_device(inputs, self._device), to_device(targets, self._device)
            if self.forwards:
                self._at_forward = self._states(), self._cuda_state()
            yield batch

    def again(self, steps: int) -> Iterator[tuple[Any, Any]]:
        """Yield `steps` batches, those of :meth:`draw` first; the generators end where they were."""
        with self._restored():
            drawn = cycle(self._data)
            for i in range(steps):
                if i < len(self._before):
                    self._set(self._before[i])
                inputs, targets = next(drawn)
                yield to_device(inputs, self._device), to_device(targets, self._device)

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Draw as the forward pass of the present step did (dropout); then go on as if nothing had been."""
        with self._restored():
            if self._at_forward is not None:
                states, cuda = self._at_forward
                self._set(states)
                if cuda is not None:
                    torch.cuda.set_rng_state(cuda, self._device)
            yield

    @contextmanager
    def _restored(self) -> Iterator[None]:
        states, cuda = self._states(), self._cuda_state()
        try:
            yield
        finally:
            self._set(states)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)

    def _states(self) -> State:
        return [g.get_state() for g in self._generators]

    def _set(self, states: State) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _cuda_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
