"""Kinds of models against methods: each cell trains, or is refused with a sentence."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.testing import Method, problem
from tests.conftest import Batch, close, drawn, start, still
from tests.laws import CASES
from tests.sampling import sampled


def images(pid: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Two batches of six 1 x 6 x 6 images; the clients' labels differ."""
    g = torch.Generator().manual_seed(40 + pid)
    y = (torch.arange(6) + pid) % (2 + pid)
    return [(torch.randn(6, 1, 6, 6, generator=g).to(dtype), y) for _ in range(2)]


def vectors(pid: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Two or three batches of five vectors of length 4."""
    g = torch.Generator().manual_seed(60 + pid)
    y = (torch.arange(5) + pid) % 3
    return [(torch.randn(5, 4, generator=g).to(dtype), y) for _ in range(2 + pid)]


def tokens(pid: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Two batches of six tokens and the tokens that follow them."""
    g = torch.Generator().manual_seed(80 + pid)
    drawn = [torch.randint(0, 5, (6,), generator=g) for _ in range(2)]
    return [(t, (t + 1 + pid) % 5) for t in drawn]


class ResNet(nn.Module):
    """One of torchvision's basic blocks between a convolution and a classifier."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn1 = norm(4)
        self.block = BasicBlock(4, 4, norm_layer=norm)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.bn1(self.conv(x)).relu())
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


batch_norm = partial(ResNet, nn.BatchNorm2d)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Counting(nn.Module):
    """Counts its training steps (by threes), knows whether it has ever trained, and has a mask."""

    steps: torch.Tensor
    trained: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("trained", torch.tensor([False, True]))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))  # no divergence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 3
            self.trained[0] = True
        return self.body(x)  # type: ignore[no-any-return]


class TiedLinear(nn.Module):
    """Two layers share a weight, not their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x).tanh()).tanh())  # type: ignore[no-any-return]


class TiedEmbedding(nn.Module):
    """An embedding whose table is the decoder's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 5, bias=False)
        self.decoder.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.mix(self.table(x)).tanh())  # type: ignore[no-any-return]


def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh(), nn.Linear(4, 5))


class Odd(nn.Module):
    """A learned temperature and a counter without dimensions, and arrays without entries."""

    seen: torch.Tensor

    def __init__(self, scalars: bool = False, empty: bool = False) -> None:
        super().__init__()
        self.body = perceptron()
        self.temperature = nn.Parameter(torch.tensor(1.5)) if scalars else None
        self.nothing = nn.Parameter(torch.zeros(0, 3)) if empty else None
        if scalars:
            self.register_buffer("seen", torch.tensor(0.25))
        if empty:
            self.register_buffer("none", torch.zeros(0, 3))
            self.register_buffer("whole", torch.zeros(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.temperature is not None and self.training:
            self.seen += 1
        out = self.body(x)
        if self.nothing is not None:
            out = out + self.nothing.sum()
        return out if self.temperature is None else out / self.temperature  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kind:
    """A kind of model: how it is built, its data, and what it asks of the strategy."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[..., list[Batch]] = vectors
    dtype: torch.dtype = torch.float32
    wire: str | None = None
    private: str = "2.*"

    def model(self) -> nn.Module:
        with drawn(3):
            return self.build().to(self.dtype)

    def arrays(self) -> ArrayRecord:
        model = self.model()
        return fr.float32_arrays(model) if self.wire else ArrayRecord(model.state_dict())


KINDS = [
    Kind("resnet-bn", batch_norm, images, private="fc.*"),
    Kind("resnet-gn", partial(ResNet, partial(nn.GroupNorm, 2)), images, private="fc.*"),
    Kind("counting", Counting, private="body.2.*"),
    Kind("tied-linear", TiedLinear, private="head.*"),
    Kind("tied-embedding", TiedEmbedding, tokens, private="mix.*"),
    Kind("sparse-embedding", sparse_embedding, tokens),
    Kind("frozen", lambda: still(perceptron(), "0"), private="0.bias"),
    Kind("scalars", lambda: Odd(scalars=True), private="body.2.*"),
    Kind("empty", lambda: Odd(empty=True), private="body.2.*"),
    Kind("float16", perceptron, dtype=torch.float16),
    Kind("float64", perceptron, dtype=torch.float64),
    Kind("float32-as-bfloat16", perceptron, wire="bfloat16"),
    Kind("resnet-bn-as-bfloat16", batch_norm, images, wire="bfloat16", private="fc.*"),
    Kind("tied-embedding-as-float16", TiedEmbedding, tokens, wire="float16", private="mix.*"),
    Kind("bfloat16", perceptron, dtype=torch.bfloat16, wire="bfloat16"),
    Kind("resnet-bn-bfloat16", batch_norm, images, torch.bfloat16, "bfloat16", private="fc.*"),
    Kind("float16-in-float32", perceptron, dtype=torch.float16, wire="float16"),
]


