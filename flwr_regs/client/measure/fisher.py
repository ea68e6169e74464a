"""The diagonal of the empirical Fisher information, sample by sample. Plain torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from flwr_regs.client.measure.fisher_layers import (
    NLL,
    Layers,
    Tensors,
    add_layers,
    add_squares,
    find_layers,
    of_layers,
    with_inputs,
)
from flwr_regs.client.train.batches import NO_DATA, Batches, mapped, tensors, to_device
from flwr_regs.client.train.task import Task, gradients, uncompiled

MEMORY = 32 * 2**20
"""Bytes of gradients that are computed together; glibc maps larger blocks anew each time."""
JOINED = 2**20
"""Bytes of the batches that are taken together: a layer's outputs may be many times as large."""


def fisher_diagonal(
    model: nn.Module,
    data: Batches,
    task: Task,
    device: str | torch.device,
    params: Tensors | None = None,
    max_samples: int | None = None,
    memory: int = MEMORY,
    layers: Layers | None = None,
) -> Tensors:
    """Return the mean over the samples of the squared gradient of a sample's log-likelihood.

    A sample's log-likelihood is minus the task's loss on a batch of this sample alone, in eval mode.
    The model must be on `device`. The model and torch's random state do not change; a generator that
    belongs to the loader advances. The result has an entry for each parameter with ``requires_grad=True``,
    in the parameter's dtype or a wider one: zeros if no loss depends on it.

    Parameters
    ----------
    data : iterable of batches
        Iterated once. Tensors, or nested dicts, lists and tuples of them; those of a batch equally long.
    task : Task
        How the model is called, and the loss.
    params : dict[str, Tensor], optional
        Where to take the gradients; they replace the model's parameters, or buffers, of the same names.
    max_samples : int, optional
        Stop after this many samples; with a shuffling loader they are a random subset.
    memory : int
        Bytes for the gradients that are computed together; one sample's gradient may take more. Linear
        layers' gradients are not formed: see client/measure/fisher_layers.py.
    layers : Layers, optional
        These layers, if they are known: under vmap they cannot be found.

    Raises ValueError if there are no data or no trainable parameters, `max_samples` is below 1, lengths
    differ, or the loss is not a scalar.

    Source: Ma et al., "Towards heterogeneous clients with elastic federated learning" (2021), Eq. 2.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples must be at least 1 or None, not {max_samples}")
    model = uncompiled(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    given = params or {}
    params = {n: given.get(n, p).detach() for n, p in trained.items()}
    # a forward may write to buffers
    buffers = {n: given.get(n, b).clone() for n, b in model.named_buffers()}
    wide = {n: torch.promote_types(p.dtype, torch.float32) for n, p in trained.items()}  # not half
    total = {n: torch.zeros_like(p, dtype=wide[n]) for n, p in trained.items()}
    seen = 0
    nll = partial(sample_loss, model, task, buffers)
    with _kept(model, torch.device(device)):
        pairs = iter(task.pairs(data))
        first = [to_device(pair, device) for pair in islice(pairs, 1)]
        if in_place := layers is None:
            layers = {}
            for batch in first:
                sample = [t[0] for t in tensors(batch) if t.ndim and len(t)]
                layers = find_layers(model, partial(nll, batch), params, sample)
        # vmap has no rule for recurrent layers, and takes some 15 times as long as one sample after another
        together = not any(isinstance(module, nn.RNNBase) for module in model.modules())
        sums = _Squares(total, params, memory, layers, in_place, together)
        limit = sys.maxsize if max_samples is None else max_samples
        most = sums.chunk // 4 if in_place else sums.chunk
        for batch, n in joined(chain(first, pairs), most, limit, device):
            sums.add(partial(nll, batch), [t[:n] for t in tensors(batch)])
            seen += n
    if not seen:
        raise ValueError(NO_DATA)
    return {n: t / seen for n, t in total.items()}


def sample_loss(
    model: nn.Module,
    task: Task,
    buffers: Tensors,
    batch: Any,
    params: Tensors,
    sample: list[Tensor],
) -> Tensor:
    """Return the loss on one sample of a batch, at other parameters and buffers."""
    parts = iter(sample)
    inputs, targets = mapped(batch, lambda _: next(parts)[None])
    loss = task.loss(task.output(model, inputs, targets, {**params, **buffers}), targets)
    if loss.ndim:
        raise ValueError(f"loss_fn must return a scalar, not shape {tuple(loss.shape)}")
    return loss


def joined(
    batches: Iterable[tuple[Any, Any]], most: int, limit: int, device: str | torch.device
) -> Iterator[tuple[Any, int]]:
    """Yield batches on the device, each with the number of its first samples that count.

    Small neighbours are joined up to `most` samples: vmap takes its time for each call, not for each
    sample. The samples are the first `limit` ones; no further batch is drawn.
    """
    held: list[tuple[Any, Any]] = []
    samples = 0
    for batch in batches:
        lengths = {t.shape[:1] for t in tensors(batch)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(f"the tensors of a batch must be equally long, not {lengths}")
        size = lengths.pop()[0]
        if held and not (samples + size <= most and _fit([*held, batch])):
            yield _join(held), samples
            limit -= samples
            held, samples = [], 0
        held.append(to_device(batch, device))
        samples += size
        if samples >= limit:
            break
    if held:
        yield _join(held), min(samples, limit)


def _fit(batches: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether batches are small and of one kind: pairs of plain tensors."""
    parts = [tuple(batch) for batch in batches]
    if not all(isinstance(t, Tensor) for part in parts for t in part):
        return False
    kinds = {tuple((t.dtype, t.shape[1:]) for t in part) for part in parts}
    return len(kinds) == 1 and sum(t.nbytes for part in parts for t in part) <= JOINED


