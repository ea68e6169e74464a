"""A term's hyper-parameters, as they travel from the strategy to the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

Self = TypeVar("Self", bound="HyperParameters")


@dataclass(frozen=True)
class HyperParameters:
    """A frozen dataclass whose fields, int, float, bool or str, go into each round's config."""

    name: ClassVar[str]
    server_only: ClassVar[bool] = False
    """True if clients need not know of it: it has no client hook and nothing of it travels."""

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``; one that is None stays at home."""
        pairs = {f"{self.name}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {} if self.server_only else {k: v for k, v in pairs.items() if v is not None}

    @classmethod
    def from_config(cls: type[Self], config: Mapping[str, Any]) -> Self:
        """Build the term from a round's config; raise KeyError naming a missing key."""
        keys = {f.name: f"{cls.name}.{f.name}" for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is None}
        if missing := [key for f, key in keys.items() if key not in config and f not in optional]:
            raise KeyError(f"the round's config lacks {missing}, which term '{cls.name}' needs")
        return cls(**{f: config[key] for f, key in keys.items() if key in config})
