"""Client state is a transaction: a slot counts if the server used the round's reply."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_regs import (
    ClientContext,
    FedFOR,
    FedFORClient,
    InProcessGrid,
    Private,
    RegClient,
    RegStrategy,
    Term,
    client_app,
)
from flwr_regs.abilities import Compresses, Folds, Personalises, Probes, TakesBack
from flwr_regs.chain import chain
from flwr_regs.client.memory.state import ClientState
from flwr_regs.testing.problem import RepeatingGrid
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients, make_model, run

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Count(Term):
    """Counts the rounds of a client, and uploads the count before the round."""

    name: ClassVar[str] = "count"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        before = ctx.client.get("n", torch.zeros(()))
        return delta, {"n": before}, {"n": before + 1}

    def update(self, server: Any, delta: Arrays, uploads: Any, ctx: Any) -> Any:
        return {str(pid): u["n"] for pid, u in uploads.items()}, delta


@dataclass(frozen=True)
class CountAlways(Count):
    keeps: ClassVar[str] = "always"


@dataclass(frozen=True)
class Return(Count, TakesBack):
    """Adds what was sent and not used to its slot."""

    name: ClassVar[str] = "return"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        before = ctx.client.get("n", torch.zeros((), dtype=torch.float64))
        return delta, {"n": before}, {"n": before + 100}

    def unused(self, before: Any, after: Any, sent: Arrays) -> Any:
        return {"n": after["n"] - 100 + sum(s.sum() for s in sent.values())}


@dataclass(frozen=True)
class Code(Term, Compresses):
    """Sends updates as plain doubles, in a code of its own."""

    name: ClassVar[str] = "code"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return {n: 2 * d for n, d in delta.items()}, {}, {}

    def encode(self, update: Any) -> bytes:
        return b"".join(a.astype("<f8").tobytes() for a in update.values())

    def decode(self, data: bytes, like: Any) -> Any:
        flat, out = torch.frombuffer(bytearray(data), dtype=torch.float64), {}
        for n, a in like.items():
            out[n], flat = flat[: a.size].reshape(a.shape).numpy(), flat[a.size :]
        return out


DROPPED = [{}, {1: 1}, {1: 2}, {}]  # client 1 is incomplete, and dropped, in rounds 2 and 3


def counts(term: Term, seen: list[dict[str, Any]]) -> RegStrategy:
    """Run four rounds with `DROPPED`; note what the server holds after each."""
    strategy = RegStrategy([term], seed=3, incomplete="drop", fraction_evaluate=0.0)
    kinds = {"terms": [type(term)]}
    grow = budgeted(RegClient, DROPPED)
    train = strategy.aggregate_train

    def watched(number: int, replies: Any) -> Any:
        result = train(number, replies)
        seen.append(dict(strategy.training.model.server[term.name]))
        return result

    strategy.aggregate_train = watched  # type: ignore[method-assign]
    run(strategy, grow, rounds=4, **kinds)
    return strategy


@pytest.mark.parametrize(
    ("kind", "last"), [(Count, 1), (CountAlways, 3)], ids=["if-used", "always"]
)
def test_a_round_that_was_not_used_has_not_been(kind: Any, last: int) -> None:
    seen: list[dict[str, Any]] = []
    strategy = counts(kind(), seen)
    assert [e["replies"] for e in strategy.history] == [
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]
    assert [float(s["0"]) for s in seen] == [0, 1, 2, 3]
    assert float(seen[0]["1"]) == 0
    assert float(seen[3]["1"]) == last  # one used round before, of three


@pytest.mark.parametrize("coded", [False, True])
def test_an_update_that_was_not_used_is_taken_back(coded: bool) -> None:
    """What `unused` gets is what was sent: the update of the last term, whatever its code."""
    data = make_clients()
    terms: list[Term] = [Return(), *([Code()] if coded else [])]
    strategy = RegStrategy(terms, seed=3, incomplete="drop", fraction_evaluate=0.0)
    client = budgeted(RegClient, [{}, {1: 1}, {}])
    models = []

    class Watching(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                arrays = messages[0].content.array_records["arrays"]
                models.append({n: torch.from_numpy(a.numpy().copy()) for n, a in arrays.items()})
            return super().push_messages(messages)

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return client(make_model(), mine, device="cpu", terms=[type(t) for t in terms])

    run(strategy, RegClient, rounds=3, grid=Watching(client_app(client_fn), 4))
    model = make_model()
    model.load_state_dict(models[1])  # what client 1 trained from, for one step, in round 2
    x, y = data[1][0]
    torch.nn.functional.cross_entropy(model(x), y).backward()
    moved = sum(-0.2 * p.grad.sum() for p in model.parameters()) * (2 if coded else 1)
    got = float(strategy.training.model.server["return"]["1"])
    assert got == pytest.approx(100 + float(moved), abs=1e-10)


def test_a_client_that_lost_its_state_is_named() -> None:
    class Forgetting(InProcessGrid):
        rounds = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                self.rounds += 1
                if self.rounds == 3:
                    self._contexts[1002].state = RecordDict()
            return super().push_messages(messages)

    data = make_clients()

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return RegClient(make_model(), mine, device="cpu", terms=[Count])

    strategy = RegStrategy([Count()], seed=3, fraction_evaluate=0.0)
    run(strategy, RegClient, rounds=4, grid=Forgetting(client_app(client_fn), 4))
    assert [e["lost_state"] for e in strategy.history] == [[], [], [2], []]
    server = strategy.training.model.server["count"]
    assert {k: float(v) for k, v in server.items()} == {"0": 3, "1": 3, "2": 1, "3": 3}


@dataclass(frozen=True)
class Mine(Term, Personalises):
    """A client's own model is its last local one."""

    name: ClassVar[str] = "mine"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {}, {n: ctx.start[n] + d for n, d in delta.items()}

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: ctx.client.get(n, p) for n, p in params.items()}


