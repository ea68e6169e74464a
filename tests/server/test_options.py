"""A strategy's settings: each row of the two tables refuses what it says, with its own sentence."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Array, Message

import flwr_regs as fr
from flwr_regs.abilities import Weighs
from flwr_regs.server.refusals import RANGES, pairs
from tests.conftest import Tampered, claiming, start
from tests.flower.test_strategy import app_of


@pytest.mark.parametrize("name", sorted({name for name, _, _ in RANGES}))
def test_a_setting_of_a_wrong_type_is_refused_with_a_sentence(name: str) -> None:
    for wrong in ([1, 2], float("nan"), torch.ones(2), 10**400):
        with pytest.raises(ValueError, match=f"^{name} must "):
            fr.FedAvg(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "given"), [("stop_when", fr.Target), ("on_round", [fr.JsonLines])]
)
def test_a_class_in_place_of_a_function_is_refused(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a function of .*, not .*class"):
        fr.FedAvg(**{name: given})


def test_a_setting_that_is_assigned_later_is_checked_and_used() -> None:
    strategy = fr.FedFOR(0.5, seed=4)
    strategy.fraction_train = 0.5
    assert strategy.options.fraction_train == 0.5
    with pytest.raises(ValueError, match=r"overlap=True sends .* write downlink='delta' too"):
        strategy.overlap = True
    with pytest.raises(ValueError, match=r"restart_lr must be True or False, not 'no'"):
        strategy.restart_lr = "no"
    with pytest.raises(ValueError, match=r"fraction_train must lie in \[0, 1\], not 2"):
        strategy.fraction_train = 2
    assert strategy.fraction_train == 0.5


def test_a_setting_that_is_assigned_between_rounds_counts_from_the_next_on() -> None:
    def change(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if kind == "train" and pid == 2 and message.content["config"]["server-round"] > 1:
            for name, array in reply.content.array_records["arrays"].items():
                reply.content["arrays"][name] = Array(array.numpy() + 1e6)
        return claiming(1, local_steps=1)(kind, pid, message, reply)

    def assign(entry: Any) -> None:
        strategy.on_divergence, strategy.incomplete = "warn", "drop"

    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0, on_round=assign)
    start(strategy, Tampered(app_of(), 4, change), 2)
    assert [entry["replies"] for entry in strategy.history] == [[0, 1, 2, 3], [0, 2, 3]]
    assert not strategy.history[1]["failures"]


def test_what_a_whole_training_rests_on_cannot_be_assigned_between_rounds() -> None:
    others = {"wire_dtype": "bfloat16", "privacy": fr.CentralDP(1.0, 0.1), "seed": 2}
    for name, value in others.items():
        strategy = fr.FedAvg(seed=1, weighting="uniform")
        strategy.on_round = lambda _, of=(strategy, name, value): setattr(*of)
        with pytest.raises(ValueError, match=f"round 2 of FedAvg: {name} must stay "):
            start(strategy, fr.InProcessGrid(app_of(), 4), 2)
        assert len(strategy.history) == 1


class Even(fr.Term, Weighs):
    name: ClassVar[str] = "even"

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        return dict.fromkeys(weights, 1 / len(weights))


SUMS = partial(fr.RFedAvgPlus, 0.1, sum_only=True)
DP = {"privacy": fr.CentralDP(1.0, 1.0), "weighting": "uniform"}
TOGETHER: list[tuple[Any, dict[str, Any], str]] = [
    # in the order of `pairs`: a method, its settings, the sentence
    (fr.FedAvg, {"arrayrecord_key": "weights"}, "record keys are part of the protocol"),
    (fr.EFL, {"lam": 0.0, "density_up": 0.1, "wire_dtype": "float16"}, "not go with compression"),
    (fr.FedFOR, {"downlink": "delta", "wire_dtype": "float16"}, "needs downlink='model'"),
    (fr.FedFOR, {"overlap": True}, "with downlink='model' each round .* write downlink='delta'"),
    (fr.EFL, {"lam": 0.0, "density_down": 0.1, "overlap": True}, "sends whole models ahead"),
    (SUMS, {"aggregator": fr.CoordinateMedian()}, r"not reach .* RFedAvgPlus upload.*_only=False"),
    (partial(fr.RegStrategy, [Even()]), {"incomplete": "scale"}, "so does Even: leave one"),
    (fr.VRLSGD, {"incomplete": "scale"}, "anew, but VRLSGD counts on their mean; use inco"),
    (fr.EFL, {"lam": 0.1, **DP}, "CentralDP.* of EFL reads more of its clients than"),
    (fr.FedAvg, {"aggregator": fr.NormBound(), **DP}, "noise is for the mean, not for aggregator"),
    (fr.FedAvg, {"max_weight": 0.5, **DP}, "leave max_weight=0.5 out"),
    (fr.FedAvg, {"cohorts": "class-covering", **DP}, "label counts without noise"),
    (fr.FedAvg, {**DP, "weighting": "num-examples"}, "use weighting='uniform'"),
    (partial(fr.RegStrategy, [Even()]), DP, "Even weighs clients unequally; the noise"),
    (fr.FedAvg, {"incomplete": "scale", **DP}, "use incomplete='average' or 'drop'"),
    (fr.FedAvg, {"drop_inactive": 1.0, **DP}, "drop_inactive draws the cohorts"),
]


@pytest.mark.parametrize("row", range(len(pairs(fr.FedAvg().options))))
def test_settings_that_exclude_each_other_are_refused(row: int) -> None:
    method, settings, sentence = TOGETHER[row]
    with pytest.raises(ValueError, match=sentence) as refused:
        method(**settings)
    text = list(pairs(fr.FedAvg().options))[row]
    start = text[: text.index("{")] if "{" in text else text
    assert str(refused.value).startswith(start)  # by this very row
