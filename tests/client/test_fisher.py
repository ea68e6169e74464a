"""The Fisher information: against plain backpropagation, one sample at a time."""

import copy
import re
import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_regs.client.measure import fisher
from flwr_regs.client.measure.fisher import fisher_diagonal
from flwr_regs.client.train.batches import NO_DATA
from flwr_regs.client.train.task import Task
from tests.conftest import close, drawn, make_model, noted
from tests.methods.test_models import TiedLinear

SAMPLE = 51 * 8  # bytes of one gradient of make_model()


def make_data(sizes: tuple[int, ...] = (5, 2, 4)) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=g).double(), torch.randint(0, 3, (n,), generator=g))
        for n in sizes
    ]


def plain(model: nn.Module, x: Any, y: Tensor) -> dict[str, Tensor]:
    """Backward on one sample after the other of the tensor, or dict of tensors, `x`."""
    model = copy.deepcopy(model).eval()
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for i in range(len(y)):
        one = {k: v[i : i + 1] for k, v in x.items()} if isinstance(x, dict) else x[i : i + 1]
        model.zero_grad()
        loss = cross_entropy(model(one), y[i : i + 1])
        if loss.requires_grad:
            loss.backward()
        for n, p in model.named_parameters():
            if p.grad is not None:
                total[n] += p.grad.to_dense() ** 2 / len(y)
    return total


