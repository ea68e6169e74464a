"""What a part of a training keeps between rounds: for checkpoints, and to go back to after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar


class Snapshots:
    """Has attributes, named in `kept`, that rounds change."""

    kept: ClassVar[tuple[str, ...]]

    def snapshot(self) -> dict[str, Any]:
        """Return what it keeps, as plain values; later rounds do not change them."""
        return {name: copy(getattr(self, name)) for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        vars(self).update({name: state[name] for name in self.kept})
