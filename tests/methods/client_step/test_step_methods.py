"""FedCM, FedSAM, FedLESAM, FedExP and q-FedAvg, where few take part and some stop early.

Their oracles say what they train. And beside other terms: the right numbers, or a refusal that says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import local_round
from flwr_regs.term import Term
from flwr_regs.testing.problem import app_of, start_weights, train
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.oracles.client_step.fedcm import fedcm
from tests.oracles.client_step.sam import fedlesam, fedsam
from tests.oracles.model import Params, gradient
from tests.oracles.server_step.fedexp import fedexp
from tests.oracles.server_step.qfedavg import qfedavg
from tests.sampling import sampled

METHODS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "FedCM": (fr.FedCM, fr.FedCMClient, fedcm, {"alpha": 0.3}),
    "FedSAM": (fr.FedSAM, fr.FedSAMClient, fedsam, {"rho": 0.1}),
    "FedLESAM": (fr.FedLESAM, fr.FedLESAMClient, fedlesam, {"rho": 0.1}),
    "FedExP": (fr.FedExP, fr.FedExPClient, fedexp, {"eps": 1e-3}),
    "QFedAvg": (fr.QFedAvg, fr.QFedAvgClient, qfedavg, {"q": 2.0}),
}
SOME = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}
SHORT = [{}, {1: 2, 3: 1}, {0: 3}, {2: 4, 4: 1}]  # round -> client -> steps that it has time for
ROUNDS = 5


def expected(history: list[dict[str, Any]], oracle: Any, **own: Any) -> list[Params]:
    """The oracle's models for the cohorts and replies of a run."""
    models: list[Params] = oracle(
        start_weights(), to_numpy(make_clients(5)), ROUNDS, lambda t: 0.2 * 0.9**t, 2,
        cohorts=[e["cohort"] for e in history],
        unused=[set(e["cohort"]) - set(e["replies"]) for e in history], **own,
    )  # fmt: skip
    return models


@sampled(
    "name,downlink,incomplete", list(product(METHODS, ["model", "delta"], ["average", "drop"])), 3
)
def test_some_clients_of_which_some_stop_early(name: str, downlink: str, incomplete: str) -> None:
    """3 of 5 unequal clients a round, mini-batches, a learning rate that falls."""
    make, client, oracle, own = METHODS[name]
    strategy = make(
        **own, downlink=downlink, incomplete=incomplete, lr_schedule=lambda t: 0.9**t, **SOME
    )
    found = train(strategy, budgeted(client, SHORT), rounds=ROUNDS, clients=make_clients(5), lr=0.2)
    short = [SHORT[t % 4] for t in range(ROUNDS)]
    models = expected(strategy.history, oracle, steps_done=short, **own)
    for a, b in zip(found, models, strict=True):
        close(a, b, 1e-10)
    dropped = [set(e["cohort"]) - set(e["replies"]) for e in strategy.history]
    assert any(dropped) == (incomplete == "drop")


def test_a_client_that_lost_its_last_model_is_named() -> None:
    """FedLESAM's next round of that client is FedAvg's."""

    class Forgetful(fr.InProcessGrid):
        rounds = 0

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.rounds += any(m.metadata.message_type == "train" for m in messages)
            if self.rounds == 4:
                self._contexts[1002].state = RecordDict()
            return super().push_messages(messages)

    strategy = fr.FedLESAM(0.1, seed=3, fraction_evaluate=0.0, lr_schedule=lambda t: 0.9**t)
    grid = Forgetful(app_of(fr.FedLESAMClient, make_clients(5)), 5)
    found = train(strategy, fr.FedLESAMClient, rounds=ROUNDS, grid=grid, lr=0.2)
    assert [e["lost_state"] for e in strategy.history] == [[]] * 3 + [[2]] + [[]]
    lost = [set[int]()] * 3 + [{2}] + [set[int]()]
    models = expected(strategy.history, fedlesam, rho=0.1, lost=lost)
    close(found[-1], models[-1], 1e-10)
    kept = expected(strategy.history, fedlesam, rho=0.1)
    assert abs(kept[3]["0.weight"] - models[3]["0.weight"]).max() > 1e-5


