"""The kit's loops are the papers', by the oracles; and each behaviour does what its name says."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conformity import model as kit
from benchmarks.conformity.behaviours import METHODS
from benchmarks.conformity.loops import federate
from benchmarks.conformity.loops.run import Task
from benchmarks.conformity.task import small_task
from tests.laws import CASES
from tests.oracles.local_sgd import local_sgd
from tests.oracles.model import Client, gradient

TASK = small_task()


def batches(task: Task) -> list[Client]:
    b = task.batch_size
    return [[(x[i : i + b], y[i : i + b]) for i in range(0, len(y), b)] for x, y in task.clients]


def apart(a: Any, b: Any, names: Any = None) -> float:
    """The largest difference between two runs' models."""
    return max(float(abs(x[n] - y[n]).max()) for x, y in zip(a, b, strict=True) for n in names or x)


ADAPTIVE = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 0.1}
ORACLES = {case.strategy.__name__: case.oracle for case in CASES}
SETTINGS: dict[str, dict[str, Any]] = {
    # of an oracle, where they are not the task's own
    "FedProx": {"mu": TASK.mu},
    "SCAFFOLD-1": {"option": 1},
    "FedNova-proximal": {"mu": TASK.mu},
    "FedADC-double": {"beta_local": 0.6, "beta_global": 0.6, "local_momentum": 0.5},
    "FedGKD": {"gamma": 2.0, "buffer": 2, "temperature": 2.0},
    "FedAvgM": {"server": "momentum", "server_lr": 0.7, "momentum": 0.6},
    "FedAdagrad": {"server": "adagrad", **ADAPTIVE, "beta1": 0.0},
    "FedAdam": {"server": "adam", **ADAPTIVE},
    "FedYogi": {"server": "yogi", **ADAPTIVE},
}
PERSONAL = ("Ditto", "APFL", "FedAMP")


def personal(kept: dict[int, Any]) -> Any:
    """All clients' models as the kit names them; the first model for who has not trained."""
    named = {}
    for k in range(len(TASK.clients)):
        u, *share = kept[k] if isinstance(kept.get(k), tuple) else (kept.get(k, TASK.parameters),)
        named |= {f"{k}.{n}": a for n, a in u.items()}
        named |= {f"{k}.alpha": np.array(a) for a in share}
    return named


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_the_oracles(method: str) -> None:
    """To 1e-13; FedCurv's oracle rounds what travels to 32 bits."""
    cohorts = [list(c) for c in TASK.cohorts]
    given: tuple[Any, ...] = (TASK.parameters, batches(TASK), len(cohorts), lambda _: TASK.lr, 2)
    oracle: Any = ORACLES[method.partition("-")[0]]
    settings = SETTINGS.get(method) or dict(TASK.settings.get(method, {}))
    if method in PERSONAL:
        settings["personal"] = []
    want = oracle(*given, cohorts=cohorts, **settings)
    if method in PERSONAL:
        want = [personal(kept) for kept in settings["personal"]]
    found = federate(TASK, method)
    assert apart(found.models, want, want[0]) < (1e-6 if method == "FedCurv" else 1e-13)
    assert apart([found.models[0]], [found.models[-1]]) > 0.05
    steps = {at[1]: len(p) for at, p in found.points.items() if at[0] == 1}
    assert steps == {2: 6, 3: 10, 4: 6}


def test_momentum_is_torchs_and_starts_anew_in_each_round() -> None:
    task = replace(TASK, cohorts=(tuple(range(5)),) * 3, momentum=0.7)
    want, _ = local_sgd(
        TASK.parameters, batches(TASK), 3, TASK.lr, TASK.epochs, mu=TASK.mu, momentum=0.7
    )
    assert apart(federate(task, "FedProx", ["uniform"]).models, want) < 1e-13


def test_the_gradient_is_the_oracles_and_with_batch_norm_torchs() -> None:
    x, y = TASK.clients[3]
    found, _ = kit.gradient(TASK.parameters, (x, y))
    assert apart([found], [gradient(TASK.parameters, x, y)]) < 1e-15
    w = kit.initial(4, 5, 3, 1, batch_norm=True)
    w["1.weight"] += 0.3
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).double()
    net.load_state_dict({n: torch.as_tensor(a) for n, a in w.items()}, strict=False)
    loss = torch.nn.functional.cross_entropy(net(torch.as_tensor(x)), torch.as_tensor(y))
    loss.backward()
    found, buffers = kit.gradient(w, (x, y))
    for name, p in net.named_parameters():
        assert abs(found[name] - p.grad.numpy()).max() < 1e-12, name  # type: ignore[union-attr]
    for name in kit.BUFFERS:
        assert abs(buffers[name] - net.state_dict()[name].numpy()).max() < 1e-12, name
    net.eval()
    right = net(torch.as_tensor(x)).argmax(1).numpy() == y
    assert kit.accuracy(w | buffers, x, y) == right.mean()
