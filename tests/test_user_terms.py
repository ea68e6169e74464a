"""What a term of a user's own meets when clients lie, abilities meet, or something raises in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from flwr_regs import (
    CentralDP,
    ClientContext,
    FedAvgClient,
    InProcessGrid,
    LeaveOneOutMean,
    RegClient,
    RegStrategy,
    SparseTernary,
    Term,
    client_app,
    load_model,
)
from flwr_regs.abilities import (
    Addresses,
    Folds,
    Freezes,
    Personalises,
    Probes,
    Recovers,
    TakesBack,
    Weighs,
)
from flwr_regs.client.local_training import local_round
from tests.conftest import budgeted, close, make_clients, make_model, run

Arrays = dict[str, Any]
QUIET: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}


def spoiled(how: Callable[[Message], None], terms: list[Any], node: int = 1003) -> InProcessGrid:
    """A grid of four clients; `how` changes the replies of one of them."""

    class Spoiled(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.src_node_id == node and "metrics" in reply.content:
                    how(reply)
            return replies

    data = make_clients()

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return RegClient(make_model(), mine, device="cpu", terms=terms)

    return Spoiled(client_app(client_fn), 4)


# privacy


@dataclass(frozen=True)
class FoldsDeltas(Term, Folds):
    name: ClassVar[str] = "folds-deltas"

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: Any, ctx: Any) -> Any:
        return acc


@dataclass(frozen=True)
class ReadsNorms(Term):
    name: ClassVar[str] = "reads-norms"

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {"norm": np.asarray(max(r.norm for r in ctx.replies.values()))}, delta


def test_noise_covers_all_that_a_term_gets_of_a_client() -> None:
    private: dict[str, Any] = {"privacy": CentralDP(0.1, 1.0), "weighting": "uniform", **QUIET}
    with pytest.raises(ValueError, match=r"clients of \['folds-deltas'\] send more"):
        RegStrategy([FoldsDeltas()], **private)
    with pytest.raises(
        ValueError, match=r"reads ctx\.replies, what was measured of single replies"
    ):
        run(RegStrategy([ReadsNorms()], **private), FedAvgClient, rounds=1)


# weights


@dataclass(frozen=True)
class LossWeights(Term, Weighs):
    name: ClassVar[str] = "loss-weights"

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        raw = {pid: p * ctx.replies[pid].loss for pid, p in weights.items()}
        return {pid: r / sum(raw.values()) for pid, r in raw.items()}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e300, None], ids=str)
def test_a_loss_that_is_no_number_costs_its_client_alone(loss: float | None) -> None:
    def how(reply: Message) -> None:
        metrics = reply.content.metric_records["metrics"]
        del metrics["train-loss"]
        if loss is not None:
            metrics["train-loss"] = loss

    strategy = RegStrategy([LossWeights()], **QUIET)
    run(strategy, RegClient, rounds=2, grid=spoiled(how, []))
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 2]
        assert "its train-loss is" in entry["failures"][3]


@dataclass(frozen=True)
class Odd(Term, Weighs):
    """Fails in one of several ways, for client 3 or for every client."""

    name: ClassVar[str] = "odd"
    how: str
    everywhere: bool = False

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        if self.everywhere or 3 in weights:
            match self.how:
                case "raises":
                    raise ZeroDivisionError("division by zero")
                case "none":
                    return None
                case "text":
                    return dict.fromkeys(weights, "a")
                case "huge":
                    return dict.fromkeys(weights, 1e300)
                case "stranger":
                    return {**weights, 77: 0.1}
        return weights


@pytest.mark.parametrize("how", ["raises", "none", "text", "huge", "stranger"])
def test_weights_that_fail_for_one_client_cost_it_alone(how: str) -> None:
    strategy = RegStrategy([Odd(how)], **QUIET)
    run(strategy, FedAvgClient, rounds=2)
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 2]
        assert "weigh of 'odd'" in entry["failures"][3]
    with pytest.raises((ValueError, RuntimeError), match="weigh of 'odd'"):
        run(RegStrategy([Odd(how, True)], **QUIET), FedAvgClient, rounds=1)


# uploads of a term without a check of its own


@dataclass(frozen=True)
class Sums(Term, Folds):
    name: ClassVar[str] = "sums"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {n: d.clone() for n, d in delta.items()}, {}

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: Any, ctx: Any) -> Any:
        return {n: acc.get(n, 0) + u for n, u in upload.items()}

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return uploads, delta


@pytest.mark.parametrize(
    "value", [np.ones((7, 8, 5)), np.ones(6, np.float32)], ids=["shape", "dtype"]
)
def test_an_upload_unlike_the_others_costs_its_client_without_a_check(value: np.ndarray) -> None:
    from flwr.app import Array

    def how(reply: Message) -> None:
        reply.content.array_records["sums.upload"]["0.bias"] = Array(value)

    strategy = RegStrategy([Sums()], **QUIET)
    run(strategy, RegClient, rounds=2, grid=spoiled(how, [Sums]))
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 2]
        assert "'0.bias' is" in entry["failures"][3]


def test_every_upload_that_cannot_be_folded_is_found_in_one_pass() -> None:
    calls = []

    @dataclass(frozen=True)
    class Fails(Term, Folds):
        name: ClassVar[str] = "fails"

        def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: Any, ctx: Any) -> Any:
            calls.append(pid)
            if pid % 2:
                raise ValueError("odd")
            return acc

    strategy = RegStrategy([Fails()], **QUIET)
    run(strategy, FedAvgClient, rounds=1)
    assert strategy.history[0]["replies"] == [0, 2]
    assert calls == [0, 1, 2, 3, 0, 2]


# abilities that meet


@dataclass(frozen=True)
class Both(Term, Recovers, Addresses):
    """Broadcasts the last step, which a client recovers, and a number of the client's own."""

    name: ClassVar[str] = "both"

    def broadcast(self, server: Any, ctx: Any) -> Any:
        return {} if ctx.previous_step is None else self.recover(ctx.previous_step, ctx.previous_lr)

    def recover(self, step: Any, lr: float) -> Any:
        return {n: s / lr for n, s in step.items()}

    def broadcast_to(self, pid: int, server: Any, ctx: Any) -> Any:
        return {"mine": np.asarray(0.1 * pid)}

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        b = ctx.broadcast
        return {n: g + b["mine"] * b[n] if n in b else g for n, g in grads.items()}


