"""FedADC's own promises: bytes, K_k, optimisers, distillation, personalisation, overlap."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import nn

from flwr_regs import (
    EmbeddedMomentum,
    FedADC,
    FedADCClient,
    FedADCPlus,
    FedAvg,
    FedAvgClient,
    InProcessGrid,
    RoundFailed,
    SelfDistillation,
    SlowMo,
    SlowMoClient,
    client_app,
)
from flwr_regs.chain import chain
from flwr_regs.client import local_training as training_module
from flwr_regs.client.local_training import LocalTraining
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.train.distillation import StartOutputs
from flwr_regs.client.train.task import Task
from flwr_regs.server.population.population import PopulationError
from flwr_regs.term import ClientContext
from flwr_regs.testing.problem import start_weights
from tests.conftest import budgeted, close, make_clients, make_model, run, to_numpy
from tests.flower.test_strategy import app_of, start
from tests.oracles.client_loss import distillation
from tests.oracles.client_step.fedadc import fedadc


def heavy(n: int = 4) -> tuple[Any, Any]:
    """A model whose arrays weigh more than their names."""

    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 3))

    return model, make_clients(n, torch.float32)


def test_in_sync_the_momentum_costs_nothing_down() -> None:
    """Measured from the messages: w_1 alone; then w_t and m_t, or the step alone."""
    model, clients = heavy()
    bytes_down = {}
    for downlink in ("model", "delta"):
        strategy = FedADC(beta=0.9, downlink=downlink, seed=1, fraction_evaluate=0.0)
        run(strategy, FedADCClient, clients=clients, model=model)
        bytes_down[downlink] = [e["bytes_down"][0] for e in strategy.history]
    one_model = bytes_down["model"][0]
    assert all(1.8 < b / one_model < 2.0 for b in bytes_down["model"][1:])
    assert all(b / one_model < 1.02 for b in bytes_down["delta"])


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)],
    ids=["Adam", "momentum"],
)
@pytest.mark.parametrize("local_momentum", [None, 0.5])
def test_a_client_optimiser_that_would_add_the_momentum_up_is_refused(
    optimizer: Any, local_momentum: float | None
) -> None:
    strategy = FedADC(local_momentum=local_momentum, fraction_evaluate=0.0)
    with pytest.raises(RoundFailed, match="SGD without momentum of their own"):
        run(strategy, FedADCClient, optimizer=optimizer)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedADC(beta=1.0), "FedADC: beta must be a number from 0 to below 1, not 1.0"),
        (lambda: FedADC(alpha=0.0), "FedADC: alpha must be a positive number, not 0.0"),
        (lambda: FedADC(variant="red"), "variant must be 'nesterov' or 'heavy-ball', not 'red'"),
        (lambda: FedADC(local_momentum=0.5, beta_local=0.1), "has one beta"),
        (lambda: FedADCPlus(lam=1.5), "FedADCPlus: lam must be a number from 0 to 1, not 1.5"),
        (lambda: FedADCPlus(temperature=0.0), "temperature must be a positive number, not 0.0"),
        (lambda: SlowMo(beta=-0.1), "SlowMo: beta must be a number from 0 to below 1, not -0.1"),
        (lambda: FedADC(overlap=True), "overlap=True needs downlink='delta'"),
        (lambda: FedADC(cohorts="all"), "cohorts must be 'uniform' or 'class-covering'"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_slowmo_is_fedadc_with_all_the_momentum_on_the_server() -> None:
    a = run(FedADC(beta_local=0.0, beta_global=0.7, seed=1), FedADCClient)
    b = run(SlowMo(beta=0.7, seed=1), SlowMoClient)
    close(a, b, 1e-12)


# Distillation


def batch_context(counts: list[int]) -> tuple[ClientContext, nn.Module, nn.Module, Any, Any]:
    x, y = make_clients()[1][0]
    model, teacher = make_model(), make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape))
    params = dict(model.named_parameters())
    ctx = ClientContext(
        start={},
        lr=0.1,
        num_steps=1,
        inputs=x,
        targets=y,
        output=model(x),
        start_output=teacher(x).detach(),
        label_counts=torch.tensor(counts),
    )
    assert params
    return ctx, model, teacher, x, y


@pytest.mark.parametrize("counts", [[7, 3, 5], [7, 3], [0, 9, 0], [4, 4, 4]], ids=str)
def test_the_loss_and_its_gradient_are_the_oracles(counts: list[int]) -> None:
    """Absent classes included: a list that ends early ends in zeros."""
    ctx, model, teacher, x, y = batch_context(counts)
    base = nn.functional.cross_entropy(ctx.output, y)
    loss = SelfDistillation(0.35, 3.0).loss(base, {}, ctx)
    loss.backward()
    arrays = [{n: p.detach().numpy() for n, p in m.named_parameters()} for m in (model, teacher)]
    full = np.array(counts + [0] * (3 - len(counts)))
    want, grads = distillation.loss_and_gradient(
        *arrays, x.numpy(), y.numpy(), full, lam=0.35, temperature=3.0
    )
    assert loss.item() == pytest.approx(want, abs=1e-12)
    close(
        {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}, grads, 1e-12
    )


def test_the_teacher_is_the_model_as_it_was_in_eval_mode() -> None:
    model = make_model(batch_norm=True)
    x = make_clients()[1][0][0]
    taught = StartOutputs(model)
    want = make_model(batch_norm=True).eval()(x).detach()
    model.train()(x)  # moves the running statistics
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(taught(x, torch.device("cpu")), want)
    flipped = taught(x.flip(0), torch.device("cpu"))
    torch.testing.assert_close(flipped, want.flip(0), rtol=0, atol=0)


# Personalisation


PERSONAL = {"personalise": "plain", "personal-lr": 0.5, "personal-epochs": 4}


def evaluated(config: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    strategy = FedAvg(seed=1)
    result = strategy.start(
        grid=InProcessGrid(app_of(partial(FedAvgClient, **kwargs)), 4),
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        evaluate_config=ConfigRecord(config),
    )
    return result, strategy.history[-1]["evaluate"]["clients"]


@pytest.mark.parametrize("kind", ["plain", "proximal", "distil", "both"])
def test_clients_report_a_personalised_accuracy_and_the_global_model_stays(kind: str) -> None:
    plain, _ = evaluated({})
    result, clients = evaluated({**PERSONAL, "personalise": kind})
    close(*({n: a.numpy() for n, a in r.arrays.items()} for r in (plain, result)), 0.0)
    for metrics in clients.values():
        assert metrics["personal-loss"] < metrics["loss"]  # own training data is the test data here
        assert 0 <= metrics["personal-accuracy"] <= 1
    averaged = result.evaluate_metrics_clientapp[2]
    assert averaged["personal-accuracy"] > averaged["accuracy"]


def test_only_the_classifier_is_trained() -> None:
    from flwr_regs.client.calibration import calibrate

    model = make_model(batch_norm=True)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    mine = calibrate(
        model,
        make_clients()[0],
        PERSONAL,
        classifier=None,
        task=Task(),
        optimizer=torch.optim.SGD,
        device=torch.device("cpu"),
    )
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    changed = {n for n, v in mine.state_dict().items() if not torch.equal(before[n], v)}
    assert changed == {"3.weight", "3.bias"}


def test_the_classifier_is_the_last_linear_layer_or_named() -> None:
    assert find_classifier(make_model()) == "2"
    assert find_classifier(make_model(), "0") == "0"
    with pytest.raises(ValueError, match=r"name one with classifier=\.\.\."):
        find_classifier(nn.Sequential(nn.Conv2d(1, 1, 1)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"personalize": "plain"}, "unknown evaluate_config key 'personalize'.*'personalise'"),
        ({"personalise": "full", "personal-lr": 0.1}, "must be one of .*'plain'.*not 'full'"),
        ({"personalise": "plain"}, "'personal-lr' must be a positive number, not None"),
        ({"personal-lr": 0.1}, "but not 'personalise'"),
        ({**PERSONAL, "personal-epochs": 2.5}, "'personal-epochs' must be a positive integer"),
        (
            {**PERSONAL, "personal-mu": 1.0},
            "'personal-mu' has no meaning for personalise = 'plain'",
        ),
        (
            {"personalise": "distil", "personal-lr": 0.1, "personal-lam": 2.0},
            "'personal-lam' must be a number from 0 to 1, not 2.0",
        ),
    ],
)
def test_a_wrong_evaluate_config_is_refused_at_once(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluated(config)


# Class-covering cohorts


def test_label_counts_are_asked_once_and_only_of_those_who_agreed() -> None:
    settings: dict[str, Any] = {"seed": 1, "fraction_train": 0.5, "cohorts": "class-covering"}
    asked = []

    class Watching(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            asked.extend(m for m in messages if m.metadata.message_type.endswith("_labels"))
            return super().push_messages(messages)

    agreed = partial(FedAvgClient, share_label_counts=True)
    strategy = FedAvg(**settings)
    start(strategy, Watching(app_of(agreed), 6), 4)
    assert len(asked) == 6
    data = make_clients(6)
    for entry in strategy.history:
        held = {int(i) for c in entry["cohort"] for _, y in data[c] for i in y}
        assert held == {0, 1, 2}
    with pytest.raises(PopulationError, match="does not share its label counts"):
        start(FedAvg(**settings), InProcessGrid(app_of(), 6))


# Overlap


@pytest.mark.parametrize("fraction", [0.34, 0.5])
def test_overlap_gives_the_same_weights_with_only_the_step_on_the_critical_path(
    fraction: float,
) -> None:
    model, clients = heavy(6)
    results, histories = {}, {}
    for overlap in (False, True):
        strategy = FedADC(
            beta=0.7,
            downlink="delta",
            overlap=overlap,
            seed=5,
            fraction_train=fraction,
            fraction_evaluate=0.0,
            min_train_nodes=1,
        )
        results[overlap] = run(strategy, FedADCClient, rounds=6, clients=clients, model=model)
        histories[overlap] = strategy.history
    close(results[True], results[False], 1e-6)
    one_model = histories[True][0]["bytes_down"]
    size = max(one_model.values())
    for entry in histories[True][1:]:
        assert all(b < 1.02 * size for b in entry["bytes_down"].values())
    assert any(b > 1.8 * size for e in histories[False][1:] for b in e["bytes_down"].values())
    for now, later in zip(histories[True], histories[True][1:], strict=False):
        assert set(now["bytes_ahead"]) == set(later["cohort"]) - set(now["cohort"])
    assert "bytes_ahead" not in histories[True][-1]  # nobody comes after the last round


def test_a_late_client_that_does_not_tell_is_left_out() -> None:
    def telling(pid: int, client: Any) -> Any:
        client.share_label_counts = pid != 3
        return client

    class Late(InProcessGrid):
        trained = False

        def get_node_ids(self) -> Any:
            return list(self._contexts)[: 4 if self.trained else 3]

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            self.trained |= any(m.metadata.message_type == "train" for m in messages)
            return super().push_messages(messages)

    strategy = FedAvg(
        seed=1, cohorts="class-covering", population=3, fraction_evaluate=0.0, min_train_nodes=2
    )
    start(strategy, Late(app_of(sabotage=telling), 4), 3)
    assert [e["cohort"] for e in strategy.history] == [[0, 1, 2]] * 3


def test_a_class_that_left_with_its_client_is_covered_no_more() -> None:
    """Partition 2 alone holds the middle class 1, then the highest class 2."""
    for only in (1, 2):
        rest = [c for c in range(3) if c != only]

        def client_fn(context: Context, only: int = only, rest: list[int] = rest) -> Any:
            pid = context.node_config["partition-id"]
            y = torch.tensor([only] * 4 if pid == 2 else rest * 2)
            data = [(torch.ones(4, 4, dtype=torch.float64), y)]
            return FedAvgClient(make_model(), data, device="cpu", share_label_counts=True)

        class Leaving(InProcessGrid):
            rounds = 0

            def get_node_ids(self) -> Any:
                return [n for n in self._contexts if n != 1002 or self.rounds < 1]

            def push_messages(self, messages: Any) -> Any:
                messages = list(messages)
                self.rounds += any(m.metadata.message_type == "train" for m in messages)
                return super().push_messages(messages)

        strategy = FedAvg(
            seed=1, cohorts="class-covering", fraction_evaluate=0.0, fraction_train=0.5
        )
        start(strategy, Leaving(client_app(client_fn), 4), 3)
        assert 2 in strategy.history[0]["cohort"]
        assert all(2 not in e["cohort"] for e in strategy.history[1:])


@pytest.mark.parametrize(
    ("output", "targets", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), "needs logits"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), "needs logits"),
        (torch.zeros(3, 3, 3), torch.zeros(3, 3, dtype=torch.long), "needs logits"),
        (
            torch.zeros(3, 2),
            torch.zeros(3, dtype=torch.long),
            "labels up to 2, the model 2 outputs",
        ),
    ],
)
def test_distillation_wants_class_logits(output: Any, targets: Any, message: str) -> None:
    ctx = ClientContext(
        start={},
        lr=0.1,
        num_steps=1,
        output=output,
        start_output=output,
        targets=targets,
        label_counts=torch.tensor([1, 1, 1]),
    )
    with pytest.raises(ValueError, match=message):
        SelfDistillation().loss(0.0, {}, ctx)


def test_distillation_stays_finite_in_half_precision_and_with_a_sure_teacher() -> None:
    sure = torch.tensor([[40.0, 0.0, 0.0], [0.0, 40.0, 0.0]], dtype=torch.float16)
    ctx = ClientContext(
        start={},
        lr=0.1,
        num_steps=1,
        output=torch.zeros(2, 3, dtype=torch.float16, requires_grad=True),
        start_output=sure,
        targets=torch.tensor([2, 2]),
        label_counts=torch.tensor([0, 0, 70_000]),
    )
    loss = SelfDistillation(0.5, 1.0).loss(torch.zeros((), dtype=torch.float16), {}, ctx)
    assert torch.isfinite(loss)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        self.head = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.embed(x)


def test_personalisation_of_odd_classifiers() -> None:
    from flwr_regs.client.calibration import calibrate

    def mine(model: nn.Module) -> nn.Module:
        return calibrate(
            model,
            make_clients()[0],
            PERSONAL,
            classifier=None,
            task=Task(),
            optimizer=torch.optim.SGD,
            device=torch.device("cpu"),
        )

    bare = nn.Linear(4, 3, dtype=torch.float64)  # the whole model is its classifier
    assert not torch.equal(mine(bare).weight, bare.weight)
    with pytest.raises(ValueError, match="'head' shares parameters with the layer 'embed'"):
        mine(Tied())
    frozen = make_model()
    frozen[2].bias.requires_grad_(False)
    assert torch.equal(mine(frozen)[2].bias, frozen[2].bias)


DONE = [{0: 1, 3: 2}, {1: 3}, {0: 3, 2: 1, 3: 9}, {}, {3: 1}]


@pytest.mark.parametrize("incomplete", ["average", "scale"])
@pytest.mark.parametrize("variant", ["nesterov", "heavy-ball"])
def test_the_momentum_of_incomplete_clients_equals_the_oracle(
    variant: str, incomplete: str
) -> None:
    """Under "scale" the server multiplies the whole update by E / s_k, the momentum's part too."""
    clients = make_clients()
    betas = {"beta_local": 0.7, "beta_global": 0.8, "variant": variant}
    strategy = FedADC(**betas, seed=3, incomplete=incomplete, fraction_evaluate=0.0)
    got = run(strategy, budgeted(FedADCClient, DONE), rounds=5, clients=clients)
    assert [sorted(e["incomplete"]) for e in strategy.history] == [sorted(d) for d in DONE]
    want = fedadc(
        start_weights(),
        to_numpy(clients),
        5,
        lambda t: 0.2,
        epochs=2,
        **betas,
        steps_done=DONE,
        incomplete=incomplete,
    )
    close(got, want[-1], 1e-10)


