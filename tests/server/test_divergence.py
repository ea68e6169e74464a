"""The guard against divergence: its signs, and what it does to a training."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.experiments.report.run_records import diverged
from flwr_regs.server.aggregate.updates import Updates
from flwr_regs.server.divergence import DivergenceGuard, Diverges, suspects
from flwr_regs.server.exchange.network import Request
from flwr_regs.server.failures import UnusableReplies
from flwr_regs.server.options import Options
from flwr_regs.server.round import Reply, Round, RoundFailed
from flwr_regs.server.training import Training
from flwr_regs.term import Arrays, Slot, Term
from flwr_regs.wire.parcel import Parcel, Record
from tests.conftest import Log
from tests.server.network import NumpyNetwork, quadratic, run
from tests.server.test_training import CENTRE, CURVATURE, training

UNSTABLE = {"lr": 0.8, "local-steps": 3}  # client 1: (1 - 0.8 * 4)^3 = -10.6, a third of the mean


def rounds_with_a_sign(steps: Any, losses: Any = None, lr: Any = None) -> list[int]:
    """The rounds, from 1, that show a sign."""
    guard = DivergenceGuard(Options.of(chain([])), "FedAvg")
    lr, losses = lr or [1.0] * len(steps), losses or [None] * len(steps)
    looks = [guard.look(*each) for each in zip(steps, lr, losses, strict=True)]
    return [t for t, sign in enumerate(looks, start=1) if sign]


CALM = [1.0, 0.9, 1.1, 1.0, 0.8]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([*CALM, 11.0, 11.0], [7]),
        ([*CALM, 11.0, 1.0, 1.0, 1.0, 1.0, 11.0], [11]),
        ([*CALM, 11.0, 1.0, 1.0, 1.0, 1.0, 1.0, 11.0], []),  # too long ago
        ([*CALM, 9.0, 9.0], []),
        ([3.0**t for t in range(9)], [7, 8, 9]),  # the median is that of three rounds before
        ([10 * (1 - 0.9**t) for t in range(1, 20)], []),  # a momentum that fills up
        ([1.0, *[1e-9] * 9, 1e-3, 1e-3, 1e-3], []),  # near convergence, far below the first step
        ([1.0, *[1e-9] * 9, 2.0, 2.0, 2.0], [11, 12, 13]),
        ([1.0, 999.0], []),
        ([1.0, 1001.0], [2]),  # at once
        ([0.0] * 9 + [1.0, 1.0, 1.0], []),  # no five steps yet
        ([*CALM, 0.0, 11.0, 0.0, 11.0], [9])
    ]
)  # fmt: skip
def test_long_steps(steps: list[float], found: list[int]) -> None:
    assert rounds_with_a_sign(steps) == found
    assert rounds_with_a_sign([1e-6 * s for s in steps]) == found  # in any unit


def test_a_step_that_is_long_because_the_learning_rate_is_long_is_no_sign() -> None:
    """``restart_lr``, or a schedule in cycles."""
    lr = [1.0, *[0.01] * 6, 1.0, 1.0]
    assert rounds_with_a_sign([1.5 * x for x in lr], lr=lr) == []
    assert rounds_with_a_sign([1.0, *[0.01] * 6, 1.5, 1.5], lr=[1.0] * 9) == [9]
    assert left_out([1e-6], [1e-6], [1.0], lr=[1e-6, 1e-6, 1.0]) == [[], [], []]  # nor an update
    # nor one that stays as long while the rate falls: an adaptive server's
    assert rounds_with_a_sign([1.0] * 9, lr=[1.0] * 6 + [0.01] * 3) == []


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([1.0, 2.9, 3.1, 0.5, 4.0], [3, 5]),
        ([None, 1.0, 3.1], [3]),
        ([-1.0, 0.0, 2.0, 5.0, 7.0], [5]),  # a loss that is not positive says nothing
        ([1.0, float("nan"), float("inf")], [3]),
        ([float("inf"), 1.0, 2.0], []),
    ],
)
def test_the_loss(losses: list[Any], found: list[int]) -> None:
    assert rounds_with_a_sign([1.0] * len(losses), losses) == found


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (fr.EFL(5, 0.1, 0.1, fisher_samples=9), ["elastic.lam (5)", "lr (0.1)"]),
        (fr.SCAFFOLD(option=2), ["lr (0.1)"]),  # a switch is no strength
        (fr.FedDyn(alpha=0.1), ["lr (0.1)"]),  # its server steps further if alpha is smaller
        (fr.FedAdam(server_lr=0.3), ["adaptive-server.lr (0.3)", "lr (0.1)"]),
        (fr.FedAvgM(), ["learning rate of the 'server-optimizer'", "lr (0.1)"]),
        (fr.RegStrategy([fr.Proximal(2.0), fr.LocalBatchNorm(), fr.SlowMomentum(0.5)]), [
            "proximal.mu (2)", "slowmo.beta (0.5)", "lr (0.1)"])
    ],
    ids=lambda v: "" if isinstance(v, list) else v.method_name
)  # fmt: skip
def test_the_likely_parameters_are_the_strengths_and_the_learning_rates(
    strategy: Any, names: list[str]
) -> None:
    assert suspects(strategy.term, {}, 0.1) == names
    assert suspects(strategy.term, {"momentum": 0.9}, 0.1) == [*names, "momentum (0.9)"]


def left_out(
    *rounds: list[float], steps: Any = None, name: str = "w", w: float = 0.0, lr: Any = (1.0,) * 3
) -> Any:
    """The clients that each round leaves out, whose changes of an array are so long; beside a mean, 1."""
    guard, out = DivergenceGuard(Options.of(chain([])), "FedAvg"), []
    base, fixed = {name: np.array([w]), "v": np.zeros(1)}, {name} - {"w"}
    for number, lengths in enumerate(rounds, start=1):
        this_round, wrong = Round(number, lr=lr[number - 1]), dict[int, str]()
        steps_of = dict(enumerate(steps or [9] * len(lengths)))

        def updates(pids: Any, lengths: Any = lengths, steps_of: Any = steps_of) -> Updates:
            most = max(steps_of.values())
            moves = {
                k: {name: np.array([lengths[k]]), "v": np.array([float(name == "mean")])}
                for k in pids
            }
            replies = {k: Reply({}, {}, {}, 1.0, moves[k], (steps_of[k], most)) for k in pids}
            p = dict.fromkeys(replies, 1 / len(replies))
            return Updates(base, replies, p, p, fixed)

        def again(pids: Any, this_round: Round = this_round, updates: Any = updates) -> None:
            guard.mean(this_round, updates(pids), compares=False)

        while len(wrong) < len(lengths):
            came = updates([k for k in range(len(lengths)) if k not in wrong])
            this_round.used = dict(came.replies)
            try:
                guard.mean(this_round, came)
                break
            except UnusableReplies as error:
                wrong |= error.why
            except Diverges as error:
                wrong |= guard.behind(this_round, str(error), again)
        guard.watch(this_round, 1.0)
        out.append(sorted(wrong))
    return out


def test_an_array_that_is_rounding_alone_leaves_out_nobody() -> None:
    guard = DivergenceGuard(Options.of(chain([])), "FedAvg")
    uploads = {k: {"t": {"v": np.ones(1), "bias": np.array([1e-17])}} for k in range(4)}
    uploads[3]["t"]["bias"][0] = 1e-9
    guard.check_uploads(Round(1, lr=1.0), uploads)
    uploads[3]["t"]["bias"][0] = 1e-6
    with pytest.raises(UnusableReplies, match="'bias' of 't' is 1e-06 long"):
        guard.check_uploads(Round(1, lr=1.0), uploads)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize(
    ("rounds", "found"),
    [
        ([[1, 1, 1001]], [[2]]),
        ([[1, 1, 999]], [[]]),
        ([[1] * 5 + [1e7] * 5], [[5, 6, 7, 8, 9]]),  # of two medians the lower one
        ([[0, 0, 1, 5000]], [[]]),  # zeros say nothing
        ([[1, 1001]], [[1]]),  # two, and nothing is known
        ([[1, 1], [1, 1001]], [[], [1]]),
        ([[1, 1], [1e-9, 1]], [[], []]),  # now the other is not taken for long
        ([[1], [1001]], [[], [0]]),
        ([[1] * 9, [1] * 4 + [2e6] * 5], [[], [4, 5, 6, 7, 8]]),  # most of them, but not always
        ([[1] * 9, [1] * 4 + [1e-9] * 5], [[], []]),
        ([[1] * 9, [1e-6] * 8 + [9]], [[], []]),  # a client with new data, once the others have converged
        ([[1] * 9, [1e-6] * 8 + [11]], [[], [8]]),
        ([[1, 1], [1e-6] * 2, [1e-6, 9]], [[], [], []]),
        ([[1e-6] * 9, [1] * 9, [1e-6] * 8 + [9]], [[], [], []]),  # a schedule that began low
    ]
)  # fmt: skip
def test_a_long_update_is_left_out(
    rounds: list[list[float]], found: Any, unit: float, sign: float
) -> None:
    assert left_out(*([sign * unit * x for x in each] for each in rounds)) == found


@pytest.mark.parametrize(
    ("steps", "length", "found"),
    [(9, 1001, [3]), (90, 9999, []), (90, 10_001, [3]), (10**9, 9999, []), (10**9, 10_001, [3])],
)
def test_a_client_that_takes_more_steps_may_go_as_much_further_up_to_max_scale(
    steps: int, length: float, found: list[int]
) -> None:
    """One with a thousand times the data, and momentum, goes over a thousand times as far."""
    taken = [9, 9, 9, steps]
    assert left_out([1, 1, 1, length], steps=taken) == [found]
    assert left_out([1, 1, 1, 0], [1, 1, 1, length], steps=taken) == [[], found]


def test_a_buffer_that_nobody_else_changes_is_compared_with_itself() -> None:
    assert left_out([0, 0, 0, 1e14], name="inv_freq", w=5.0) == [[3]]
    assert left_out([0, 0, 0, 4999], name="inv_freq", w=5.0) == [[]]
    assert left_out([0, 0, 0, 1e14], name="mean", w=0.0) == [[]]
    rounding = [1e-16, 2e-17, -1e-16]
    ends = [left_out([*rounding, last], name="mean") for last in (999, 1001)]
    assert ends == [[[]], [[3]]]
    assert left_out([*rounding, 1], name="mean", w=1e-4) == [[3]]


def test_a_counter_is_compared_too_and_may_count_more_steps() -> None:
    assert left_out([9, 9, 9, 1e14], name="count", w=5) == [[3]]
    assert left_out([9, 9, 9, 9001], name="count", w=0) == [[3]]
    assert left_out([9, 9, 9, 90_000], steps=[9, 9, 9, 90_000], name="count", w=0) == [[]]
    assert left_out([1, 1, 1, 9000], steps=[9, 9, 9, 90_000], name="mean") == [[3]]


def reporting(loss: Any) -> NumpyNetwork:
    """Quadratic clients that report ``loss(round, client)``."""
    plain = quadratic(CURVATURE, CENTRE)

    def client(k: int, request: Request, parcel: Parcel) -> Any:
        reply = plain(k, request, parcel)
        if request.kind == "train" and isinstance(reply, Parcel):
            number = parcel.config["server-round"]
            reply = replace(reply, metrics={**reply.metrics, "train-loss": loss(number, k)})
        return reply

    return NumpyNetwork(3, client)


def test_one_warning_in_the_log_and_in_the_history(log: Log) -> None:
    network = NumpyNetwork(3, quadratic(CURVATURE, CENTRE))
    one = training()
    for t in range(1, 16):
        run(one.round(t, UNSTABLE, network), network)
    (told,) = [e["round"] for e in one.history if "divergence" in e]
    text = one.history[told - 1]["divergence"]
    assert log(level=logging.WARNING) == [text]
    assert text.startswith(f"round {told} of FedAvg looks like divergence: for the second time")
    assert text.endswith("try a smaller lr (0.8)")


def test_stop_keeps_the_model_and_the_history_of_the_rounds_before() -> None:
    """As a model that is not finite does. A caller that goes on is stopped at every sign."""
    network = reporting(lambda t, k: 1.0 if t != 3 else 3.5)
    one = training(on_divergence="stop")
    for t in (1, 2):
        run(one.round(t, {"lr": 0.1, "local-steps": 3}, network), network)
    before = one.model.snapshot()
    for _ in range(2):
        with pytest.raises(RoundFailed, match=r"loss is over 3 times .*\(3.5 against 1\).*stop"):
            run(one.round(3, {"lr": 0.1, "local-steps": 3}, network), network)
    np.testing.assert_equal(one.model.snapshot(), before)
    assert "divergence" in one.history[2]
    run(one.round(4, {"lr": 0.1, "local-steps": 3}, network), network)
    assert "divergence" not in one.history[3]
    assert len(one.history[2]["attempts"]) == 1


def test_under_privacy_only_the_noised_step_is_judged() -> None:
    """Else the end of a training would tell of losses that get no noise."""
    network = reporting(lambda t, k: 10.0**t)
    private = training(on_divergence="stop", privacy=fr.CentralDP(1.0, 0.0), weighting="uniform")
    open_ = training(on_divergence="stop")
    run(open_.round(1, UNSTABLE, network), network)
    with pytest.raises(RoundFailed, match="training loss"):
        run(open_.round(2, UNSTABLE, network), network)
    for t in (1, 2, 3):
        run(private.round(t, UNSTABLE, network), network)


def test_a_loss_that_is_no_number_is_passed_over() -> None:
    """Most are such: nothing is known. One is: it does not hide what the others report."""
    for liars, stopped in (({0, 1}, False), ({1}, True)):
        network = reporting(lambda t, k, liars=liars: "high" if k in liars else 10.0**t)
        one = training(on_divergence="stop")
        run(one.round(1, {"lr": 0.1, "local-steps": 3}, network), network)
        with pytest.raises(RoundFailed, match="training loss") if stopped else nullcontext():
            run(one.round(2, {"lr": 0.1, "local-steps": 3}, network), network)


@dataclass(frozen=True)
class Stretched(Term):
    """A server's step that is long though the clients' mean is not: `stretch` of (round, mean) times it."""

    name: ClassVar[str] = "stretched"
    server_only: ClassVar[bool] = True
    stretch: Callable[[int, float], float] = field(repr=False)

    def init(self, params: Arrays) -> Slot:
        return {"rounds": np.zeros(())}

    def update(self, server: Slot, delta: Any, uploads: Any, ctx: Any) -> tuple[Slot, Any]:
        times = self.stretch(ctx.round, float(np.linalg.norm(delta["w"])))
        return {"rounds": server["rounds"] + 1}, {"w": times * delta["w"]}


LIE = 100.0
"""How many times too far the liar goes: no update is over 1,000 times the others'."""


