"""EFL beyond the laws: what ST keeps, and coded steps (equal bits, catching up)."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import nn

import flwr_regs as fr
from flwr_regs.methods.parts.ternary import sparse_ternary
from flwr_regs.testing.problem import SerialisingGrid, app_of, train
from flwr_regs.wire.records import from_record
from tests.conftest import Attended, close, drawn, make_clients


def test_st_keeps_exactly_k_and_of_equal_ones_the_first() -> None:
    update = {"a": torch.tensor([[1.0, -3.0], [3.0, 0.5]]), "b": torch.tensor([-3.0, 2.0])}
    got = sparse_ternary(update, 0.34)  # k = 2 of 6
    torch.testing.assert_close(got["a"], torch.tensor([[0.0, -3.0], [3.0, 0.0]]))
    torch.testing.assert_close(got["b"], torch.zeros(2))
    got = sparse_ternary(update, 0.67)  # k = 4: mean magnitude (3 + 3 + 3 + 2) / 4
    torch.testing.assert_close(got["a"], torch.tensor([[0.0, -2.75], [2.75, 0.0]]))
    torch.testing.assert_close(got["b"], torch.tensor([-2.75, 2.75]))
    one = sparse_ternary(update, 1e-9)  # k = max(…, 1)
    assert [int((t != 0).sum()) for t in one.values()] == [1, 0]
    some = sparse_ternary({"a": torch.arange(100.0)}, 0.29)["a"]  # 0.29 * 100 is just below 29
    assert int((some != 0).sum()) == 29
    lost = sparse_ternary({**update, "c": torch.tensor([torch.nan])}, 0.3)  # hides in no residual
    assert all(t.isnan().all() for t in lost.values())


# coded steps


def wide_model() -> nn.Module:
    with drawn():
        return nn.Sequential(nn.Linear(4, 400), nn.BatchNorm1d(400), nn.Tanh(), nn.Linear(400, 3))


def wide_run(
    strategy: Any, client: Any, rounds: int, n: int, kind: Any = SerialisingGrid
) -> tuple[list[Any], Any]:
    """The models after each round, and the grid."""
    grid = kind(app_of(client, make_clients(n, torch.float32), wide_model), n)
    return train(strategy, client, rounds=rounds, model=wide_model, grid=grid), grid


class Noting(SerialisingGrid):
    """Notes the models that clients keep, of real serialised messages."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        if messages[0].metadata.message_type == "train":
            states = [self._contexts[m.metadata.dst_node_id].state for m in messages]
            records = [item for state in states for item in state.array_records.items()]
            kept = [from_record(record) for key, record in records if key.endswith(".model")]
            self.kept = [*getattr(self, "kept", []), kept]
        return ids


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_server_and_in_sync_clients_hold_equal_bits(fraction: float) -> None:
    some = {"fraction_train": fraction, "min_train_nodes": 1, "fraction_evaluate": 0.0}
    strategy = fr.EFL(0.0, 0.02, 0.02, seed=4, **some)
    models, grid = wide_run(strategy, fr.EFLClient, 12, 5, Noting)
    first = {n: a.numpy() for n, a in wide_model().state_dict().items()}
    for model, kept in zip([first, *models[:-1]], grid.kept, strict=True):
        assert kept
        for own in kept:
            close(own, model, 0.0)
    whole = max(strategy.history[0]["bytes_down"].values())
    missed, last = 0, dict[int, int]()
    for entry in strategy.history:
        for pid, size in entry["bytes_down"].items():
            if pid not in last:
                assert size > 0.99 * whole
            else:  # the missed steps; the batch norm's buffers are most of it
                assert size < 0.5 * whole
                missed += entry["round"] - last[pid] > 1
            last[pid] = entry["round"]
    assert (missed > 0) == (fraction < 1)


def test_a_client_that_missed_too_much_gets_the_model() -> None:
    """At density 1 a step costs a bit for each parameter: 32 of them cost as much as the model."""
    rare = partial(Attended, there=lambda pid, sent: pid or not 1 < sent < 41)  # from 2 to 40
    strategy = fr.EFL(0.0, 1.0, 1.0, seed=4, fraction_evaluate=0.0, min_available_nodes=1)
    wide_run(strategy, fr.EFLClient, 42, 2, rare)
    whole = strategy.history[0]["bytes_down"][0]
    assert [0 in e["cohort"] for e in strategy.history].count(True) == 3
    assert strategy.history[40]["bytes_down"][0] >= whole
    assert strategy.history[41]["bytes_down"][0] < 0.6 * whole
    # the log of steps is never longer than the model
    steps = strategy.training.model.coded_steps
    assert sum(map(len, steps.values())) <= whole
    assert len(steps) < 41


def test_a_probing_method_compresses_the_model_of_its_probe() -> None:
    terms = [fr.LeaveOneOutMean(0.1), fr.Elastic(0.1), fr.SparseTernary(0.05, 0.05)]
    strategy = fr.RegStrategy(terms, seed=1, fraction_evaluate=0.0)
    wide_run(strategy, partial(fr.RegClient, terms=[type(t) for t in terms]), 4, 3)
    first, last = strategy.history[0], strategy.history[-1]
    assert not any(e["failures"] for e in strategy.history)
    assert last["bytes_probe_down"][0] < 0.5 * first["bytes_probe_down"][0]