def go(model: nn.Module, data: Any, loss_fn: Any = cross_entropy, **kwargs: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Fisher information one sample at a time")
        return fisher_diagonal(model, data, Task(loss_fn), **{"device": "cpu", **kwargs})


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have all gradients formed by vmap; return the list to which it adds its numbers of samples."""
    sizes: list[int] = []

    def vmap(f: Any, in_dims: Any) -> Any:
        return lambda *args: sizes.append(len(args[-1][0])) or torch.func.vmap(f, in_dims)(*args)

    monkeypatch.setattr(fisher, "vmap", vmap)
    monkeypatch.setattr(fisher, "find_layers", lambda *args: {})
    return sizes


@pytest.mark.parametrize("chunk", [0, 1, 3, 1000])
def test_it_is_the_mean_of_the_samples_squared_gradients_in_chunks_that_fit(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, sizes = make_model(), make_data(), spied(monkeypatch)
    got = go(model, data, memory=chunk * SAMPLE + 1)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    close(got, plain(model, x, y), 1e-15)
    assert sizes == {0: [1] * 11, 1: [1] * 11, 3: [3, 2, 2, 3, 1], 1000: [11]}[chunk]


@pytest.mark.parametrize(("most", "batches"), [(1, 1), (4, 1), (5, 1), (6, 2), (11, 3), (99, 3)])
def test_the_first_samples_of_the_pass_and_no_batch_more(most: int, batches: int) -> None:
    model, data, seen = make_model(), make_data(), []
    passing = (seen.append(1) or batch for batch in data)
    x, y = (torch.cat(parts)[:most] for parts in zip(*data, strict=True))
    close(go(model, passing, max_samples=most), plain(model, x, y), 1e-15)
    assert len(seen) == batches


def test_it_is_taken_at_given_parameters_and_under_no_grad() -> None:
    model, ((x, y),) = make_model(), make_data((6,))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2.0)
        got = go(model, [(x, y)], params=dict(other.named_parameters()))
    close(got, plain(other, x, y), 1e-15)
    assert not any(t.requires_grad for t in got.values())


class Cube(torch.autograd.Function):
    """Written as before torch.func, which refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(super().forward(x))


class Branch(nn.Linear):
    """Its loss reaches no parameter on some samples, or only the bias."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0.5:
            return x[:, :3]
        return super().forward(x) if x.sum() < 0 else x[:, :3] + self.bias


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.out = kind(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.reshape(-1, 2, 2))[0][:, -1])


class Words(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x > 0).long()).sum(1)


def odd(make: Any, *args: Any, **kwargs: Any) -> nn.Module:
    with drawn(2):
        return make(*args, **kwargs).double()


@pytest.mark.parametrize(
    "model",
    [
        *(odd(Recurrent, kind) for kind in (nn.LSTM, nn.GRU)),
        *(odd(kind, 4, 3) for kind in (Custom, Branch)),
        odd(Words, 2, 3, sparse=True),
    ],
    ids=["lstm", "gru", "custom", "branch", "sparse"],
)
def test_what_vmap_cannot_batch_goes_one_at_a_time(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, data = noted(monkeypatch, fisher, "vmap"), make_data()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    if isinstance(model, Recurrent):  # newer versions of torch batch some
        got = fisher_diagonal(model, data, Task(), "cpu", memory=1)
    else:
        with pytest.warns(UserWarning, match=r"one sample at a time: vmap failed \(\w+: .+\)"):
            got = fisher_diagonal(model, data, Task(), "cpu", memory=1)
        assert len(tries) == 2 - isinstance(model, Words)  # with layers, and without
    close(got, plain(model, x, y), 1e-14)
    assert all((t != 0).any() for t in got.values())


def test_frozen_tied_and_unused_parameters() -> None:
    model, ((x, y),) = odd(TiedLinear), make_data((6,))
    model.head.bias.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(2).double())
    got = go(model, [(x, y)])
    assert set(got) == {"spare", "a.weight", "a.bias", "b.bias", "head.weight"}
    close(got, plain(model, x, y), 1e-15)
    assert not got["spare"].any()


def test_nested_inputs_and_targets() -> None:
    class Two(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x["left"] + x["more"][0])

    model, ((x, y),) = odd(Two, 4, 3), make_data((6,))
    batch = ({"left": x, "more": (x**2, "a name")}, [y, y])
    got = go(model, [batch], lambda output, targets: cross_entropy(output, targets[1]))
    reference = odd(nn.Linear, 4, 3)
    reference.load_state_dict(model.state_dict())
    close(got, plain(reference, x + x**2, y), 1e-15)


class Restless(nn.Sequential):
    """Changes all that a forward pass can change."""

    def forward(self, x: Tensor) -> Tensor:
        self[1].num_batches_tracked += 1
        self.seen = super().forward(x)
        if not self.training:
            self.noise = torch.rand(1)
        return self.seen


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("restless", [False, True])
def test_eval_mode_and_everything_is_left_as_it_was(restless: bool, fails: bool) -> None:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)]
    model = odd(Restless if restless else nn.Sequential, *layers)
    data = make_data()
    cross_entropy(model.train()(data[0][0]), data[0][1]).backward()
    model[1].eval()
    flags = [m.training for m in model.modules()]
    grads = [p.grad.clone() for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    attributes, random = dict(vars(model)), torch.get_rng_state()
    loader = DataLoader(TensorDataset(*data[0]), batch_size=2, shuffle=True)
    wrong = (torch.zeros(2, 3).double(), torch.zeros(2).long())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fails:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                fisher_diagonal(model, chain(loader, [wrong]), Task(), "cpu")
        else:
            got = fisher_diagonal(model, loader, Task(), "cpu")
    assert sum("one sample at a time" in str(w.message) for w in caught) == restless
    assert torch.equal(random, torch.get_rng_state())
    assert flags == [m.training for m in model.modules()]
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[k] is v for k, v in attributes.items())
    for p, g in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, g)
        assert p.requires_grad
    close(model.state_dict(), state, 0.0)
    if not fails:
        close(got, plain(nn.Sequential(*model), *data[0]), 1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_at_least_single_precision(dtype: torch.dtype) -> None:
    model, ((x, y),) = make_model(dtype), make_data((1,))
    one = go(model, [(x.to(dtype), y)])
    many = go(model, [(x.to(dtype).repeat(1000, 1), y.repeat(1000))])
    for n, p in model.named_parameters():
        assert many[n].dtype == one[n].dtype == torch.promote_types(p.dtype, torch.float32)
        rtol = max(2 * torch.finfo(dtype).eps, 1e-4)
        torch.testing.assert_close(many[n], one[n], rtol=rtol, atol=1e-7)
    large = nn.Linear(1, 2, bias=False).to(dtype)
    nn.init.zeros_(large.weight)
    x, y = torch.full((2, 1), 400.0, dtype=dtype), torch.tensor([0, 1])
    assert (go(large, [(x, y)])["weight"] == 200.0**2).all()  # the sum is more than float16 holds


def test_errors() -> None:
    model, data = make_model(), make_data()
    for empty in ([], [(torch.zeros(0, 4).double(), torch.zeros(0).long())]):
        with pytest.raises(ValueError, match=re.escape(NO_DATA)):
            go(model, empty)
    with pytest.raises(ValueError, match="max_samples must be at least 1 or None, not 0"):
        go(model, data, max_samples=0)
    with pytest.raises(ValueError, match=r"must return a scalar, not shape \(1,\)"):
        go(model, data, nn.CrossEntropyLoss(reduction="none"))
    for x, y in (
        (torch.zeros(3, 4), torch.zeros(2)),
        (torch.zeros(3, 4), torch.tensor(1)),
        ("no", "tensor"),
    ):
        with pytest.raises(ValueError, match="tensors of a batch must be equally long"):
            go(model, [(x, y)])
    with pytest.raises(ValueError, match="Sequential has no parameter with requires_grad=True"):
        go(make_model().requires_grad_(False), data)
