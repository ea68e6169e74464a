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
from tests.oracles.client_loss.fedgkd import fedgkd
from tests.oracles.client_loss.logits import fedlc, fedrs
from tests.oracles.client_loss.moon import moon
from tests.oracles.client_loss.rfedavg import rfedavg, rfedavg_plus
from tests.oracles.client_step.fedadc import fedadc
from tests.oracles.client_step.fedcurv import fedcurv
from tests.oracles.client_step.feddyn import feddyn
from tests.oracles.client_step.fedinit import fedinit
from tests.oracles.client_step.fedprox import fedprox
from tests.oracles.client_step.fedspeed import fedsmoo, fedspeed
from tests.oracles.client_step.sam import fedgamma, fedlesam, fedsam
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.local_sgd import local_sgd
from tests.oracles.model import Client, gradient
from tests.oracles.personal.apfl import apfl
from tests.oracles.personal.ditto import ditto
from tests.oracles.personal.fedamp import fedamp
from tests.oracles.server_step.fedavg import fedavg
from tests.oracles.server_step.fedexp import fedexp
from tests.oracles.server_step.fednova import fednova
from tests.oracles.server_step.fedopt import fedopt
from tests.oracles.server_step.qfedavg import qfedavg

TASK = small_task()
ALL = replace(TASK, cohorts=(tuple(range(5)),) * 3)


def batches(task: Task) -> list[Client]:
    b = task.batch_size
    return [[(x[i : i + b], y[i : i + b]) for i in range(0, len(y), b)] for x, y in task.clients]


def apart(a: Any, b: Any, names: Any = None) -> float:
    """The largest difference between two runs' models."""
    return max(float(abs(x[n] - y[n]).max()) for x, y in zip(a, b, strict=True) for n in names or x)


ADAPTIVE = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 0.1}
ORACLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (fedavg, {}),
    "FedProx": (fedprox, {"mu": TASK.mu}),
    "SCAFFOLD": (scaffold, {}),
    "SCAFFOLD-1": (scaffold, {"option": 1}),
    "FedDyn": (feddyn, {}),
    "FedNova-proximal": (fednova, {"mu": TASK.mu}),
    "FedADC-double": (
        fedadc,
        {"beta_local": 0.6, "beta_global": 0.6, "local_momentum": 0.5},
    ),
    "FedLESAM": (fedlesam, {}),
    "FedCurv": (fedcurv, {}),
    "FedSAM": (fedsam, {}),
    "FedGAMMA": (fedgamma, {}),
    "FedSpeed": (fedspeed, {}),
    "FedSMOO": (fedsmoo, {}),
    "FedInit": (fedinit, {}),
    "RFedAvg": (rfedavg, {}),
    "RFedAvgPlus": (rfedavg_plus, {}),
    "MOON": (moon, {}),
    "FedGKD": (fedgkd, {"gamma": 2.0, "buffer": 2, "temperature": 2.0}),
    "FedLC": (fedlc, {}),
    "FedRS": (fedrs, {}),
    "FedExP": (fedexp, {}),
    "QFedAvg": (qfedavg, {}),
    "FedAvgM": (fedopt, {"server": "momentum", "server_lr": 0.7, "momentum": 0.6}),
    "FedAdagrad": (fedopt, {"server": "adagrad", **ADAPTIVE, "beta1": 0.0}),
    "FedAdam": (fedopt, {"server": "adam", **ADAPTIVE}),
    "FedYogi": (fedopt, {"server": "yogi", **ADAPTIVE}),
    "Ditto": (ditto, {"personal": []}),
    "APFL": (apfl, {"personal": []}),
    "FedAMP": (fedamp, {"personal": []}),
}
"""Each method's oracle, and its settings where they are not the task's own."""


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
    oracle, settings = ORACLES[method]
    settings = settings or dict(TASK.settings.get(method, {}))
    if "personal" in settings:
        settings = {**TASK.settings[method], "personal": []}
    want = oracle(*given, cohorts=cohorts, **settings)
    if "personal" in settings:
        want = [personal(kept) for kept in settings["personal"]]
    found = federate(TASK, method)
    assert apart(found.models, want, want[0]) < (1e-6 if method == "FedCurv" else 1e-13)
    assert apart([found.models[0]], [found.models[-1]]) > 0.05
    assert {at: len(p) for at, p in found.points.items() if at[0] == 1} == {
        (1, 2): 6,
        (1, 3): 10,
        (1, 4): 6,
    }


def test_momentum_is_torchs_and_starts_anew_in_each_round() -> None:
    task = replace(ALL, momentum=0.7)
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


def test_a_behaviour_that_a_method_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FedAvg cannot have the behaviours \['wrong-sign'\]"):
        federate(TASK, "FedAvg", ["wrong-sign"])
