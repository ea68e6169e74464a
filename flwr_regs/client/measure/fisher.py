"""The diagonal of the empirical Fisher information, sample by sample. Plain torch.

For a linear layer on one row a, with g the gradient with respect to its output, the gradient of the weight
is ``g aᵀ``. So the sum of the squares over samples is the matrix product ``(g²)ᵀ (a²)``, and no sample's
gradient is formed. Convolutions are left to vmap: a product of each sample's unfolded image was slower.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from flwr_regs.client.measure.classifier import attributes_kept
from flwr_regs.client.train.batches import NO_DATA, Batches, forked, mapped, tensors, to_device
from flwr_regs.client.train.task import Task, gradients, uncompiled

Tensors = dict[str, Tensor]
Parts = list[Tensor]
NLL = Callable[[Tensors, Parts], Tensor]
Names = tuple[str | None, str | None]

LITTLE = 2**12
"""Entries of a parameter up to which a sum over samples is faster than one sample after the other."""
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
        layers' gradients are not formed: see the top of this file.
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
    with attributes_kept(model), forked(torch.device(device)), torch.enable_grad():
        model.eval()
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
    model: nn.Module, task: Task, buffers: Tensors, batch: Any, params: Tensors, sample: Parts
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
    in_place: bool  # under vmap it cannot be
    together: bool

    @property
    def chunk(self) -> int:
        """The number of samples whose gradients are computed together."""
        known = of_layers(self.layers)
        sizes = [p.nbytes for n, p in self.params.items() if n not in known]
        return max(1, self.memory // sum(sizes + [layer.size for layer in self.layers.values()]))

    def add(self, nll: NLL, samples: Parts) -> None:
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

    def _add_together(self, nll: NLL, samples: Parts) -> str:
        """Add the squares by vmap; where it fails, return why, and add nothing."""
        known = of_layers(self.layers)
        rest = {n: p for n, p in self.params.items() if n not in known}
        zeros = {names: layer.like for names, layer in self.layers.items()}

        def loss(rest: Tensors, zeros: dict[Names, Tensor], sample: Parts) -> Any:
            given = {**self.params, **rest}
            ids, inputs = {id(given[n]) for n in known}, dict[Names, Tensor]()

            def passed(args: Iterable[Any]) -> None:
                if any(id(a) in ids for a in args):
                    raise ValueError("a layer's parameter has another use")

            def seen(names: Names, call: dict[str, Any]) -> Tensor:
                """Keep a layer's input; add zeros to its output, to differentiate with respect to them."""
                out = linear(**call)
                passed([call["input"]] if names in zeros else call.values())
                if names not in zeros:
                    return out
                if names in inputs or out.shape != zeros[names].shape:
                    raise ValueError(f"a layer is called anew, or with another shape: {names}")
                inputs[names] = call["input"]
                return out + zeros[names]

            with _Watch(given, seen, passed):
                value = nll(given, sample)
            if inputs.keys() != zeros.keys():
                raise ValueError("a layer was not called")
            return value, inputs

        try:
            of_each = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0))
            (grads, outputs), inputs = of_each(rest, zeros, samples)
        except Exception as e:  # an error of the model itself is raised again, one by one
            return f"{type(e).__name__}: {e}".partition("\n")[0]
        for n, g in grads.items():
            self._add_squares(n, g)
        for names, layer in self.layers.items():
            g, a = outputs[names].flatten(1), inputs[names].flatten(1)
            if layer.bias:
                self._add_squares(layer.bias, g)
            if layer.weight:
                t = self.total[layer.weight]
                left, right = factors(g.to(t.dtype), a.to(t.dtype))
                new = t.addmm_(left, right) if self.in_place else t + left @ right
                self.total[layer.weight] = new
        return ""

    def _add_squares(self, name: str, grads: Tensor) -> None:
        """Add the squares of a parameter's gradients, one of each sample."""
        t = self.total[name]
        if not self.in_place:
            self.total[name] = t + grads.to(t.dtype).square().sum(0)
        elif t.numel() <= LITTLE:
            t.add_(grads.to(t.dtype).square().sum(0))
        else:  # the other way is slower here and doubles the memory
            for one in grads:
                t.addcmul_(one, one)

    def _add_one_by_one(self, nll: NLL, samples: Parts) -> None:
        # cuDNN's RNNs have no backward in eval mode
        with torch.backends.cudnn.flags(enabled=False):
            for sample in zip(*samples, strict=True):
                leaves = {n: p.detach().requires_grad_() for n, p in self.params.items()}
                for n, g in gradients(nll(leaves, list(sample)), leaves).items():
                    one = g.to_dense()  # an embedding's gradient may be sparse
                    self.total[n].addcmul_(one, one)