def telling(moves: Callable[[int, int], float]) -> NumpyNetwork:
    """Five clients with equal weights, that move by ``moves(round, client)``."""
    plain = quadratic([1.0] * 5, [0.0] * 5)

    def client(k: int, request: Request, parcel: Parcel) -> Any:
        reply = plain(k, request, parcel)
        if request.kind != "train" or not isinstance(reply, Parcel):
            return reply
        w = np.asarray(parcel.records["arrays"]["w"]) + moves(parcel.config["server-round"], k)
        metrics = {**reply.metrics, "num-examples": 1}
        return replace(reply, records={"arrays": Record({"w": w})}, metrics=metrics)

    return NumpyNetwork(5, client)


def stretched(
    stretch: Callable[[int, float], float],
    moves: Callable[[int, int], float],
    rounds: int,
    lr: Callable[[int], float] = lambda t: 0.1,
    **settings: Any,
) -> Training:
    one, network = training([Stretched(stretch)], **settings), telling(moves)
    for t in range(1, rounds + 1):
        run(one.round(t, {"lr": lr(t), "local-steps": 1}, network), network)
    return one


def cubed(t: int, mean: float) -> float:
    return mean**2


@pytest.mark.parametrize("at", [2, 6, 20])
def test_a_long_step_is_made_again_without_the_client_behind_it(at: int) -> None:
    """Though its update is no longer than may be: the training is as if it had not replied.

    One that goes four times as far as the median stays.
    """
    at_once = (4.0, 1.0, -1.0, LIE, 0.0)
    lying = stretched(cubed, lambda t, k: at_once[k] if t == at else 1.0, 20)
    away = stretched(cubed, lambda t, k: 1.0, 20)
    np.testing.assert_allclose(lying.model.model["w"], away.model.model["w"], rtol=1e-12)
    np.testing.assert_equal(lying.model.server, away.model.server)
    entry = lying.history[at - 1]
    assert entry["replies"] == [0, 1, 2, 4]
    why = entry["failures"][3]
    assert re.search(r"with its reply, the global step is .* over 1000 times .* \(2\.83\)", why)
    assert [e["round"] for e in lying.history if "divergence" in e] == [at]
    assert entry["divergence"].startswith("client 3: with its reply, the global step is")


