"""What a term declares: how it composes, what it needs, and its hyper-parameters as they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Declared:
    """A frozen dataclass whose fields, int, float, bool or str, go into each round's config."""

    name: ClassVar[str]
    owns_step: ClassVar[bool] = False
    """True if `update` replaces the averaged delta by a server optimiser's step."""
    keeps_delta: ClassVar[bool] = False
    """True if `update` returns `delta` as it came; if not, it stands right of a step owner."""
    compresses: ClassVar[bool] = False
    """True if `finish` or `release` makes the update lossy; such a term comes last."""
    needs_start_output: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of terms that are another version of this one."""
    probes: ClassVar[bool] = False
    """True if clients answer a question at ``w_t`` before anyone trains."""
    server_only: ClassVar[bool] = False
    """True if clients need not know of it: it has no client hook and nothing of it travels."""

    @property
    def uploads(self) -> bool:
        """Whether clients send anything beside their update: what clipping and noise do not cover."""
        return self.probes

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``; one that is None stays at home."""
        pairs = {f"{self.name}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {} if self.server_only else {k: v for k, v in pairs.items() if v is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the term from a round's config; raise KeyError naming a missing key."""
        keys = {f.name: f"{cls.name}.{f.name}" for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is None}
        if missing := [key for f, key in keys.items() if key not in config and f not in optional]:
            raise KeyError(f"the round's config lacks {missing}, which term '{cls.name}' needs")
        return cls(**{f: config[key] for f, key in keys.items() if key in config})
