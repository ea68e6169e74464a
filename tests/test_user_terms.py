"""What a term of a user's own meets when clients lie, abilities meet, or something raises in between."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

import flwr_regs as fr
from flwr_regs.abilities import Compresses, Folds, Probes, TakesBack, Weighs
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.testing.problem import app_of
from tests.conftest import QUIET, Tampered, budgeted, make_clients, make_model, run
from tests.methods.early_stops import Forgetful

Arrays = dict[str, Any]


def spoiled(how: Callable[[Message], None], terms: list[Any]) -> Tampered:
    """Four clients; `how` changes the replies of the last."""

    def change(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if pid == 3 and "metrics" in reply.content:
            how(reply)
        return reply

    return Tampered(app_of(fr.RegClient, make_clients(), terms=terms), 4, change)


def costs_client_3(strategy: fr.RegStrategy, why: str, grid: Any = None) -> None:
    """Train; client 3 alone fails in each round, with that reason."""
    run(strategy, fr.RegClient, rounds=2, grid=grid, terms=[])
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 2]
        assert why in entry["failures"][3]


# privacy


class ReadsNorms(fr.Term):
    name: ClassVar[str] = "reads-norms"

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {"norm": np.asarray(max(r.norm for r in ctx.replies.values()))}, delta


def test_noise_covers_all_that_a_term_gets_of_a_client() -> None:
    private: dict[str, Any] = {"privacy": fr.CentralDP(0.1, 1.0), "weighting": "uniform", **QUIET}
    with pytest.raises(ValueError, match=r"reads ctx\.replies, what was measured of single"):
        run(fr.RegStrategy([ReadsNorms()], **private), fr.FedAvgClient, rounds=1)


# weights, and uploads of a term without a check of its own


class LossWeights(fr.Term, Weighs):
    name: ClassVar[str] = "loss-weights"

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        raw = {pid: p * ctx.replies[pid].loss for pid, p in weights.items()}
        return {pid: r / sum(raw.values()) for pid, r in raw.items()}


@pytest.mark.parametrize("loss", [float("nan"), 1e300, None], ids=str)
def test_a_loss_that_is_no_number_costs_its_client_alone(loss: float | None) -> None:
    def how(reply: Message) -> None:
        metrics = reply.content.metric_records["metrics"]
        del metrics["train-loss"]
        if loss is not None:
            metrics["train-loss"] = loss

    costs_client_3(fr.RegStrategy([LossWeights()], **QUIET), "its train-loss is", spoiled(how, []))


@dataclass(frozen=True)
class Odd(fr.Term, Weighs):
    """Weighs in a wrong way, for client 3 or for every client."""

    name: ClassVar[str] = "odd"
    wrong: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "raises": lambda weights: 1 / 0,
        "text": lambda weights: dict.fromkeys(weights, "a"),
        "huge": lambda weights: dict.fromkeys(weights, 1e300),
        "stranger": lambda weights: {**weights, 77: 0.1},
    }
    how: str
    everywhere: bool = False

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        return self.wrong[self.how](weights) if self.everywhere or 3 in weights else weights


@pytest.mark.parametrize("how", Odd.wrong)
def test_weights_that_fail_for_one_client_cost_it_alone(how: str) -> None:
    costs_client_3(fr.RegStrategy([Odd(how)], **QUIET), "weigh of 'odd'")
    with pytest.raises((ValueError, RuntimeError), match="weigh of 'odd'"):
        run(fr.RegStrategy([Odd(how, True)], **QUIET), fr.FedAvgClient, rounds=1)


class Sums(fr.Term, Folds):
    name: ClassVar[str] = "sums"

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
        return delta, {n: d.clone() for n, d in delta.items()}, {}

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: Any, ctx: Any) -> Any:
        return {n: acc.get(n, 0) + u for n, u in upload.items()}

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return uploads, delta


@pytest.mark.parametrize("value", [np.ones((7, 8, 5)), np.ones(6, "f4")], ids=["shape", "dtype"])
def test_an_upload_unlike_the_others_costs_its_client_without_a_check(value: np.ndarray) -> None:
    def how(reply: Message) -> None:
        reply.content.array_records["sums.upload"]["0.bias"] = Array(value)

    costs_client_3(fr.RegStrategy([Sums()], **QUIET), "'0.bias' is", spoiled(how, [Sums]))


# errors in the middle


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda *_: 1 / 0, "division by zero"),
        (lambda output, _: output.detach().sum(), "depends on no trained parameter: nothing"),
        (lambda *_: torch.ones((), requires_grad=True), "no parameter of this round's model"),
    ],
)
def test_a_round_that_raises_leaves_the_model_as_it_found_it(loss: Any, match: str) -> None:
    model, data = make_model(), make_clients()[0]
    term = chain([fr.LeaveOneOutMean(0.1), fr.FixedHead()])  # hooks, and parameters held still
    with pytest.raises((ZeroDivisionError, RuntimeError), match=match):
        local_round(model, term, data, lr=0.1, steps=1, device="cpu", loss_fn=loss)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are switched off"):
        local_round(model, term, data, lr=0.1, steps=1, device="cpu")
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


# state


class Once(fr.Term):
    """Keeps something in its first round alone."""

    name: ClassVar[str] = "once"

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
        first = ctx.config["server-round"] == 1
        return delta, {}, {"n": torch.ones(())} if first else {}


class Always(Once):
    keeps: ClassVar[str] = "always"

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
        return delta, {}, {"n": torch.ones(())}


class ForgetfulAll(Forgetful):
    who, before = (0, 1, 2, 3), 3


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ([Once()], []),  # a slot that ends is not lost
        ([Always()], [0, 1, 2, 3]),
        ([fr.LeaveOneOutMean(0.1, sum_only=True), fr.SparseTernary(0.5)], [0, 1, 2, 3]),
    ],
    ids=["ends", "always", "probe"],
)
def test_who_lost_state_is_named_and_nobody_else(terms: Any, named: list[int]) -> None:
    app = app_of(fr.RegClient, make_clients(), terms=[type(t) for t in terms])
    grid: type[fr.InProcessGrid] = ForgetfulAll if named else fr.InProcessGrid
    strategy = fr.RegStrategy(terms, **QUIET)
    run(strategy, fr.RegClient, rounds=4, grid=grid(app, 4))
    assert [e["lost_state"] for e in strategy.history] == [[], [], named, []]
    assert not any(e["failures"] for e in strategy.history)


class ProbesAlways(fr.Term, Probes):
    """Its probe returns no slot, which must leave the kept one alone."""

    name: ClassVar[str] = "probes-always"
    keeps: ClassVar[str] = "always"

    def probe(self, ctx: fr.ClientContext) -> Any:
        return {"x": torch.ones(())}, {}

    def answer(self, probes: Any) -> Any:
        return {pid: {} for pid in probes}

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
        n = ctx.client.get("n", torch.zeros(()))
        return delta, {"n": n}, {"n": n + 1}

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {str(p): u["n"] for p, u in uploads.items()}, delta


def test_an_empty_slot_of_a_probe_leaves_the_kept_one() -> None:
    strategy = fr.RegStrategy([ProbesAlways()], **QUIET)
    run(strategy, fr.RegClient, rounds=3, terms=[ProbesAlways])
    server = strategy.training.model.server["probes-always"]
    assert {float(n) for n in server.values()} == {2.0}


class Stumbles(fr.Term, TakesBack):
    """Cannot take back what was not used."""

    name: ClassVar[str] = "stumbles"

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
        return delta, {}, {"n": torch.ones(())}

    def unused(self, before: Any, after: Any) -> Any:
        raise KeyError("boo")


class TakesNothingBack(Stumbles):
    def unused(self, before: Any, after: Any) -> Any: ...


@pytest.mark.parametrize("kind", [Stumbles, TakesNothingBack])
def test_a_state_that_cannot_be_read_is_lost_and_the_client_goes_on(kind: Any) -> None:
    strategy = fr.RegStrategy([kind()], incomplete="drop", **QUIET)
    run(strategy, budgeted(fr.RegClient, [{}, {1: 1}, {}, {}]), rounds=4, terms=[kind])
    assert [e["replies"] for e in strategy.history][2:] == [[0, 1, 2, 3]] * 2
    assert [e["lost_state"] for e in strategy.history] == [[], [], [1], []]


class Coarse(fr.Term, Compresses):
    """Codes updates and steps as half precision: a code that loses something."""

    name: ClassVar[str] = "coarse"

    def finish(self, delta: Arrays, ctx: fr.ClientContext) -> Any:
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
    strategy = fr.RegStrategy([Coarse()], seed=3, fraction_evaluate=0.0)
    models = [{n: p.detach().numpy() for n, p in make_model().named_parameters()}]
    train = strategy.aggregate_train

    def watched(number: int, replies: Any) -> Any:
        result = train(number, replies)
        models.append({n: a.numpy() for n, a in strategy.arrays.items()})
        return result

    strategy.aggregate_train = watched  # type: ignore[method-assign]
    run(strategy, fr.RegClient, rounds=4, terms=[Coarse])
    for before, after in itertools.pairwise(models):
        for n in before:
            step = after[n] - before[n]
            np.testing.assert_allclose(step, step.astype(np.float16), rtol=0, atol=1e-15)
    for entry in strategy.history[1:]:
        assert entry["bytes_down"][0] < 0.8 * strategy.history[0]["bytes_down"][0]
