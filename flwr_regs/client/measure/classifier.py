"""The output layer of a model: found, or named by the user; checked on a forward pass."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import Tensor, nn

LOG = logging.getLogger("flwr")


def find_classifier(model: nn.Module, name: str | None = None) -> str:
    """Return the name of the output layer: `name`, or else the ``nn.Linear`` that was registered last.

    Raises ValueError if there is no such layer; the message says how to name one.
    """
    if name is not None:
        named_layer(model, name, "classifier ")
        return name
    layers: dict[str, nn.Module] = dict(model.named_modules())
    linear = [n for n, layer in layers.items() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to use as its output layer; name one with "
            f"classifier=..., out of {[n for n in layers if n]}"
        )
    return linear[-1]


def named_layer(model: nn.Module, name: str, what: str = "") -> nn.Module:
    """Return a layer of the model; raise ValueError if there is none of that name."""
    layers: dict[str, nn.Module] = {n: layer for n, layer in model.named_modules() if n}
    if name not in layers:
        raise ValueError(
            f"{what}'{name}' is not a layer of {type(model).__name__}; it has {[*layers]}"
        )
    return layers[name]


@cache
def announce(model: str, layer: str) -> None:
    """Log once in a process which output layer is used in a kind of model."""
    LOG.info("%s: its output layer is '%s'; name another with classifier=", model, layer)


def makes(logits: Any, produced: Any) -> bool:
    """Return whether `logits` come from a layer's output `produced`, and from no parameters beside.

    Functions without parameters may follow the layer (a softmax), and parameters with a single entry (a
    temperature). Needs the graph of a forward pass with gradients.
    """
    if logits is produced:
        return True
    if not isinstance(logits, Tensor) or not isinstance(produced, Tensor):
        return False
    if logits.untyped_storage().data_ptr() == produced.untyped_storage().data_ptr():  # a view
        return True
    layer, nodes, known, through_layer = produced.grad_fn, [logits.grad_fn], set(), False
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node is layer:
            through_layer = True
            continue
        if (parameter := getattr(node, "variable", None)) is not None and parameter.numel() > 1:
            return False
        nodes += [following for following, _ in node.next_functions]
    return through_layer
