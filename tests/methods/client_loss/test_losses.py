"""MOON, FedNTD, FedLC, FedRS and FedGKD beyond the laws: what they see, keep, refuse and go with."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.term import Arrays, ClientContext, Term
from tests.conftest import close, drawn, make_clients, make_model

# the teachers

Extra = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(features, logits, inputs) of a batch to a further part of the loss."""
DATA = make_clients()[1]


def fresh(seed: int) -> nn.Sequential:
    """A model with BatchNorm, whose parameters and statistics depend on the seed."""
    model = make_model(batch_norm=True)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype)
        for n, b in model.named_buffers():
            if n != "1.num_batches_tracked":
                b += torch.rand(b.shape, generator=g, dtype=b.dtype)
    return model


def trained(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], steps: int = 6) -> Any:
    """Plain SGD on a client's data; the state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss(*DATA[step % len(DATA)]))
        optimizer.step()
    return model.state_dict()


def teacher(others: Arrays) -> nn.Sequential:
    """fresh(0) with some other parameters, frozen, in eval mode."""
    model = fresh(0)
    model.load_state_dict({**model.state_dict(), **others})
    return model.eval().requires_grad_(False)


def contrasted(features: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    near, far = (F.cosine_similarity(features, z).div(tau).exp() for z in (near, far))
    return -torch.log(near / (near + far)).mean()


def moon_by_hand(last: Arrays) -> Extra:
    current, before = teacher({})[:3], teacher(last)[:3]
    return lambda features, z, x: 5 * contrasted(features, current(x), before(x), 0.5)


def distilled_by_hand(others: Arrays) -> Extra:
    one = teacher(others)

    def extra(features: Tensor, z: Tensor, x: Tensor) -> Tensor:
        p, q = F.softmax(one(x), -1), F.softmax(z, -1)
        return 1.5 / 2 * (p * (p / q).log()).sum(-1).mean()

    return extra


OTHER = {n: p.detach() for n, p in fresh(7).named_parameters()}
SHARED = {n: p for n, p in OTHER.items() if not n.startswith("1.")}
MOON, GKD, BN = fr.ModelContrast(5.0), fr.PastModels(1.5, 3), fr.LocalBatchNorm()


@pytest.mark.parametrize(
    ("terms", "extra", "slots"),
    [
        ([MOON], moon_by_hand(OTHER), {"client": {"model-contrast": OTHER}}),
        ([BN, MOON], moon_by_hand(SHARED), {"client": {"model-contrast": SHARED}}),
        ([GKD], distilled_by_hand(OTHER), {"broadcast": {"past-models": OTHER}}),
        ([BN, GKD], distilled_by_hand(SHARED), {"broadcast": {"past-models": SHARED}}),
        ([GKD], distilled_by_hand({}), {}),
    ],
    ids=["MOON", "FedBN+MOON", "FedGKD", "FedBN+FedGKD", "FedGKD-first"],
)
def test_a_teacher_is_one_model_in_the_whole_round(
    terms: list[Term], extra: Extra, slots: dict[str, Any]
) -> None:
    """In eval mode, with BatchNorm's statistics and private entries as they were at the start."""
    student = fresh(0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        features = student[:3](x)
        z = student[3](features)
        return F.cross_entropy(z, y) + extra(features, z, x)

    expected = trained(student, loss)
    how: dict[str, Any] = {"lr": 0.2, "steps": 6, "device": "cpu", **slots}
    close(local_round(fresh(0), chain(terms), DATA, **how).state, expected, 1e-10)


# where MOON's features come from


class Sided(nn.Module):
    """A projection head beside the path to the logits, which is registered last."""

    def __init__(self) -> None:
        super().__init__()
        with drawn(3):
            self.body, self.out, self.head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
            self.memory, self.spare = nn.LSTM(6, 4), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        self.head(torch.relu(hidden))
        self.memory(hidden)
        return self.out(hidden)  # type: ignore[no-any-return]

    def projected(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(torch.tanh(self.body(x))))  # type: ignore[no-any-return]


def test_a_head_beside_the_path_to_the_logits() -> None:
    term, last = fr.ModelContrast(2.0, 0.7, "head"), Sided().state_dict()
    last = {n: p + 0.2 for n, p in last.items()}
    done = local_round(Sided(), term, DATA, lr=0.2, steps=5, device="cpu", client=last)
    model, current, before = Sided(), Sided().requires_grad_(False), Sided().requires_grad_(False)
    before.load_state_dict(last)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        contrast = contrasted(*(m.projected(x) for m in (model, current, before)), 0.7)
        return F.cross_entropy(model(x), y) + 2.0 * contrast

    expected = trained(model, loss, steps=5)
    close(done.state, expected, 1e-10)
    close(done.client, {n: expected[n] for n, _ in model.named_parameters()}, 1e-10)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("haed", "'haed' is not a layer of Sided: .*'head'"),
        ("spare", "layer 'spare' is not used in the forward pass of Sided; name another layer"),
        ("memory", "layer 'memory' makes no tensor in the forward pass of Sided"),
    ],
)
def test_a_wrong_projection_is_named(layer: str, why: str) -> None:
    model = Sided()
    with pytest.raises(ValueError, match=why):
        local_round(model, fr.ModelContrast(1.0, 0.5, layer), DATA, lr=0.1, steps=1)
    assert not any(m._forward_hooks for m in model.modules())


