"""EFL beyond the laws: the penalty's derivative, ST, coded messages, catching up, incomplete clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from torch import nn

from flwr_regs import (
    EFL,
    EFLClient,
    Elastic,
    EmbeddedMomentum,
    FedAvg,
    FedAvgClient,
    FedCurv,
    FedCurvClient,
    InProcessGrid,
    LeaveOneOutMean,
    RegClient,
    RegStrategy,
    RFedAvgPlus,
    RFedAvgPlusClient,
    RoundFailed,
    SparseTernary,
    client_app,
)
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.methods.client_step.ternary import decode, sparse_ternary
from flwr_regs.term import ClientContext
from flwr_regs.testing.problem import (
    Point,
    SerialisingGrid,
    half_squared_error,
    quadratic_clients,
    start_weights,
)
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record
from tests.conftest import budgeted, close, make_clients, make_model, run, to_numpy
from tests.oracles.client_step.efl import efl

# The elastic term


def test_the_elastic_term_is_the_derivative_of_its_penalty() -> None:
    """Eq. 2, two clients, displacements of both signs."""
    v = torch.tensor([1.5, -0.5, 2.0], requires_grad=True)
    ends = [torch.tensor([1.0, 0.5, 2.0]), torch.tensor([2.0, -1.0, 0.0])]
    fishers = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 0.0, 3.0])]
    penalty = sum((f * (v - e) ** 2).sum() for f, e in zip(fishers, ends, strict=True))
    (0.7 / 2 * penalty).backward()
    sums = {"U.w": sum(fishers), "V.w": fishers[0] * ends[0] + fishers[1] * ends[1]}
    ctx = ClientContext(start={"w": torch.zeros(3)}, lr=0.1, num_steps=3, broadcast=sums)
    got = Elastic(0.7).correct({"w": torch.zeros(3)}, {"w": v.detach()}, ctx)["w"]
    torch.testing.assert_close(got, v.grad)
    assert (got > 0).any()
    assert (got < 0).any()


def test_two_quadratic_clients_reach_the_fixed_point_of_the_elastic_term() -> None:
    """f_k(v) = a/2 (v − c)²: u_k = a² (v_k − c)², and each round is an affine map of w.

    K steps from w of v ← v − η ((a + λU) v − (a c + λV)) end at v* + (1 − η (a + λU))^K (w − v*) with
    v* = (a c + λV)/(a + λU); iterating that with U, V of the ends gives the limit.
    """
    curvature, centre, lr, steps, lam = (1.0, 4.0), (-1.0, 2.0), 0.1, 5, 0.2
    p, w, big_u, big_v = (1 / 3, 2 / 3), 0.0, 0.0, 0.0
    for _ in range(300):
        ends = []
        for a, c in zip(curvature, centre, strict=True):
            rest = (a * c + lam * big_v) / (a + lam * big_u)
            ends.append(rest + (1 - lr * (a + lam * big_u)) ** steps * (w - rest))
        fishers = [(a * (v - c)) ** 2 for a, c, v in zip(curvature, centre, ends, strict=True)]
        big_u, big_v = sum(fishers), sum(f * v for f, v in zip(fishers, ends, strict=True))
        w = sum(q * v for q, v in zip(p, ends, strict=True))
    clients = quadratic_clients(curvature, centre)
    got, plain = (
        run(
            EFL(lam=strength, seed=3, fraction_evaluate=0.0),
            EFLClient,
            rounds=300,
            clients=clients,
            model=Point,
            lr=lr,
            train={"local-steps": steps},
            loss_fn=half_squared_error,
        )["v"][0]
        for strength in (lam, 0.0)
    )
    assert got == pytest.approx(w, abs=1e-6)
    assert abs(got - plain) > 0.01


# ST


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
    everything = sparse_ternary(update, 1.0)
    assert all((t.abs() == 12.5 / 6).all() for t in everything.values())


def test_the_residual_loses_nothing() -> None:
    """What was sent over many rounds plus what is kept is what there was to send."""
    g = torch.Generator().manual_seed(1)
    term, kept = SparseTernary(0.1, 0.1), {}
    total = sent_total = torch.zeros(50, dtype=torch.float64)
    for _ in range(20):
        delta = {"w": torch.randn(50, generator=g, dtype=torch.float64)}
        ctx = ClientContext(start={}, lr=0.1, num_steps=1, client=kept)
        sent, _, kept = term.finish(delta, ctx)
        total, sent_total = total + delta["w"], sent_total + sent["w"]
        assert int((sent["w"] != 0).sum()) == 5
    torch.testing.assert_close(sent_total + kept["w"], total)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan")])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="density_up must be a number above 0, up to 1, or None"):
        EFL(0.1, density_up=density)
    with pytest.raises(ValueError, match="density_down must be a number above 0, up to 1, or None"):
        EFL(0.1, density_down=density)


# On the wire


class Recording(SerialisingGrid):
    """Keeps the sizes of real serialised messages, and checks the models that clients keep."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[dict[int, dict[str, np.ndarray]]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        if messages and messages[0].metadata.message_type == "train":
            models = {}
            for m in messages:
                state = self._contexts[m.metadata.dst_node_id].state
                for key, record in state.array_records.items():
                    if key.endswith(".model"):
                        models[m.metadata.dst_node_id - 1000] = from_record(record)
            self.kept.append(models)
        return ids


