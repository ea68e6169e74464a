"""A client's task: how its model is called on a batch, which part of the output is logits, and the loss.

Every forward pass of the package goes through `Task.output`. Plain torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flwr_regs.client.train.batches import Batches, Keywords, Pairs

LossFn = Callable[[Any, Any], Tensor]
OutputFn = Callable[[Any], Any]
Tensors = Mapping[str, Tensor]

_OWN_LOSS = "_flwr_regs_loss"  # the attribute of logits that holds the loss which came with them


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile(model)``, whose names are plain; any other model itself.

    Raises TypeError for what is no module, and ValueError for a model with compiled layers, whose names are
    not plain.
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, not {given}")
    plain = getattr(model, "_orig_mod", model)
    if layers := [n for n, _ in plain.named_modules() if n.endswith("_orig_mod")]:
        compiled = [n.removesuffix("._orig_mod") for n in layers]
        raise ValueError(
            f"the layers {compiled} are torch.compile(layer), which renames their parameters; compile the "
            "whole model, torch.compile(model), or layers in place, layer.compile()"
        )
    return plain


@dataclass(frozen=True)
class Task:
    """What a client trains for.

    Parameters
    ----------
    loss_fn : callable, optional
        ``loss_fn(output, targets) -> scalar``, a mean over the batch; `output` are the logits. None: the
        model computes its loss and returns it as ``.loss``. It then gets the targets as a keyword: under
        the key that they have in a batch that is a mapping, else as ``labels``. All other entries of a
        mapping go in as keywords, too.
    target_key : str, optional
        The key of the targets in batches that are mappings: see :class:`.batches.Pairs`.
    output_fn : callable, optional
        ``output_fn(output) -> logits``, of what the model returns. Default: a tensor itself; else the
        attribute or entry ``logits``; else the first element of a tuple, list or dataclass.
    """

    loss_fn: LossFn | None = nn.functional.cross_entropy
    target_key: str | None = None
    output_fn: OutputFn | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for a class in place of a loss, and for what is no function."""
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise TypeError(f"loss_fn is the class {name}: give what it makes, {name}()")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn must be a function, loss_fn(output, targets), or None, not {self.loss_fn!r}"
            )

        if self.output_fn is not None and not callable(self.output_fn):
            raise TypeError(f"output_fn must be a function of an output, not {self.output_fn!r}")

    def pairs(self, data: Batches) -> Pairs:
        """Return `data` as pairs of (inputs, targets); data that already are pairs stay as they are."""
        if isinstance(data, Pairs):
            return data
        return Pairs(data, self.target_key, keywords=self.loss_fn is None)

    def output(
        self, model: nn.Module, inputs: Any, targets: Any = None, params: Tensors | None = None
    ) -> Any:
        """Return the model's logits on a batch.

        `params` replace the model's parameters, or buffers, of the same names. A model that computes its
        loss needs the `targets`; without them, `loss` has no loss of this output.

        Raises TypeError if the output holds no logits: see `logits`; ValueError for an entry of a batch
        that the model does not take.
        """
        if params is None and type(inputs) is Tensor and self.loss_fn is not None:
            return self.logits(model(inputs))  # as most steps do
        args, kwargs = self.arguments(inputs, targets)
        try:
            if params is None:
                return self.logits(model(*args, **kwargs))
            return self.logits(called(model, dict(params), args, kwargs))
        except TypeError as error:
            entries = inputs if isinstance(inputs, Keywords) else ()
            if not any(f"unexpected keyword argument '{n}'" in str(error) for n in entries):
                raise  # a mistake inside the model
            raise ValueError(
                f"{error}: a batch's entries beside the targets, here {[*inputs]}, all go into the model; "
                "leave out of the data what it does not take"
            ) from error

    def arguments(self, inputs: Any, targets: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with which the model is called on a batch."""
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Keywords) else ((inputs,), {})
        if self.loss_fn is None and targets is not None:
            kwargs[inputs.target if isinstance(inputs, Keywords) else "labels"] = targets
        return args, kwargs

    def logits(self, output: Any) -> Any:
        """Return the logits in what the model returned; raise TypeError if there are none."""
        logits = self.output_fn(output) if self.output_fn else find_logits(output)
        if self.loss_fn is None and isinstance(logits, Tensor):
            setattr(logits, _OWN_LOSS, _entry(output, "loss"))
        return logits

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the loss of logits from `output` or `logits`.

        Raises TypeError if the model should have returned its loss, but did not.
        """
        if self.loss_fn is not None:
            return self.loss_fn(output, targets)
        if (loss := getattr(output, _OWN_LOSS, None)) is None:
            raise TypeError(
                "loss_fn=None needs a model whose output has .loss when it gets the targets: pass loss_fn="
            )
        return cast(Tensor, loss)


def called(model: nn.Module, values: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Return what the model makes of a batch with other parameters and buffers, by their first names.

    `values` then hold what the forward pass has made of them. As ``torch.func.functional_call``, but that
    leaves its values in a module which the model has under two names.
    """
    places = {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    owned = {id(places[name]): value for name, value in values.items() if name in places}
    tied = {name: owned[id(t)] for name, t in places.items() if id(t) in owned}
    given = {**values, **tied}
    output = functional_call(model, given, args, kwargs, tie_weights=False)
    values.update({name: given[name] for name in values})
    return output


def gradients(loss: Tensor, leaves: Tensors) -> dict[str, Tensor]:
    """Return the gradient of `loss`, dense; zero for a leaf that it does not depend on."""
    if not loss.requires_grad:
        return {n: torch.zeros_like(p) for n, p in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    whole = {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}
    return {n: g.to_dense() if g.is_sparse else g for n, g in whole.items()}


def returns_loss(output: Any) -> bool:
    """Return whether logits came from a model that computes the loss itself."""
    return getattr(output, _OWN_LOSS, None) is not None


def find_logits(output: Any) -> Tensor:
    """Return a tensor itself, ``output.logits``, ``output["logits"]``, or the first element of `output`.

    Raises TypeError if that is not a tensor with a batch dimension.
    """
    if isinstance(output, Tensor):
        return output
    logits = _entry(output, "logits")
    if logits is None:
        logits = next((v for v in _elements(output) if v is not None), None)
    if isinstance(logits, Tensor) and logits.ndim:
        return logits
    names = f" with the entries {list(output)}" if isinstance(output, Mapping) else ""
    raise TypeError(
        f"the model's output, a {type(output).__name__}{names}, has no logits: neither it nor .logits nor "
        "its first element is a tensor with a batch dimension; pass output_fn=, from output to logits"
    )


def _entry(output: Any, name: str) -> Any:
    entry = getattr(output, name, None)
    return output.get(name) if entry is None and isinstance(output, Mapping) else entry


def _elements(output: Any) -> list[Any]:
    """Return the elements in order; none of a plain dict, whose order says nothing."""
    if isinstance(output, list | tuple):
        return list(output)
    if isinstance(output, Mapping):
        return [] if type(output) in (dict, OrderedDict) else list(output.values())
    if is_dataclass(output):
        return [getattr(output, f.name) for f in fields(output)]
    return []
