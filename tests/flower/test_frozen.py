"""Frozen parameters: clients hold them, only their digest travels, and no two backbones are mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import nn
from torch.nn.functional import cross_entropy

import flwr_regs as fr
from flwr_regs.abilities import Freezes
from flwr_regs.server.exchange import frozen as server_frozen
from flwr_regs.server.exchange.frozen import ASK_ABOVE, MOST_SENT
from flwr_regs.term import Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.frozen import frozen_digest, read_said
from flwr_regs.wire.records import from_record
from tests.conftest import close

Arrays = dict[str, np.ndarray]
SMALL, LARGE = 6, 300  # the second is beyond ASK_ABOVE
FROZEN = {"0.weight", "0.bias", "2.weight", "2.bias"}
CONFIG = ConfigRecord({"lr": 0.1, "local-epochs": 2})


def net(seed: int = 0, width: int = SMALL) -> nn.Sequential:
    """A frozen backbone of its own for each seed, and one head for all."""
    torch.manual_seed(seed)
    body = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.BatchNorm1d(width)]
    torch.manual_seed(9)
    model = nn.Sequential(*body, nn.Linear(width, 3))
    for i in (0, 2):
        model[i].requires_grad_(False)
    return model


def batches(pid: int) -> list[Any]:
    g = torch.Generator().manual_seed(pid)
    return [
        (torch.randn(5 + pid, 4, generator=g), torch.randint(0, 3, (5 + pid,), generator=g))
        for _ in range(2)
    ]


def grid_of(
    client: Any, width: int, seeds: Mapping[int, int] | None = None, n: int = 3, **kwargs: Any
) -> fr.InProcessGrid:
    """Clients of which some have another backbone: partition id -> its seed."""

    def client_fn(context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        model = net((seeds or {}).get(pid, 0), width)
        return client(model, batches(pid), batches(pid), device="cpu", **kwargs)

    return fr.InProcessGrid(fr.client_app(client_fn), n)


def state(width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in net(seed, width).state_dict().items()}


def start(strategy: Any, grid: Any, arrays: Mapping[str, torch.Tensor], rounds: int = 3) -> Arrays:
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord({**arrays}), num_rounds=rounds, train_config=CONFIG
    )
    return {n: a.numpy() for n, a in result.arrays.items()}


def size(arrays: Mapping[str, torch.Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in arrays.values())


def by_hand(width: int, rounds: int = 3) -> Arrays:
    """FedAvg in a plain loop; the frozen parameters do not move."""
    w = state(width)
    for _ in range(rounds):
        ends, counts = [], []
        for pid in range(3):
            model = net(width=width)
            model.load_state_dict(w)
            trained = [p for p in model.parameters() if p.requires_grad]
            for _ in range(2):
                for x, y in batches(pid):
                    grads = torch.autograd.grad(cross_entropy(model(x), y), trained)
                    for p, g in zip(trained, grads, strict=True):
                        p.data -= 0.1 * g
            ends.append({n: v.double() for n, v in model.state_dict().items()})
            counts.append(2 * (5 + pid))
        mean = {
            n: sum(c * e[n] for c, e in zip(counts, ends, strict=True)) / sum(counts) for n in w
        }
        w = {
            n: mean[n].round().to(v.dtype) if not v.is_floating_point() else mean[n].to(v.dtype)
            for n, v in w.items()
        }
    return {n: v.numpy() for n, v in w.items()}


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_only_what_is_trained_travels_and_the_model_is_as_by_hand(width: int) -> None:
    assert (size(state(width)) > ASK_ABOVE) == (width == LARGE)
    moving = size({n: v for n, v in state(width).items() if n not in FROZEN})
    strategy = fr.FedAvg(seed=1)
    got = start(strategy, grid_of(fr.FedAvgClient, width), state(width))
    close(got, by_hand(width), 1e-5)
    for n in FROZEN:
        np.testing.assert_array_equal(got[n], state(width)[n].numpy())
    assert list(got) == list(state(width))  # whole, in its order
    for entry in strategy.history[width == SMALL :]:  # a small model travels whole once
        for sent in (entry["bytes_down"], entry["bytes_up"], entry["evaluate"]["bytes_down"]):
            assert max(sent.values()) < moving + 1800, entry["round"]  # names, headers, the digest
    assert all("frozen_sent" not in e and not e["failures"] for e in strategy.history)


class FixedHead(Term, Freezes):
    """Holds the output layer still, as FedBABU does: the server's own, which no client has."""

    name: ClassVar[str] = "fixed-head"

    def frozen(self, names: Collection[str]) -> set[str]:
        return {"2.weight", "2.bias"}


METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "FedFOR, delta": (lambda **kw: fr.FedFOR(alpha=0.5, downlink="delta", **kw), fr.FedFORClient),
    "EFL": (lambda **kw: fr.EFL(lam=0.1, density_up=0.3, density_down=0.5, **kw), fr.EFLClient),
    "rFedAvg+": (lambda **kw: fr.RFedAvgPlus(lam=0.1, **kw), fr.RFedAvgPlusClient),
    "FedBN": (lambda **kw: fr.FedBN(**kw), fr.FedBNClient),
    "FedAdam": (lambda **kw: fr.FedAdam(server_lr=0.01, **kw), fr.FedAdamClient),
    "frozen by a term": (
        lambda **kw: fr.RegStrategy([FixedHead()], **kw),
        partial(fr.RegClient, terms=[FixedHead]),
    ),
    "overlap": (
        lambda **kw: fr.FedADC(downlink="delta", overlap=True, beta=0.5, **kw),
        fr.FedADCClient,
    ),
}


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("name", METHODS)
def test_another_backbone_is_replaced_once_by_the_servers(name: str, width: int) -> None:
    """Whatever the clients' backbones, they train the server's: the same bits, whoever had another."""
    make, client = METHODS[name]
    want = start(make(seed=1), grid_of(client, width), state(width), 4)
    strategy = make(seed=1)
    got = start(strategy, grid_of(client, width, {1: 5}), state(width), 4)
    close(got, want, 0.0)
    assert not any(e["failures"] for e in strategy.history)
    sent = [e["round"] for e in strategy.history if "frozen_sent" in e]
    assert sent == ([1] if width == LARGE else [])  # a small model's came with it in round 1
    assert all(e.get("frozen_sent", [1]) == [1] for e in strategy.history)
    backbone = size({n: v for n, v in state(width).items() if n in FROZEN})
    if width == LARGE:
        assert sum(e["bytes_down"][1] for e in strategy.history) < 3 * backbone
        assert all(b < backbone / 3 for e in strategy.history[1:] for b in e["bytes_down"].values())


def test_half_precision_rounds_what_is_trained_alone() -> None:
    strategies = [fr.FedAvg(seed=1, wire_dtype="bfloat16") for _ in range(2)]
    want = start(strategies[0], grid_of(fr.FedAvgClient, LARGE), state(LARGE))
    got = start(strategies[1], grid_of(fr.FedAvgClient, LARGE, {2: 7}), state(LARGE))
    close(got, want, 0.0)
    np.testing.assert_array_equal(got["0.weight"], state(LARGE)["0.weight"].numpy())
    assert strategies[1].history[0]["frozen_sent"] == [2]


def test_a_client_first_met_in_an_evaluation_gets_them_too() -> None:
    strategy = fr.FedAvg(seed=1, fraction_train=0.3, min_train_nodes=1, fraction_evaluate=1.0)
    start(strategy, grid_of(fr.FedAvgClient, LARGE, {0: 1, 1: 1, 2: 1}), state(LARGE), 5)
    assert not any(e["evaluate"]["failures"] or e["failures"] for e in strategy.history)
    sent = dict.fromkeys(range(3), 0)
    for e in strategy.history:
        for by in (e["bytes_down"], e["evaluate"]["bytes_down"]):
            for pid, b in by.items():
                sent[pid] += b > 300_000
    assert sent == {0: 1, 1: 1, 2: 1}