@pytest.mark.parametrize("variant", ["nesterov", "heavy-ball", "double"])
def test_a_straggler_carries_the_same_momentum_under_a_step_and_a_time_budget(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "scale", β m / E in both. With "average", β m / K_k if K_k is known beforehand, else β m / E."""
    how = {"local_momentum": 0.5} if variant == "double" else {"variant": variant}
    seconds = [0.0]
    monkeypatch.setattr(training_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    class Slow(list[Any]):
        """A batch takes a second."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                seconds[0] += 1.0
                yield batch

    def trained(incomplete: str, **budget: Any) -> dict[str, np.ndarray]:
        strategy = FedADC(0.7, **how, seed=3, incomplete=incomplete, fraction_evaluate=0.0)
        clients = [Slow(c) for c in make_clients()]
        models = run(strategy, FedADCClient, rounds=4, clients=clients, **budget)
        planned = [2 * len(c) for c in make_clients()]
        assert strategy.history[-1]["steps"] == {k: min(5, e) for k, e in enumerate(planned)}
        return models

    by_step, by_time = ({"step_budget": 5}, {"time_budget": 4.5})
    close(trained("scale", **by_step), trained("scale", **by_time), 0.0)
    by_steps, by_seconds = trained("average", **by_step), trained("average", **by_time)
    assert max(np.abs(by_steps[n] - by_seconds[n]).max() for n in by_steps) > 1e-3


def test_a_time_budget_takes_back_the_shift_that_was_made() -> None:
    """The steps taken are not known beforehand: m̄ is divided by E, at the start and at the end."""
    data, m = make_clients()[3], {n: torch.ones_like(p) for n, p in make_model().named_parameters()}
    start = {n: p.detach().clone() for n, p in make_model().named_parameters()}
    term = chain([EmbeddedMomentum(0.5, 0.5)])
    training = LocalTraining(
        model := make_model(),
        term,
        data,
        lr=0.1,
        steps=10,
        device="cpu",
        broadcast={"fedadc": m},
        max_seconds=60.0,
    )
    optimizer, taken = training.optimizer(torch.optim.SGD), 3
    for _, (x, y) in zip(range(taken), training.batches(), strict=False):  # the time is over
        optimizer.zero_grad()
        output = model(x)
        base = torch.nn.functional.cross_entropy(output, y)
        training.loss(0.0 * base, x, y, output).backward()
        training.correct()
        optimizer.step()
    delta = training.finish().delta
    close(delta, {n: torch.full_like(p, -0.1 * 0.5 / 10 * taken) for n, p in start.items()}, 1e-12)
