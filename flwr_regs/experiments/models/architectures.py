"""The models by name, as architectures.toml lists them. Nothing here loads torch before one is made."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    @property
    def words(self) -> bool:
        """Whether its inputs are sequences of integers."""
        return self.family == "recurrent"

    def make(self, *size: Any) -> Any:
        """Return its body for the shape of an input; with `words`, for how many integers there are."""
        family = importlib.import_module(f"{__package__}.{self.family}")
        return getattr(family, self.name.replace("-", "_"))(*size)


_LIST = Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")
NETS = {name: Net(name, **row) for name, row in tomllib.loads(_LIST).items()}
MODELS = {
    "auto": "cnn for images of at least 16 x 16, else mlp; cnn-bn for data sets named -domains; "
    "char-lstm for integers; a point for quadratics",
    **{name: f"{net.meaning} ({net.source})".removesuffix(" (–)") for name, net in NETS.items()},
}
"""Name -> its meaning in one line. Any other model is a reference, such as ``mine.py:Net``."""
