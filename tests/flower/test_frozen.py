"""Frozen parameters: what `initial_arrays` holds travels; the rest is the same on all clients."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn

import flwr_regs as fr
from tests import conftest
from tests.conftest import close, plain_fedavg, still

Arrays = dict[str, np.ndarray]
FROZEN = {"0.weight", "0.bias", "2.weight", "2.bias"}
CONFIG = {"lr": 0.1, "local-epochs": 2}
OTHER = "other frozen parameters than the others"


def net(seed: int = 0) -> nn.Module:
    """A frozen backbone of its own for each seed, and one head for all."""
    torch.manual_seed(seed)
    body = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6)]
    torch.manual_seed(9)
    return still(nn.Sequential(*body, nn.Linear(6, 3)), "0", "2")


def batches(pid: int) -> list[Any]:
    g = torch.Generator().manual_seed(pid)
    n = 5 + pid
    return [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for _ in range(2)]


def grid_of(
    client: Any, models: Mapping[int, Callable[[], nn.Module]] | None = None, n: int = 3
) -> fr.InProcessGrid:
    """Clients of which some have another model: partition id -> what makes it."""

    def client_fn(context: Context) -> Any:
        pid = int(context.node_config["partition-id"])
        model = (models or {}).get(pid, net)()
        return client(model, batches(pid), batches(pid), device="cpu")

    return fr.InProcessGrid(fr.client_app(client_fn), n)


def start(strategy: Any, grid: Any, arrays: Mapping[str, torch.Tensor], rounds: int = 3) -> Arrays:
    result = conftest.start(strategy, grid, rounds, lambda: arrays, CONFIG)
    return {n: a.numpy() for n, a in result.arrays.items()}


def by_hand() -> Arrays:
    """FedAvg in plain loops; the frozen parameters do not move."""
    state, _ = plain_fedavg(net, [batches(pid) for pid in range(3)], 3, 0.1)
    return {n: v.numpy() for n, v in state.items()}


def test_the_trainable_part_travels_alone_and_trains_as_by_hand() -> None:
    part = fr.trainable(net())
    assert list(part) == [n for n in net().state_dict() if n not in FROZEN]
    strategies = [fr.FedAvg(seed=1), fr.FedAvg(seed=1)]
    got = start(strategies[0], grid_of(fr.FedAvgClient), part)
    whole = start(strategies[1], grid_of(fr.FedAvgClient), net().state_dict())
    close(whole, by_hand(), 1e-5)
    close({n: whole[n] for n in FROZEN}, {n: net().state_dict()[n].numpy() for n in FROZEN}, 0.0)
    close(got, {n: whole[n] for n in part}, 0.0)
    for entry, other in zip(*(s.history for s in strategies), strict=True):
        assert not entry["failures"]
        for what in ("bytes_down", "bytes_up"):
            assert max(entry[what].values()) < min(other[what].values())


METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "FedFOR, delta": (lambda **kw: fr.FedFOR(alpha=0.5, downlink="delta", **kw), fr.FedFORClient),
    "EFL": (lambda **kw: fr.EFL(lam=0.1, density_up=0.3, density_down=0.5, **kw), fr.EFLClient),
    "FedBN": (lambda **kw: fr.FedBN(**kw), fr.FedBNClient),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_client_with_another_frozen_rest_is_refused_by_name(name: str) -> None:
    """In training and in evaluation. The others train as without it."""
    make, client = METHODS[name]
    strategy = make(seed=1)
    start(strategy, grid_of(client, {0: lambda: net(5)}, n=4), fr.trainable(net()))
    for entry in strategy.history:
        for failures in (entry["failures"], entry["evaluate"]["failures"]):
            assert list(failures) == [0]
            assert OTHER in failures[0]
        assert entry["replies"] == [1, 2, 3]
    undecided = make(seed=1)  # of two, nobody knows which is right
    start(undecided, grid_of(client, {0: lambda: net(5)}, n=2), fr.trainable(net()))
    assert all("equally many each way" in entry["failed"] for entry in undecided.history)


def test_frozen_parameters_in_the_initial_arrays_reach_every_client() -> None:
    """Whatever the clients' backbones, they train the server's: the same bits."""
    state = net().state_dict()
    for make, client in METHODS.values():
        want = start(make(seed=1), grid_of(client), state)
        close(start(make(seed=1), grid_of(client, {1: lambda: net(5)}), state), want, 0.0)


def test_some_frozen_parameters_may_travel() -> None:
    part = {n: v for n, v in net().state_dict().items() if n not in FROZEN or n == "2.bias"}
    got = start(fr.FedAvg(seed=1), grid_of(fr.FedAvgClient), part)
    close(got, {n: by_hand()[n] for n in part}, 1e-5)


def test_what_is_missing_or_unknown_is_an_error_with_its_name() -> None:
    part = fr.trainable(net())
    without = {n: v for n, v in part.items() if n not in ("3.running_mean", "4.bias")}
    with pytest.raises(fr.RoundFailed, match=r"missing \['3.running_mean', '4.bias'\]"):
        start(fr.FedAvg(), grid_of(fr.FedAvgClient), without)
    with pytest.raises(fr.RoundFailed, match=r"unexpected \['more'\]"):
        start(fr.FedAvg(), grid_of(fr.FedAvgClient), {**part, "more": torch.zeros(1)})


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

    part, strategy = fr.trainable(Tied()), fr.FedAvg(seed=1)
    assert set(part) == {"adapter.weight", "adapter.bias"}
    got = start(strategy, grid_of(fr.FedAvgClient, dict.fromkeys(range(3), Tied)), part)
    assert all((a != part[n].numpy()).any() for n, a in got.items())
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in strategy.history)
