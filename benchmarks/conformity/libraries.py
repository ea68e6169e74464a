"""The libraries that the command can drive: their packages, their driver, and their methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .behaviours import METHODS


@dataclass(frozen=True)
class Library:
    """One library; `environment` are variables that its driver needs."""

    name: str
    packages: tuple[str, ...]
    methods: tuple[str, ...]
    note: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver(self) -> str:
        """The driver, as `host.load` takes it."""
        return f"{Path(__file__).with_name(f'drive_{self.name}.py')}:drive"


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "pfl",
            ("pfl==0.6.0", "torch==2.13.0", "numpy==2.4.6"),
            METHODS[:4],
            "with torch; client states in memory",
            {"PFL_PYTORCH_DEVICE": "cpu"},
        ),
        Library(
            "fedjax",
            (
                "fedjax==0.0.17",
                "jax==0.4.25",  # the newest that has what FedJAX calls
                "jaxlib==0.4.25",
                "dm-haiku==0.0.11",
                "optax==0.1.9",
                "chex==0.1.85",
                "scipy==1.12.0",
                "numpy==1.26.4",
            ),
            METHODS[:2],
            "has no SCAFFOLD",
            {"JAX_PLATFORMS": "cpu"},
        ),
    )
}