# beside other terms


def test_what_stands_left_of_them_is_part_of_their_gradient() -> None:
    """Two steps of a client by hand, with FedProx's pull on either side."""
    [(x, y), *_] = data = make_clients()[0]
    w, lr, mu, alpha, rho = start_weights(), 0.2, 0.7, 0.3, 0.1
    g = {n: np.full_like(a, 0.1) for n, a in w.items()}

    def plain(v: Params, pull: float) -> Params:
        found = gradient(v, x.numpy(), y.numpy())
        return {n: found[n] + pull * (v[n] - w[n]) for n in v}

    def blended(v: Params, left: float, right: float) -> Params:
        return {
            n: alpha * a + (1 - alpha) / 2 * g[n] + right * (v[n] - w[n])
            for n, a in plain(v, left).items()
        }

    def sharp(v: Params, left: float, right: float) -> Params:
        d = plain(v, left)
        length = sum((a**2).sum() for a in d.values()) ** 0.5
        ahead = plain({n: v[n] + rho * d[n] / length for n in v}, left)
        return {n: a + right * (v[n] - w[n]) for n, a in ahead.items()}

    pull = fr.Proximal(mu)
    momentum, sam = fr.ClientMomentum(alpha), fr.LocalPerturbation(rho)
    for terms, force in (
        ([pull, momentum], lambda v: blended(v, mu, 0)),
        ([momentum, pull], lambda v: blended(v, 0, mu)),
        ([pull, sam], lambda v: sharp(v, mu, 0)),
        ([sam, pull], lambda v: sharp(v, 0, mu)),
    ):
        v = w
        for _ in range(2):
            step = force(v)
            v = {n: v[n] - lr * step[n] for n in v}
        broadcast = {"fedcm": {n: torch.from_numpy(a) for n, a in g.items()}}
        found = local_round(
            make_model(), chain(terms), data[:1], lr=lr, steps=2, broadcast=broadcast, device="cpu"
        )
        close({n: a.numpy() for n, a in found.state.items()}, v, 1e-12)


def test_under_scale_fedcm_spreads_the_step_over_the_planned_steps() -> None:
    """The server multiplies the update by E / s_k; so it repeats the same part of the last step."""
    data = [(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long))]
    model = make_model()
    for p in (model[2].weight, model[2].bias):  # all that has a gradient here
        p.requires_grad_(False)
    g = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.requires_grad}
    for config, steps in (({}, 3), ({keys.INCOMPLETE_KEY: "scale"}, 6)):
        found = local_round(
            model, fr.ClientMomentum(0.25), data, lr=0.1, steps=6, max_steps=3,
            broadcast=g, config=config, device="cpu",
        )  # fmt: skip
        torch.testing.assert_close(
            found.delta["0.weight"], torch.full_like(g["0.weight"], -0.1 * 0.75 * 3 / steps)
        )


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ([fr.LocalPerturbation(0.1), fr.GlobalPerturbation(0.1)], "would count twice: keep one"),
        ([fr.Extrapolation(), fr.SlowMomentum(0.5)], "only one term can own the server's step"),
    ],
)
def test_what_cannot_stand_beside_each_other(terms: list[Term], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        chain(terms)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fr.FedCM(0.0), "FedCM: alpha must be a number above 0, up to 1, not 0.0"),
        (lambda: fr.FedCM(1.5), "FedCM: alpha must be"),
        (lambda: fr.FedSAM(-0.1), "FedSAM: rho must be a number of at least 0, not -0.1"),
        (lambda: fr.FedLESAM(float("nan")), "FedLESAM: rho must be"),
        (lambda: fr.FedExP(0), "FedExP: eps must be a positive number, not 0"),
        (lambda: fr.QFedAvg(-1), "QFedAvg: q must be a number of at least 0, not -1"),
    ],
)
def test_wrong_parameters(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