def wide_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 400), nn.BatchNorm1d(400), nn.Tanh(), nn.Linear(400, 3))


def grid_of(client: Any, n: int, kind: type[InProcessGrid] = Recording) -> Any:
    data = make_clients(n, torch.float32)

    def client_fn(context: Any) -> Any:
        mine = data[context.node_config["partition-id"]]
        return client(wide_model(), mine, mine, device="cpu")

    return kind(client_app(client_fn), n)


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_server_and_in_sync_clients_hold_equal_bits(fraction: float) -> None:
    grid = grid_of(EFLClient, 5)
    strategy = EFL(
        0.0,
        0.02,
        0.02,
        seed=4,
        fraction_train=fraction,
        min_train_nodes=1,
        fraction_evaluate=0.0,
    )
    seen: list[dict[str, np.ndarray]] = []
    advance = from_record

    class Watching(EFL):
        def configure_train(self, server_round: int, arrays: Any, *args: Any) -> Any:
            seen.append(advance(arrays))
            return super().configure_train(server_round, arrays, *args)

    strategy.__class__ = Watching
    run(strategy, EFLClient, rounds=12, model=wide_model, grid=grid)
    assert len(grid.kept) == 12
    for model, kept in zip(seen, grid.kept, strict=True):
        for mine in kept.values():
            close(mine, model, 0.0)
    whole = max(strategy.history[0]["bytes_down"].values())
    missed = 0
    last: dict[int, int] = {}
    for entry in strategy.history:
        for pid, size in entry["bytes_down"].items():
            held = last.get(pid)
            if held is None:
                assert size > 0.99 * whole
            else:  # the missed steps; the batch norm's buffers are most of it
                assert size < 0.5 * whole
                missed += entry["round"] - held > 1
            last[pid] = entry["round"]
    assert (missed > 0) == (fraction < 1)


def test_a_client_that_missed_too_much_gets_the_model() -> None:
    """At density 1 a step costs a bit for each parameter: 32 of them cost as much as the model."""

    class Rare(InProcessGrid):
        """Partition 0 is away until the end."""

        rounds = 0

        def get_node_ids(self) -> Iterable[int]:
            return [n for n in self._contexts if n != 1000 or not 1 <= self.rounds < 40]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.rounds += any(m.metadata.message_type == "train" for m in messages)
            return super().push_messages(messages)

    grid = grid_of(EFLClient, 2, Rare)
    strategy = EFL(0.0, 1.0, 1.0, seed=4, fraction_evaluate=0.0, min_available_nodes=1)
    run(strategy, EFLClient, rounds=42, model=wide_model, grid=grid)
    whole = strategy.history[0]["bytes_down"][0]
    assert [0 in e["cohort"] for e in strategy.history].count(True) == 3
    assert strategy.history[40]["bytes_down"][0] >= whole
    assert strategy.history[41]["bytes_down"][0] < 0.6 * whole
    # the log of steps is never longer than the model
    steps = strategy.training.model.coded_steps
    assert sum(map(len, steps.values())) <= whole
    assert len(steps) < 41


