"""The diagonal of the empirical Fisher information, sample by sample. Plain torch.

For a linear layer on one row a, with g the gradient with respect to its output, the gradient of the weight
is ``g aᵀ``. So the sum of the squares over samples is the matrix product ``(g²)ᵀ (a²)``, and no sample's
gradient is formed. Convolutions are left to vmap: a product of each sample's unfolded image was slower.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from flwr_regs.client.train.batches import NO_DATA, Batches, mapped, tensors, to_device
from flwr_regs.client.train.task import Task, gradients, uncompiled

Tensors = dict[str, Tensor]
NLL = Callable[[Tensors, list[Tensor]], Tensor]
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
    gpus = [device] if device.type == "cuda" else []
    with attributes_kept(model), torch.random.fork_rng(devices=gpus), torch.enable_grad():
        model.eval()
        yield


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


def find_layers(model: nn.Module, nll: NLL, params: Tensors, sample: list[Tensor]) -> Layers:
    """Return the layers of a model that see one row of inputs of a sample; none if in doubt.

    Their parameters have no other use: with this call left out, the loss does not depend on them.
    """
    opaque = (
        isinstance(m, torch.jit.ScriptModule) or m._compiled_call_impl for m in model.modules()
    )
    if any(opaque):
        return {}
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    try:
        with torch.backends.cudnn.flags(enabled=False), _Finder(leaves) as finder:
            loss = nll(leaves, sample)
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    except Exception:  # an error of the model itself is raised again where it counts
        return {}
    also = {n for n, g in zip(leaves, grads, strict=True) if g is not None}
    layers = {}
    for names, layer in finder.layers.items():
        weight, bias = (None if n in also else n for n in names)
        if weight or bias:
            layers[names] = Layer(weight, bias, layer.like, layer.size)
    return layers


def of_layers(layers: Layers) -> set[str]:
    """Return the names of the parameters whose gradients follow from the layers' inputs."""
    return {n for layer in layers.values() for n in (layer.weight, layer.bias) if n}


def with_inputs(nll: NLL, params: Tensors, layers: Layers) -> Callable[..., Any]:
    """Return a function of (the other parameters, zeros for each layer, a sample).

    It returns the gradients with respect to the first two, and the layers' inputs. Raises ValueError if a
    layer is not called once, as it was when it was found.
    """

    def loss(rest: Tensors, zeros: dict[Names, Tensor], sample: list[Tensor]) -> Any:
        given = {**params, **rest}
        with _Recorder(given, layers, zeros) as recorder:
            value = nll(given, sample)
        if recorder.inputs.keys() != layers.keys():
            raise ValueError("a layer was not called")
        return value, recorder.inputs

    return grad(loss, argnums=(0, 1), has_aux=True)


def add_layers(
    total: Tensors,
    layers: Layers,
    outputs: Mapping[Names, Tensor],
    inputs: Mapping[Names, Tensor],
    in_place: bool = True,
) -> None:
    """Add the samples' squared gradients to `total`, from the outputs' gradients and the inputs.

    Both have a dimension for the samples in front.
    """
    for names, layer in layers.items():
        g, a = outputs[names].flatten(1), inputs[names].flatten(1)
        if layer.bias:
            add_squares(total, layer.bias, g, in_place)
        if layer.weight:
            t = total[layer.weight]
            left, right = factors(g.to(t.dtype), a.to(t.dtype))
            total[layer.weight] = t.addmm_(left, right) if in_place else t + left @ right


def factors(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(g²)ᵀ`` and ``a²``, scaled so that their product is the sum of the squares of ``g aᵀ``."""
    # the squares of one alone could leave the numbers' range; powers of 2 round nothing
    power = g.abs().amax(1, keepdim=True).frexp().exponent.clamp(-120, 120)
    scale = torch.ldexp(torch.ones_like(power, dtype=g.dtype), power)
    left, right = g / scale, a * scale
    return left.mul_(left).T, right.mul_(right)


def add_squares(total: Tensors, name: str, grads: Tensor, in_place: bool = True) -> None:
    """Add the squares of gradients, one of each sample, to a sum in `total`; under vmap not `in_place`."""
    t = total[name]
    if not in_place:
        total[name] = t + grads.to(t.dtype).square().sum(0)
    elif t.numel() <= LITTLE:
        t.add_(grads.to(t.dtype).square().sum(0))
    else:  # the other way is slower here and doubles the memory
        for one in grads:
            t.addcmul_(one, one)


class _Watch(TorchFunctionMode):
    """Sees each call of ``linear`` with one of the parameters."""

    def __init__(self, params: Tensors) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in params.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear:
            call = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            names = self.name(call["weight"]), self.name(call.get("bias"))
            if names != (None, None):
                return self.seen(names, call)
        else:
            self.passed([*args, *kwargs.values()])
        return func(*args, **kwargs)

    def name(self, tensor: Any) -> str | None:
        return self.names.get(id(tensor))

    def seen(self, names: Names, call: dict[str, Any]) -> Tensor:
        """Return the output of a layer."""
        raise NotImplementedError

    def passed(self, args: Iterable[Any]) -> None:
        """Take note of the arguments of any other function."""


class _Finder(_Watch):
    """Takes the parameters of each layer's first call as constants, if it sees one row."""

    def __init__(self, params: Tensors) -> None:
        super().__init__(params)
        self.layers: Layers = {}
        self.taken: set[str | None] = set()

    def seen(self, names: Names, call: dict[str, Any]) -> Tensor:
        out, a = linear(**call), call["input"]
        one_row = a.numel() == a.shape[-1] and out.numel()
        if not one_row or self.taken & {n for n in names if n}:
            return out
        self.taken |= set(names)
        size = (a.numel() + out.numel()) * out.element_size()
        self.layers[names] = Layer(*names, torch.zeros_like(out), size)
        constants = {k: t.detach() for k, t in call.items() if k != "input" and self.name(t)}
        return linear(**call | constants)


class _Recorder(_Watch):
    """Keeps the layers' inputs, and adds zeros to the outputs, to differentiate with respect to them."""

    def __init__(self, params: Tensors, layers: Layers, zeros: Mapping[Names, Tensor]) -> None:
        super().__init__(params)
        self.layers, self.zeros, self.inputs = layers, zeros, dict[Names, Tensor]()
        self.known = {id(params[n]) for n in of_layers(layers)}

    def seen(self, names: Names, call: dict[str, Any]) -> Tensor:
        out = linear(**call)
        self.passed([call["input"]])
        if names not in self.layers:
            self.passed(call.values())
            return out
        zeros = self.zeros[names]
        if names in self.inputs or out.shape != zeros.shape:
            raise ValueError(f"a layer is called anew, or with another shape: {names}")
        self.inputs[names] = call["input"]
        return out + zeros

    def passed(self, args: Iterable[Any]) -> None:
        if any(id(a) in self.known for a in args):
            raise ValueError("a layer's parameter has another use")
