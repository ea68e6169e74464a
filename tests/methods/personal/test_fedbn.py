"""FedBN and private entries: what stays, what never travels, and that it survives across rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import nn

from flwr_regs import (
    FedAvg,
    FedAvgClient,
    FedBN,
    FedBNClient,
    FedPer,
    FedPerClient,
    InProcessGrid,
    LocalBatchNorm,
    Private,
    client_app,
)
from flwr_regs.testing.problem import SerialisingGrid
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record
from tests.conftest import close, make_clients, make_model, run

BN = {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def model() -> nn.Module:
    return make_model(torch.float64, batch_norm=True)


class Tapped(SerialisingGrid):
    """Keeps the names of every array that is sent or answered, and the clients' states."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()
        self.blobs: list[RecordDict] = []

    def _note(self, content: RecordDict) -> None:
        self.blobs.append(content)
        for record in content.array_records.values():
            self.names |= set(record)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for m in messages:
            self._note(m.content)
        ids = list(super().push_messages(messages))
        for i in ids:
            if not self._replies[i].has_error():
                self._note(self._replies[i].content)
        return ids


def grid_of(client: Any, kind: Any = Tapped, n: int = 3, **kwargs: Any) -> Any:
    data = make_clients(n)

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return client(model(), mine, mine, device="cpu", **kwargs)

    return kind(client_app(client_fn), n)


def private_of(grid: Any, pid: int) -> dict[str, np.ndarray]:
    records = grid._contexts[1000 + pid].state.array_records
    (key,) = (k for k in records if k.endswith(keys.PRIVATE_KEY))
    return from_record(records[key])


def by_hand(rounds: int, n: int = 3) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """FedBN in plain loops (Alg. 1): two epochs a round, weights n_k / n, BatchNorm local."""
    data = make_clients(n)
    models = [model() for _ in data]
    shares = np.array([sum(len(y) for _, y in d) for d in data], dtype=np.float64)
    shares /= shares.sum()
    shared = {k: v.clone() for k, v in model().state_dict().items() if k not in BN}
    for _ in range(rounds):
        for m, batches in zip(models, data, strict=True):
            m.load_state_dict(shared, strict=False)
            m.train()
            opt = torch.optim.SGD(m.parameters(), lr=0.2)
            for _ in range(2):
                for x, y in batches:
                    opt.zero_grad()
                    nn.functional.cross_entropy(m(x), y).backward()
                    opt.step()
        ends = [m.state_dict() for m in models]
        shared = {k: sum(p * e[k] for p, e in zip(shares, ends, strict=True)) for k in shared}
    return shared, [{k: v for k, v in m.state_dict().items() if k in BN} for m in models]


def test_fedbn_equals_the_plain_loops_and_batch_norm_never_travels() -> None:
    grid = grid_of(FedBNClient)
    got = run(FedBN(seed=1), FedBNClient, rounds=4, model=model, grid=grid)
    shared, local = by_hand(4)
    close(got, {k: v.numpy() for k, v in shared.items()}, 1e-12)
    for pid in range(3):
        mine = private_of(grid, pid)
        assert mine.keys() == BN
        close(mine, {k: v.numpy() for k, v in local[pid].items()}, 1e-12)
    assert max(abs(local[0]["1.weight"] - local[1]["1.weight"])) > 1e-3
    assert grid.names == set(shared)  # in train and evaluate messages and replies alike


def test_batch_norm_that_is_averaged_is_another_method() -> None:
    a = run(FedBN(seed=1), FedBNClient, rounds=3, model=model)
    b = run(FedAvg(seed=1), FedAvgClient, rounds=3, model=model)
    assert max(abs(a[k] - b[k]).max() for k in a) > 1e-3


def test_clients_evaluate_with_their_own_batch_norm() -> None:
    strategy = FedBN(seed=1)
    grid = grid_of(FedBNClient)
    run(strategy, FedBNClient, rounds=3, model=model, grid=grid)
    shared, local = by_hand(3)
    for pid, batches in enumerate(make_clients(3)):
        m = model()
        m.load_state_dict({**shared, **local[pid]})
        m.eval()
        with torch.no_grad():
            losses = [float(nn.functional.cross_entropy(m(x), y)) for x, y in batches]
        told = strategy.history[-1]["evaluate"]["clients"][pid]["loss"]
        assert told == pytest.approx(np.mean(losses), abs=1e-12)


def test_a_client_that_lost_its_state_goes_on_with_its_own_model_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="flwr")

    class Forgetful(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self._contexts[1001].state = RecordDict()
            return super().push_messages(messages)

    strategy = FedBN(seed=1)
    run(strategy, FedBNClient, model=model, grid=grid_of(FedBNClient, Forgetful))
    assert not any(e["failures"] for e in strategy.history)
    assert [e["lost_private"] for e in strategy.history] == [[], [1], [1], [1]]
    assert caplog.text.count("clients [1] have lost their private entries") == 3
    run(strategy, FedBNClient, model=model, grid=grid_of(FedBNClient))
    assert [e["lost_private"] for e in strategy.history] == [[]] * 4


@pytest.mark.parametrize(
    ("strategy", "client", "build", "match"),
    [
        (FedBN(), FedBNClient, make_model, "found no BatchNorm layer"),
        (
            FedPer("head.*"),
            FedPerClient,
            make_model,
            r"'head.\*' matches none of the model's arrays",
        ),
        (FedPer("*"), FedPerClient, make_model, "initial_arrays is empty"),
    ],
)
def test_nothing_to_keep_and_nothing_to_share_are_refused(
    strategy: Any, client: Any, build: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        run(strategy, client, model=build)


def test_wrong_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="patterns must be a string of names"):
        Private("a,,b")
    assert Private("0.*, 3.bias").private(["0.weight", "3.bias", "3.weight"]) == {
        "0.weight",
        "3.bias",
    }


def test_batch_norm_inside_blocks_is_found() -> None:
    names = [
        "conv.weight",
        "block.bn.weight",
        "block.bn.running_mean",
        "block.bn2.weight",
        "running_mean",
    ]
    assert LocalBatchNorm().private(names[:4]) == {"block.bn.weight", "block.bn.running_mean"}
    assert "running_mean" in LocalBatchNorm().private(names)
