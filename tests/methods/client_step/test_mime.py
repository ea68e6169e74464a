"""Mime and MimeLite beyond the laws: who counts in c, and names of gradients."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import flwr_regs as fr
from flwr_regs.testing.problem import app_of, start_weights, train
from flwr_regs.wire import keys
from tests.conftest import Tampered, close, make_clients, to_numpy
from tests.oracles.client_step.mime import mime


@pytest.mark.parametrize("where", [keys.PROBE, "train"])
def test_a_client_that_drops_out_between_the_exchanges_stays_in_c(where: str) -> None:
    """One that drops out before the first does not."""

    def fail(kind: str, pid: int, message: Message, reply: Message) -> Message | str:
        lost = (kind, pid) == (where, 1) and message.content["config"]["server-round"] in (2, 3)
        return "gone" if lost else reply

    grid = Tampered(app_of(fr.MimeClient, make_clients(5)), 5, fail)
    strategy = fr.Mime(0.7, seed=3, fraction_evaluate=0.0)
    models = train(strategy, fr.MimeClient, rounds=4, grid=grid)
    replies = [e["replies"] for e in strategy.history]
    assert replies == [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    who: dict[str, Any] = {"unused": [set(), {1}, {1}, set()]}
    if where == keys.PROBE:
        who = {"cohorts": replies}
    plan = (start_weights(), to_numpy(make_clients(5)), 4, lambda t: 0.2, 2)
    close(models[-1], mime(*plan, beta=0.7, **who)[-1], 1e-10)


def test_clients_with_gradients_of_other_names_are_named() -> None:
    arrays = {n: a.astype(np.float32) for n, a in start_weights().items()}
    fewer = {n: a for n, a in arrays.items() if n != "2.bias"}
    refused = fr.CorrectedMomentum(0.5).agree({0: arrays, 1: fewer, 2: arrays})
    assert list(refused) == [1]
    assert "but most clients' ['0.bias', '0.weight', '2.bias'" in refused[1]


def test_c_is_a_mean_where_the_round_has_no_weights() -> None:
    probes = {k: {"w": np.array([float(k), -float(k)])} for k in (0, 1, 7)}
    plain = fr.CorrectedMomentum(0.5).answer(probes)
    np.testing.assert_allclose(plain[7]["c.w"], [8 / 3, -8 / 3])
