"""Who is there: waiting, leaving, coming back, and nodes that do not reply."""

import logging
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flwr_regs.flower.node import INT64
from flwr_regs.server.exchange.network import Replies, Request
from flwr_regs.server.population import population
from flwr_regs.server.population.population import Population, PopulationError
from flwr_regs.wire.parcel import Parcel
from tests.conftest import Log
from tests.server.network import NumpyNetwork


def network_of(
    n: int, claims: dict[int, int] | None = None, total: int | None = None
) -> NumpyNetwork:
    """`n` nodes; node k serves partition `claims[k]`, by default k; `mute` ones fail or keep silent."""

    def client(k: int, request: Request, parcel: Parcel) -> Parcel | str | None:
        if k in mute:
            return mute[k]
        config = {"partition-id": (claims or {}).get(k, k)}
        return Parcel(config=config | ({"num-partitions": total} if total else {}))

    mute: dict[int, str | None] = {}
    network = NumpyNetwork(n, client)
    network.mute = mute  # type: ignore[attr-defined]
    return network


@pytest.mark.parametrize("silence", ["it is starting", None], ids=["error", "silence"])
def test_a_node_that_returns_and_is_silent_at_first_is_asked_again(silence: str | None) -> None:
    """With a new node id, as a restarted SuperNode; the run went on without it, or ended for want of it."""
    network = network_of(4, {3: 1})
    network.here = {100, 101, 102}
    who = Population(3, 3, 10.0)
    assert who.refresh(network) == [0, 1, 2]
    network.here = {100, 102, 103}
    network.mute[3] = silence  # type: ignore[attr-defined]
    asks = len(network.asked)

    def wake(kind: str, pid: int) -> None:
        if len(network.asked) > asks + 1:
            network.mute.clear()  # type: ignore[attr-defined]

    client, network._client = network._client, lambda k, r, p: (wake(r.kind, k), client(k, r, p))[1]
    began = time.monotonic()
    assert who.refresh(network) == [0, 1, 2]
    assert time.monotonic() - began < 5
    assert who.request("train", {1: Parcel()}).nodes == {1: 103}


def test_a_mute_node_is_not_asked_in_every_round() -> None:
    network = network_of(3)
    who = Population(2, 2, 1.0)
    network.here = {100, 101}
    who.refresh(network)
    network.here.add(102)
    network.mute[2] = None  # type: ignore[attr-defined]
    for _ in range(50):
        assert who.refresh(network) == [0, 1]
    assert network.asked.count(("query.flwr_regs", 102)) <= 2


def test_the_wait_ends_with_those_who_came_and_the_others_are_named(log: Log) -> None:
    who, network = Population(2, None, 0.2), network_of(3, total=5)
    assert who.refresh(network) == [0, 1, 2]
    (said,) = log(level=logging.WARNING)
    assert said == "training starts without partitions [3, 4] after 0 s"
    assert who.refresh(network) == [0, 1, 2]  # and does not wait again
    assert not log(level=logging.WARNING)
    resumed = Population(2, None, 300.0)
    resumed.restore(who.snapshot())  # it waits for those who were there
    assert resumed.refresh(network_of(3, total=5)) == [0, 1, 2]
    assert log("training starts without partitions [3, 4] after 0 s")
    odd = Population(2, 5, 0.2)
    assert odd.refresh(network_of(3, {0: 70, 1: 80, 2: 90})) == [70, 80, 90]
    assert log("training starts without 2 of 5 clients")


def test_nodes_that_do_not_reply_take_no_longer_than_the_wait_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(request: Request, timeout: float) -> Replies:
        clock.now += timeout
        return inner(request, timeout)

    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(population, "time", clock)
    network = network_of(3)
    network.mute.update({1: None, 2: None})  # type: ignore[attr-defined]
    inner, network.ask = network.ask, ask  # type: ignore[assignment, method-assign]
    sentence = (
        r"1 of 3 clients came within 100 s \(partitions \[0\]\); "
        "2 connected without a report .*wait_timeout"
    )
    with pytest.raises(PopulationError, match=sentence):
        Population(2, 3, 100.0).refresh(network)
    assert 100 < clock.now < 103


@pytest.mark.parametrize("odd", [[1], -1, math.nan, True], ids=str)
@pytest.mark.parametrize("key", ["partition-id", "num-partitions"])
def test_a_node_that_reports_nonsense_is_refused_by_name_not_waited_for(key: str, odd: Any) -> None:
    network = network_of(3, total=3)
    inner = network._client

    def client(k: int, request: Request, parcel: Parcel) -> Any:
        reply = inner(k, request, parcel)
        assert isinstance(reply, Parcel)
        return replace(reply, config={**reply.config, key: odd}) if k == 1 else reply

    network._client = client
    who = Population(2, None, 30.0)
    began = time.monotonic()
    assert who.refresh(network) == [0, 2]
    assert time.monotonic() - began < 5
    assert list(who.refused) == [101]
    assert f"node 101 reports {'the ' * (key == 'partition-id')}{key}" in who.refused[101]
    assert len(who.refused[101]) < 500


def test_a_node_that_cannot_say_who_it_is_is_left_out() -> None:
    network = network_of(3)
    network.mute[1] = "unknown message type"  # type: ignore[attr-defined]
    who = Population(2, 3, 1.0)
    assert who.refresh(network) == [0, 2]
    assert "no report of its partition" in who.refused[101]
    assert "unknown message type" in who.refused[101]
    network.mute.clear()  # type: ignore[attr-defined]
    time.sleep(0.3)
    assert who.refresh(network) == [0, 1, 2]
    assert not who.refused


def test_a_node_without_a_partition_gets_a_number_that_messages_can_carry() -> None:
    network = NumpyNetwork(1, lambda *_: Parcel())
    network.here = {node := 2**64 - 3}
    who = Population(1, 1, 1.0)
    (pid,) = who.refresh(network)
    assert INT64.fits(pid)
    assert who.request("train", {pid: Parcel()}).nodes == {pid: node}


def test_of_two_nodes_with_one_partition_the_second_is_left_out() -> None:
    who, network = Population(2, 3, 30.0), network_of(3, {1: 0})
    assert who.refresh(network) == [0, 2]
    assert "nodes 100 and 101 both serve partition-id 0" in who.refused[101]
    network.here.discard(100)  # it restarts: its new node was there before the old one had left
    time.sleep(0.3)
    assert who.refresh(network) == [0, 2]
    assert not who.refused
    assert who.request("train", {0: Parcel()}).nodes == {0: 101}


def test_too_few_that_can_take_part_end_the_run_at_once_with_the_reasons() -> None:
    network = network_of(3)
    network.mute.update({0: "no such type", 1: "no such type", 2: "no such kind"})  # type: ignore[attr-defined]
    began = time.monotonic()
    sentence = r"0 of 2 clients can(?s:.*)2 nodes \(ids 100-101\).*such type(?s:.*)such kind"
    with pytest.raises(PopulationError, match=sentence):
        Population(2, 3, 30.0).refresh(network)
    assert time.monotonic() - began < 5


def test_a_node_that_comes_back_as_another_partition_has_no_second_voice() -> None:
    claims: dict[int, int] = {}
    network = network_of(3, claims)
    who = Population(2, 3, 1.0)
    assert who.refresh(network) == [0, 1, 2]
    for new in (7, 8):
        network.here.remove(101)
        assert who.refresh(network) == [0, 2]
        claims[1] = new
        network.here.add(101)
        assert who.refresh(network) == [0, 2, new]
    assert who.size == 3
