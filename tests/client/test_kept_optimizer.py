"""A client whose optimiser keeps its state between rounds: against one long run, and as client state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.client.memory import to_numpy
from flwr_regs.client.train.optimizer import load_state, state_of
from flwr_regs.testing.problem import RepeatingGrid, SerialisingGrid, app_of, train
from tests.conftest import QUIET, close, descend, make_clients, make_model, norm_model
from tests.flower.clients.test_own_loop import own_app
from tests.flower.test_stacked import grouped

ONE: dict[str, Any] = {**QUIET, "min_train_nodes": 1, "min_available_nodes": 1}


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.05),
    "SGD": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": partial(torch.optim.ASGD, lambd=1.0),
    "groups": grouped,
}


def long_run(make: Any, rounds: int, fresh: bool) -> dict[str, Any]:
    """Two epochs a round of client 0, in plain torch; `fresh`: a new optimiser in each round."""
    model, (data,) = make_model(), make_clients(1)
    optimizer = make(model.parameters(), lr=0.02)
    for _ in range(rounds):
        if fresh:
            optimizer = make(model.parameters(), lr=0.02)
        descend(model, optimizer, data * 2)
    return {n: v.numpy() for n, v in model.state_dict().items()}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("keep", [True, False])
def test_one_client_is_one_long_run_if_its_optimiser_goes_on(name: str, keep: bool) -> None:
    """Else each round is a run of its own, as ever; both in a loop of one's own, too."""
    make, how = MAKERS[name], {"lr": 0.02, "rounds": 3, "clients": make_clients(1)}
    settings = {"optimizer": make, "keep_optimizer": keep}
    found = train(fr.FedAvg(**ONE), fr.FedAvgClient, **how, **settings)[-1]
    close(found, long_run(make, 3, fresh=not keep), 1e-12)
    other = long_run(make, 3, fresh=keep)
    assert max(abs(found[n] - other[n]).max() for n in found) > 1e-3
    app = own_app(fr.FedAvgClient, make=make, n=1, keep_optimizer=keep)
    looped = train(fr.FedAvg(**ONE), fr.FedAvgClient, **how, grid=fr.InProcessGrid(app, 1))
    close(looped[-1], found, 0.0)


@pytest.mark.parametrize("grid", [SerialisingGrid, RepeatingGrid])
def test_the_state_is_client_state(grid: Any) -> None:
    """It goes through bytes, and a round that the server repeats begins with the state from before it."""
    settings = {"optimizer": MAKERS["AdamW"], "keep_optimizer": True}
    model, found = norm_model, []  # FedBN's private parameters have state, too
    for kind in (fr.InProcessGrid, grid):
        app = app_of(fr.FedBNClient, make_clients(), model=model, **settings)
        places = kind(app, 4)
        strategy = fr.FedBN(fraction_train=0.75, **QUIET)
        found.append(train(strategy, fr.FedBNClient, grid=places, lr=0.02, model=model))
        assert all(not e["lost_state"] for e in strategy.history)
    for a, b in zip(*found, strict=True):
        close(a, b, 0.0)


def test_the_state_of_half_precision_comes_back_as_it_was() -> None:
    """A client keeps it in float32; and a parameter may have taken fewer steps than the others."""
    model, (data,) = make_model(torch.bfloat16), make_clients(1, torch.bfloat16)
    params = dict(model.named_parameters())
    optimizer, other = torch.optim.AdamW(params.values()), torch.optim.AdamW(params.values())
    descend(model, optimizer, data)
    optimizer.state[params["0.bias"]]["step"] -= 1
    optimizer.state[params["2.bias"]]["later"] = None
    kept = {n: torch.from_numpy(to_numpy(a)) for n, a in state_of(optimizer, params).items()}
    load_state(other, params, kept)
    for p in params.values():
        for entry, value in optimizer.state[p].items():
            torch.testing.assert_close(other.state[p].get(entry), value, rtol=0, atol=0)


# what is refused


def test_what_cannot_be_kept_is_refused() -> None:
    how = {"rounds": 1, "keep_optimizer": True}
    with pytest.raises(fr.RoundFailed, match="LBFGS has a list as 'al', expected arrays"):
        train(fr.FedAvg(**QUIET), fr.FedAvgClient, optimizer=torch.optim.LBFGS, **how)
    with pytest.raises(fr.RoundFailed, match="the method makes the client's optimiser anew"):
        train(fr.FedADC(0.5, local_momentum=0.5, **QUIET), fr.FedADCClient, **how)