def test_of_liars_that_agree_each_is_found() -> None:
    lying = stretched(cubed, lambda t, k: LIE if t == 7 and k in (1, 3) else 1.0, 8)
    assert lying.history[6]["replies"] == [0, 2, 4]
    assert set(lying.history[6]["failures"]) == {1, 3}


def test_a_long_mean_of_half_the_clients_is_made_again_without_them() -> None:
    lying = stretched(lambda t, m: 1.0, lambda t, k: 1e5 if t == 7 and k > 1 else 1.0, 8)
    assert lying.history[6]["replies"] == [0, 1]
    assert "with its reply, the clients' mean is" in lying.history[6]["divergence"]


def test_a_step_that_is_long_whoever_is_left_out_fails_the_round() -> None:
    """And leaves all as it was; without five steps before, it is only warned of."""
    once = {4: 1e4, 8: 1e5}
    one, network = training([Stretched(lambda t, m: once.get(t, 1.0))]), telling(lambda t, k: 1.0)
    config = {"lr": 0.1, "local-steps": 1}
    for t in range(1, 8):
        run(one.round(t, config, network), network)
    text = one.history[3]["divergence"]
    assert text.startswith("round 4 of FedAvg: it diverges: the global step is")
    assert text.endswith("whoever is left out; try a smaller lr (0.1)")
    assert one.history[3]["replies"] == [0, 1, 2, 3, 4]
    before = one.snapshot()
    with pytest.raises(RoundFailed, match=r"round 8 .*diverges.*'warn' lets it in") as failed:
        run(one.round(8, config, network), network)
    assert not isinstance(failed.value, fr.TooFewReplies)  # another attempt would diverge too
    assert diverged(str(failed.value), one.history)  # so a table counts the seed
    np.testing.assert_equal(one.snapshot(), before)
    assert one.history[7]["divergence"] in one.history[7]["failed"]
    run(one.round(9, config, network), network)
    np.testing.assert_allclose(one.model.model["w"], 7 + 1e4)


