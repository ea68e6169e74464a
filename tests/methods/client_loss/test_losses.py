"""MOON, FedNTD, FedLC, FedRS and FedGKD beyond the laws: what they see, keep, refuse and go with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.term import Arrays, ClientContext, ServerContext, Term
from flwr_regs.testing import spies
from flwr_regs.testing.problem import SerialisingGrid, app_of, start_weights, train
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.oracles.client_loss import fedgkd as gkd
from tests.oracles.client_loss import fedntd as ntd
from tests.oracles.client_loss import logits as changed
from tests.oracles.client_loss import moon as contrast
from tests.oracles.model import Params

SOME = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}
SHORT = [{}, {1: 2, 3: 1}, {0: 3}, {2: 4, 4: 1}]  # round -> client -> steps that it has time for
ROUNDS = 6


@dataclass(frozen=True)
class Case:
    """A method, and its oracle with the same parameters."""

    make: Callable[..., Any]
    client: Any
    oracle: Callable[..., Any]

    def __str__(self) -> str:
        return str(self.client.__name__.removesuffix("Client"))


CASES = [
    Case(partial(fr.MOON, 5.0, 0.5), fr.MOONClient, contrast.moon),
    Case(partial(fr.FedNTD, 1.5), fr.FedNTDClient, partial(ntd.fedntd, beta=1.5)),
    Case(partial(fr.FedLC, 0.8), fr.FedLCClient, partial(changed.fedlc, tau=0.8)),
    Case(partial(fr.FedRS, 0.3), fr.FedRSClient, partial(changed.fedrs, alpha=0.3)),
    Case(
        partial(fr.FedGKD, 1.5, 3), fr.FedGKDClient, partial(gkd.fedgkd, gamma=1.5, buffer=3)
    ),
    Case(
        partial(fr.FedGKD, 1.5, 1), fr.FedGKDClient, partial(gkd.fedgkd, gamma=1.5, buffer=1)
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "incomplete"), list(zip(CASES, cycle(["drop", "average"]))), ids=str
)
def test_some_clients_of_which_some_stop_early(case: Case, incomplete: str) -> None:
    """3 of 5 clients a round. The models are the oracle's; so is what MOON's clients keep, used or not."""
    strategy = case.make(incomplete=incomplete, **SOME)
    client, calls = budgeted(case.client, SHORT), list[spies.LocalCall]()
    with spies.recorded(calls):
        grid = SerialisingGrid(app_of(client, make_clients(5)), 5)
        found = train(strategy, client, rounds=ROUNDS, grid=grid)
    kept: list[dict[int, Params]] = []
    expected = case.oracle(
        start_weights(), to_numpy(make_clients(5)), ROUNDS, lambda t: 0.2, 2,
        cohorts=[e["cohort"] for e in strategy.history],
        unused=[set(e["cohort"]) - set(e["replies"]) for e in strategy.history],
        steps_done=[SHORT[t % 4] for t in range(ROUNDS)],
        **({"kept": kept} if case.client is fr.MOONClient else {}),
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-10)
    assert strategy.weighting == "num-examples"
    assert any(e["incomplete"] for e in strategy.history)
    last: dict[int, Arrays] = {}
    for call in calls:
        slot = call.result.client.get("model-contrast", {})
        last[call.client] = {n: a.numpy() for n, a in slot.items()}
    assert bool(kept) == any(last.values())
    for k, mine in kept[-1].items() if kept else ():
        close(last[k], mine, 1e-10)


def test_a_client_that_lost_its_last_model_is_named_and_trains_without_the_term() -> None:
    class Forgetful(fr.InProcessGrid):
        rounds = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.rounds += any(m.metadata.message_type == "train" for m in messages)
            if self.rounds == 3:
                self._contexts[1002].state = RecordDict()
            return super().push_messages(messages)

    strategy = fr.MOON(seed=3, fraction_evaluate=0.0)
    grid = Forgetful(app_of(fr.MOONClient, make_clients()), 4)
    found = train(strategy, fr.MOONClient, rounds=4, grid=grid)
    assert [e["lost_state"] for e in strategy.history] == [[], [], [2], []]
    data, lost = to_numpy(make_clients()), [set[int](), set[int](), {2}, set[int]()]
    expected = contrast.moon(start_weights(), data, 4, lambda t: 0.2, 2, lost=lost)
    close(found[-1], expected[-1], 1e-10)
    other = contrast.moon(start_weights(), data, 4, lambda t: 0.2, 2)
    assert abs(found[-1]["0.weight"] - other[-1]["0.weight"]).max() > 1e-5


# the teachers

Extra = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(features, logits, inputs, labels) of a batch to a further part of the loss."""


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


