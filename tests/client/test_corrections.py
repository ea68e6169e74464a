"""Corrections slice by slice: the bits of those of whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flwr_regs import FirstOrder, Proximal
from flwr_regs.chain import chain
from flwr_regs.client.train import corrections
from flwr_regs.client.train.corrections import Corrections, owner
from flwr_regs.client.train.local_training import LocalTraining, local_round
from flwr_regs.term import Arrays, ClientContext, Slot, Term
from flwr_regs.testing import Method
from flwr_regs.testing.problem import train
from tests.conftest import close
from tests.laws import CASES

ELEMENTWISE = [m for m in CASES if any(t.elementwise for t in m.terms)]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the entries of a slice; a model of more than two slices is cut."""

    def set_to(entries: int) -> None:
        monkeypatch.setattr(corrections, "SLICE", entries)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    return set_to


@pytest.mark.parametrize("method", ELEMENTWISE, ids=lambda m: m.name)
def test_a_training_in_slices_has_the_bits_of_one_that_is_not(
    method: Method, small_slices: Callable[[int], None]
) -> None:
    def trained() -> Any:
        return train(method.build(seed=3, fraction_evaluate=0.0), method.make_client, rounds=3)

    expected = trained()
    small_slices(7)  # of weights (6, 4) and (3, 6), and the biases together
    for got, want in zip(trained(), expected, strict=True):
        close(got, want, 0.0)


@dataclass(frozen=True)
class Halved(Term):
    """Not elementwise: divides by the norm, and adds the gradient elsewhere, which the left corrects."""

    name: ClassVar[str] = "halved"

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        there = ctx.gradient_at({n: 0.5 * p for n, p in params.items()})
        norm = sum(g.square().sum() for g in grads.values()).sqrt()
        return {n: g / norm + there[n] for n, g in grads.items()}


class Odd(nn.Module):
    """A 0-dimensional, an empty, a strided, an unused and a channels-last parameter, and a large one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(4)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        self.scale = nn.Parameter(made())
        self.empty = nn.Parameter(made(0, 3))
        self.strided = nn.Parameter(made(3, 8).T)
        self.unused = nn.Parameter(made(9, 9))
        self.conv = nn.Conv2d(2, 8, 3, padding=1).to(dtype).to(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(made(8, 2, 3, 3).to(memory_format=torch.channels_last))
        self.weight = nn.Parameter(made(37, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        return hidden @ self.weight.T @ self.weight @ self.strided


def odd_data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 2, 4, 4, generator=g).to(dtype), torch.arange(4) % 3) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "terms",
    [
        [FirstOrder(0.3)],
        [Proximal(0.2), FirstOrder(0.3)],
        [Proximal(0.2), Halved(), FirstOrder(0.3)],
        [FirstOrder(0.3), Proximal(0.2), Halved()],
    ],
    ids=lambda terms: "+".join(t.name for t in terms),
)
def test_odd_parameters_and_chains(
    terms: list[Term], dtype: torch.dtype, small_slices: Callable[[int], None]
) -> None:
    """A slot in float32 widens half-precision gradients, also for the term on its right."""

    def once() -> Any:
        torch.manual_seed(6)
        model = Odd(dtype)
        g = torch.Generator().manual_seed(7)
        last = {n: 0.3 * torch.randn(p.shape, generator=g) for n, p in model.named_parameters()}
        slots = {"first-order": last}
        settings: dict[str, Any] = {"lr": 0.001, "epochs": 2, "device": "cpu", "broadcast": slots}
        end = local_round(model, chain(terms), odd_data(dtype), **settings).state
        assert all(v.isfinite().all() for v in end.values())
        return end

    expected = once()
    small_slices(20)
    got = once()
    assert any((got[n] != v).any() for n, v in Odd(dtype).state_dict().items())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=name)


def test_a_term_alone_is_cut_too_and_no_gradient_is_there(
    small_slices: Callable[[int], None],
) -> None:
    sizes: list[list[int]] = []

    @dataclass(frozen=True)
    class Looks(Term):
        elementwise: ClassVar[bool] = True

        def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
            sizes.append([g.numel() for g in grads.values()])
            assert {*grads} == {*params} == {*ctx.start} == {*ctx.broadcast} - {"rate"}
            assert len(ctx.inputs) == 5
            with pytest.raises(RuntimeError, match="gradient_at is not there"):
                ctx.gradient_at(params)
            return grads

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    slot: Slot = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    data = [(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))]
    settings: dict[str, Any] = {"lr": 0.1, "steps": 1, "device": "cpu"}
    small_slices(10)
    local_round(model, Looks(), data, broadcast=slot | {"rate": torch.ones(())}, **settings)
    assert sizes == [[10], [10], [4], [10], [8], [6, 3]]
    small_slices(26)  # of 51 entries
    sizes.clear()
    with pytest.raises(RuntimeError, match="gradient_at is there in `correct`"):
        local_round(nn.Linear(4, 3), Asks(), data, **settings)


@dataclass(frozen=True)
class Asks(Term):
    elementwise: ClassVar[bool] = True

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return ctx.gradient_at(params)


def test_gradients_of_other_strides_and_sparse_ones(small_slices: Callable[[int], None]) -> None:
    """A loop of one's own may set any gradient; a sparse one is not cut."""
    start = torch.arange(12.0).reshape(4, 3)
    for make in (lambda: torch.ones(3, 4).T, lambda: torch.ones(()).expand(4, 3)):
        p = nn.Parameter(start + 1)
        p.grad = make()
        ctx = ClientContext(start={"p": start}, lr=0.1, num_steps=1)
        small_slices(5)
        Corrections(Proximal(0.5), {"p": p}, ctx)(ctx)
        torch.testing.assert_close(p.grad, torch.full((4, 3), 1.5), rtol=0, atol=0)
    table = nn.Embedding(9, 3, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 2))
    data = [(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))]
    small_slices(5)
    local_round(model, Same(), data, lr=0.1, steps=1, device="cpu")


@dataclass(frozen=True)
class Same(Term):
    elementwise: ClassVar[bool] = True

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return grads


def test_the_parameter_of_an_entry_has_the_longest_name_and_the_same_shape() -> None:
    params = {"weight": torch.zeros(2), "0.weight": torch.zeros(2), "bias": torch.zeros(3)}
    two = torch.zeros(2)
    assert owner("0.weight", two, params) == "0.weight"
    assert owner("U.0.weight", two, params) == "0.weight"
    assert owner("1.weight", two, params) == "weight"
    assert owner("0.weight", torch.zeros(1), params) is None
    assert owner("rate", two, params) is None
    assert owner("U.bias", two, params) is None
    assert owner("bias", "text", params) is None


def test_a_loop_of_ones_own_keeps_its_gradient_tensors(
    small_slices: Callable[[int], None],
) -> None:
    """In slices the result goes into the gradients' own memory."""
    model = nn.Linear(10, 3)
    data = [(torch.randn(5, 10), torch.zeros(5, dtype=torch.int64))]
    small_slices(4)
    training = LocalTraining(model, chain([Proximal(0.3)]), data, lr=0.1, steps=1, device="cpu")
    for inputs, targets in training.batches():
        output = model(inputs)
        loss = nn.functional.cross_entropy(output, targets)
        training.loss(loss, inputs, targets, output).backward()
        before = model.weight.grad
        training.correct()
        assert model.weight.grad is before
