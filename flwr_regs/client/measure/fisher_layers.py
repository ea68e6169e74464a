"""Squared gradients of samples from layers' inputs and their outputs' gradients. Plain torch.

For a linear layer on one row a, with g the gradient with respect to its output, the gradient of the weight
is ``g aᵀ``. So the sum of the squares over samples is the matrix product ``(g²)ᵀ (a²)``, and no sample's
gradient is formed. Convolutions are left to vmap: a product of each sample's unfolded image was slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

Tensors = dict[str, Tensor]
NLL = Callable[[Tensors, list[Tensor]], Tensor]
Names = tuple[str | None, str | None]

LITTLE = 2**12
"""Entries of a parameter up to which a sum over samples is faster than one sample after the other."""


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