def test_a_client_that_lost_its_state_is_served_in_the_round() -> None:
    class Forgetful(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self._contexts[1001].state = RecordDict()
            return super().push_messages(messages)

    strategy = EFL(0.1, 0.05, 0.05, seed=4, fraction_evaluate=0.0)
    run(
        strategy,
        EFLClient,
        rounds=4,
        model=wide_model,
        grid=grid_of(EFLClient, 3, Forgetful),
    )
    assert all(e["replies"] == [0, 1, 2] and not e["failures"] for e in strategy.history)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", lambda b: 7]
)
def test_a_corrupt_update_costs_only_its_client(spoil: Any) -> None:
    class Corrupt(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = list(super().push_messages(messages))
            for reply in (self._replies[i] for i in ids):
                config = reply.content.config_records.get(keys.CONFIG, ConfigRecord())
                if keys.UPDATE_KEY in config and reply.metadata.src_node_id == 1002:
                    config[keys.UPDATE_KEY] = spoil(config[keys.UPDATE_KEY])
            return ids

    data = make_clients()

    def client_fn(context: Any) -> Any:
        return EFLClient(make_model(), data[context.node_config["partition-id"]], device="cpu")

    strategy = EFL(0.1, 0.2, 0.2, seed=1, fraction_evaluate=0.0)
    run(strategy, EFLClient, rounds=2, grid=Corrupt(client_app(client_fn), 4))
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 3]
        assert "the reply of client 2 cannot be used" in entry["failures"][2]


def test_ternary_composes_with_momentum_which_clients_recover_from_the_step_as_released() -> None:
    """FedADC + ST against the equations in plain loops: m̄ is that of the step the clients were sent."""
    beta, q, lr, steps = 0.6, 0.3, 0.1, 4
    data = make_clients()
    strategy = RegStrategy(
        [EmbeddedMomentum(beta, beta, variant="heavy-ball"), SparseTernary(q, q)],
        seed=1,
        weighting="uniform",
        fraction_evaluate=0.0,
    )
    got = run(
        strategy,
        RegClient,
        rounds=5,
        lr=lr,
        train={"local-steps": steps},
        clients=data,
        terms=[EmbeddedMomentum, SparseTernary],
    )

    def top(v: np.ndarray) -> np.ndarray:
        k = max(int(len(v) * q), 1)
        kept = np.argsort(-np.abs(v), kind="stable")[:k]
        out = np.zeros_like(v)
        out[kept] = np.abs(v[kept]).mean() * np.sign(v[kept])
        return out

    model = make_model()

    def gradient(flat: np.ndarray, x: Any, y: Any) -> np.ndarray:
        nn.utils.vector_to_parameters(torch.from_numpy(flat), model.parameters())
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])

    w = nn.utils.parameters_to_vector(make_model().parameters()).detach().numpy().copy()
    m, server, residuals = np.zeros_like(w), np.zeros_like(w), [np.zeros_like(w) for _ in data]
    for _ in range(5):
        sent = []
        for k, batches in enumerate(data):
            v = w.copy()
            for s in range(steps):
                x, y = batches[s % len(batches)]
                v = v - lr * (gradient(v, x, y) + beta * m / steps)
            total = residuals[k] + v - w
            sent.append(top(total))
            residuals[k] = total - sent[-1]
        total = server + np.mean(sent, axis=0)
        step = top(total)
        server = total - step
        w, m = w + step, -step / lr
    flat = np.concatenate([got[n].ravel() for n, _ in model.named_parameters()])
    np.testing.assert_allclose(flat, w, atol=1e-10)
    whole = strategy.history[0]["bytes_down"][0]
    assert strategy.history[-1]["bytes_down"][0] < whole + 200  # the momentum itself is not sent


# Incomplete and inactive clients

DONE = [{0: 1, 2: 3}, {1: 0, 3: 5}, {}, {0: 0, 1: 0, 2: 1}]


