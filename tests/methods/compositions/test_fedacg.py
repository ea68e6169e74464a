"""FedACG beyond the laws: Nesterov's SGD on the server, and the model that its paper reports."""

from functools import partial
from typing import Any

import flwr_regs as fr
from flwr_regs.testing.problem import train
from tests.conftest import close

SOME: dict[str, Any] = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1}


def test_what_is_sent_follows_nesterovs_sgd_of_learning_rate_1() -> None:
    ours = train(fr.FedACG(0.7, 0.3, **SOME), fr.FedACGClient)
    nesterov = fr.FedOpt("SGD", lr=1.0, momentum=0.7, nesterov=True).term.terms
    strategy = fr.RegStrategy([fr.Proximal(0.3), *nesterov], weighting="uniform", **SOME)
    theirs = train(strategy, partial(fr.RegClient, terms=[fr.Proximal]))
    for z, same in zip(ours, theirs, strict=True):
        close(z, same, 1e-12)
