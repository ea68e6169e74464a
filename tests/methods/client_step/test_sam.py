"""FedSAM and FedLESAM: where a step's gradient is taken."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining, local_round
from flwr_regs.term import Term
from flwr_regs.testing.problem import Point, half_squared_error, quadratic_clients, settled
from tests.conftest import close, make_clients, make_model
from tests.methods.test_theory import CENTRES, CURVATURES, path


def one_step(term: Term, model: nn.Module, **settings: Any) -> Any:
    return local_round(model, term, make_clients()[0], lr=0.1, steps=1, device="cpu", **settings)


def test_without_a_direction_there_is_no_perturbation() -> None:
    """A gradient of 0, and a model that is the one before."""
    at_rest = quadratic_clients([1.0], [0.0])[0]
    term = fr.LocalPerturbation(0.3)
    how: dict[str, Any] = {"lr": 0.1, "steps": 2, "device": "cpu", "loss_fn": half_squared_error}
    assert local_round(Point(), term, at_rest, **how).state["v"].item() == 0.0
    same = {n: p.detach().clone() for n, p in make_model().named_parameters()}
    still = one_step(fr.GlobalPerturbation(0.3), make_model(), client=same).state
    plain = one_step(fr.GlobalPerturbation(0.0), make_model()).state
    close(still, plain, 1e-15)


class Watching(Term):
    """Sees where a step's loss is taken, and where corrections are."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[Any]] = []

    def loss(self, base: Any, params: Any, ctx: Any) -> Any:
        self.seen.append({n: p.detach().clone() for n, p in params.items()})
        return base

    def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
        self.seen.append({n: p.clone() for n, p in params.items()})
        return grads


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_fedlesam_takes_one_gradient_a_step_at_the_perturbed_point(optimizer: Any) -> None:
    """Also where the optimiser asks for it several times, as LBFGS; corrections are at v."""
    model, passes, rho = make_model(), [0], 0.3
    model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    kept = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
    slots = {"fedlesam": kept}
    Watching.seen.clear()
    term = chain([fr.GlobalPerturbation(rho), Watching()])
    one_step(term, model, client=slots, optimizer=optimizer)
    there, here = Watching.seen[::2], Watching.seen[1::2]
    assert passes[0] == len(there) == len(here)
    assert (len(there) == 1) == (optimizer is torch.optim.SGD)
    norm = sum(0.01 * v.numel() for v in kept.values()) ** 0.5
    for at, v in zip(there, here, strict=True):
        close(at, {n: p + rho * 0.1 / norm for n, p in v.items()}, 1e-12)


def test_a_loop_that_moves_on_without_the_perturbation_is_refused() -> None:
    model, (x, y) = make_model(), make_clients()[0][0]
    kept = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
    how: dict[str, Any] = {"lr": 0.1, "steps": 1, "device": "cpu", "client": kept}
    loop = LocalTraining(model, fr.GlobalPerturbation(0.3), make_clients()[0], **how)
    output = model(x)
    with pytest.raises(RuntimeError, match=r"perturbs the model .* use batches"):
        loop.loss(nn.functional.cross_entropy(output, y), x, y, output)


def test_half_precision_keeps_the_direction() -> None:
    """The squares of a gradient of 1e-4 are 0 in float16."""
    seen = {}

    class Context:
        gradient_at = staticmethod(lambda params: seen.update(params) or params)

    zeros = {"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(1, dtype=torch.float16)}
    tiny = {n: torch.full_like(p, 1e-4) for n, p in zeros.items()}
    fr.LocalPerturbation(1.0).correct(tiny, zeros, Context())  # type: ignore[arg-type]
    for n in zeros:
        torch.testing.assert_close(seen[n], torch.full_like(zeros[n], 0.5))


def test_fedlesam_goes_past_fedavgs_fixed_point_and_back() -> None:
    """Where w rises, the perturbation is −ρ at all clients: it nears the fixed point + ρ.

    When w no longer moves there is no perturbation, w falls back, and nears the fixed point − ρ.
    """
    rho, plain = 0.05, settled(CURVATURES, CENTRES, (0.5, 0.5), 0.1, 5)
    w = path("FedLESAM", 5, 80, rho=rho)
    assert w[19] == pytest.approx(plain + rho, abs=1e-7)
    assert min(w[30:]) == pytest.approx(plain - rho, abs=1e-7)
    assert max(w) <= plain + rho + 1e-9
