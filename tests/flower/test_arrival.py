"""Replies that come one by one are read while others are awaited; what a run makes of them is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

import flwr_regs as fr
from flwr_regs import InProcessGrid, SparseTernary
from flwr_regs.server.exchange.replies import Reader
from flwr_regs.testing.problem import app_of
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record
from tests.conftest import close, make_clients, run

TIMED = ("seconds",)


class Dripping(InProcessGrid):
    """Replies come one at a time, the last first; client 1's holds NaN."""

    replies_at_once = False
    spoils = True

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(list(message_ids)[-1:]))
        for reply in replies if self.spoils else ():
            if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1001:
                spoil(reply.content)
        return replies


class AtOnce(Dripping):
    replies_at_once = True

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [r for i in message_ids for r in super(AtOnce, self).pull_messages([i])]


def spoil(content: RecordDict, value: float = np.nan) -> None:
    record = content.array_records["arrays"]
    if not record:  # a coded update
        content.config_records["config"][keys.UPDATE_KEY] = b"damaged"
        return
    name = next(iter(record))
    array = from_record(record)[name]
    array[0] = value
    record[name] = Array(array)


METHODS: dict[str, tuple[Any, Any]] = {
    "FedFOR": (lambda **k: fr.FedFOR(alpha=0.3, **k), fr.FedFORClient),
    "SCAFFOLD": (fr.SCAFFOLD, fr.SCAFFOLDClient),
    "ternary": (
        lambda **k: fr.RegStrategy([SparseTernary(0.3)], **k),
        lambda *a, **k: fr.RegClient(*a, terms=[SparseTernary], **k),
    ),
}


def read_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note each reply that the reader looks at, by partition id."""
    seen: list[int] = []
    read = Reader.read

    def noted(self: Reader, pid: int, *rest: Any) -> Any:
        seen.append(pid)
        return read(self, pid, *rest)

    monkeypatch.setattr(Reader, "read", noted)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_arrival_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, client = METHODS[method]
    found = []
    for kind in (AtOnce, Dripping):
        seen = read_counts(monkeypatch)
        strategy = make(seed=3, fraction_train=1.0)
        grid = kind(app_of(client, make_clients()), len(make_clients()))
        model = run(strategy, client, rounds=3, grid=grid)
        entries = [{k: v for k, v in e.items() if k not in TIMED} for e in strategy.history]
        found.append((model, entries))
        asked = sum(len(e["bytes_up"]) for e in strategy.history)
        spoilt = sum(1 in e["failures"] for e in strategy.history)
        # one that cannot be used is read twice, unless it comes last
        assert asked <= len(seen) <= asked + (spoilt if kind is Dripping else 0)
        monkeypatch.undo()
    (at_once, first), (dripping, second) = found
    assert first == second
    assert any(1 in e["failures"] for e in first)
    assert all(
        list(a["bytes_up"]) == list(b["bytes_up"]) for a, b in zip(first, second, strict=True)
    )
    close(at_once, dripping, 0.0)


def test_a_reply_that_is_changed_after_it_came_is_read_again() -> None:
    class Changing(fr.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            for reply in replies:
                if reply.metadata.src_node_id == 1001:
                    spoil(reply.content, 5.0)
                    reply.content["metrics"] = MetricRecord({"num-examples": 1000})
            return super().aggregate_train(server_round, replies)

    results = []
    for kind in (AtOnce, Dripping):
        grid = kind(app_of(fr.FedAvgClient, make_clients()), len(make_clients()))
        grid.spoils = False
        strategy = Changing(seed=3)
        run(strategy, fr.FedAvgClient, rounds=2, grid=grid)
        results.append(from_record(strategy.arrays))
    plain = fr.FedAvg(seed=3)
    run(plain, fr.FedAvgClient, rounds=2)
    close(results[0], results[1], 0.0)
    name = next(iter(results[0]))
    assert not np.array_equal(results[0][name], from_record(plain.arrays)[name])
    assert isinstance(strategy.arrays, ArrayRecord)
