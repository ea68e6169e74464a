"""All methods that can be compared, as plain loops in float64, and with the behaviours of `behaviours.py`.

``tests/benchmarks/conformity`` compares the loops with the oracles of the package's own tests, which share
no code with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..behaviours import BEHAVIOURS
from ..model import Params
from .client_losses import MOON, FedGKD, FedLC, FedRS, RFedAvg, RFedAvgPlus
from .client_steps import SCAFFOLD, FedADC, FedCurv, FedDyn, FedLESAM, FedNova, FedProx
from .personal_models import APFL, Ditto, FedAMP
from .perturbed_steps import FedGAMMA, FedInit, FedSAM, FedSMOO, FedSpeed
from .run import Run, Task, Trace
from .server_steps import AdaptiveServer, FedAvg, FedAvgM, FedExP, QFedAvg

LOOPS: dict[str, type[Run]] = {
    "FedAvg": FedAvg,
    "FedProx": FedProx,
    "SCAFFOLD": SCAFFOLD,
    "SCAFFOLD-1": SCAFFOLD,
    "FedDyn": FedDyn,
    "FedNova-proximal": FedNova,
    "FedADC-double": FedADC,
    "FedLESAM": FedLESAM,
    "FedCurv": FedCurv,
    "FedSAM": FedSAM,
    "FedGAMMA": FedGAMMA,
    "FedSpeed": FedSpeed,
    "FedSMOO": FedSMOO,
    "FedInit": FedInit,
    "RFedAvg": RFedAvg,
    "RFedAvgPlus": RFedAvgPlus,
    "MOON": MOON,
    "FedGKD": FedGKD,
    "FedLC": FedLC,
    "FedRS": FedRS,
    "FedExP": FedExP,
    "QFedAvg": QFedAvg,
    "FedAvgM": FedAvgM,
    "FedAdagrad": AdaptiveServer,
    "FedAdam": AdaptiveServer,
    "FedYogi": AdaptiveServer,
    "Ditto": Ditto,
    "APFL": APFL,
    "FedAMP": FedAMP,
}


def federate(
    task: Task, method: str, behaviours: Collection[str] = (), points: bool = True
) -> Trace:
    """Run a method of `METHODS` on a task, with some behaviours, and return what it did."""
    trace = Trace()
    for t, (model, visited) in enumerate(rounds(task, method, behaviours)):
        trace.models.append(model)
        if points:
            trace.points |= {(t, k): where for k, where in visited.items()}
    return trace


def rounds(
    task: Task, method: str, behaviours: Collection[str] = ()
) -> Iterator[tuple[Params, dict[int, list[Params]]]]:
    """Yield, round by round, the new model and each client's points; as :func:`federate` keeps them."""
    if unknown := [b for b in behaviours if method not in BEHAVIOURS[b].methods]:
        raise ValueError(f"{method} cannot have the behaviours {unknown}")
    run = LOOPS[method](task, method, frozenset(behaviours))
    for cohort in task.cohorts:
        yield run.next_round(cohort)