@pytest.mark.parametrize("weighting", ["num-examples", "uniform"])
@pytest.mark.parametrize(
    "densities", [{}, {"density_up": 0.3, "density_down": 0.4}], ids=["dense", "ternary"]
)
def test_unequal_steps_equal_the_oracle(weighting: str, densities: dict[str, float]) -> None:
    clients = make_clients()
    strategy = EFL(0.4, **densities, seed=3, weighting=weighting, fraction_evaluate=0.0)
    got = run(strategy, budgeted(EFLClient, DONE), rounds=4, clients=clients)
    want = efl(
        start_weights(),
        to_numpy(clients),
        4,
        lambda t: 0.2,
        epochs=2,
        weighting=weighting,
        lam=0.4,
        **densities,
        steps_done=DONE,
        float32_fisher=True,
    )
    close(got, want[-1], 1e-10)
    assert [e["inactive"] for e in strategy.history] == [[], [1], [], [0, 1]]
    assert [e["incomplete"] for e in strategy.history] == [[0, 2], [3], [], [2]]
    assert strategy.history[0]["steps"] == {0: 1, 1: 6, 2: 3, 3: 10}
    assert strategy.history[3]["replies"] == [2, 3]
    assert not any(e["failures"] for e in strategy.history)


def test_incomplete_clients_can_be_averaged_or_dropped() -> None:
    clients = make_clients()
    done = [{0: 1, 3: 4}]
    got = {
        kind: run(
            FedAvg(seed=3, incomplete=kind, fraction_evaluate=0.0),
            budgeted(FedAvgClient, done),
            rounds=2,
            clients=clients,
        )
        for kind in ("average", "drop", "scale")
    }
    steps = [1, 6, 8, 4]
    planned = [4, 6, 8, 10]
    n = np.array([10, 15, 20, 25])
    w = start_weights()
    for kind in got:
        params = {k: v.copy() for k, v in w.items()}
        used = [0, 1, 2, 3] if kind != "drop" else [1, 2]
        for _ in range(2):
            model = make_model()
            ends = []
            for k in used:
                model.load_state_dict({a: torch.from_numpy(v) for a, v in params.items()})
                opt = torch.optim.SGD(model.parameters(), lr=0.2)
                for s in range(steps[k]):
                    x, y = clients[k][s % len(clients[k])]
                    opt.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    opt.step()
                ends.append({a: v.numpy().copy() for a, v in model.state_dict().items()})
            p = n[used] / n[used].sum()
            if kind == "scale":
                p = p * np.array(planned)[used] / np.array(steps)[used]
            params = {
                a: v + sum(q * (e[a] - v) for q, e in zip(p, ends, strict=True))
                for a, v in params.items()
            }
        close(got[kind], params, 1e-12)


def test_a_round_in_which_everybody_is_inactive_fails_loudly() -> None:
    with pytest.raises(RoundFailed, match=r"0 usable replies.*inactive: \[0, 1, 2, 3\]"):
        run(FedAvg(seed=1), budgeted(FedAvgClient, [dict.fromkeys(range(4), 0)]))


def test_an_inactive_client_keeps_its_residual_and_a_shifted_start_is_undone() -> None:
    term = EmbeddedMomentum(0.5, 0.5)
    m = {n: torch.ones_like(p) for n, p in make_model().named_parameters()}
    residual = {"w": torch.ones(3)}
    result = local_round(
        make_model(),
        term,
        make_clients()[0],
        lr=0.1,
        steps=3,
        broadcast=m,
        client=residual,
        max_steps=0,
    )
    close(result.state, make_model().state_dict(), 0.0)
    close(result.client, residual, 0.0)


@pytest.mark.parametrize("budget", [{"step_budget": -1}, {"time_budget": -0.1}])
def test_a_negative_budget_is_refused(budget: Any) -> None:
    with pytest.raises(
        ValueError, match=r"FedAvgClient: .*_budget must be .*of at least 0, or None"
    ):
        FedAvgClient(make_model(), make_clients()[0], **budget)


# Arrivals and departures


def test_an_often_inactive_client_is_dropped_by_eq_9_and_the_schedule_restarts() -> None:
    """T = 8 rounds of E = 10 steps: with a constant of 40 the bound is 40 / 80 = 1/2."""
    away = [{1: 0}, {1: 0}, {}, {}]
    strategy = FedAvg(
        seed=3,
        drop_inactive=40.0,
        restart_lr=True,
        lr_schedule=lambda t: 0.5 ** (t - 1),
        fraction_evaluate=0.0,
    )
    run(strategy, budgeted(FedAvgClient, away), rounds=8, lr=0.2)
    cohorts = [e["cohort"] for e in strategy.history]
    assert cohorts == [[0, 1, 2, 3]] * 2 + [[0, 2, 3]] * 6
    assert strategy.history[2]["dropped_for_good"] == [1]
    assert strategy.history[2]["shift"] == {"arrived": [], "departed": [1]}
    assert [e["lr"] for e in strategy.history[:4]] == [0.2, 0.1, 0.2, 0.1]