def test_what_is_recovered_stands_beside_what_came_for_this_client() -> None:
    ends = [
        run(RegStrategy([Both()], downlink=kind, **QUIET), RegClient, terms=[Both])
        for kind in ("model", "delta")
    ]
    close(ends[0], ends[1], 0.0)


@dataclass(frozen=True)
class HasField(Term):
    """Runs on the server alone; its field does not travel."""

    name: ClassVar[str] = "has-field"
    k: float

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return server, {n: self.k * d for n, d in delta.items()}


@pytest.mark.parametrize("terms", [[HasField], []], ids=["named", "left out"])
def test_a_client_may_name_a_term_of_the_server(terms: list[Any]) -> None:
    strategy = RegStrategy([HasField(0.5)], seed=3)
    run(strategy, RegClient, rounds=1, terms=terms)
    assert strategy.history[0]["failures"] == strategy.history[0]["evaluate"]["failures"] == {}


# names


@pytest.mark.parametrize("name", ["", "regs", "a,b", "a.pending", "a+b"])
def test_a_name_that_would_clash_with_a_key_is_refused(name: str) -> None:
    kind = type("Named", (Term,), {"name": name})
    with pytest.raises(ValueError, match="a term's name is part of keys"):
        RegStrategy([kind()])


def test_a_term_without_a_hook_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Typo(Term):
        name: ClassVar[str] = "typo"

        def corect(self, grads: Any, params: Any, ctx: Any) -> Any:
            return grads

    caplog.set_level(logging.WARNING, logger="flwr")
    for _ in range(2):
        RegStrategy([Typo()])
    found = [r.getMessage() for r in caplog.records if "Typo" in r.getMessage()]
    assert len(found) == 1
    assert "changes nothing; did you mean 'correct' with 'corect'?" in found[0]


# errors in the middle


@dataclass(frozen=True)
class Held(Term, Freezes):
    name: ClassVar[str] = "held"
    needs: ClassVar[tuple[str, ...]] = ("features",)

    def frozen(self, names: Any) -> set[str]:
        return {n for n in names if n.startswith("2.")}


def test_a_round_that_raises_leaves_the_model_as_it_found_it() -> None:
    model = make_model()

    def fails(output: Any, target: Any) -> Any:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        local_round(model, Held(), make_clients()[0], lr=0.1, steps=1, device="cpu", loss_fn=fails)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_loss_without_a_gradient_says_so() -> None:
    def constant(output: Any, target: Any) -> Any:
        return output.detach().sum()

    with pytest.raises(RuntimeError, match="the loss depends on no parameter that is trained"):
        local_round(
            make_model(), Term(), make_clients()[0], lr=0.1, steps=1, device="cpu", loss_fn=constant
        )


# state


@dataclass(frozen=True)
class Once(Term, Personalises):
    """Keeps something in its first round alone."""

    name: ClassVar[str] = "once"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        first = ctx.config["server-round"] == 1
        return delta, {}, {"n": torch.ones(())} if first else {}

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: p + ctx.client.get("n", 0) for n, p in params.items()}


