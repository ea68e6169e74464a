"""The models by name, as architectures.toml lists them. Nothing here loads torch before one is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_regs.experiments.extras import table_beside


@dataclass(frozen=True)
class Net:
    """A kind of model; architectures.toml says what each field is."""

    name: str
    family: str
    meaning: str
    source: str = "–"
    smallest: int = 0
    example: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    layers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> bool:
        """Whether its inputs are sequences of integers."""
        return self.family == "recurrent"

    def make(self, *size: Any) -> Any:
        """Return its body for the shape of an input; with `words`, for how many integers there are."""
        from flwr_regs.experiments.models import layers

        make = getattr(layers, self.name.replace("-", "_"), None)
        return make(*size) if make else layers.stacked(size[0], **self.layers)


NETS = {name: Net(name, **row) for name, row in table_beside(__file__).items()}
MODELS = {
    "auto": "cnn for images of at least 16 x 16, else mlp; cnn-bn for data sets named -domains; "
    "char-lstm for integers; a point for quadratics",
    **{name: f"{net.meaning} ({net.source})".removesuffix(" (–)") for name, net in NETS.items()},
}
"""Name -> its meaning in one line. Any other model is a reference, such as ``mine.py:Net``."""


def chosen(dataset: str, kind: str, examples: Any) -> Net | None:
    """Return the model of a name, or of ``auto``, for a data set's inputs; None is the point of quadratics.

    Raises ValueError if it does not take inputs of this shape and type.
    """
    shape, integers = examples.shape[1:], examples.dtype.kind in "iu"
    side = min(shape[1:]) if len(shape) == 3 else 0
    if kind == "auto":
        if dataset.partition("(")[0] == "quadratics":
            return None
        kind = "cnn" if side >= 16 else "char-lstm" if integers and len(shape) == 1 else "mlp"
        kind = "cnn-bn" if dataset.endswith("-domains") else kind
    net = NETS[kind]
    hint, wanted = "set model to another, or to your own, such as mine.py:Net", ""
    if side < net.smallest:
        wanted = f"images of shape (channels, height, width), of at least {net.smallest} each way"
    elif not shape:
        wanted, hint = "inputs of at least one dimension", f"give them as x[:, None], or {hint}"
    elif net.words and not (integers and len(shape) == 1):
        wanted = "sequences of integers, shape (length,)"
    elif integers and not net.words:
        wanted, hint = "inputs of floats", f"convert them, as in x / 255, or {hint}"
    if wanted:
        given = f"an input of dataset '{dataset}' has {examples.dtype} and the shape {shape}"
        raise ValueError(f"model '{kind}' needs {wanted}, but {given}: {hint}")
    return net