def test_the_schedule_restarts_when_a_client_arrives() -> None:
    class Late(InProcessGrid):
        rounds = 0

        def get_node_ids(self) -> Iterable[int]:
            return [n for n in self._contexts if n != 1003 or self.rounds >= 2]

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.rounds += any(m.metadata.message_type == "train" for m in messages)
            return super().push_messages(messages)

    data = make_clients()

    def client_fn(context: Any) -> Any:
        return FedAvgClient(make_model(), data[context.node_config["partition-id"]], device="cpu")

    lrs = {}
    for restart in (False, True):
        strategy = FedAvg(
            seed=3,
            population=3,
            restart_lr=restart,
            lr_schedule=lambda t: 0.5 ** (t - 1),
            fraction_evaluate=0.0,
        )
        run(strategy, FedAvgClient, rounds=4, grid=Late(client_app(client_fn), 4))
        assert strategy.history[2]["shift"] == {"arrived": [3], "departed": []}
        lrs[restart] = [e["lr"] for e in strategy.history]
    assert lrs == {False: [0.2, 0.1, 0.05, 0.025], True: [0.2, 0.1, 0.2, 0.1]}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"incomplete": "skip"}, "incomplete must be"),
        ({"drop_inactive": 0.0}, "drop_inactive must be"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedAvg(**settings)


# What is malformed, unused or does not go together


def test_an_update_that_was_not_used_goes_back_into_the_residual() -> None:
    """Client 1 is incomplete in round 1 and dropped there: R + what is pending is all it ever learnt."""
    data = make_clients()
    strategy = EFL(0.0, 0.2, seed=1, incomplete="drop", fraction_evaluate=0.0)

    def client_fn(context: Any) -> Any:
        pid = context.node_config["partition-id"]
        return budgeted(EFLClient, [{1: 3}, {}])(make_model(), data[pid], device="cpu")

    models = []

    class Watching(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                models.append(from_record(messages[0].content.array_records["arrays"]))
            return super().push_messages(messages)

    grid = Watching(client_app(client_fn), 4)
    run(strategy, EFLClient, rounds=2, grid=grid)
    assert strategy.history[0]["replies"] == [0, 2, 3]
    learnt: dict[str, Any] = {}
    for w, steps in zip(models, (3, 6), strict=True):
        model = make_model()
        model.load_state_dict({n: torch.from_numpy(a) for n, a in w.items()})
        end = local_round(model, SparseTernary(), data[1], lr=0.2, steps=steps).delta
        learnt = {n: learnt.get(n, 0) + d for n, d in end.items()}
    state = grid._contexts[1001].state.array_records
    slots = {k.split(".", 4)[-1]: from_record(r) for k, r in state.items()}
    like = {n: learnt[n].numpy() for n in sorted(learnt)}
    sent = decode(slots["regs.pending.client"]["sent.|code"].tobytes(), like)
    close({n: slots["ternary.pending.client"][n] + sent[n] for n in like}, like, 1e-12)


def test_buffers_are_averaged_whatever_the_parameters_weigh() -> None:
    ends = {
        kind: run(
            FedAvg(seed=3, incomplete=kind, fraction_evaluate=0.0),
            budgeted(FedAvgClient, [{0: 1, 1: 2}]),
            rounds=1,
            model=lambda: make_model(torch.float64, batch_norm=True),
        )
        for kind in ("average", "scale")
    }
    for name in ("1.running_var", "1.running_mean", "1.num_batches_tracked"):
        np.testing.assert_array_equal(ends["scale"][name], ends["average"][name])
    assert abs(ends["scale"]["0.weight"] - ends["average"]["0.weight"]).max() > 1e-3


def test_the_order_of_terms_is_checked() -> None:
    with pytest.raises(ValueError, match="put them behind 'fedadc'"):
        chain([Elastic(0.1), EmbeddedMomentum(0.5, 0.5)])
    chain([EmbeddedMomentum(0.5, 0.5), Elastic(0.1)])


def _shape(record: Any) -> None:
    record["U.0.bias"] = Array(np.zeros(7, np.float32))


def _missing(record: Any) -> None:
    del record["U.0.bias"]


def _some(record: Any) -> None:
    record["V.0.bias"] = Array(np.zeros(6, np.float32))


def _extra(record: Any) -> None:
    record["W"] = Array(np.zeros(1000, np.float32))


def _negative(record: Any) -> None:
    record["U.0.bias"] = Array(-np.ones(6, np.float32))


def _huge(record: Any) -> None:
    record["U.0.bias"] = Array(np.full(6, 1e39))


class Spoiling(InProcessGrid):
    """Lets `spoil(reply)` change what client 2, or 1 with a probe, answered."""

    spoil: Any = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        for i in ids:
            type(self).spoil(self._replies[i])
        return ids


def spoiling(client: Any, n: int, how: Any) -> Spoiling:
    data = make_clients(n)

    def client_fn(context: Any) -> Any:
        return client(make_model(), data[context.node_config["partition-id"]], device="cpu")

    kind = type("Spoiling", (Spoiling,), {"spoil": staticmethod(how)})
    return kind(client_app(client_fn), n)  # type: ignore[no-any-return]


@pytest.mark.parametrize("spoil", [_shape, _missing, _some, _extra, _negative, _huge])
def test_an_unusable_upload_costs_only_its_client(spoil: Any) -> None:
    def how(reply: Message) -> None:
        records = reply.content.array_records
        if reply.metadata.src_node_id == 1002 and "fedcurv.upload" in records:
            spoil(records["fedcurv.upload"])

    strategy = FedCurv(0.1, seed=1, fraction_evaluate=0.0)
    run(strategy, FedCurvClient, rounds=3, grid=spoiling(FedCurvClient, 4, how))
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 3]
        assert "upload of 'fedcurv'" in entry["failures"][2]


@pytest.mark.parametrize("told", [(6, 10**9), (11, 10), (5.5, 10), (0, 0), (-1, 10)])
@pytest.mark.parametrize("train", [{"local-epochs": 2}, {"local-steps": 10}], ids=str)
def test_steps_that_the_round_did_not_ask_for_cost_only_their_client(told: Any, train: Any) -> None:
    class Boasting(FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, n, metrics = super().fit(parameters, config)
            if config[keys.CLIENT_KEY] == 0:
                metrics |= dict(zip(("local-steps", "planned-steps"), told, strict=True))
                n = 4
            return arrays, n, metrics

    strategy = FedAvg(seed=1, incomplete="scale", fraction_evaluate=0.0)
    run(strategy, Boasting, rounds=1, train=train)
    assert "where the round asked for" in strategy.history[0]["failures"][0]


def test_a_probing_method_compresses_the_model_of_its_probe() -> None:
    terms = [LeaveOneOutMean(0.1), Elastic(0.1), SparseTernary(0.05, 0.05)]
    strategy = RegStrategy(terms, seed=1, fraction_evaluate=0.0)
    grid = grid_of(lambda *a, **k: RegClient(*a, **k, terms=[type(t) for t in terms]), 3)
    run(strategy, RegClient, rounds=4, model=wide_model, grid=grid)
    first, last = strategy.history[0], strategy.history[-1]
    assert not any(e["failures"] for e in strategy.history)
    assert last["bytes_probe_down"][0] < 0.5 * first["bytes_probe_down"][0]


def test_a_client_that_never_finds_its_model_is_given_up() -> None:
    def how(reply: Message) -> None:
        if reply.metadata.message_type == keys.PROBE and reply.metadata.src_node_id == 1001:
            reply.content = RecordDict({keys.CONFIG: ConfigRecord({keys.OUT_OF_SYNC_KEY: True})})

    strategy = RFedAvgPlus(0.1, seed=1, fraction_evaluate=0.0)
    run(strategy, RFedAvgPlusClient, rounds=2, grid=spoiling(RFedAvgPlusClient, 3, how))
    for entry in strategy.history:
        assert entry["replies"] == [0, 2]
        assert "it says that it lacks the model" in entry["failures"][1]


def test_what_compression_does_not_go_with_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap=True sends whole models ahead"):
        EFL(0.1, 0.1, 0.1, overlap=True)
