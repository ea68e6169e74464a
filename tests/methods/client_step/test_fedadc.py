"""FedADC beyond the laws: bytes, K_k, distillation, class-covering cohorts, and overlap."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.client import local_training as training_module
from flwr_regs.testing.problem import app_of, make_clients, make_model, start_weights, train
from flwr_regs.wire import keys
from tests.conftest import Attended, Log, Tampered, budgeted, close, to_numpy, wide
from tests.methods.client_loss.test_losses import batch
from tests.oracles.client_step.fedadc import fedadc

HEAVY: dict[str, Any] = {"clients": make_clients(4, torch.float32), "model": partial(wide, 400)}


# Distillation


def test_distillation_stays_finite_in_half_precision_and_with_a_sure_teacher() -> None:
    sure = torch.tensor([[40.0, 0.0, 0.0], [0.0, 40.0, 0.0]], dtype=torch.float16)
    output = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    base = torch.zeros((), dtype=torch.float16)
    counts = torch.tensor([0, 0, 70_000])
    ctx = batch(output, torch.tensor([2, 2]), start_output=sure, label_counts=counts)
    assert torch.isfinite(fr.SelfDistillation(0.5, 1.0).loss(base, {}, ctx))


# Class-covering cohorts


def test_label_counts_are_asked_once_and_of_those_who_are_there() -> None:
    """Partition 2 alone holds class 1 and leaves; partition 4 comes late, and does not tell."""

    def client_fn(context: Any) -> Any:
        pid = context.node_config["partition-id"]
        labels = torch.tensor([1] * 4 if pid == 2 else [0, 2] * 2)
        data = [(torch.ones(4, 4, dtype=torch.float64), labels)]
        return fr.FedAvgClient(make_model(), data, device="cpu", share_label_counts=pid < 4)

    settings: dict[str, Any] = {"seed": 1, "fraction_train": 0.5, "fraction_evaluate": 0.0}
    strategy = fr.FedAvg(**settings, population=4, cohorts="class-covering")
    app = fr.client_app(client_fn)
    grid = Attended(app, 5, lambda pid, sent: pid != (2 if sent > 3 else 4))
    train(strategy, fr.FedAvgClient, rounds=5, grid=grid)
    assert all(2 in e["cohort"] for e in strategy.history[:2])
    assert all({2, 4}.isdisjoint(e["cohort"]) for e in strategy.history[2:])
    assert grid.kinds.count("query.flwr_regs_labels") == 5


# On the wire


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_overlap_gives_the_same_weights_and_sends_only_the_step_last(fraction: float) -> None:
    """Measured from the messages; the momentum costs nothing with a delta downlink."""
    ends, histories = {}, {}
    for settings in ({}, {"downlink": "delta"}, {"downlink": "delta", "overlap": True}):
        strategy = fr.FedADC(
            beta=0.7, **settings, seed=5, fraction_train=fraction, min_train_nodes=1,
            fraction_evaluate=0.0
        )  # fmt: skip
        ends[len(settings)] = train(strategy, fr.FedADCClient, rounds=6, **HEAVY)[-1]
        histories[len(settings)] = strategy.history
    close(ends[1], ends[0], 1e-6)
    close(ends[2], ends[1], 1e-6)
    model = max(histories[0][0]["bytes_down"].values())
    down = {k: [b for e in h[1:] for b in e["bytes_down"].values()] for k, h in histories.items()}
    assert all(1.8 < b / model < 2.0 for b in down[0])  # w_t and m_t
    assert all(b < 1.02 * model for b in down[2])
    assert any(b > 1.8 * model for b in down[1]) == (fraction < 1)
    for entry, later in zip(histories[2], histories[2][1:], strict=False):
        ahead = set(later["cohort"]) - set(entry["cohort"])
        assert set(entry.get("bytes_ahead", {})) == ahead
    assert "bytes_ahead" not in histories[2][-1]  # nobody comes after the last round


def test_a_model_that_does_not_go_ahead_is_named_and_goes_with_its_round(log: Log) -> None:
    def change(kind: str, pid: int, message: Any, reply: Any) -> Any:
        return "the disk is full" if kind == keys.PREFETCH else reply

    app, settings = app_of(fr.FedADCClient, make_clients(4)), {"seed": 5, "fraction_train": 0.5}
    strategy = fr.FedADC(**settings, fraction_evaluate=0.0, downlink="delta", overlap=True)
    grids = fr.InProcessGrid(app, 4), Tampered(app, 4, change)
    close(*(train(strategy, fr.FedADCClient, rounds=6, grid=grid)[-1] for grid in grids), 1e-6)
    sent = [e["round"] for e in strategy.history if e.get("bytes_ahead")]
    for number, line in zip(sent, log(level=logging.WARNING), strict=True):  # none of the first run
        assert line.endswith(f" got no model ahead of round {number + 1}: the disk is full")
    assert sent


# K_k

DONE = [{0: 1, 3: 2}, {1: 3}, {0: 3, 2: 1, 3: 9}, {}, {3: 1}]


@pytest.mark.parametrize("variant", ["nesterov", "heavy-ball"])
def test_scaled_momentum_of_incomplete_clients_equals_the_oracle(variant: str) -> None:
    """Under "scale" the server multiplies the whole update by E / s_k, the momentum's part too."""
    settings = {"beta_local": 0.7, "beta_global": 0.8, "variant": variant, "incomplete": "scale"}
    strategy = fr.FedADC(**settings, seed=3, fraction_evaluate=0.0)
    got = train(strategy, budgeted(fr.FedADCClient, DONE), rounds=5)
    plan = (to_numpy(make_clients()), 5, lambda t: 0.2, 2)
    close(got[-1], fedadc(start_weights(), *plan, **settings, steps_done=DONE)[-1], 1e-10)


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
            for pair in super().__iter__():
                seconds[0] += 1.0
                yield pair

    def trained(incomplete: str, **budget: Any) -> dict[str, np.ndarray]:
        strategy = fr.FedADC(0.7, **how, seed=3, incomplete=incomplete, fraction_evaluate=0.0)
        clients = [Slow(c) for c in make_clients()]
        models = train(strategy, fr.FedADCClient, clients=clients, **budget)
        planned = [2 * len(c) for c in make_clients()]
        assert strategy.history[-1]["steps"] == {k: min(5, e) for k, e in enumerate(planned)}
        return models[-1]

    by_step, by_time = ({"step_budget": 5}, {"time_budget": 4.5})
    close(trained("scale", **by_step), trained("scale", **by_time), 0.0)
    by_steps, by_seconds = trained("average", **by_step), trained("average", **by_time)
    assert max(np.abs(by_steps[n] - by_seconds[n]).max() for n in by_steps) > 1e-3