def test_beyond_the_limit_a_client_with_another_backbone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MOST_SENT == 64 * 2**20
    monkeypatch.setattr(server_frozen, "MOST_SENT", 100_000)
    strategy = fr.FedAvg(seed=1)
    start(strategy, grid_of(fr.FedAvgClient, LARGE, {1: 5}), state(LARGE))
    for entry in strategy.history:
        for failures in (entry["failures"], entry["evaluate"]["failures"]):
            assert list(failures) == [1]
            assert "0.4 MiB" in failures[1]
            assert "same pretrained weights" in failures[1]
        assert entry["replies"] == [0, 2]


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_the_initial_arrays_may_hold_the_trained_part_alone(width: int) -> None:
    part = {n: v for n, v in state(width).items() if n not in FROZEN}
    strategies = [fr.FedFOR(alpha=0.5, seed=1) for _ in range(3)]
    want = start(strategies[0], grid_of(fr.FedFORClient, width), state(width))
    got = start(strategies[1], grid_of(fr.FedFORClient, width), part)
    close(got, {n: want[n] for n in part}, 0.0)
    assert all(max(e["bytes_down"].values()) < 2 * size(part) + 3000 for e in strategies[1].history)
    # a client with another backbone cannot be served: it is left out, and named
    start(strategies[2], grid_of(fr.FedFORClient, width, {0: 4}, n=4), part)
    for entry in strategies[2].history:
        for failures in (entry["failures"], entry["evaluate"]["failures"]):
            assert "initial_arrays lacks them" in failures[0]
        assert entry["replies"] == [1, 2, 3]


def test_initial_arrays_with_some_of_the_frozen_parameters_are_refused() -> None:
    part = {n: v for n, v in state(SMALL).items() if n not in FROZEN or n == "2.bias"}
    with pytest.raises(fr.RoundFailed, match=r"lacks \['0.bias', '0.weight', '2.weight'\].*all of"):
        start(fr.FedAvg(), grid_of(fr.FedAvgClient, SMALL), part)


def test_buffers_cannot_be_left_out() -> None:
    part = {n: p.detach() for n, p in net().named_parameters() if p.requires_grad}
    with pytest.raises(fr.RoundFailed, match=r"missing \['3.num_batches_tracked'"):
        start(fr.FedAvg(), grid_of(fr.FedAvgClient, SMALL), part)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_client_that_trains_the_backbone_is_named(width: int) -> None:
    def thawed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args[0][0][0].shape[0] == 6:  # partition 1
            model.requires_grad_(True)
        return fr.FedAvgClient(model, *args, **kwargs)

    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    start(strategy, grid_of(thawed, width), state(width))
    for entry in strategy.history:
        assert list(entry["failures"]) == [1]
        assert "0.weight" in entry["failures"][1]


def test_a_restarted_node_gets_its_model_and_its_backbone_again() -> None:
    class Restarted(fr.InProcessGrid):
        """Partition 1 loses its state before round 3."""

        pushes = 0

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            trains = [m for m in messages if m.metadata.message_type == "train"]
            if trains and trains[0].content["config"].get("server-round") == 3 and not self.pushes:
                self.pushes = 1
                self._contexts[1001].state.clear()
            return super().push_messages(messages)

    make = METHODS["FedFOR, delta"][0]
    want = start(make(seed=1), grid_of(fr.FedFORClient, LARGE), state(LARGE), 4)
    grid = grid_of(fr.FedFORClient, LARGE, {1: 5})
    grid.__class__ = Restarted
    strategy = make(seed=1)
    close(start(strategy, grid, state(LARGE), 4), want, 0.0)
    assert [e["round"] for e in strategy.history if "frozen_sent" in e] == [1, 3]