def composed(*terms: Any) -> Method:
    name = "+".join(t.name for t in terms)
    return Method(partial(fr.RegStrategy, terms), None, terms, name=name)


PER = Method(fr.FedPer, fr.FedPerClient, [], name="FedPer")
METHODS = [
    *(c for c in CASES if not {"unequal", "projection"} & {*c.name.split("-")}),
    Method(fr.FedBN, fr.FedBNClient, [], name="FedBN"),
    PER,
    composed(fr.FirstOrder(0.6), fr.SparseTernary(0.3, 0.3)),
    composed(fr.EmbeddedMomentum(0.6, 0.6), fr.SparseTernary(0.3)),
    composed(fr.LeaveOneOutMean(0.2), fr.SparseTernary(None, 0.3)),
    composed(fr.FirstOrder(0.6), fr.LocalBatchNorm()),
    composed(fr.SelfDistillation(), fr.LocalBatchNorm(), fr.SparseTernary(0.3, 0.3)),
]
HALF = r".*-as-.*|.*bfloat16|float16-in.*"
REFUSED = [  # method, kind, why: all that does not train
    ("FedAdamW", "float16.*", "is 0 in the model's torch.float16"),
    ("FedAdamW", "sparse.*", "does not support sparse gradients"),  # torch says it
    ("FedBABU", "frozen", "shares no parameter with requires_grad=True"),  # but the head
    (r".*ternary|EFL(?!-sums-16).*", HALF, "does not go with compression"),
    (r"Fed(FOR|ADC|CM)-delta", HALF, "needs downlink='model'"),
    (r"FedBN|.*local-bn.*", r"(?!resnet-bn).*", "the model has no BatchNorm layer"),
]


CONFIG = {"lr": 0.1, "local-epochs": 2}


def app_of(kind: Kind, method: Method, **kwargs: Any) -> Any:
    data = [kind.data(pid, kind.dtype) for pid in range(2)]
    return problem.app_of(method.make_client, data, kind.model, **kwargs)


def train(
    kind: Kind, method: Method, rounds: int = 3, grid: Any = fr.InProcessGrid, **kwargs: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """Return (the strategy, the global model by name)."""
    extra = {"patterns": kind.private} if method.name == "FedPer" else {}
    extra |= {"wire_dtype": kind.wire} if kind.wire else {}
    strategy = method.build(**{"seed": 2, **extra, **kwargs})
    result = start(strategy, grid(app_of(kind, method), 2), rounds, kind.arrays, CONFIG)
    return strategy, {n: a.numpy() for n, a in result.arrays.items()}


def refusal(kind: Kind, method: Method) -> str | None:
    for refused, of, why in REFUSED:
        if re.fullmatch(refused, method.name) and re.fullmatch(of, kind.name):
            return why
    return None


CELLS = list(product(KINDS, METHODS))


@sampled("kind,method", [c for c in CELLS if refusal(*c)], 1, lambda v: v.name)
def test_what_does_not_train_is_refused_with_a_sentence(kind: Kind, method: Method) -> None:
    with pytest.raises((ValueError, fr.RoundFailed), match=refusal(kind, method)):
        train(kind, method)


@sampled("kind,method", [c for c in CELLS if not refusal(*c)], 1, lambda v: v.name)
def test_every_kind_of_model_trains_under_every_method(kind: Kind, method: Method) -> None:
    """That is: hooks see arrays by name, of any dtype and shape, and nothing else of a model."""
    strategy, got = train(kind, method, rounds=2)
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in strategy.history)
    model = kind.model()
    params = dict(model.named_parameters(remove_duplicate=False))
    trained = {n for n, p in params.items() if p.requires_grad}
    start = {n: a.numpy() for n, a in kind.arrays().items()}
    private = strategy.term.private(start)
    assert list(got) == [n for n in start if n not in private]
    for n, a in got.items():
        assert (a.shape, a.dtype) == (start[n].shape, start[n].dtype), n
        assert (np.isfinite(a) | (a == start[n])).all()
        if n in params and n not in trained:
            assert (a == start[n]).all(), n
    # with tied names
    held = {id(params[n]) for n in strategy.term.frozen(list(start)) if n in params}
    in_play = {n for n in trained & set(got) if got[n].size and id(params[n]) not in held}
    moved = {n for n in in_play if (got[n] != start[n]).any()}
    if "EFL" in method.name or "ternary" in method.name:  # sparse steps
        assert moved
    elif torch.bfloat16 in (kind.dtype, getattr(torch, kind.wire or "float32")):
        # a client's small steps beside a weight of 1 round to none
        assert len(moved) > len(in_play) / 2
    else:
        assert moved == in_play
    # 4 and 6 steps of clients with 10 and 15 examples
    a_step = 5.2 if strategy.weighting == "num-examples" else 5
    if kind.name == "counting":
        assert got["steps"] == 2 * round(3 * a_step)  # the mean 15.6 is rounded, not cut
        assert got["trained"].all()
    if kind.name == "scalars":
        assert got["seen"] == pytest.approx(0.25 + 2 * a_step, rel=1e-6)
    for one, other in (("a.weight", "b.weight"), ("table.weight", "decoder.weight")):
        if one in got and other in got:
            assert (got[one] == got[other]).all()