@pytest.mark.parametrize("behind", [True, False], ids=["one client", "all"])
def test_a_long_step_under_the_other_two_settings(behind: bool) -> None:
    at = 7
    stretch = cubed if behind else lambda t, m: 1e5 if t == at else 1.0
    moves = lambda t, k: LIE if behind and (t, k) == (at, 3) else 1.0  # noqa: E731
    one = stretched(stretch, moves, 8, on_divergence="warn")
    (told,) = [e for e in one.history if "divergence" in e]
    assert told["round"] == at
    assert told["replies"] == [0, 1, 2, 3, 4]
    assert ("client 3: with its reply" if behind else "whoever is left out") in told["divergence"]
    assert one.model.model["w"][0] > 5e3
    with pytest.raises(RoundFailed, match=r"the global step .*on_divergence='stop'"):
        stretched(stretch, moves, 8, on_divergence="stop")


@pytest.mark.parametrize(
    ("stretch", "moves", "lr"),
    [
        (lambda t, m: 0.0 if t < 4 else 1.0, lambda t, k: 1.0, None),  # no steps at first
        (lambda t, m: 1.0 if t % 3 == 0 else 0.0, lambda t, k: 9.0**t, None),  # every third round
        (lambda t, m: 1.0, lambda t, k: 1e-6 if t == 1 else 1.0, None),  # a warm-up of a client's own
        (lambda t, m: 1.0, lambda t, k: 1e-5 ** (t % 2), lambda t: 0.1 * 1e-5 ** (t % 2)),  # a schedule
        (lambda t, m: 1.0, lambda t, k: 1e-3 ** (t - 1) if t < 9 else 5.0, None),  # new data
        (lambda t, m: 1.0, lambda t, k: 0.5**t if t < 9 or k else 1.0, None),  # of one client
        (lambda t, m: 1 / (1e-9 + m), lambda t, k: 1e-3 ** (t - 1), None),  # an adaptive server
    ]
)  # fmt: skip
def test_honest_clients_are_not_left_out(stretch: Any, moves: Any, lr: Any) -> None:
    one = stretched(stretch, moves, 14, *([lr] if lr else []))
    assert [e["failures"] for e in one.history] == [{}] * 14