# linear layers


@dataclass(frozen=True)
class Layer:
    """One call of ``linear`` for a sample.

    Parameters
    ----------
    weight, bias : str, optional
        The parameters of which this call is the only use. None: not trained, or used elsewhere, too.
    like : Tensor
        Zeros like the output.
    size : int
        Bytes for a sample.
    """

    weight: str | None
    bias: str | None
    like: Tensor
    size: int


Layers = dict[Names, Layer]
"""The layers by the trained parameters, weight and bias, in the call."""


def find_layers(model: nn.Module, nll: NLL, params: Tensors, sample: Parts) -> Layers:
    """Return the layers of a model that see one row of inputs of a sample; none if in doubt.

    Their parameters have no other use: with this call left out, the loss does not depend on them.
    """
    if any(isinstance(m, torch.jit.ScriptModule) or m._compiled_call_impl for m in model.modules()):
        return {}
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    found: Layers = {}
    taken: set[str | None] = set()

    def seen(names: Names, call: dict[str, Any]) -> Tensor:
        """Take the parameters of a layer's first call as constants, if it sees one row."""
        out, a = linear(**call), call["input"]
        one_row = a.numel() == a.shape[-1] and out.numel()
        if not one_row or taken & {n for n in names if n}:
            return out
        taken.update(names)
        size = (a.numel() + out.numel()) * out.element_size()
        found[names] = Layer(*names, torch.zeros_like(out), size)
        named = dict(zip(("weight", "bias"), names, strict=True))
        return linear(**call | {k: call[k].detach() for k, n in named.items() if n})

    try:
        with torch.backends.cudnn.flags(enabled=False), _Watch(leaves, seen):
            loss = nll(leaves, sample)
        every = list(leaves.values())
        grads = torch.autograd.grad(loss, every, allow_unused=True) if loss.requires_grad else ()
    except Exception:  # an error of the model itself is raised again where it counts
        return {}
    also = {n for n, g in zip(leaves, grads, strict=False) if g is not None}
    layers = {}
    for names, layer in found.items():
        weight, bias = (None if n in also else n for n in names)
        if weight or bias:
            layers[names] = Layer(weight, bias, layer.like, layer.size)
    return layers


def of_layers(layers: Layers) -> set[str]:
    """Return the names of the parameters whose gradients follow from the layers' inputs."""
    return {n for layer in layers.values() for n in (layer.weight, layer.bias) if n}


def factors(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(g²)ᵀ`` and ``a²``, scaled so that their product is the sum of the squares of ``g aᵀ``."""
    # the squares of one alone could leave the numbers' range; powers of 2 round nothing
    power = g.abs().amax(1, keepdim=True).frexp().exponent.clamp(-120, 120)
    scale = torch.ldexp(torch.ones_like(power, dtype=g.dtype), power)
    left, right = g / scale, a * scale
    return left.mul_(left).T, right.mul_(right)


class _Watch(TorchFunctionMode):
    """Sees each call of ``linear`` with one of the parameters.

    ``seen(names, call)`` returns its output; ``passed(args)`` looks at the arguments of other functions.
    """

    def __init__(
        self, params: Tensors, seen: Any, passed: Callable[..., None] | None = None
    ) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in params.items()}
        self.seen, self.passed = seen, passed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear:
            call = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            names = self.names.get(id(call["weight"])), self.names.get(id(call.get("bias")))
            if names != (None, None):
                return self.seen(names, call)
        elif self.passed is not None:
            self.passed([*args, *kwargs.values()])
        return func(*args, **kwargs)
