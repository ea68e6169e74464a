"""Find the output layer of a model, or take the one that the user names."""

from __future__ import annotations

from torch import nn


def find_classifier(model: nn.Module, name: str | None = None) -> str:
    """Return the name of the output layer: `name`, or else the ``nn.Linear`` that was registered last.

    Raises ValueError if there is no such layer; the message says how to name one.
    """
    layers: dict[str, nn.Module] = dict(model.named_modules())
    if name is not None:
        if name not in layers or name == "":
            raise ValueError(
                f"classifier '{name}' is not a layer of {type(model).__name__}; "
                f"it has {[n for n in layers if n]}"
            )
        return name
    linear = [n for n, layer in layers.items() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to use as its output layer; name one with "
            f"classifier=..., out of {[n for n in layers if n]}"
        )
    return linear[-1]
