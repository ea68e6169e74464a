"""The parameters that a client holds still: the server sends only their digest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import nn

from flwr_regs.chain import Chain
from flwr_regs.client.memory.state import to_numpy
from flwr_regs.client.train.trainable import Every, every_parameter, freezes, trained_parameters
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, check_names, unpack
from flwr_regs.wire.delta import OutOfSync
from flwr_regs.wire.frozen import frozen_digest, said


def held_still(
    model: nn.Module, term: Chain, private: Collection[str], every: Every | None = None
) -> NDArrays:
    """Return the values of the parameters that this client does not train, also under tied names.

    Private ones are left out: they are this client's own.
    """
    every = every_parameter(model) if every is None else every
    if not freezes(term) and all(p.requires_grad for _, p in every):
        return {}
    trained = {id(p) for p in trained_parameters(model, term, every).values()}
    still = [n for n, p in every if id(p) not in trained and n not in private]
    state = model.state_dict()
    return {n: to_numpy(state[n]) for n in still}


def frozen_part(
    own: NDArrays, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> NDArrays:
    """Return the frozen parameters to load beside the `arrays` that came; none if `own` ones are right.

    Raises
    ------
    OutOfSync
        The server asks for them, or names another digest than that of these and of those that it once sent.
    ProtocolError
        Only some of them came, or the server's are other parameters than this client's.
    """
    if config.get(keys.ASK_KEY):
        raise OutOfSync(said(own))
    expected = config.get(keys.FROZEN_DIGEST_KEY)
    if expected is None:
        missing = sorted(own.keys() - arrays.keys())
        if missing and len(missing) < len(own):
            raise ProtocolError(
                f"the global model lacks {missing} of the parameters that this client does not train, but "
                "not the others: give initial_arrays all of them, or none"
            )
        return {}
    if frozen_digest(own) == expected:
        return {}
    kept = unpack(config[keys.FROZEN_KEPT_KEY]) if keys.FROZEN_KEPT_KEY in config else {}
    if frozen_digest(kept) != expected:
        raise OutOfSync(said(own))
    check_names(kept, own, "the frozen parameters of the others")
    for name, a in kept.items():
        if a.shape != own[name].shape:
            raise ProtocolError(
                f"the frozen parameter '{name}' has shape {a.shape}, expected {own[name].shape}"
            )
    return kept
