"""Attacks: who lies how, with which methods, and what must hold.

A row is a lie, the methods that it is told to, and the settings under which it costs the training next to
nothing. What no reader takes for a reply stands in tests/server/exchange. ``-m full`` plays every row with
every method that it concerns. Lies that nobody thought of stand in tests/server/exchange/test_fuzz.py.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord

import flwr_regs as fr
from flwr_regs.methods.registry import METHODS
from flwr_regs.wire import keys
from tests.attacks.harness import CLIENTS, HUGE, LIAR, Lie, Reply, honest, play

LEAST = 0.05
"""The accuracy that a lie may cost."""
TWO = ("FedAvg", "EFL")
EVERY = tuple(name for name in METHODS if name not in ("FedBN", "FedPer"))  # other models
UPLOADING = ("EFL", "FedCurv", "SCAFFOLD(option=1)", "MimeLite", "RFedAvg")
PROBING = ("Mime", "RFedAvgPlus")
MANY = 10**12


def values(change: Callable[[np.ndarray], Any], at: int = 0, record: str = "arrays") -> Lie:
    """A lie about the arrays of records whose name ends so, in one round, or in all."""

    def lie(reply: Reply) -> None:
        for name in list(reply.content.array_records) if at in (0, reply.number) else []:
            if name.endswith(record):
                reply.change(name, "", change)

    return lie


def longer(more: float, at: int = 0) -> Lie:
    return values(lambda a: a + more, at)


def uploads(value: float, at: int = 0) -> Lie:
    return values(lambda a: 0 * a + value, at, ".upload")


def buffer(name: str, value: float) -> Lie:
    return lambda reply: reply.change("arrays", name, lambda a: np.full_like(a, value))


def infinite(at: int = 0) -> Lie:
    return values(lambda a: a * np.inf, at)


def claims(**metrics: Any) -> Lie:
    return lambda reply: reply.say(**metrics)


def entry(key: str, value: Any) -> Lie:
    """A lie in the config of a reply."""

    def lie(reply: Reply) -> None:
        if "config" in reply.content:
            reply.content["config"] = ConfigRecord({**reply.content["config"], key: value})

    return lie


def beside(record: str) -> Lie:
    """One array more, four times as large each round."""

    def lie(reply: Reply) -> None:
        more = {"more": Array(np.ones(100 * 4**reply.number, np.float32))}
        reply.content[record] = ArrayRecord({**reply.content.get(record, {}), **more})

    return lie


def again(*kinds: str, renamed: bool = False) -> Lie:
    """The first reply to messages of these kinds, in each round; `renamed`, as a reply of that round."""
    first: dict[str, dict[str, Any]] = {}

    def lie(reply: Reply) -> None:
        if reply.number == 1:
            first[reply.kind] = {key: record.copy() for key, record in reply.content.items()}
        if reply.kind in kinds:
            config = reply.content["config"]
            for key, record in first[reply.kind].items():
                reply.content[key] = config if renamed and key == "config" else record.copy()

    return lie


def only(kind: str, lie: Lie) -> Lie:
    return lambda reply: lie(reply) if reply.kind == kind else None


def many_metrics(number: int, length: int) -> Lie:
    """Names that nobody else reports, other ones each round."""
    return lambda reply: reply.say(
        **{f"{reply.number}_{i}".ljust(length, "x"): float(i) for i in range(number)}
    )


def cancelling(reply: Reply) -> None:
    """Two long updates that are nothing together."""
    values(lambda a: a + (20.0 if reply.pid == LIAR else -20.0), 4)(reply)


@dataclass(frozen=True)
class Attack:
    """A row.

    Attributes
    ----------
    lie : callable
    methods : tuple of str
        The first is always played, the others with ``-m full``.
    named : int
        In how many rounds the liar has no usable reply; −1: it does not matter.
    cost : float
        The accuracy that it may cost.
    event : str
        What the history's ``"divergence"`` says of the liar.
    settings : dict
        Of the training.
    liars : tuple of int
        Who lies, by partition id.
    """

    lie: Lie
    methods: tuple[str, ...] = ("FedAvg",)
    named: int = -1
    cost: float = LEAST
    event: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    liars: tuple[int, ...] = (LIAR,)


FLIPPED = {"flipped": True}
BOUNDED = {**FLIPPED, "max_weight": 0.2}
SCALE = {"incomplete": "scale"}
BY_EPOCHS = {"length": {"lr": 0.3, "local-epochs": 2}, "weighting": "uniform"}
FAR = "over 1000 times its cohort's median"
PAST = "the median of the last 5 rounds"
NORM = {"batch_norm": True}
PAIR = {"clients": 2}
STACK = {"stacked": True}
PRIVATE = {"privacy": fr.CentralDP(1.0, 0.0), "weighting": "uniform"}
MINORITY = (1, 3, 4, 8)
HALVED = {"wire_dtype": "float16"}
CODED = "EFL(lam=0.01, density_up=0.3)"
ADC = ("FedAvg", "FedADC")
DRIFT = ("FedAvg", "SCAFFOLD")
FAIR = ("QFedAvg(q=0.5)", "QFedAvg(q=1.0)", "QFedAvg(q=2.0)")
OTHERS = ("FedAvg", "FedProx", "FedFOR", "FedSAM", "EFL", "RFedAvgPlus", "MOON", "Ditto")
HEAVY = claims(num_examples=10**15)

ATTACKS: dict[str, Attack] = {
    # what a client says of itself
    "many examples, bounded": Attack(HEAVY, OTHERS, 0, 0.1, settings=BOUNDED),
    "1 step of 9, bounded": Attack(claims(local_steps=1), TWO, 0, settings=BOUNDED | SCALE),
    "many steps of many": Attack(
        claims(local_steps=MANY, planned_steps=MANY, num_examples=MANY),
        ("FedNova()", "FedNova(momentum=0.5)", "SCAFFOLD"),
        0,
        settings=FLIPPED | BY_EPOCHS,
    ),
    "a loss of 1e15": Attack(uploads(1e15), FAIR, 6, event=FAR, settings=FLIPPED),
    "a huge training loss": Attack(claims(train_loss=1e15, examples_processed=10**15), TWO, 0, 0.0),
    # what it sends
    "one huge update in round 1": Attack(longer(HUGE, 1), EVERY, 1, event=FAR),
    "one huge update in round 2": Attack(longer(HUGE, 2), ("SCAFFOLD", *EVERY), 1, event=FAR),
    "one huge update in the last round": Attack(longer(-HUGE, 6), ("FedDyn", *EVERY), 1, event=FAR),
    "huge updates": Attack(values(lambda a: -HUGE * a), ("FedAMP", *EVERY), 6, event=FAR),
    "a long update": Attack(longer(3000.0, 3), ("EFL", *EVERY), 1, event=FAR),
    "a huge update in half precision": Attack(
        values(lambda a: a + 2e4 if a.dtype == np.float16 else a, 2), ADC, 1, LEAST, FAR, HALVED
    ),
    "a huge upload": Attack(uploads(HUGE, 2), UPLOADING, 1, event="upload"),
    "Fisher information of an unstable pull": Attack(
        values(lambda a: 9e5 * a, 1, ".upload"), ("EFL", "FedCurv", CODED), 1, event="over 10 times"
    ),
    "a huge upload in round 1": Attack(uploads(HUGE, 1), UPLOADING[1:], 1, event="upload"),
    "a huge probe": Attack(uploads(HUGE, 2), PROBING, 1, event="first exchange"),
    "a negative huge probe in round 1": Attack(
        uploads(-HUGE, 1), PROBING[::-1], 1, event="first exchange"
    ),
    "a negative variance": Attack(buffer("running_var", -100.0), ADC, 6, LEAST, "negative", NORM),
    "a huge mean in BatchNorm": Attack(buffer("running_mean", -HUGE), DRIFT, 6, LEAST, FAR, NORM),
    "a huge variance": Attack(buffer("running_var", HUGE), TWO, 6, event=FAR, settings=NORM),
    "a huge update in a cohort of two": Attack(
        longer(HUGE, 2), ("FedAvg", "EFL", "SCAFFOLD", "FedAdam"), 1, event=PAST, settings=PAIR
    ),
    "a huge update in round 1 of a cohort of two": Attack(
        longer(HUGE, 1), (*TWO, "SCAFFOLD"), 1, 0.1, FAR, PAIR
    ),
    "a huge upload in a cohort of two": Attack(uploads(HUGE, 3), UPLOADING[2:], 1, 0.1, PAST, PAIR),
    "a huge probe in a cohort of two": Attack(uploads(HUGE, 3), PROBING[:1], 1, 0.1, PAST, PAIR),
    "a huge mean in BatchNorm in a cohort of two": Attack(
        buffer("running_mean", HUGE), DRIFT, 6, 0.1, "change", NORM | PAIR
    ),
    # what it says about its arrays
    "other buffers than the others'": Attack(entry(keys.NOT_TRAINED_KEY, ["0.bias"]), TWO, 6),
    "the model of round 1 again, as a new one": Attack(again("train", renamed=True), DRIFT, 0),
    # how much of it
    "an upload that nobody asked for": Attack(beside("elastic.upload"), DRIFT, 6),
    "metrics of other names each round": Attack(many_metrics(900, 500), cost=0.0, named=0),
    "a code of nothing": Attack(entry(keys.STEPS_KEY, [b""]), (CODED,), 6),
    "it has lost its model, again and again": Attack(
        entry(keys.MEMORY_KEY, [keys.LOST_MODEL]), ("FedAvg", "FedADC(downlink='delta')"), 6
    ),
    "it has lost its state each round": Attack(
        entry(keys.MEMORY_KEY, [keys.LOST_STATE]), ("SCAFFOLD", "FedDyn"), 0
    ),
    # nothing but numbers about itself
    "lists for numbers": Attack(claims(train_loss=[0.1] * 2000), ("FedAvg", "Mime"), 0, 0.0),
    "fewer steps than it took": Attack(claims(local_steps=1), ("FedAvg", "FedProx"), 0, 0.0),
    "no work": Attack(values(lambda a: 0 * a, record=".upload"), ("SCAFFOLD(option=1)", "EFL"), 0),
    # in the first exchange
    "a probe of many examples, bounded": Attack(
        only(keys.PROBE, HEAVY), PROBING, 0, 0.1, settings=BOUNDED
    ),
    "an honest probe, and a huge update": Attack(
        only("train", longer(HUGE, 3)), PROBING, 1, event=FAR
    ),
    # several that agree
    "1 step of 9 by a minority, bounded": Attack(
        claims(local_steps=1), TWO, 0, settings=SCALE | {"max_weight": 0.1}, liars=MINORITY
    ),
    "two with many examples, bounded": Attack(
        HEAVY, ("FedAvg", "FedProx"), 0, 0.15, "", FLIPPED | {"max_weight": 0.1}, (3, 7)
    ),
    "two that cancel each other": Attack(
        cancelling, ("FedExP",), 1, event="the global step is", liars=(3, 7)
    ),
    # where updates are clipped
    "a huge update where it is clipped": Attack(longer(HUGE), ADC, 0, 0.1, settings=PRIVATE),
    "many examples where all weigh alike": Attack(HEAVY, ADC, 0, 0.1, settings=PRIVATE | FLIPPED),
    "an infinite update where it is clipped": Attack(infinite(2), named=1, settings=PRIVATE),
    # in a stack, without messages
    "infinite updates in a stack": Attack(infinite(), ("FedAvg", "FedDyn"), 6, settings=STACK),
    "the reply of round 1 again, in a stack": Attack(again("train"), TWO, 5, settings=STACK),
}
RETOLD = ("one huge update in round 2", "a huge upload", "a huge probe", "a negative variance")
TOLD_ELSEWHERE = [
    ("a negative variance", "under a robust aggregator", {"aggregator": fr.NormBound()}),
    *((name, "in a stack", STACK) for name in (*RETOLD, "1 step of 9, bounded")),
]
ATTACKS |= {
    f"{name} {where}": replace(ATTACKS[name], settings=ATTACKS[name].settings | more)
    for name, where, more in TOLD_ELSEWHERE
}
BY_A_MINORITY = (*RETOLD, "other buffers than the others'")
ATTACKS |= {f"{n} by a minority": replace(ATTACKS[n], liars=MINORITY) for n in BY_A_MINORITY}
VARIED = re.compile(r"(?<!update)(?<!in round 2) (in a stack|in a cohort of two|by a minority)")
"""Rows that are another row told elsewhere, or by several: one of each is always played."""
CELLS = [
    (name, m, i > 0 or VARIED.search(name) is not None)
    for name, a in ATTACKS.items()
    for i, m in enumerate(a.methods)
]


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(n, m, marks=[pytest.mark.full] * rest, id=f"{n}-{m}") for n, m, rest in CELLS],
)
def test_a_lie_costs_next_to_nothing(name: str, method: str) -> None:
    attack = ATTACKS[name]
    got = play(method, attack.lie, liars=attack.liars, **attack.settings)
    plain = {k: v for k, v in attack.settings.items() if k != "flipped"}
    liars = {k % plain.get("clients", CLIENTS) for k in attack.liars}
    assert got.accuracy >= honest(method, **plain) - attack.cost - 1e-9
    assert all(len(got.named(k)) == attack.named for k in liars if attack.named >= 0)
    for e in got.history:
        assert set(e["failures"]) <= liars
        assert all(map(math.isfinite, e["train_metrics"].values()))
        assert len(repr(e)) < 20_000  # whatever it sends
    if attack.named >= 0:
        told = got.events()
        assert all(f"client {k}: " in text for text in told.values() for k in liars)
        assert all(attack.event in text for text in told.values())
        assert len(told) == (attack.named if attack.event else 0)


def test_who_has_most_of_the_weight_is_named_once(tmp_path: Path) -> None:
    """Also by a resumed run."""
    play("FedAvg", HEAVY, rounds=1, checkpoint_dir=tmp_path)
    got = play("FedAvg", HEAVY, rounds=3, checkpoint_dir=tmp_path, resume=tmp_path)
    assert got.events("heavy") == {1: {LIAR: pytest.approx(1.0)}}
    few = play("FedAvg", HEAVY, clients=4, rounds=1)
    bounded = play("FedAvg", HEAVY, rounds=1, max_weight=0.2)
    robust = play("FedAvg", HEAVY, rounds=1, aggregator=fr.CoordinateMedian())
    assert not any(run.events("heavy") for run in (few, bounded, robust))


def test_a_warning_lets_the_lie_in_and_stop_keeps_the_model_before_it() -> None:
    lie = ATTACKS["one huge update in round 2"].lie
    got = play("FedAvg", lie, rounds=2, on_divergence="warn")
    assert got.history[1]["replies"] == list(range(CLIENTS))
    assert f"client {LIAR}: its update is" in got.events()[2]
    assert max(abs(a.numpy()).max() for a in got.strategy.arrays.values()) > 1e12
    with pytest.raises(fr.RoundFailed, match=rf"client {LIAR}: its update.*on_divergence='stop'"):
        play("FedAvg", lie, rounds=2, on_divergence="stop")
    with pytest.raises(fr.RoundFailed, match="its reply in the first exchange"):
        play("Mime", ATTACKS["a huge probe"].lie, rounds=2, on_divergence="stop")
