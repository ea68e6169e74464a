"""The optimiser that a round's config describes: against plain loops, and with every method."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining, local_round
from flwr_regs.client.train.optimizer import clip, optimizer_of
from flwr_regs.testing import Method
from flwr_regs.testing.problem import start_weights
from tests.conftest import QUIET, close, make_clients, make_model, run, to_numpy
from tests.flower.clients.test_own_loop import Loop, own_app, plain_loop, without
from tests.laws import CASES
from tests.oracles.local_sgd import local_sgd

LENGTH = {"local-epochs": 2}
SETTINGS = {"momentum": 0.6, "weight-decay": 0.05}


def own_loop(make: Any = None, loop: Loop = plain_loop) -> fr.InProcessGrid:
    """Clients with a loop of their own."""
    return fr.InProcessGrid(own_app(fr.FedProxClient, loop, make=make), 4)


def fedprox(**settings: Any) -> fr.FedProx:
    return fr.FedProx(0.7, weighting="uniform", **QUIET, **settings)


@pytest.mark.parametrize(
    ("momentum", "decay", "norm"),
    [(0.6, 0.0, None), (0.0, 0.05, None), (0.0, 0.0, 0.3), (0.6, 0.05, 0.3)],
    ids=["momentum", "weight decay", "clipping", "all"],
)
def test_a_run_equals_plain_loops(momentum: float, decay: float, norm: float | None) -> None:
    """Clipping comes after the method's correction: its force counts in the norm."""
    config = {"momentum": momentum, "weight-decay": decay, "clip-norm": norm}
    train = {**LENGTH, **{key: value for key, value in config.items() if value}}
    more = {"momentum": momentum, "decay": decay, "norm": norm or math.inf, "mu": 0.7}
    expected, clipped = local_sgd(start_weights(), to_numpy(make_clients()), 3, 0.2, 2, **more)
    assert (clipped > 20) == (norm is not None)
    found = run(fedprox(), fr.FedProxClient, rounds=3, train=train)
    close(found, expected[-1], 1e-10)
    close(run(fedprox(), fr.FedProxClient, rounds=3, train=train, grid=own_loop()), found, 0.0)


@pytest.mark.parametrize("method", CASES[::6], ids=lambda m: m.name)
def test_a_config_gives_the_bits_of_a_factory_with_every_method(method: Method) -> None:
    """FedFOR's default strength depends on the momentum, whoever set it; FedADC refuses one.

    SCAFFOLD's option 2 and Mime take plain SGD alone: the first of these that a method takes.
    """
    term = chain(method.terms)

    def taken(config: dict[str, Any]) -> bool:
        try:
            make = term.client_optimizer(optimizer_of(config))
            make([torch.zeros(1, requires_grad=True)], lr=0.1)
        except ValueError:
            return False
        return True

    config = next(c for c in (SETTINGS, {"weight-decay": 0.05}, {"optimizer": "SGD"}) if taken(c))
    own = {key.replace("-", "_"): v for key, v in config.items() if key != "optimizer"}
    make = partial(torch.optim.SGD, **own)
    by_config, by_factory = (
        run(method.build(**QUIET), method.make_client, rounds=2, **how)
        for how in ({"train": {**LENGTH, **config}}, {"optimizer": make})
    )
    close(by_config, by_factory, 0.0)


# Refused


def test_a_client_has_one_optimiser() -> None:
    """The config's or its own: none wins silently. A norm to clip to goes with both."""
    both = r"the train config sets \{'momentum': 0.6.*an optimiser of its own, .*AdamW"
    for how in ({"optimizer": torch.optim.AdamW}, {"grid": own_loop(torch.optim.AdamW)}):
        with pytest.raises(fr.RoundFailed, match=both):
            run(fedprox(), fr.FedProxClient, train={**LENGTH, **SETTINGS}, **how)
        run(fedprox(), fr.FedProxClient, train={**LENGTH, "clip-norm": 0.3}, rounds=1, **how)
    unasked = r"the config sets \['momentum', 'weight-decay'\]: create it with loop.optimizer"
    grid = own_loop(torch.optim.SGD, without("optimizer"))
    with pytest.raises(fr.RoundFailed, match=unasked):
        run(fedprox(), fr.FedProxClient, train={**LENGTH, **SETTINGS}, grid=grid)
    how: dict[str, Any] = {"lr": 0.1, "steps": 1, "config": {"clip-norm": -1.0}}
    with pytest.raises(ValueError, match="config key 'clip-norm' must be a positive number"):
        LocalTraining(make_model(), chain([]), make_clients()[0], **how)


def test_an_optimiser_of_other_parameters_is_refused() -> None:
    training = LocalTraining(make_model(), chain([]), make_clients()[0], lr=0.1, steps=1)
    with pytest.raises(ValueError, match="holds none of those that the client trains"):
        training.optimizer(lambda params, lr: torch.optim.SGD(make_model().parameters(), lr))
    with pytest.raises(TypeError, match="must return an optimiser, not NoneType"):
        training.optimizer(lambda params, lr: None)  # type: ignore[arg-type,return-value]


# What moves, and what must not


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_clipping_in_half_precision(dtype: torch.dtype) -> None:
    """The squares of such gradients overflow float16: the norm is taken in float32."""
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (2,))]
    for p in params:
        p.grad = torch.full_like(p, 3e4)
    clip([*params, nn.Parameter(torch.zeros(5))], 1.0)
    for p in params:
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.full_like(p, 14**-0.5), rtol=1e-2, atol=0)
    how: dict[str, Any] = {"lr": 0.1, "steps": 3, "config": {**SETTINGS, "clip-norm": 0.1}}
    term, data = chain([fr.Proximal(0.1)]), make_clients(1, dtype)[0]
    result = local_round(make_model(dtype), term, data, device="cpu", **how)
    assert all(d.isfinite().all() and d.any() for d in result.delta.values())


def test_gradients_that_no_optimiser_holds_do_not_add_up() -> None:
    """They count in the norm that is clipped to, each in its own step."""
    model, plain, (data, *_) = make_model(), make_model(), make_clients()

    def head(params: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD([*params][-2:], lr)

    how: dict[str, Any] = {"optimizer": head, "config": {"clip-norm": 0.1}, "device": "cpu"}
    local_round(model, chain([]), data, lr=0.1, epochs=2, **how)
    optimizer = head(plain.parameters(), 0.1)
    for x, y in [*data, *data]:
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    close(model.state_dict(), plain.state_dict(), 1e-12)
