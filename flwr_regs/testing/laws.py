"""The laws of a federated method, in the order in which they are checked."""

from __future__ import annotations

from flwr_regs.testing import client_rounds as rounds
from flwr_regs.testing import whole_runs as runs

LAWS = {
    law.name: law
    for law in (
        *(runs.neutral, runs.moves, runs.oracle),
        *(rounds.pure, rounds.runners, rounds.stacked),
        *(runs.state, runs.repeated, runs.downlinks, rounds.unused, runs.order, runs.identity),
        *(runs.fixed_point, rounds.incomplete),
    )
}
