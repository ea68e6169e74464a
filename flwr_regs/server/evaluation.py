"""The clients' evaluation of the global model."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from flwr_regs.server.client_metrics import common_metrics, long_lists, read_metrics
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
from flwr_regs.wire.text import MOST_NAMES

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
    free = training.evaluators(training.population.refresh(network), network)
    size = max(int(len(free) * options.fraction_evaluate), options.min_evaluate_nodes)
    cohort = uniform_cohort(free, (options.seed, number), size, EVALUATION)
    state = training.model
    shared = tie({n: a for n, a in model.items() if n in state.model}, state.tied or {})
    arrays = {keys.ARRAYS: Record(narrow(shared, options.wire_dtype))}
    common = {**config, **training.identity, keys.ROUND_KEY: number}
    if options.term.personalising:
        common[keys.PREVIOUS_LR_KEY] = state.previous_lr or 0.0
    own = {pid: training.remembered.entries(pid, options.seed, number) for pid in cohort}
    parcels = {pid: Parcel(arrays, {**common, **entries}) for pid, entries in own.items()}
    bytes_down = {pid: parcel.nbytes for pid, parcel in parcels.items()}
    clock = time.monotonic()

    (replies,) = yield [training.population.request("evaluate", parcels)]
    bytes_down |= dict.fromkeys(replies.unsent, 0)

    def measured(pid: int, reply: Parcel) -> dict[str, Any]:
        check_round(f"the evaluation of client {pid}", reply, common)
        return dict(read_metrics(pid, reply, options.weighted_by_key)[0])

    metrics, unread = read_each(replies.came, measured)
    if failures := {**replies.failures, **unread}:
        LOG.warning("\t> evaluation: %s", name_failures(failures))
    history = training.history
    if not history or history[-1]["round"] != number:
        history.append({"round": number, "seconds": {}})  # evaluation alone
    entry = history[-1]
    entry["seconds"]["evaluate"] = time.monotonic() - clock
    entry["evaluate"] = told = {"bytes_down": bytes_down, "failures": failures, "clients": metrics}
    for what, clients in losses(replies.came).items():
        if clients:
            told[f"lost_{what}"] = clients
            LOG.warning("clients %s evaluate without what they kept (lost_%s)", clients, what)
    if (layer := output_layer(replies.came)) is not None:
        entry["output_layer"] = layer
    if metrics:
        training.evaluated = True
        averaged, left_out = common_metrics(metrics)
        for pid, m in metrics.items():
            if lists := long_lists(replies.came[pid], m):
                left_out[pid] = [*left_out.get(pid, ()), *lists][:MOST_NAMES]
        told |= {"metrics_left_out": left_out} if left_out else {}
        if not averaged:
            return None
        mean = training.mean_of_metrics("evaluate", averaged)
        entry["evaluate_metrics"] = dict(mean)
        return mean
    all_late = options.deadline is not None and set(parcels) == set(replies.silent)
    if training.evaluated or all_late:
        return None
    nobody = f"round {number} of {training.method}: no client of {len(cohort)} could evaluate"
    none = "none is drawn, so raise fraction_evaluate or min_evaluate_nodes"
    raise RoundFailed(f"{nobody}: {name_failures(failures) if cohort else none}")
