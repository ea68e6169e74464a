"""The libraries that the command can drive: their packages, their driver, and their methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .behaviours import METHODS


@dataclass(frozen=True)
class Source:
    """A public repository at one commit, and the licence that it states. It is not copied here."""

    repository: str
    commit: str
    licence: str


@dataclass(frozen=True)
class Library:
    """One library; `environment` are variables that its driver needs.

    A library that is no package has a `source`; its driver finds the folder in CONFORMITY_SOURCE.
    """

    name: str
    packages: tuple[str, ...]
    methods: tuple[str, ...]
    note: str
    environment: Mapping[str, str] = field(default_factory=dict)
    source: Source | None = None

    @property
    def driver(self) -> str:
        """The driver, as `host.load` takes it."""
        return f"{Path(__file__).with_name('drivers') / f'drive_{self.name}.py'}:drive"


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
        Library(
            "flower",
            ("flwr==1.41.0", "numpy==2.4.6"),
            ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"),
            "its strategies; clients are the kit's",
            {"FLWR_TELEMETRY_ENABLED": "0"},
        ),
        Library(
            "rfedavg",
            ("torch==2.13.0", "numpy==2.4.6", "pyyaml==6.0.3", "tqdm==4.70.1"),
            ("FedProx", "SCAFFOLD", "RFedAvg", "RFedAvgPlus", "QFedAvg"),
            "the authors' code; loaders do not shuffle",
            source=Source(
                "https://github.com/BUAA-BDA/rfedavg",
                "5c54c77b16c2fdb2f37cefd132993d22bc035167",
                "none stated",
            ),
        ),
        Library(
            "flsimulator",
            ("torch==2.13.0", "numpy==2.4.6"),
            ("FedSAM", "FedGAMMA", "FedSpeed", "FedSMOO", "FedInit"),
            "the authors' code of FedSpeed, FedSMOO and FedInit; loaders do not shuffle",
            source=Source(
                "https://github.com/woodenchild95/FL-Simulator",
                "502bec65570165d1ff1a6ce76375297145c734e3",
                "none stated",
            ),
        ),
        Library(
            "fedlesam",
            ("torch==2.13.0", "numpy==2.4.6"),
            ("FedLESAM",),
            "the authors' optimiser; the loop around it is the driver's",
            source=Source(
                "https://github.com/MediaBrain-SJTU/FedLESAM",
                "8a9fe9078951b50e0bb3bd2a42bff5e93f260e4c",
                "none stated",
            ),
        ),
    )
}