class Partial(nn.Sequential):
    """Its state_dict leaves out its first layer."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {n: v for n, v in super().state_dict(*args, **kwargs).items() if n[0] != "0"}

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        return super().load_state_dict(state, strict=False)


def test_a_state_dict_lacks_frozen_parameters_at_most() -> None:
    kind = Kind("partial", lambda: still(Partial(*perceptron()), "0"))
    method = next(m for m in METHODS if m.name == "SCAFFOLD")
    whole = train(replace(kind, build=lambda: still(perceptron(), "0")), method)[1]
    close(train(kind, method)[1], {n: whole[n] for n in ("2.weight", "2.bias")}, 0.0)
    with pytest.raises(
        fr.RoundFailed, match=r"state_dict\(\) lacks \['0.weight', '0.bias'\], which"
    ):
        train(replace(kind, build=lambda: Partial(*perceptron())), method)


# Equal to what is plain


class OneName(TiedLinear):
    """TiedLinear's twin: the same computation, where the shared weight has one name."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Module()  # type: ignore[assignment]
        self.b.bias = TiedLinear().b.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.a(x).tanh(), self.a.weight, self.b.bias)
        return self.head(hidden.tanh())  # type: ignore[no-any-return]


TIED = Kind("tied", TiedLinear, dtype=torch.float64, private="head.*")


def one_name() -> nn.Module:
    model = OneName().double()
    state = TIED.model().state_dict()
    model.load_state_dict({n: state[n] for n in model.state_dict()})
    return model


ONE_NAME = Kind("one name", one_name, dtype=torch.float64, private="head.*")


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if "BN" not in m.name and "bn" not in m.name][::5],
    ids=lambda m: m.name,
)
def test_tied_weights_are_one_weight(method: Method) -> None:
    """To the bit, and coded once: compressed, the second name costs its name alone."""
    a, got = train(TIED, method)
    b, want = train(ONE_NAME, method)
    assert (got["a.weight"] == got["b.weight"]).all()
    close({n: got[n] for n in want}, want, 0.0)
    assert got.keys() - want.keys() == {"b.weight"}
    up, down = (
        [e[k][0] - f[k][0] for e, f in zip(a.history, b.history, strict=True)]
        for k in ("bytes_up", "bytes_down")
    )
    if b.term.coder("finish"):
        assert max(up) < 60
    if b.term.coder("release"):
        assert down[2] < 60


# Tied weights: what clients say of them is checked


def test_tied_weights_that_came_apart_are_refused() -> None:
    arrays = TIED.arrays()
    arrays["b.weight"] = Array(arrays["b.weight"].numpy() + 1)
    strategy = fr.FedAvg()
    with pytest.raises(fr.RoundFailed, match=r"'b\.weight' and 'a\.weight' are one parameter here"):
        start(strategy, fr.InProcessGrid(app_of(TIED, METHODS[0]), 2), 3, lambda: arrays, CONFIG)


def test_tied_weights_are_private_as_a_whole() -> None:
    with pytest.raises(fr.RoundFailed, match="make both private, or neither"):
        train(replace(TIED, private="b.*"), PER)
    _, got = train(replace(TIED, private="a.*,b.*"), PER)
    assert got.keys() == {"head.weight", "head.bias"}