def by_hand(extra: Extra, steps: int = 6) -> dict[str, Tensor]:
    """Plain SGD from fresh(0) on a client's data; a teacher in `extra` is a frozen copy."""
    model, data = fresh(0), make_clients()[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        features = model[:3](x)
        z = model[3](features)
        torch.autograd.backward(F.cross_entropy(z, y) + extra(features, z, x, y))
        optimizer.step()
    return model.state_dict()


def teacher(others: Arrays) -> nn.Sequential:
    """fresh(0) with some other parameters, frozen, in eval mode."""
    model = fresh(0)
    model.load_state_dict({**model.state_dict(), **others})
    return model.eval().requires_grad_(False)


OTHER = {n: p.detach() for n, p in fresh(7).named_parameters()}
SHARED = {n: p for n, p in OTHER.items() if not n.startswith("1.")}


def moon_by_hand(last: Arrays) -> Extra:
    now, before = teacher({}), teacher(last)

    def extra(features: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        near, far = (F.cosine_similarity(features, m[:3](x)) / 0.5 for m in (now, before))
        return -5 * torch.log(near.exp() / (near.exp() + far.exp())).mean()

    return extra


def distilled_by_hand(others: Arrays) -> Extra:
    one = teacher(others)

    def extra(features: Tensor, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p, q = F.softmax(one(x), -1), F.softmax(z, -1)
        return 1.5 / 2 * (p * (p / q).log()).sum(-1).mean()

    return extra


MOON, GKD = fr.ModelContrast(5.0), fr.PastModels(1.5, 3)
BN = fr.LocalBatchNorm()


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
    found = local_round(
        fresh(0), chain(terms), make_clients()[1], lr=0.2, steps=6, device="cpu", **slots
    )
    for n, expected in by_hand(extra).items():
        torch.testing.assert_close(found.state[n], expected, rtol=0, atol=1e-10)


# where MOON's features come from


class Sided(nn.Module):
    """A projection head beside the path to the logits, which is registered last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body, self.out, self.head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
            self.memory, self.spare = nn.LSTM(6, 4), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        self.head(torch.relu(hidden))
        self.memory(hidden)
        return self.out(hidden)  # type: ignore[no-any-return]


def test_a_head_beside_the_path_to_the_logits() -> None:
    data, last = make_clients()[1], Sided().state_dict()
    last = {n: p + 0.2 for n, p in last.items()}
    slots = {"client": last}
    found = local_round(
        Sided(), fr.ModelContrast(2.0, 0.7, "head"), data, lr=0.2, steps=5, device="cpu", **slots
    )
    model, now, before = Sided(), Sided(), Sided()
    before.load_state_dict(last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def head(m: Sided, x: Tensor) -> Tensor:
        return m.head(torch.relu(torch.tanh(m.body(x))))  # type: ignore[no-any-return]

    for step in range(5):
        x, y = data[step % len(data)]
        optimizer.zero_grad()
        near, far = (
            F.cosine_similarity(head(model, x), head(m, x).detach()) / 0.7 for m in (now, before)
        )
        loss = F.cross_entropy(model(x), y) + 2.0 * torch.log1p((far - near).exp()).mean()
        torch.autograd.backward(loss)
        optimizer.step()
    for n, expected in model.state_dict().items():
        torch.testing.assert_close(found.state[n], expected, rtol=0, atol=1e-10)
    kept = found.client
    for n, expected in model.named_parameters():
        torch.testing.assert_close(kept[n], expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("haed", "'haed' is not a layer of Sided; it has .*'head'"),
        ("spare", "layer 'spare' is not used in the forward pass of Sided; name another layer"),
        ("memory", "layer 'memory' makes no tensor in the forward pass of Sided"),
    ],
)
def test_a_wrong_projection_is_named(layer: str, why: str) -> None:
    model = Sided()
    with pytest.raises(ValueError, match=why):
        local_round(model, fr.ModelContrast(1.0, 0.5, layer), make_clients()[0], lr=0.1, steps=1)
    assert not any(m._forward_hooks for m in model.modules())


@dataclass(frozen=True)
class Again(Term):
    """Computes each gradient a second time."""

    name: ClassVar[str] = "again"

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        return ctx.gradient_at(params)


def test_a_layers_output_is_there_at_other_parameters_too() -> None:
    """FedSAM's gradient elsewhere is of MOON's loss as well."""
    data, slots = make_clients()[1], {"model-contrast": {n: p + 0.3 for n, p in state().items()}}
    ends = [
        local_round(
            make_model(), chain(terms), data, lr=0.2, steps=4, device="cpu", client=slots
        ).state
        for terms in ([fr.ModelContrast(5.0, 0.5, "0")], [fr.ModelContrast(5.0, 0.5, "0"), Again()])
    ]
    for n in ends[0]:
        torch.testing.assert_close(ends[0][n], ends[1][n], rtol=0, atol=1e-12)


def state() -> Arrays:
    return {n: p.detach() for n, p in make_model().named_parameters()}


# losses on a batch


def batch(output: Tensor, targets: Any, **more: Any) -> ClientContext:
    return ClientContext(
        start={},
        lr=0.1,
        num_steps=1,
        output=output,
        targets=targets,
        loss_fn=F.cross_entropy,
        **more,
    )


def test_a_zero_vector_has_no_direction() -> None:
    """A dead ReLU layer makes one; the loss and its gradient stay finite, tiny features count."""
    z = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [3.0, 4.0]], requires_grad=True)
    other = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    ctx = batch(
        z, None, client={"v": z}, features=z, features_at=lambda p, layer: other if p else -other
    )
    loss = fr.ModelContrast(1.0, 1.0).loss(torch.zeros(()), {}, ctx)
    (grad,) = torch.autograd.grad(loss, z)
    # cosines (0, 0), (-1, 1), (0, 0): log 2, log(1 + e^2), log 2
    expected = (2 * np.log(2) + np.log1p(np.exp(2.0))) / 3
    assert loss.item() == pytest.approx(expected)
    assert torch.isfinite(grad).all()
    assert not grad[[0, 2]].any()


def test_the_true_class_takes_no_part() -> None:
    z = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, own = torch.tensor([0, 4, 2, 2]), torch.tensor([9.0, -9.0, 50.0, 0.0])
    losses, grads = [], []
    for shift in (0.0, own[:, None] * F.one_hot(y, 5)):
        leaf = (z + shift).requires_grad_()
        ctx = batch(leaf, y, start_output=2 * z.flip(0) + shift)
        losses.append(fr.NotTrueDistillation(2.0, 3.0).loss(torch.zeros(()), {}, ctx))
        grads += torch.autograd.grad(losses[-1], leaf)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)
    assert not grads[0][torch.arange(4), y].any()
    assert grads[0].abs().max() > 1e-2


COUNTS = torch.tensor([16, 0, 81, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_class_that_a_client_lacks_leaves_the_softmax(
    dtype: torch.dtype, smoothing: float
) -> None:
    """To the bit that of the other classes alone; with label smoothing, too, all is finite."""
    z = torch.tensor([[1.0, 60.0, 2.0, 0.5], [-3.0, 0.0, 1.0, -80.0]]).to(dtype).requires_grad_()
    y = torch.tensor([2, 0])
    ctx = batch(z, y, label_counts=COUNTS)
    loss_fn = partial(F.cross_entropy, label_smoothing=smoothing)
    ctx = ClientContext(**{**vars(ctx), "loss_fn": lambda a, b: loss_fn(a, b)})
    found = fr.LogitCalibration(2.0).loss(torch.zeros(()), {}, ctx) + loss_fn(z, y)
    (grad,) = torch.autograd.grad(found, z)
    assert torch.isfinite(found)
    assert torch.isfinite(grad).all()
    if smoothing:
        return
    wide = torch.promote_types(dtype, torch.float32)
    leaf = z.detach().to(wide).requires_grad_()
    rest = leaf[:, [0, 2]] - 2.0 / torch.tensor([2.0, 3.0], dtype=wide)
    expected = F.cross_entropy(rest, torch.tensor([1, 0]))
    (wanted,) = torch.autograd.grad(expected, leaf)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 0.1}[dtype]
    torch.testing.assert_close(found.to(wide), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(grad.to(wide), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("term", [fr.LogitCalibration(2.0), fr.RestrictedSoftmax(0.0)])
def test_a_label_that_the_count_has_not_seen_is_not_absent(term: Term) -> None:
    """A stream may show one later; it counts as often as its batch has it."""
    z = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 1.0, 2.0, -1.0]], requires_grad=True)
    y = torch.tensor([3, 2])
    one, other = (
        term.loss(torch.zeros(()), {}, batch(z, y, label_counts=counts))
        for counts in (COUNTS, torch.tensor([16, 0, 81, 1]))
    )
    assert one == other
    (grad,) = torch.autograd.grad(one + F.cross_entropy(z, y), z)
    assert grad[0, 3] < 0  # towards the label


# what is refused

CLASSES = {
    "FedNTD": fr.NotTrueDistillation(),
    "FedLC": fr.LogitCalibration(1.0),
    "FedRS": fr.RestrictedSoftmax(),
    "FedGKD": fr.PastModels(),
}
KINDS = {
    "regression": (
        torch.zeros(4, 1),
        torch.zeros(4, 1),
        r"float32 \(4, 1\) and torch.float32 \(4, 1\)",
    ),
    "numbers": (torch.zeros(4, 2), torch.zeros(4), r"float32 \(4, 2\) and torch.float32 \(4,\)"),
    "binary": (torch.zeros(4), torch.zeros(4), r"\(4,\) and"),
    "several labels": (torch.zeros(4, 3), torch.zeros(4, 3), r"\(4, 3\)$"),
    "sequence": (
        torch.zeros(4, 3, 7),
        torch.zeros(4, 7).long(),
        r"\(4, 3, 7\) and torch.int64 \(4, 7\)",
    ),
    "mapping": (torch.zeros(4, 3), {"a": torch.zeros(4)}, "and dict"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_targets_that_are_no_class_labels_are_refused(name: str, kind: str) -> None:
    output, targets, found = KINDS[kind]
    ctx = batch(output, targets, start_output=output, label_counts=torch.tensor([4]))
    why = rf"{name} needs logits \(batch, classes\) and integer labels \(batch,\), not .*{found}"
    with pytest.raises(ValueError, match=why):
        CLASSES[name].loss(torch.zeros(()), {}, ctx)


# FedGKD's server


def test_the_teacher_is_the_mean_in_the_models_dtype() -> None:
    term = fr.PastModels(0.2, 3)
    w = [{"a": np.full(2, v, np.float32)} for v in (1.0, 2.0, 4.0, 9.0)]
    slot: Any = {}
    for t, (params, mean) in enumerate(zip(w, (None, 1.5, 7 / 3, 5.0), strict=True), start=1):
        ctx = ServerContext(t, 0.1, params)
        found = term.broadcast(slot, ctx)
        assert found == {} if mean is None else found["a"].tolist() == [np.float32(mean)] * 2
        assert mean is None or found["a"].dtype == np.float32
        slot, _ = term.update(slot, {}, {}, ctx)


# beside other methods


OURS = [
    fr.ModelContrast(5.0),
    fr.NotTrueDistillation(1.5),
    fr.LogitCalibration(0.8),
    fr.RestrictedSoftmax(0.3),
    fr.PastModels(1.5, 2),
]


def test_two_changes_of_the_logits_are_refused() -> None:
    """Their losses would add up, less the plain one: that is the loss of no logits."""
    for pair in ([OURS[2], OURS[3]], [OURS[3], OURS[2]]):
        with pytest.raises(
            ValueError, match="are versions of one term and together would count twice"
        ):
            fr.RegStrategy(pair)


def test_changed_logits_stand_left_of_what_weighs_the_loss() -> None:
    """Left of self-distillation the loss is (1 − λ) ℓ(z̃) + λ T² KL."""
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([0, 2, 2])
    ctx = batch(z, y, start_output=z.flip(1), label_counts=COUNTS)
    plain, both = F.cross_entropy(z, y), chain([OURS[2], fr.SelfDistillation(0.4, 2.0)])
    wide = ClientContext(**{**vars(ctx), "broadcast": {}, "client": {}})
    calibrated = OURS[2].loss(plain, {}, ctx)
    kl = fr.SelfDistillation(1.0, 2.0).loss(plain, {}, ctx)
    assert both.loss(plain, {}, wide).item() == pytest.approx((0.6 * calibrated + 0.4 * kl).item())
    assert calibrated.item() == pytest.approx(
        F.cross_entropy(
            z[:, [0, 2]] - 0.8 / torch.tensor([2.0, 3.0]), torch.tensor([0, 1, 1])
        ).item()
    )