class Again(Term):
    """Computes each gradient a second time."""

    name: ClassVar[str] = "again"

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return ctx.gradient_at(params)


def test_a_layers_output_is_there_at_other_parameters_too() -> None:
    """FedSAM's gradient elsewhere is of MOON's loss as well."""
    term = fr.ModelContrast(5.0, 0.5, "0")
    last = {"model-contrast": {n: p.detach() + 0.3 for n, p in make_model().named_parameters()}}
    how: dict[str, Any] = {"lr": 0.2, "steps": 4, "device": "cpu", "client": last}
    chains = [chain([term]), chain([term, Again()])]
    close(*(local_round(make_model(), both, DATA, **how).state for both in chains), 1e-12)


# losses on a batch

ZERO = torch.zeros(())


def batch(output: Any, targets: Any, **more: Any) -> ClientContext:
    more = {"loss_fn": F.cross_entropy, **more}
    return ClientContext(start={}, lr=0.1, num_steps=1, output=output, targets=targets, **more)


def contrast(tau: float, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """MOON's loss of features, and those of the global model and of the client's last one."""
    where = {"client": {"v": far}, "features_at": lambda p, layer: far if p else near}
    return fr.ModelContrast(1.0, tau).loss(ZERO, {}, batch(z, None, features=z, **where))


def test_a_zero_vector_has_no_direction() -> None:
    """A dead ReLU layer makes one; the loss and its gradient stay finite, tiny features count."""
    z = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [3.0, 4.0]], requires_grad=True)
    other = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    loss = contrast(1.0, z, -other, other)
    (grad,) = torch.autograd.grad(loss, z)
    # cosines (0, 0), (-1, 1), (0, 0): log 2, log(1 + e^2), log 2
    expected = (2 * np.log(2) + np.log1p(np.exp(2.0))) / 3
    assert loss.item() == pytest.approx(expected)
    assert torch.isfinite(grad).all()
    assert not grad[[0, 2]].any()


def test_features_in_half_precision_are_compared_in_single() -> None:
    parts = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(contrast(0.1, *parts), contrast(0.1, *parts.float()))


