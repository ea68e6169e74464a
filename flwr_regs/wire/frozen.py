"""Parameters that no client trains: clients hold them, and only their digest travels."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError, digest
from flwr_regs.wire.text import LONGEST_NAME, quoted, read_json


def frozen_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the digest of frozen parameters; "" without any.

    Half precision counts as float32, so that a model in half precision equals the server's in float32.
    """
    if not arrays:
        return ""
    return digest({n: a.astype(np.float32) if a.dtype == "f2" else a for n, a in arrays.items()})


def said(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return what a client says of the frozen parameters that it holds: their names and digest."""
    return {
        keys.FROZEN_KEY: json.dumps(sorted(arrays)),
        keys.FROZEN_DIGEST_KEY: frozen_digest(arrays),
    }


def read_said(
    config: Mapping[str, Any], trained: Collection[str] = ()
) -> tuple[frozenset[str], str]:
    """Return (names, digest) of what a client says; none without an entry.

    Raises ProtocolError unless they are names, none of them `trained`, and a text.
    """
    if keys.FROZEN_KEY not in config and keys.FROZEN_DIGEST_KEY not in config:
        return frozenset(), ""
    try:
        names: Any = read_json(config.get(keys.FROZEN_KEY, "[]"))
    except ValueError:
        names = None
    own = config.get(keys.FROZEN_DIGEST_KEY, "")
    if (
        not isinstance(names, list)
        or not all(isinstance(n, str) for n in names)
        or not isinstance(own, str)
        or len(own) > LONGEST_NAME
        or set(names) & set(trained)
    ):
        what = quoted(config.get(keys.FROZEN_KEY))
        raise ProtocolError(
            f"'{keys.FROZEN_KEY}' must be a JSON list of parameters that are not trained, but is {what}"
        )
    return frozenset(names), own