def test_evaluation_sees_what_is_pending_and_changes_nothing() -> None:
    data = make_clients()
    strategy = RegStrategy([Mine()], seed=3)
    run(strategy, RegClient, rounds=1, clients=data, terms=[Mine])
    measured = strategy.history[0]["evaluate"]["clients"]
    for pid, batches in enumerate(data):
        local = RegStrategy([], seed=3, fraction_evaluate=0.0, min_train_nodes=1)
        local.min_available_nodes = 1
        end = run(local, RegClient, rounds=1, clients=[batches], terms=[])
        model = make_model()
        model.load_state_dict({n: torch.from_numpy(a) for n, a in end.items()})
        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
        assert measured[pid]["personal-loss"] == pytest.approx(loss, abs=1e-12)
        assert abs(measured[pid]["loss"] - loss) > 1e-6


def test_an_evaluation_without_the_clients_own_model_is_named() -> None:
    class Restarting(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if any(m.metadata.message_type == "evaluate" for m in messages):
                self._contexts[1002].state = RecordDict()
            return super().push_messages(messages)

    data = make_clients()

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return RegClient(make_model(), mine, mine, device="cpu", terms=[Mine])

    strategy = RegStrategy([Mine()], seed=3)
    run(strategy, RegClient, rounds=1, grid=Restarting(client_app(client_fn), 4))
    assert strategy.history[0]["evaluate"]["lost_state"] == [2]
    assert "lost_private" not in strategy.history[0]["evaluate"]


def test_a_client_whose_model_is_of_a_repeated_round_asks_for_the_whole() -> None:
    """On a "delta" downlink; it then trains to the same bits."""
    asked, models = [], []

    class Watching(RepeatingGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            configs = [m.content.config_records.get("config", {}) for m in replies]
            asked.append(sum(bool(c.get(keys.OUT_OF_SYNC_KEY)) for c in configs))
            return replies

    data = make_clients()
    for kind in (InProcessGrid, Watching):

        def client_fn(context: Any) -> Any:
            mine = data[context.node_config["partition-id"]]
            return FedFORClient(make_model(), mine, device="cpu")

        strategy = FedFOR(alpha=0.5, seed=3, downlink="delta", fraction_evaluate=0.0)
        grid = kind(client_app(client_fn), 4)
        models.append(run(strategy, FedFORClient, rounds=3, grid=grid))
    assert sum(asked) >= 4 * 2  # in rounds 2 and 3
    close(models[0], models[1], 0.0)


@dataclass(frozen=True)
class Asked(Term, Probes):
    """Keeps what its probe measured until the round ends, and from then on if the round was used."""

    name: ClassVar[str] = "asked"

    def probe(self, ctx: ClientContext) -> Any:
        return {"n": ctx.client.get("n", torch.zeros(()))}, {
            "n": ctx.client.get("n", torch.zeros(())) + 1
        }

    def answer(self, probes: Any) -> Any:
        return {pid: {} for pid in probes}

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {"seen": ctx.client["n"]}, {"n": ctx.client["n"]}

    def update(self, server: Any, delta: Arrays, uploads: Any, ctx: Any) -> Any:
        return {str(pid): u["seen"] for pid, u in uploads.items()}, delta


def test_a_probes_slot_is_there_in_its_round_and_pending_with_it() -> None:
    seen: list[dict[str, Any]] = []
    counts(Asked(), seen)
    assert [float(s["0"]) for s in seen] == [1, 2, 3, 4]
    assert (float(seen[0]["1"]), float(seen[3]["1"])) == (1, 2)


@dataclass(frozen=True)
class Picky(Term, Folds):
    """Cannot fold what client 2 sends in round 2."""

    name: ClassVar[str] = "picky"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {"id": torch.tensor(ctx.client_id)}, {}

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: Any, ctx: Any) -> Any:
        if upload["id"] == 2 and ctx.round == 2:
            raise KeyError("two")
        return {**acc, str(pid): weight}

    def update(self, server: Any, delta: Arrays, uploads: Any, ctx: Any) -> Any:
        return uploads, delta


def test_an_upload_that_cannot_be_folded_costs_its_client_alone() -> None:
    ends = []
    for done, terms in (([{}, {}, {}], [Picky]), ([{}, {2: 0}, {}], [])):
        strategy = RegStrategy([t() for t in terms], seed=3, fraction_evaluate=0.0)
        ends.append(run(strategy, budgeted(RegClient, done), rounds=3, terms=terms))
        assert strategy.history[1]["replies"] == [0, 1, 3]
        if terms:
            assert "its upload cannot be used: 'two'" in strategy.history[1]["failures"][2]
            weights = strategy.training.model.server["picky"]
            assert list(weights) == ["0", "1", "2", "3"]
            assert sum(weights.values()) == pytest.approx(1)
    close(ends[0], ends[1], 0.0)


@dataclass(frozen=True)
class Coarse(Term, Compresses):
    """Codes updates and steps as half precision: a code that loses something."""

    name: ClassVar[str] = "coarse"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return dict(delta), {}, {}

    def release(self, server: Any, step: Arrays, ctx: Any) -> Any:
        return server, dict(step)

    def encode(self, update: Any) -> bytes:
        return b"".join(np.asarray(a, "<f2").tobytes() for a in update.values())

    def decode(self, data: bytes, like: Any) -> Any:
        flat, out = np.frombuffer(data, "<f2"), {}
        for n, a in like.items():
            out[n], flat = flat[: a.size].reshape(a.shape).astype(a.dtype), flat[a.size :]
        return out


def test_the_server_moves_by_what_its_code_says() -> None:
    """So a client that adds the decoded step has the server's model, to the bit."""
    strategy = RegStrategy([Coarse()], seed=3, fraction_evaluate=0.0)
    models = [{n: p.detach().numpy() for n, p in make_model().named_parameters()}]
    train = strategy.aggregate_train

    def watched(number: int, replies: Any) -> Any:
        result = train(number, replies)
        models.append({n: a.numpy() for n, a in strategy.arrays.items()})
        return result

    strategy.aggregate_train = watched  # type: ignore[method-assign]
    run(strategy, RegClient, rounds=4, terms=[Coarse])
    for was, now in itertools.pairwise(models):
        for n in was:
            step = now[n] - was[n]
            np.testing.assert_allclose(step, step.astype(np.float16), rtol=0, atol=1e-15)
    for entry in strategy.history[1:]:
        assert entry["bytes_down"][0] < 0.8 * strategy.history[0]["bytes_down"][0]


@dataclass(frozen=True)
class AskedAlways(Asked):
    """Its probe's slot counts at once."""

    keeps: ClassVar[str] = "always"


@dataclass(frozen=True)
class ReturnAll(Return):
    """Sends its slot with the update, and keeps what it does not send: half of both."""

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        whole = {n: d + ctx.client.get(n, 0 * d) for n, d in delta.items()}
        sent = {n: w / 2 for n, w in whole.items()}
        return sent, {"n": sum(w.sum() for w in whole.values())}, sent

    def unused(self, before: Any, after: Any, sent: Arrays) -> Any:
        return {n: r + sent[n] for n, r in after.items()}


KINDS = [Count, CountAlways, ReturnAll, Mine, Asked, AskedAlways]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_repeated_round_has_been_once(kind: Any) -> None:
    """Private entries too; with client 1 left out of two rounds, whose updates it takes back."""
    ends: list[Any] = []
    for times in (1, 3):
        data = make_clients()
        client = budgeted(RegClient, DROPPED)

        def client_fn(context: Any, data: Any = data, client: Any = client) -> Any:
            mine = data[context.node_config["partition-id"]]
            kinds = [Private, kind]
            return client(make_model(batch_norm=True), mine, device="cpu", terms=kinds)

        grid = RepeatingGrid(client_app(client_fn), 4)
        grid.times = times
        terms = [Private("1.*"), kind()]
        strategy = RegStrategy(terms, seed=3, incomplete="drop", fraction_evaluate=0.0)
        start = ArrayRecord(make_model(batch_norm=True).state_dict())
        strategy.start(grid, start, 4, train_config=ConfigRecord({"lr": 0.2, "local-epochs": 2}))
        states = [c.state.array_records for c in grid._contexts.values()]
        mine = [
            {(key.split(".", 4)[4], n): a.numpy() for key in s for n, a in s[key].items()}
            for s in states
        ]
        ends.append((strategy.training.model.model, *mine))
        assert strategy.history[2]["replies"] == [0, 2, 3]
        assert not any(e["lost_state"] + e["lost_private"] for e in strategy.history)
    assert any(key.endswith("private.client") for key, _ in ends[0][1])
    for once, often in zip(*ends, strict=True):
        close(once, often, 0.0)


def entered(state: ClientState, number: int, used: int | None) -> tuple[Any, bool]:
    config = {keys.ROUND_KEY: number, **({} if used is None else {keys.USED_KEY: used})}
    after, lost = state.entering(chain([Count()]), config, {})
    return float(after.settled.get("count", {}).get("n", torch.tensor(-1.0))), lost


def test_slots_of_another_course_of_the_training_are_lost() -> None:
    """Settled up to round 5, pending of round 8: the server resumes at one of its checkpoints."""
    slot = {"count": {"n": torch.tensor(5.0)}}
    state = ClientState(slot, {"count": {"n": torch.tensor(8.0)}}, 8, reaches=5)
    assert entered(state, 9, 8) == (8.0, False)
    assert entered(state, 9, 5) == (5.0, False)
    assert entered(state, 8, 5) == (5.0, False)
    assert entered(state, 6, 5) == (5.0, False)
    assert entered(state, 5, 4) == (-1.0, True)  # it depends on round 5, which is repeated
    assert entered(state, 12, 11) == (-1.0, True)  # it has lost round 11


def test_a_client_that_cannot_go_back_far_enough_is_named() -> None:
    """The server goes back two rounds, but a node keeps one state before its last."""

    class Late(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for m in messages:
                config = m.content.config_records.get("config")
                if config and config[keys.ROUND_KEY] == 4:
                    config[keys.ROUND_KEY] = 2
            return super().push_messages(messages)

    data = make_clients()

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return RegClient(make_model(), mine, device="cpu", terms=[CountAlways, Private])

    terms = [CountAlways(), Private("0.bias")]
    strategy = RegStrategy(terms, seed=3, fraction_evaluate=0.0)
    run(strategy, RegClient, rounds=5, grid=Late(client_app(client_fn), 4))
    named = [e.get("state_ahead", []) for e in strategy.history]
    assert named == [[], [], [], [0, 1, 2, 3], []]