def _join(batches: Sequence[tuple[Any, Any]]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@dataclass
class _Squares:
    """The sums of the samples' squared gradients, and the fastest way that still works.

    First by the `layers`, then without them, then one sample after the other.
    """

    total: Tensors
    params: Tensors
    memory: int
    layers: Layers
    in_place: bool = True
    together: bool = True

    @property
    def chunk(self) -> int:
        """The number of samples whose gradients are computed together."""
        known = of_layers(self.layers)
        sizes = [p.nbytes for n, p in self.params.items() if n not in known]
        return max(1, self.memory // sum(sizes + [layer.size for layer in self.layers.values()]))

    def add(self, nll: NLL, samples: list[Tensor]) -> None:
        """Add the squares of some samples, given by the tensors of their batch."""
        done, number = 0, len(samples[0])
        while done < number:  # vmap's own chunk_size would keep all the chunks
            some = [t[done : done + self.chunk] for t in samples]
            why = self._add_together(nll, some) if self.together else ""
            if why and self.layers:
                self.layers = {}  # and again, without them
                continue
            if why or not self.together:
                self._add_one_by_one(nll, some)
            if why:  # a warning, not a log: Python shows it once, not for each client and round
                self.together = False
                text = f"Fisher information one sample at a time: vmap failed ({why})"
                warnings.warn(text, stacklevel=3)
            done += len(some[0])

    def _add_together(self, nll: NLL, samples: list[Tensor]) -> str:
        """Add the squares by vmap; where it fails, return why, and add nothing."""
        known = of_layers(self.layers)
        rest = {n: p for n, p in self.params.items() if n not in known}
        zeros = {names: layer.like for names, layer in self.layers.items()}
        try:
            of_each = vmap(with_inputs(nll, self.params, self.layers), in_dims=(None, None, 0))
            (grads, outputs), inputs = of_each(rest, zeros, samples)
        except Exception as e:  # an error of the model itself is raised again, one by one
            return f"{type(e).__name__}: {e}".partition("\n")[0]
        for n, g in grads.items():
            add_squares(self.total, n, g, self.in_place)
        add_layers(self.total, self.layers, outputs, inputs, self.in_place)
        return ""

    def _add_one_by_one(self, nll: NLL, samples: list[Tensor]) -> None:
        with torch.backends.cudnn.flags(
            enabled=False
        ):  # cuDNN's RNNs have no backward in eval mode
            for sample in zip(*samples, strict=True):
                leaves = {n: p.detach().requires_grad_() for n, p in self.params.items()}
                for n, g in gradients(nll(leaves, list(sample)), leaves).items():
                    one = g.to_dense()  # an embedding's gradient may be sparse
                    self.total[n].addcmul_(one, one)


@contextmanager
def _kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run in eval mode with gradients; then restore the modules' attributes and torch's random state."""
    before = [(vars(m), dict(vars(m))) for m in model.modules()]  # flags, and what a forward stores
    try:
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.enable_grad():
            model.eval()
            yield
    finally:
        for attributes, as_before in before:
            attributes.clear()
            attributes.update(as_before)
