"""The squares of gradients from layers' inputs: against backpropagation, one sample at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from flwr_regs.client.measure import fisher
from flwr_regs.client.measure.fisher import of_layers
from tests.client.test_fisher import go, make_data, odd, plain
from tests.conftest import close, noted


class Called(nn.Module):
    """A model of some layers and a function of them and the inputs, of shape (batch, 4)."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Twice(torch.autograd.Function):
    """A use of two tensors that is no function of torch's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x + 2 * weight.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shapes = inputs[0].shape, inputs[1].shape

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, (2 * g.sum()).expand(ctx.shapes[1])


def conv() -> nn.Module:
    return Called(
        lambda m, x: m.out(m.conv(x.reshape(-1, 1, 2, 2)).tanh().flatten(1)),
        conv=nn.Conv2d(1, 2, 2, padding=1),
        out=nn.Linear(18, 3),
    )


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def shared_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].bias = model[0].bias
    return model


def three(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A layer `a`, a matrix `b`, and a vector `c`."""
    b, c = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    return Called(forward, a=nn.Linear(4, 3), b=b, c=c)


def two(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two layers, of which the second makes the logits."""
    return Called(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))


linear = partial(nn.Linear, 4, 3)
OUT = {"out.weight", "out.bias"}
AB = {"a.weight", "a.bias", "b.weight", "b.bias"}
CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "inplace": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        {"0.weight", "0.bias", "2.weight", "2.bias"},
    ),
    "frozen-weight": (lambda: frozen(nn.Linear(4, 3), "weight"), {"bias"}),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Dropout(), nn.Linear(6, 3)
        ),
        {"0.weight", "0.bias", "4.weight", "4.bias"},
    ),
    "conv": (conv, OUT),
    "function": (
        lambda: Called(
            lambda m, x: functional.linear(input=x, bias=m.b, weight=m.a),
            a=nn.Parameter(torch.randn(3, 4)),
            b=nn.Parameter(torch.randn(3)),
        ),
        {"a", "b"},
    ),
    "parameter-as-input": (
        lambda: three(lambda m, x: m.a(x) + functional.linear(m.a.weight[0], m.b) + m.a(m.c[None])),
        {"b"},
    ),
    "its-own-input": (
        lambda: three(lambda m, x: m.a(x) + functional.linear(m.c, m.b)),
        {"a.weight", "a.bias", "b"},
    ),
    "attention": (
        lambda: Called(
            lambda m, x: m.b(m.a(*3 * [x.reshape(-1, 2, 2)], need_weights=False)[0].flatten(1)),
            a=nn.MultiheadAttention(2, 1, batch_first=True),
            b=nn.Linear(4, 3),
        ),
        {"b.weight", "b.bias"},
    ),
    "shared-bias": (shared_bias, {"0.weight"}),
    "penalty": (lambda: Called(lambda m, x: m.a(x) * m.a.weight.norm(), a=linear()), {"a.bias"}),
    "own-function": (
        lambda: two(lambda m, x: m.b(Twice.apply(m.a(x), m.a.weight))),
        AB - {"a.weight"},
    ),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), {"bias"}),
    # of one sample
    "over-the-batch": (lambda: two(lambda m, x: m.b(m.a(x) - x.mean(0) / 2)), AB),
}


@pytest.mark.parametrize("case", CASES)
def test_squares_are_those_of_each_samples_own_gradient(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(args)

    make, names = CASES[case]
    model, data = odd(make), make_data()
    found = noted(monkeypatch, fisher, "find_layers")
    monkeypatch.setattr(fisher.warnings, "warn", failed)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    want = plain(model, x, y)
    for memory in (1, 2**20):
        close(go(model, data, memory=memory), want, 1e-13)
    assert [of_layers(layers) for *_, layers in found] == [names, names]


def test_numbers_whose_own_squares_have_no_float() -> None:
    """Large inputs and small gradients, or the reverse, as long as their product has a square."""
    y = torch.tensor([0, 1])
    for size in (1e25, 1e-25):
        model, x = nn.Linear(2, 3, bias=False), torch.tensor([[size, 0.0], [0.0, -3 * size]])
        nn.init.zeros_(model.weight)

        def loss(output: Tensor, targets: Tensor, size: float = size) -> Tensor:
            return cross_entropy(output * 0, targets) + (output / size).pow(1).sum()

        got = go(model, [(x, y)], loss)["weight"]
        torch.testing.assert_close(got, torch.tensor([[0.5, 4.5]] * 3), rtol=1e-6, atol=0)


class Moody(nn.Linear):
    """Uses its weight in another way from its second call on."""

    calls, ways = 0, ("again", "not", "reshaped", "other", "beside")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1 and self.way == "not":
            return x @ self.weight.T + self.bias
        out = super().forward(x)
        if self.calls == 1:
            return out
        if self.way == "again":
            return out + super().forward(x)
        if self.way == "other":
            return out + functional.linear(x, self.weight)
        if self.way == "beside":
            return x @ self.weight.T + self.bias
        return super().forward(torch.stack([x, x])).sum(0)


@pytest.mark.parametrize("way", Moody.ways)
def test_a_layer_that_is_called_otherwise_than_it_was_found_goes_by_vmap(way: str) -> None:
    model, data = odd(Moody, 4, 3), make_data()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    model.way = way
    got = go(model, data)
    model.calls = 1
    close(got, plain(model, x, y), 1e-14)
