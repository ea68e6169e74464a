"""Terms and chains: derivatives against the penalties, composition rules, configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from flwr_regs import FedFOR, FedProx, FirstOrder, Proximal, RegStrategy
from flwr_regs.abilities import Compresses, Probes, Steps, Weighs
from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining
from flwr_regs.term import ClientContext, ServerContext, Term


def context(v: torch.Tensor, start: torch.Tensor, **slots: torch.Tensor) -> ClientContext:
    return ClientContext(start={"w": start}, lr=0.1, num_steps=3, broadcast=dict(slots))


def test_proximal_is_the_derivative_of_its_penalty() -> None:
    v = torch.tensor([1.5, -0.5, 2.0], requires_grad=True)
    start = torch.tensor([1.0, 0.5, 2.0])
    (0.7 / 2 * ((v - start) ** 2).sum()).backward()
    zero = {"w": torch.zeros(3)}
    got = Proximal(0.7).correct(zero, {"w": v.detach()}, context(v, start))["w"]
    torch.testing.assert_close(got, v.grad)
    torch.testing.assert_close(got, 0.7 * torch.tensor([0.5, -1.0, 0.0]))


def test_first_order_is_the_derivative_of_its_penalty() -> None:
    """Eq. 7 with displacements and g of both signs, and a coordinate that has not moved."""
    v = torch.tensor([1.5, 1.5, -0.5, -0.5, 2.0], requires_grad=True)
    start = torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0])
    g = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0])
    (0.6 * torch.relu(g * (v - start)).sum()).backward()
    zero = {"w": torch.zeros(5)}
    got = FirstOrder(0.6).correct(zero, {"w": v.detach()}, context(v, start, w=g))["w"]
    torch.testing.assert_close(got, v.grad)
    torch.testing.assert_close(got, 0.6 * torch.tensor([2.0, 0.0, 0.0, -2.0, 0.0]))


def test_a_step_moves_an_opposing_coordinate_by_alpha_times_the_last_global_step() -> None:
    before, now, eta, alpha = torch.tensor([1.0]), torch.tensor([1.4]), 0.1, 0.5
    ctx = ServerContext(2, eta, {"w": now}, {"w": now - before}, eta)
    g = FirstOrder(alpha).broadcast({}, ctx)["w"]
    torch.testing.assert_close(g, (before - now) / eta)
    v = now - 0.05  # moved back, against the last step
    grad = FirstOrder(alpha).correct({"w": torch.zeros(1)}, {"w": v}, context(v, now, w=g))["w"]
    torch.testing.assert_close(-eta * grad, alpha * (now - before))


def test_first_order_uses_the_learning_rate_of_the_round_that_made_the_step() -> None:
    ctx = ServerContext(3, 0.1, previous_step={"w": torch.tensor([0.4])}, previous_lr=0.2)
    torch.testing.assert_close(FirstOrder(1.0).broadcast({}, ctx)["w"], torch.tensor([-2.0]))


@pytest.mark.parametrize("build", [lambda: FedProx(mu=-0.1), lambda: FedFOR(alpha=-1.0)])
def test_negative_strengths_are_refused(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="must be a number of at least 0"):
        build()


@dataclass(frozen=True)
class Owner(Term, Steps):
    name: ClassVar[str] = "owner"


@dataclass(frozen=True)
class OtherOwner(Owner):
    name: ClassVar[str] = "other-owner"


@dataclass(frozen=True)
class Squeeze(Term, Compresses):
    name: ClassVar[str] = "squeeze"

    def encode(self, update):  # type: ignore[no-untyped-def]
        return b""

    def decode(self, data, like):  # type: ignore[no-untyped-def]
        return dict(like)


@dataclass(frozen=True)
class Weigh(Term, Weighs):
    name: ClassVar[str] = "weigh"

    def weigh(self, weights, uploads, ctx):  # type: ignore[no-untyped-def]
        return weights


@dataclass(frozen=True)
class WeighToo(Weigh):
    name: ClassVar[str] = "weigh-too"


@dataclass(frozen=True)
class Needy(Term):
    name: ClassVar[str] = "needy"
    needs: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class Keeper(Term):
    name: ClassVar[str] = "keeper"
    keeps: ClassVar[str] = "never"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Proximal(1.0), Proximal(2.0)], "each term may appear once.*proximal"),
        ([Owner(), Proximal(1.0), OtherOwner()], "only one term can own.*owner.*other-owner"),
        ([Squeeze(), Proximal(1.0)], "comes last.*squeeze"),
        ([Weigh(), WeighToo()], "only one term can weigh.*weigh.*weigh-too"),
        ([Needy()], "'needy' needs .'labels'., but a term can need"),
        ([Keeper()], "'keeper' keeps 'never', expected one of"),
    ],
)
def test_terms_that_do_not_go_together_are_refused(terms: list[Term], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegStrategy(terms)


@dataclass(frozen=True)
class Times(Term):
    """Multiplies at every hook, after adding one: the order shows in the result."""

    name: ClassVar[str] = "a"
    factor: float

    def loss(self, base, params, ctx):  # type: ignore[no-untyped-def]
        return (base + 1) * self.factor

    def correct(self, grads, params, ctx):  # type: ignore[no-untyped-def]
        return {n: (g + 1) * self.factor for n, g in grads.items()}

    def finish(self, delta, ctx):  # type: ignore[no-untyped-def]
        return {n: (d + 1) * self.factor for n, d in delta.items()}, {}, {}

    def update(self, server, delta, uploads, ctx):  # type: ignore[no-untyped-def]
        return server, {n: (d + 1) * self.factor for n, d in delta.items()}


@dataclass(frozen=True)
class TimesB(Times):
    name: ClassVar[str] = "b"


def test_client_hooks_run_left_to_right_and_server_updates_right_to_left() -> None:
    term = chain([Times(2.0), TimesB(10.0)])
    ctx = ClientContext(start={}, lr=0.1, num_steps=1)
    assert term.loss(1.0, {}, ctx) == 50.0
    assert term.correct({"w": 1.0}, {}, ctx) == {"w": 50.0}
    assert term.finish({"w": 1.0}, ctx)[0] == {"w": 50.0}
    server = term.init({})
    assert term.update(server, {"w": 1.0}, {}, ServerContext(1, 0.1))[1] == {"w": 42.0}


def test_a_step_budget_of_zero_is_zero() -> None:
    """A context without a budget takes the steps that are known; 0 is a budget like any other."""
    ctx = ClientContext(start={}, lr=0.1, num_steps=4)
    assert (ctx.planned_steps, ctx.budget_steps) == (4, 4)
    ctx = ClientContext(start={}, lr=0.1, num_steps=4, planned_steps=3, budget_steps=0)
    assert (ctx.planned_steps, ctx.budget_steps) == (3, 0)
    training = LocalTraining(
        torch.nn.Linear(2, 2), Proximal(0.1), [(torch.ones(1, 2), torch.ones(1).long())],
        lr=0.1, steps=3, device="cpu", max_steps=0,
    )  # fmt: skip
    assert (training._ctx.num_steps, training._ctx.budget_steps) == (0, 0)


def test_hyper_parameters_travel_by_name_and_a_missing_one_is_named() -> None:
    assert FirstOrder(0.3).config() == {"first-order.alpha": 0.3}
    assert FirstOrder.from_config({"first-order.alpha": 0.3, "x": 1}) == FirstOrder(0.3)
    assert FirstOrder().config() == {}  # None does not travel
    assert FirstOrder.from_config({"lr": 0.1}) == FirstOrder()
    with pytest.raises(KeyError, match=r"proximal\.mu"):
        Proximal.from_config({"lr": 0.1})


def test_the_seam_needs_no_flwr() -> None:
    """term.py and client/ are plain torch."""
    import subprocess
    import sys

    code = "import sys, flwr_regs.client.local_training; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_method_of_an_ability_that_is_not_inherited_is_refused() -> None:
    with pytest.raises(TypeError, match=r"defines fold\(\), but does not inherit Folds"):

        class Sums(Term):
            def fold(self, *args: Any) -> Any: ...

    class Half(Term, Probes):
        def probe(self, ctx: Any) -> Any: ...

    with pytest.raises(TypeError, match="answer"):
        Half()  # type: ignore[abstract]


def test_a_term_that_does_not_check_its_settings_is_refused() -> None:
    @dataclass(frozen=True)
    class Forgets(Proximal):
        name: ClassVar[str] = "forgets"

        def __post_init__(self) -> None:
            assert self.mu != 7

    with pytest.raises(TypeError, match=r"Forgets.__post_init__ must call super\(\).__post_init__"):
        RegStrategy([Forgets(-1.0)])
