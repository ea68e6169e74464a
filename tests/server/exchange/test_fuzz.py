"""Whatever one client sends, the run goes on, the client is named, and the others make the model.

Real replies are damaged at random (damage.py). ``FUZZ`` multiplies the examples.
"""

import json
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_regs.wire import keys
from tests.server.exchange import damage as wrong
from tests.server.exchange.damage import ANSI, BAD, CASES, LONG, Playback, Recording

FUZZ = int(os.environ.get("FUZZ", "1"))
EXAMPLES = 25
"""Damaged runs of each method; each has two rounds, two evaluations and an identity."""
NAMES = ["arrays", "config", "metrics", "rfedavg.upload", ".upload", "x.upload", ANSI]
KEYS = [
    *(value for name, value in vars(keys).items() if name.endswith("_KEY")),
    *("partition-id", "num-partitions", "num-examples", "train-loss", "loss", "local-steps"),
    *("planned-steps", "examples-processed", "accuracy", "", ANSI, LONG[:100_000]),
]


@cache
def recorded(name: str) -> tuple[Any, Any, Any]:
    """Return (the replies of a method's clients, the model and history of the run without the bad one)."""
    case = CASES[name]
    grid = Recording(case.app(), 4)
    strategy = case.start(grid)
    return grid.kept, strategy.arrays, strategy.history


class Damage:
    """A few changes to a reply's content, drawn one by one."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._seeds = [draw(st.integers(0, 2**31)) for _ in range(draw(st.integers(1, 3)))]

    def __repr__(self) -> str:
        return f"Damage({self._seeds})"

    def __call__(self, content: RecordDict) -> RecordDict:
        for seed in self._seeds:
            change(content, np.random.default_rng(seed))
        return content


def pick(rng: np.random.Generator, options: Any) -> Any:
    return list(options)[int(rng.integers(len(options)))]


def change(content: RecordDict, rng: np.random.Generator) -> None:
    """Drop, rename or exchange a record, or an entry of one."""
    place: Any = content
    names, others = NAMES, [ArrayRecord({"a": Array(np.ones(2))}), ConfigRecord({"a": LONG})]
    if content and rng.random() < 0.8:
        place = content[pick(rng, content)]
        names = KEYS
    name = pick(rng, [*place, *place, *names])
    what = pick(rng, ["drop", "rename", "exchange", "exchange", "exchange"])
    old = place.get(name)
    if what == "exchange":
        place[name] = pick(rng, others) if place is content else exchanged(place, old, rng)
    elif old is not None:
        del place[name]
        if what == "rename":
            place[pick(rng, [*names, f"_orig_mod.{name}"])] = old


def exchanged(record: Any, old: Any, rng: np.random.Generator) -> Any:
    """Return another value for an entry of a record."""
    if isinstance(record, MetricRecord):
        return pick(rng, [*wrong.BEYOND, [], [1, 2], [float("nan")] * 5000])
    if isinstance(record, ConfigRecord):
        return pick(rng, [*wrong.VALUES, *(spoilt(old, rng) if isinstance(old, bytes) else [])])
    old = old or Array(np.ones(2))
    others = [*wrong.NOT_ARRAYS.values(), *spoilt(old.data, rng)]
    made = [Array(old.dtype, old.shape, old.stype, data) for data in others]
    labels = [("", ()), ("float16", (2**62,) * 3), ("object", ()), (LONG, ())]
    made += [Array(dtype, shape, old.stype, old.data) for dtype, shape in labels]
    made += [Array(old.dtype, old.shape, "pickle", old.data)]
    return pick(rng, [*made, *2 * wrong.arrays_like(readable(old))])


def spoilt(data: bytes, rng: np.random.Generator) -> list[bytes]:
    """Return bytes of which some are changed, or cut off, or more came."""
    flipped = bytearray(data or b"\0")
    for at in rng.integers(len(flipped), size=3):
        flipped[at] ^= 1 << int(rng.integers(8))
    return [bytes(flipped), bytes(flipped), data[: len(data) // 2], data + b"\0"]


def readable(value: Array) -> Any:
    """Return an array's content; two numbers for one that an earlier change has made unreadable."""
    try:
        array = value.numpy()
    except Exception:
        array = None
    usual = isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
    return array if usual else np.ones(2)


MESSAGES = [
    *("train", "train", "train", "evaluate", "query.flwr_regs", "query.flwr_regs_probe"),
    "query.flwr_regs_labels",
]


@st.composite
def damages(draw: st.DrawFn) -> Any:
    """A way to damage the replies to some kinds of message, in one round or in all."""
    kinds = {draw(st.sampled_from(MESSAGES))} | ({"train"} if draw(st.booleans()) else set())
    number = draw(st.sampled_from([0, 1, 2]))
    special = draw(st.sampled_from(["", "", "", "", "", "", "error", "silence"]))
    text = draw(st.sampled_from([ANSI, LONG, "", wrong.DEEP])) if special == "error" else ""
    return kinds, number, special, text, Damage(draw)


def check(name: str, damage: Any) -> None:
    """The one property."""
    kinds, number, special, text, change = damage
    kept, model, history = recorded(name)

    def how(kind: str, at: int, content: RecordDict) -> Any:
        if kind not in kinds or number not in (0, at):
            return content
        return {"error": text, "silence": None}.get(special, "") if special else change(content)

    strategy = CASES[name].start(Playback(kept, how))
    assert len(strategy.history) == 2
    others = [p for p in range(4) if p != BAD]
    used = False
    for entry in strategy.history:
        assert [p for p in entry["replies"] if p in others] == others, entry["failures"]
        assert all(p not in entry["failures"] for p in others), entry["failures"]
        evaluation = entry["evaluate"]
        assert all(p in evaluation["clients"] for p in others), evaluation["failures"]
        replied = BAD in entry["replies"]
        used |= bool(set(entry["replies"]) - set(others))
        if not replied and BAD in entry["cohort"]:
            assert BAD in entry["failures"] or BAD in entry["inactive"] + entry["incomplete"]
        if BAD not in entry["cohort"]:
            other = set(entry["cohort"]) - set(others)  # it says that it serves another partition
            assert other or "missing" in entry or 1000 + BAD in entry.get("refused", {})
    written = json.dumps(strategy.history)
    assert len(written) < 60_000
    for entry in strategy.history:
        for why in [*entry["failures"].values(), *entry.get("refused", {}).values()]:
            assert len(why) <= 700
            assert why.isprintable()
    got = {n: a.numpy() for n, a in strategy.arrays.items()}
    norms = [np.linalg.norm(a) for a in got.values()]
    assert max(norms) < 1e6  # no step is beyond 1,000 times an honest one
    if not used and name != "private":  # its noise differs from run to run
        want = {n: a.numpy() for n, a in model.items()}
        assert all(np.array_equal(got[n], want[n]) for n in want)
        for entry, expected in zip(strategy.history, history, strict=True):
            assert entry["train_metrics"] == expected["train_metrics"]


FULL = ("FedDyn", "FedNova", "Mime", "QFedAvg")
"""Cases of full runs, with other damage each time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in CASES]
)
def test_a_damaged_reply_costs_its_client_alone(name: str) -> None:
    @settings(
        max_examples=EXAMPLES * FUZZ,
        deadline=None,
        derandomize=name not in FULL,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(damages())
    def run(damage: Any) -> None:
        check(name, damage)

    run()