@dataclass(frozen=True)
class Always(Once):
    keeps: ClassVar[str] = "always"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {}, {"n": torch.ones(())}


def forgetful(terms: list[Any], at: int) -> InProcessGrid:
    """Every client loses its state before the messages of round `at`."""

    class Forgetful(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in messages:
                config = message.content.config_records.get("config", {})
                first = message.metadata.message_type != "train" or LeaveOneOutMean not in terms
                if config.get("server-round") == at and first:
                    self._contexts[message.metadata.dst_node_id].state = RecordDict()
            return super().push_messages(messages)

    data = make_clients()

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return RegClient(make_model(), mine, mine, device="cpu", terms=terms)

    return Forgetful(client_app(client_fn), 4)


@pytest.mark.parametrize(
    ("terms", "at", "named"),
    [
        ([Once()], 9, [[], [], [], []]),  # a slot that ends is not lost
        ([Always()], 3, [[], [], [0, 1, 2, 3], []]),
        (
            [LeaveOneOutMean(0.1, sum_only=True), SparseTernary(0.5)],
            3,
            [[], [], [0, 1, 2, 3], []],
        ),
    ],
    ids=["ends", "always", "probe"],
)
def test_who_lost_state_is_named_and_nobody_else(terms: Any, at: int, named: Any) -> None:
    strategy = RegStrategy(terms, **QUIET)
    run(strategy, RegClient, rounds=4, grid=forgetful([type(t) for t in terms], at))
    assert [e["lost_state"] for e in strategy.history] == named
    assert not any(e["failures"] for e in strategy.history)


def test_evaluation_sees_that_a_slot_has_ended() -> None:
    strategy = RegStrategy([Once()], seed=3)
    run(strategy, RegClient, rounds=2, terms=[Once])
    for entry, same in zip(strategy.history, (False, True), strict=True):
        for metrics in entry["evaluate"]["clients"].values():
            assert (metrics["loss"] == metrics["personal-loss"]) == same


@dataclass(frozen=True)
class ProbesAlways(Term, Probes):
    """Its probe returns no slot, which must leave the kept one alone."""

    name: ClassVar[str] = "probes-always"
    keeps: ClassVar[str] = "always"

    def probe(self, ctx: ClientContext) -> Any:
        return {"x": torch.ones(())}, {}

    def answer(self, probes: Any) -> Any:
        return {pid: {} for pid in probes}

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        n = ctx.client.get("n", torch.zeros(()))
        return delta, {"n": n}, {"n": n + 1}

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {str(p): u["n"] for p, u in uploads.items()}, delta


def test_an_empty_slot_of_a_probe_leaves_the_kept_one() -> None:
    strategy = RegStrategy([ProbesAlways()], **QUIET)
    run(strategy, RegClient, rounds=3, terms=[ProbesAlways])
    server = strategy.training.model.server["probes-always"]
    assert {float(n) for n in server.values()} == {2.0}


@dataclass(frozen=True)
class Stumbles(Term, TakesBack):
    """Cannot take back what was not used."""

    name: ClassVar[str] = "stumbles"

    def finish(self, delta: Arrays, ctx: ClientContext) -> Any:
        return delta, {}, {"n": torch.ones(())}

    def unused(self, before: Any, after: Any, sent: Any) -> Any:
        raise KeyError("boo")


def test_a_state_that_cannot_be_read_is_lost_and_the_client_goes_on() -> None:
    strategy = RegStrategy([Stumbles()], incomplete="drop", **QUIET)
    run(strategy, budgeted(RegClient, [{}, {1: 1}, {}, {}]), rounds=4, terms=[Stumbles])
    assert [e["replies"] for e in strategy.history][2:] == [[0, 1, 2, 3]] * 2
    assert [e["lost_state"] for e in strategy.history] == [[], [], [1], []]


def test_a_personal_model_is_loaded_only_from_a_method_that_has_one() -> None:
    from flwr_regs import RegClientApp

    app = RegClientApp()

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        load_model(message, FedAvgClient, make_model(), personal=True)
        raise AssertionError

    @app.train()
    def train(message: Message, context: Any) -> Message:
        from flwr_regs import ClientRound

        mine = make_clients()[context.node_config["partition-id"]]
        loop = ClientRound(message, FedAvgClient, make_model(), mine, device="cpu")
        return loop.reply()

    from flwr_regs import RoundFailed

    strategy = RegStrategy([], seed=3, fraction_train=0.0)
    with pytest.raises(RoundFailed, match="FedAvg gives the clients no models of their own"):
        run(strategy, FedAvgClient, rounds=1, grid=InProcessGrid(app, 4))