def test_weights_tied_in_the_frozen_part_and_a_backbone_in_half_precision() -> None:
    """As a language model with adapters: tied embeddings, in bfloat16, which numpy lacks."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Linear(4, 3, bias=False).bfloat16().requires_grad_(False)
            self.head = nn.Linear(4, 3, bias=False)
            self.head.weight = self.embed.weight
            self.adapter = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.bfloat16()).float() + self.adapter(x)

    def client_fn(context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        return fr.FedAvgClient(Tied(), batches(pid), batches(pid), device="cpu")

    part = {n: v for n, v in Tied().state_dict().items() if "adapter" in n}
    strategy = fr.FedAvg(seed=1)
    got = start(strategy, fr.InProcessGrid(fr.client_app(client_fn), 3), part)
    assert got.keys() == part.keys()
    assert all((a != part[n].numpy()).any() for n, a in got.items())
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in strategy.history)


def test_a_loop_of_your_own_is_asked_too() -> None:
    app = fr.RegClientApp()
    calls = []

    @app.train()
    def train(message: Any, context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        calls.append(pid)
        model = net(pid, LARGE)
        loop = fr.ClientRound(message, fr.FedProxClient, model, batches(pid), device="cpu")
        with loop.seeded():
            optimizer = loop.optimizer(torch.optim.SGD)
            for x, y in loop.batches():
                optimizer.zero_grad()
                output = model(x)
                loop.loss(cross_entropy(output, y), x, y, output).backward()
                loop.correct()
                optimizer.step()
            return loop.reply()

    strategies = [fr.FedProx(mu=0.1, seed=1, fraction_evaluate=0.0) for _ in range(2)]
    want = start(strategies[0], grid_of(fr.FedProxClient, LARGE), state(LARGE))
    close(start(strategies[1], fr.InProcessGrid(app, 3), state(LARGE)), want, 1e-6)
    assert strategies[1].history[0]["frozen_sent"] == [1, 2]
    assert calls == [0, 1, 2] * 4  # round 1 asked first


def test_other_code_that_is_asked_gets_the_whole_model() -> None:
    from flwr.client import NumPyClient

    class Plain(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [parameters[0] + 1], 4, {}

    app = fr.client_app(lambda context: Plain())
    got = start(
        fr.FedAvg(seed=1, fraction_evaluate=0.0),
        fr.InProcessGrid(app, 2),
        {"w": torch.zeros(ASK_ABOVE)},
        2,
    )
    assert (got["w"] == 2).all()


@pytest.mark.parametrize("failing", [{0, 1}, {0, 1, 2}], ids=["most", "all"])
def test_a_client_whose_code_fails_when_it_is_asked_decides_nothing(failing: set[int]) -> None:
    class Fails(fr.FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            if config.get(keys.ASK_KEY) and len(self.train_data[0][0]) - 5 in failing:  # type: ignore[index]
                raise MemoryError("while it built its data")
            return super().fit(parameters, config)

    strategy = fr.FedAvg(seed=1)
    got = start(strategy, grid_of(Fails, LARGE, {1: 5}), state(LARGE))
    close(got, start(fr.FedAvg(seed=1), grid_of(fr.FedAvgClient, LARGE), state(LARGE)), 0.0)
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in strategy.history)
    sent = [{p for p, b in e["bytes_down"].items() if b > ASK_ABOVE} for e in strategy.history]
    whole = len(failing) == 3  # nobody answered: the whole model went, and the replies told
    assert sent == [{0, 1, 2} if whole else {1}, set(), set()]


def test_a_client_that_freezes_what_the_others_train_is_told_so() -> None:
    def thawed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model.requires_grad_(args[0][0][0].shape[0] != 6)  # but partition 1
        model[4].requires_grad_(True)
        return fr.FedAvgClient(model, *args, **kwargs)

    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    start(strategy, grid_of(thawed, LARGE), state(LARGE), 1)
    failures = strategy.history[0]["failures"]
    assert failures == {1: "it holds parameters frozen that the others train"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_backbone_in_half_precision_takes_float32_arrays(dtype: torch.dtype, width: int) -> None:
    class Half(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width)).to(dtype)
            self.body.requires_grad_(False)
            torch.manual_seed(9)
            self.head = nn.Linear(width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.to(dtype)).float())

    def run(seeds: Mapping[int, int]) -> tuple[Arrays, Any]:
        def client_fn(context: Context) -> Any:
            pid = int(context.node_config["partition-id"])
            return fr.FedAvgClient(
                Half(seeds.get(pid, 0)), batches(pid), batches(pid), device="cpu"
            )

        strategy, arrays = (
            fr.FedAvg(seed=1),
            {n: v.float() for n, v in Half(0).state_dict().items()},
        )
        return start(strategy, fr.InProcessGrid(fr.client_app(client_fn), 3), arrays), strategy

    (want, _), (got, strategy) = run({}), run({1: 5})
    close(got, want, 0.0)
    sent = [e["round"] for e in strategy.history if "frozen_sent" in e]
    assert sent == ([1] if width == LARGE else [])  # the client keeps what came, not what it had


def test_where_nothing_is_left_to_train_the_client_says_so() -> None:
    def client_fn(context: Context) -> Any:
        model = nn.Sequential(nn.Linear(4, ASK_ABOVE // 16), nn.Linear(ASK_ABOVE // 16, 3))
        model[0].requires_grad_(False)
        return fr.FedPerClient(model, batches(0), device="cpu")

    arrays = {"0.weight": torch.zeros(ASK_ABOVE // 16, 4), "0.bias": torch.zeros(ASK_ABOVE // 16)}
    arrays |= {"1.weight": torch.zeros(3, ASK_ABOVE // 16), "1.bias": torch.zeros(3)}
    strategy = fr.FedPer(patterns="1.*", wire_dtype="bfloat16")
    with pytest.raises(fr.RoundFailed, match="shares no parameter"):
        start(strategy, fr.InProcessGrid(fr.client_app(client_fn), 2), arrays, 1)


def test_the_caller_may_change_the_backbone_between_rounds() -> None:
    def changed(strategy: Any, grid: Any) -> Arrays:
        train, _ = strategy.prepare(3, None, CONFIG, {})
        arrays = ArrayRecord(state(SMALL))
        for t in (1, 2, 3):
            replies = grid.send_and_receive(strategy.configure_train(t, arrays, train, grid))
            arrays, _ = strategy.aggregate_train(t, replies)
            if t == 1:
                held = from_record(arrays)
                held |= {n: net(3).state_dict()[n].numpy() for n in FROZEN}
                arrays = ArrayRecord({n: torch.from_numpy(a) for n, a in held.items()})
        return from_record(arrays)

    strategies = [fr.FedAvg(seed=1, fraction_evaluate=0.0) for _ in range(2)]
    want = changed(strategies[0], grid_of(fr.FedAvgClient, SMALL))
    got = changed(strategies[1], grid_of(fr.FedAvgClient, SMALL, {1: 3}))
    close(got, want, 0.0)
    assert strategies[0].history[1]["frozen_sent"] == [0, 1, 2]
    np.testing.assert_array_equal(got["0.weight"], net(3).state_dict()["0.weight"].numpy())


LIES = [
    "no json",
    "[" * 100_000,
    json.dumps({"0.weight": 1}),
    json.dumps(["0.weight", 3]),
    json.dumps(["4.weight"]),  # which it trains
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie[:12])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_client_that_lies_about_them_costs_itself_alone(lie: str, width: int) -> None:
    class Liar(fr.InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                config = reply.content.config_records.get("config") if reply.has_content() else None
                if reply.metadata.src_node_id == 1000 and config and keys.FROZEN_KEY in config:
                    config[keys.FROZEN_KEY] = lie
            return replies

    want = start(
        fr.FedAvg(seed=1, fraction_evaluate=0.0), grid_of(fr.FedAvgClient, width), state(width)
    )
    grid = grid_of(fr.FedAvgClient, width)
    grid.__class__ = Liar
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    got = start(strategy, grid, state(width))
    assert all(e["replies"][-2:] == [1, 2] for e in strategy.history)
    if width == LARGE:  # what it said when asked was not needed
        close(got, want, 0.0)
    else:
        assert "regs.frozen" in strategy.history[0]["failures"][0]


def test_what_is_said_is_checked() -> None:
    ok = {keys.FROZEN_KEY: '["a", "b"]', keys.FROZEN_DIGEST_KEY: "x"}
    assert read_said(ok, ["c"]) == ({"a", "b"}, "x")
    assert read_said({}) == (frozenset(), "")
    for wrong in (
        {keys.FROZEN_KEY: 3},
        {keys.FROZEN_DIGEST_KEY: 3},
        {**ok, keys.FROZEN_KEY: '"ab"'},
    ):
        with pytest.raises(ProtocolError):
            read_said(wrong)
    half = {"a": np.float16([0.5]), "b": np.float32([1])}
    assert frozen_digest(half) == frozen_digest({"b": half["b"], "a": np.float32([0.5])})
    assert frozen_digest(half) != frozen_digest({**half, "b": np.float32([2])})
    assert frozen_digest({}) == ""
