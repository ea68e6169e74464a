"""FedSAM and FedLESAM: what the second gradient leaves alone, and where they settle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.term import Term
from flwr_regs.testing.problem import (
    Point,
    half_squared_error,
    quadratic_clients,
    settled,
    train,
)
from tests.conftest import make_clients, make_model

RHO = 0.05
CURVATURES, CENTRES = (1.0, 4.0), (-1.0, 2.0)


def one_step(term: Term, model: nn.Module, **settings: Any) -> Any:
    return local_round(model, term, make_clients()[0], lr=0.1, steps=1, device="cpu", **settings)


def away() -> dict[str, torch.Tensor]:
    """What FedLESAM's client kept: a model beside ``w_t``."""
    return {n: p.detach() + 0.1 for n, p in make_model(batch_norm=True).named_parameters()}


@pytest.mark.parametrize("term", [fr.LocalPerturbation(1.0), fr.GlobalPerturbation(1.0)])
def test_batch_norms_statistics_are_those_of_the_first_gradient(term: Term) -> None:
    kept = {"fedlesam": away()} if term.name == "fedlesam" else {}
    found = one_step(chain([term]), make_model(batch_norm=True), client=kept).state
    plain = one_step(fr.Proximal(0.0), make_model(batch_norm=True)).state
    for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(found[n], plain[n], rtol=0, atol=0)
    assert (found["0.weight"] - plain["0.weight"]).abs().max() > 1e-5


def test_the_dropout_mask_is_that_of_the_first_gradient() -> None:
    def stepped(rho: float) -> torch.Tensor:
        torch.manual_seed(5)
        model = nn.Sequential(make_model(), nn.Dropout(0.5))
        return one_step(fr.LocalPerturbation(rho), model).state["0.0.weight"]  # type: ignore[no-any-return]

    torch.testing.assert_close(stepped(1e-9), stepped(0.0), rtol=0, atol=1e-9)


def test_without_a_direction_there_is_no_perturbation() -> None:
    """A gradient of 0, and a model that is the one before."""
    at_rest = quadratic_clients([1.0], [0.0])[0]
    found = local_round(
        Point(), fr.LocalPerturbation(0.3), at_rest, lr=0.1, steps=2, device="cpu",
        loss_fn=half_squared_error,
    )  # fmt: skip
    assert found.state["v"].item() == 0.0
    same = {n: p.detach().clone() for n, p in make_model().named_parameters()}
    still = one_step(fr.GlobalPerturbation(0.3), make_model(), client=same).state
    plain = one_step(fr.GlobalPerturbation(0.0), make_model()).state
    for n in still:
        torch.testing.assert_close(still[n], plain[n], rtol=0, atol=1e-15)


def test_half_precision_keeps_the_direction() -> None:
    """The squares of a gradient of 1e-4 are 0 in float16."""
    term = fr.LocalPerturbation(1.0)
    seen = {}

    class Context:
        gradient_at = staticmethod(lambda params: seen.update(params) or params)

    zeros = {"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(1, dtype=torch.float16)}
    tiny = {n: torch.full_like(p, 1e-4) for n, p in zeros.items()}
    term.correct(tiny, zeros, Context())  # type: ignore[arg-type]
    for n in zeros:
        torch.testing.assert_close(seen[n], torch.full_like(zeros[n], 0.5))


def quadratics(strategy: Any, client: Any, rounds: int) -> list[float]:
    models = train(
        strategy, client, rounds=rounds, clients=quadratic_clients(CURVATURES, CENTRES),
        model=Point, lr=0.1, length={"local-steps": 5}, loss_fn=half_squared_error,
    )  # fmt: skip
    return [float(m["v"][0]) for m in models]


def test_fedlesam_goes_past_fedavgs_fixed_point_and_back() -> None:
    """Where w rises, the perturbation is −ρ at all clients: it nears the fixed point + ρ.

    When w no longer moves there is no perturbation, w falls back, and nears the fixed point − ρ.
    """
    plain = settled(CURVATURES, CENTRES, (0.5, 0.5), 0.1, 5)
    path = quadratics(fr.FedLESAM(RHO, seed=3, fraction_evaluate=0.0), fr.FedLESAMClient, 80)
    assert path[19] == pytest.approx(plain + RHO, abs=1e-7)
    assert min(path[30:]) == pytest.approx(plain - RHO, abs=1e-7)
    assert max(path) <= plain + RHO + 1e-9