COUNTS = torch.tensor([16, 0, 81, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_absent_class_leaves_the_softmax(dtype: torch.dtype, smoothing: float) -> None:
    """To the bit that of the other classes alone; with label smoothing, too, all is finite."""
    z = torch.tensor([[1.0, 60.0, 2.0, 0.5], [-3.0, 0.0, 1.0, -80.0]]).to(dtype).requires_grad_()
    y = torch.tensor([2, 0])
    loss_fn = partial(F.cross_entropy, label_smoothing=smoothing)
    ctx = batch(z, y, label_counts=COUNTS, loss_fn=loss_fn)
    loss = fr.LogitCalibration(2.0).loss(ZERO, {}, ctx) + loss_fn(z, y)
    (grad,) = torch.autograd.grad(loss, z)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    if smoothing:
        return
    wide = torch.promote_types(dtype, torch.float32)
    leaf = z.detach().to(wide).requires_grad_()
    rest = leaf[:, [0, 2]] - 2.0 / torch.tensor([2.0, 3.0], dtype=wide)
    expected = F.cross_entropy(rest, torch.tensor([1, 0]))
    (wanted,) = torch.autograd.grad(expected, leaf)
    tolerance = 1e-12 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(loss.to(wide), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(grad.to(wide), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("term", [fr.LogitCalibration(2.0), fr.RestrictedSoftmax(0.0)])
def test_a_label_that_the_count_has_not_seen_is_not_absent(term: Term) -> None:
    """A stream may show one later; it counts as often as its batch has it."""
    z = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 1.0, 2.0, -1.0]], requires_grad=True)
    y = torch.tensor([3, 2])
    one, other = (
        term.loss(ZERO, {}, batch(z, y, label_counts=counts))
        for counts in (COUNTS, torch.tensor([16, 0, 81, 1]))
    )
    assert one == other
    (grad,) = torch.autograd.grad(one + F.cross_entropy(z, y), z)
    assert grad[0, 3] < 0  # towards the label


CLASSES: dict[str, Term] = {
    "self-distillation": fr.SelfDistillation(0.5, 1.0),
    "FedNTD": fr.NotTrueDistillation(),
    "FedLC": fr.LogitCalibration(1.0),
    "FedRS": fr.RestrictedSoftmax(),
    "FedGKD": fr.PastModels(),
}
KINDS: list[tuple[tuple[int, ...], Any, str]] = [
    ((4, 1), torch.zeros(4).long(), r"float32 \(4, 1\) and torch.int64 \(4,\)"),
    ((4, 2), torch.zeros(4), r"float32 \(4, 2\) and torch.float32 \(4,\)"),
    ((4,), torch.zeros(4), r"\(4,\) and"),
    ((4, 3, 7), torch.zeros(4, 7).long(), r"\(4, 3, 7\) and torch.int64 \(4, 7\)"),
    ((4, 3), {"a": torch.zeros(4)}, "and dict"),
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("name", CLASSES)
def test_targets_that_are_no_class_labels_are_refused(name: str, kind: int) -> None:
    shape, targets, shown = KINDS[kind]
    output = torch.zeros(shape)
    ctx = batch(output, targets, start_output=output, label_counts=torch.tensor([4]))
    why = rf"{name} needs logits \(batch, classes\) and integer labels \(batch,\), not .*{shown}"
    with pytest.raises(ValueError, match=why):
        CLASSES[name].loss(ZERO, {}, ctx)


def test_a_label_without_an_output_is_named() -> None:
    z = torch.zeros(3, 2)
    ctx = batch(z, torch.zeros(3).long(), start_output=z, label_counts=torch.ones(3))
    with pytest.raises(ValueError, match="labels up to 2, the model 2 outputs"):
        fr.SelfDistillation(0.5, 1.0).loss(ZERO, {}, ctx)


def test_changed_logits_stand_left_of_what_weighs_the_loss() -> None:
    """Left of self-distillation the loss is (1 − λ) ℓ(z̃) + λ T² KL."""
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([0, 2, 2])
    ctx = batch(z, y, start_output=z.flip(1), label_counts=COUNTS, broadcast={}, client={})
    plain, term = F.cross_entropy(z, y), fr.LogitCalibration(0.8)
    both = chain([term, fr.SelfDistillation(0.4, 2.0)]).loss(plain, {}, ctx)
    calibrated = term.loss(plain, {}, ctx)
    kl = fr.SelfDistillation(1.0, 2.0).loss(plain, {}, ctx)
    assert both.item() == pytest.approx((0.6 * calibrated + 0.4 * kl).item())


@pytest.mark.parametrize(("examples", "width"), [(1, 6), (5, 1)])
def test_one_example_or_one_feature_has_no_correlations(examples: int, width: int) -> None:
    data = [(x[:examples], y[:examples]) for x, y in make_clients()[0]]
    ends = []
    for term in (fr.Proximal(0.0), fr.Decorrelation(5.0)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
        ends.append(local_round(model, term, data, lr=0.1, epochs=1, device="cpu").state)
    close(*ends, 0.0)


def test_features_that_do_not_vary_give_no_nan() -> None:
    """A dead unit: its centred values are 0, and only the 1e-8 keeps them from 0/0."""
    ctx = batch(None, None, features=torch.zeros(4, 3).requires_grad_())
    loss = fr.Decorrelation(1.0).loss(ZERO, {}, ctx)
    (g,) = torch.autograd.grad(loss, ctx.features)
    assert loss == 0
    assert not g.any()
