"""The clients' evaluation of the global model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from flwr_regs.server.client_metrics import common_metrics, read_metrics
from flwr_regs.server.exchange.network import Course, Network
from flwr_regs.server.exchange.replies import check_round, output_layer
from flwr_regs.server.failures import name_failures, read_each
from flwr_regs.server.population.cohorts import EVALUATION, uniform_cohort
from flwr_regs.server.round import RoundFailed, losses
from flwr_regs.server.training import Training
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, tie
from flwr_regs.wire.parcel import Parcel, Record
from flwr_regs.wire.precision import narrow

LOG = logging.getLogger("flwr")


def evaluation(
    training: Training, number: int, model: NDArrays, config: Mapping[str, Any], network: Network
) -> Course[Mapping[str, Any] | None]:
    """Let clients evaluate `model` after round `number`; return their mean metrics.

    Each client's own metrics, failures and bytes are in the history. Returns None if no client could
    evaluate this time.

    Raises
    ------
    RoundFailed
        No usable reply, and none in any evaluation before: an evaluation that never works is a mistake.
    """
    options = training.options
    connected = training.population.refresh(network)
    free = training.evaluators(connected, network)
    size = max(int(len(free) * options.fraction_evaluate), options.min_evaluate_nodes)
    cohort = uniform_cohort(free, (options.seed, number), size, EVALUATION)
    global_model = training.model
    shared = {name: a for name, a in model.items() if name in global_model.model}
    tied = tie(shared, global_model.tied or {})
    arrays = {keys.ARRAYS: Record(narrow(tied, options.wire_dtype))}
    common = {**config, **training.identity, keys.ROUND_KEY: number}
    if options.term.personalising:
        common[keys.PREVIOUS_LR_KEY] = global_model.previous_lr or 0.0
    own_entries = partial(training.remembered.entries, seed=options.seed, number=number)
    parcels = {pid: Parcel(arrays, {**common, **own_entries(pid)}) for pid in cohort}
    bytes_down = {pid: parcel.nbytes for pid, parcel in parcels.items()}
    clock = time.monotonic()

    (replies,) = yield [training.population.request("evaluate", parcels)]

    def measured(pid: int, reply: Parcel) -> tuple[Mapping[str, Any], float]:
        check_round(f"the evaluation of client {pid}", reply, common)
        return read_metrics(pid, reply, options.weighted_by_key)

    read, unread = read_each(replies.came, measured)
    metrics = {pid: dict(reported) for pid, (reported, _) in read.items()}
    if failures := {**replies.failures, **unread}:
        LOG.warning("\t> evaluation: %s", name_failures(failures))
    history = training.history
    if not history or history[-1]["round"] != number:
        history.append({"round": number, "seconds": {}})  # evaluation alone
    entry = history[-1]
    entry["seconds"]["evaluate"] = time.monotonic() - clock
    told = {"bytes_down": bytes_down, "failures": failures, "clients": metrics}
    entry["evaluate"] = told
    for what, clients in losses(replies.came).items():
        if clients:
            told[f"lost_{what}"] = clients
            LOG.warning("clients %s evaluate without what they kept (lost_%s)", clients, what)
    if (layer := output_layer(replies.came)) is not None:
        entry["output_layer"] = layer
    if metrics:
        training.evaluated = True
        averaged, left_out = common_metrics(metrics)
        if left_out:
            told["metrics_left_out"] = left_out
        if not averaged:
            return None
        mean = training.mean_of_metrics("evaluate", averaged)
        entry["evaluate_metrics"] = dict(mean)
        return mean
    all_late = options.deadline is not None and set(parcels) == set(replies.silent)
    if training.evaluated or all_late:
        return None
    raise RoundFailed(
        f"round {number} of {training.method}: no client of {len(cohort)} could evaluate: "
        f"{name_failures(failures)}"
    )
