"""A training on the server's own values: whole rounds over a network of numpy clients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flwr_regs.chain import chain
from flwr_regs.server.evaluation import evaluation
from flwr_regs.server.exchange.network import Request
from flwr_regs.server.options import Options
from flwr_regs.server.round import RoundFailed
from flwr_regs.server.training import Training
from flwr_regs.term import Term
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel
from tests.server.network import NumpyNetwork, quadratic, run

CONFIG = {"lr": 0.1, "local-steps": 3}
CURVATURE, CENTRE = (1.0, 4.0, 2.0), (-1.0, 2.0, 0.5)


def training(terms: Sequence[Term] = (), **settings: Any) -> Training:
    options = Options.of(chain(terms), seed=3, min_train_nodes=1, **settings)
    return Training(options, "FedAvg", {"w": np.zeros(2)}, 5, lambda kind, metrics: {})


def test_a_course_that_is_left_in_the_middle_changes_nothing() -> None:
    network = NumpyNetwork(3, quadratic(CURVATURE, CENTRE))
    train = training(downlink="delta")
    course = train.round(1, CONFIG, network)
    (request,) = next(course)
    assert (request.kind, sorted(request.parcels)) == ("train", [0, 1, 2])
    course.close()
    assert (train.model.model["w"] == 0).all()
    run(train.round(1, CONFIG, network), network)
    assert [(e["round"], e["examples_processed"]) for e in train.history] == [(1, 1)]  # -1, 0, 1
    (request,) = next(train.round(2, CONFIG, network))
    told = {parcel.config[keys.DOWNLINK_KEY] for parcel in request.parcels.values()}
    assert told == {"delta"}  # though no term reads the step
    assert train.adopt({"w": np.ones(2)})
    (request,) = next(train.round(2, CONFIG, network))
    assert {parcel.config[keys.DOWNLINK_KEY] for parcel in request.parcels.values()} == {"model"}


def test_an_evaluation_to_which_all_come_late_is_none_and_without_a_deadline_an_error() -> None:
    def silent(k: int, request: Request, parcel: Parcel) -> Parcel | None:
        there = request.kind == keys.IDENTIFY
        return quadratic(CURVATURE, CENTRE)(k, request, parcel) if there else None

    network = NumpyNetwork(3, silent)  # type: ignore[arg-type]
    late, lost = training(deadline=1.0), training()
    assert run(evaluation(late, 1, late.model.model, {}, network), network) is None
    with pytest.raises(RoundFailed, match="no client of 3 could evaluate"):
        run(evaluation(lost, 1, lost.model.model, {}, network), network)
