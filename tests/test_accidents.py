"""Accidents that a client can cause: the run goes on, the client is named, the others make the model.

Messages are real; client 3's replies are exchanged for what the accident makes of them (tests/damage.py).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import flwr_regs as fr
from flwr_regs import InProcessGrid
from tests.damage import ANSI, BAD, CASES, DEEP, NOT_ARRAYS, Playback
from tests.test_fuzz import recorded

Change = Callable[[RecordDict], RecordDict | str | None]
OTHERS = [0, 1, 2]
MEGABYTES = "A" * 20_000_000


def played(
    change: Change,
    method: str = "FedFOR",
    kinds: Iterable[str] = ("train",),
    evaluate: bool = True,
) -> Any:
    """Return a strategy after two rounds in which `change` made client 3's replies."""

    def how(kind: str, number: int, content: RecordDict) -> RecordDict | str | None:
        return change(content) if kind in kinds else content

    return CASES[method].start(Playback(recorded(method)[0], how), evaluate=evaluate)


def costs_only_its_client(
    change: Change, reason: str, method: str = "FedFOR", kinds: Iterable[str] = ("train",)
) -> None:
    """Assert the one property: named with `reason` in both rounds, and not in the model."""
    strategy = played(change, method, kinds)
    _, want, history = recorded(method)
    assert [e["replies"] for e in strategy.history] == [OTHERS, OTHERS]
    for entry in strategy.history:
        assert list(entry["failures"]) == [BAD]
        why = entry["failures"][BAD]
        assert reason in why, why
        assert len(why) <= 600
        assert why.isprintable()
    for name, array in strategy.arrays.items():
        np.testing.assert_array_equal(array.numpy(), want[name].numpy())
    assert strategy.history[1]["train_metrics"] == history[1]["train_metrics"]


def with_arrays(make: Callable[[np.ndarray], Any], key: str = "0.weight") -> Change:
    """Return a change of one array: to another array, or to bytes under the right labels."""

    def change(content: RecordDict) -> RecordDict:
        record = content.array_records["arrays"]
        old = record[key]
        new = make(old.numpy())
        if isinstance(new, bytes):
            record[key] = Array(old.dtype, old.shape, old.stype, new)
        else:
            record[key] = Array(np.asarray(new))
        return content

    return change


def with_metric(name: str, value: Any) -> Change:
    """Return a change of one metric; None removes it."""

    def change(content: RecordDict) -> RecordDict:
        record = content.metric_records["metrics"]
        del record[name]
        if value is not None:
            record[name] = value
        return content

    return change


def with_config(name: str, value: Any) -> Change:
    """Return a change of one config entry."""

    def change(content: RecordDict) -> RecordDict:
        content.config_records.get("config", ConfigRecord())
        if "config" not in content:
            content["config"] = ConfigRecord()
        content.config_records["config"][name] = value
        return content

    return change


def with_bytes(name: str) -> Change:
    """Return a change of one array to bytes that are no array."""
    return with_arrays(lambda _: NOT_ARRAYS[name])


def without(record: str, key: str = "") -> Change:
    """Return a change that takes a record, or one entry of it, away."""

    def change(content: RecordDict) -> RecordDict:
        if key:
            del content[record][key]  # type: ignore[attr-defined]
        else:
            del content[record]
        return content

    return change


def renamed(content: RecordDict) -> RecordDict:
    record = content.array_records["arrays"]
    record["other\x1b"] = record["0.weight"]
    del record["0.weight"]
    return content


def mislabelled(content: RecordDict) -> RecordDict:
    record = content.array_records["arrays"]
    old = record["0.weight"]
    record["0.weight"] = Array("float64", (2**40, 2**40), old.stype, old.data)
    return content


NOT_NPY = "it is not numpy's .npy format"
REPLIES: dict[str, tuple[Change, str]] = {
    "raises": (lambda _: "ValueError: disk on fire", "disk on fire"),
    "never answers": (lambda _: None, "no reply"),
    "nan": (with_arrays(lambda a: a * np.nan), "'0.weight' holds NaN or infinity"),
    "infinity": (with_arrays(lambda a: a + np.inf), "'0.weight' holds NaN or infinity"),
    "weights of 3e38": (
        with_arrays(lambda a: np.full_like(a, 3e38)),
        "'0.weight' holds values beyond ±1e+15",
    ),
    "wrong names": (renamed, r"missing ['0.weight'], unexpected ['other\\x1b']"),
    "wrong shapes": (with_arrays(lambda a: a[:1]), "has shape (1, 4), expected (6, 4)"),
    "wrong dtypes": (
        with_arrays(lambda a: a.astype(np.float32)),
        "has dtype float32, expected float64",
    ),
    "wrong labels": (mislabelled, "has shape (6, 4), but is labelled [1099511627776,"),
    "too few arrays": (without("arrays", "2.bias"), "missing ['2.bias'], unexpected []"),
    "no arrays": (without("arrays"), "must hold an ArrayRecord 'arrays'"),
    "no metrics": (
        without("metrics"),
        "must hold a MetricRecord 'metrics', but holds ['arrays', 'config']",
    ),
    "zip": (with_bytes("zip"), NOT_NPY),
    "pickle": (with_bytes("pickle"), NOT_NPY),
    "terabyte header": (with_bytes("terabyte"), "needs 1099511627776 bytes, but 0 came"),
    "empty array": (with_arrays(lambda _: np.zeros(0)), "has shape (0,), expected (6, 4)"),
    "no bytes": (with_bytes("nothing"), NOT_NPY),
    "deep JSON": (with_config("regs.tied", DEEP), "'regs.tied' must map names"),
    "no mask": (with_config("regs.not-trainable", "text"), "expected a mask of 4 bits"),
    "a long mask": (with_config("regs.not-trainable", b"\0\0"), "expected a mask of 4 bits"),
    "a mask beyond": (with_config("regs.not-trainable", b"\x01"), "has more of them set"),
    "more steps": (with_metric("local-steps", 10**6), "1000000 local steps of"),
    "nan steps": (with_metric("planned-steps", float("nan")), "local steps of nan"),
    "another method": (with_config("regs.method", "FedAvg"), "does not come from a FedFOR client"),
    **{
        f"n = {n}": (
            with_metric("num-examples", n),
            "'num-examples' must be a number from 1e-15 to 1e+15",
        )
        for n in (0, float("nan"), 2e15, 5e-324, [1, 2], None)
    },
}


@pytest.mark.parametrize("what", REPLIES)
def test_accident_in_a_reply(what: str) -> None:
    costs_only_its_client(*REPLIES[what])


def test_accident_a_million_times_the_update() -> None:
    """It cannot be told from an honest reply alone: the mean takes it, and the run goes on."""
    strategy = played(with_arrays(lambda a: a * 1e6))
    assert [e["replies"] for e in strategy.history] == [[0, 1, 2, 3]] * 2
    largest = max(np.abs(a.numpy()).max() for a in strategy.arrays.values())
    assert 1e4 < largest < 1e15


def test_accident_array_of_objects(capsys: pytest.CaptureFixture[str]) -> None:
    costs_only_its_client(with_bytes("objects"), "its dtype is '|O0', expected")
    assert "unpickled" not in capsys.readouterr().out


def test_accident_20_megabytes_of_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        costs_only_its_client(lambda _: MEGABYTES, "AAAA … AAAA")
        costs_only_its_client(with_config("regs.method", MEGABYTES), "does not come from a FedFOR")
        costs_only_its_client(with_config("regs.not-trainable", MEGABYTES), "expected a mask of")
        strategy = played(with_config("regs.output-layer", MEGABYTES))
        assert len(json.dumps(strategy.history)) < 20_000
    assert max(len(record.getMessage()) for record in caplog.records) < 2000


def test_accident_ansi_codes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        costs_only_its_client(lambda _: ANSI, r"\x1b[31m\x1b[2J\x07 run failed\u202e\u200b\x00")
        costs_only_its_client(with_config("regs.method", ANSI), r"but from \x1b[31m")

        def change(content: RecordDict) -> RecordDict:
            content.metric_records["metrics"][ANSI] = 1.0
            return content

        strategy = played(change, kinds=["train", "evaluate"])
        left = strategy.history[0]["metrics_left_out"]
        assert list(left) == [BAD]
        assert left[BAD][0].startswith(r"\x1b[31m")
        assert left[BAD][0].isprintable()
    lines = "".join(r.getMessage() for r in caplog.records)
    assert re.sub(r"\n  |\t[>└├]", "", lines).isprintable()  # ours


@pytest.mark.parametrize("pid", ["x", -1, float("nan"), 2**40, True, 0])
def test_accident_partition_id(pid: Any) -> None:
    """Text, a list, negative, NaN, huge, of another kind, or another node's: the node is refused."""
    change = with_config("partition-id", pid)
    strategy = played(change, kinds=["query.flwr_regs"])
    _, want, _ = recorded("FedFOR")
    for entry in strategy.history:
        assert entry["cohort"] == OTHERS
        assert list(entry["refused"]) == [1000 + BAD]
        assert "partition-id" in entry["refused"][1000 + BAD]
    for name, array in strategy.arrays.items():
        np.testing.assert_array_equal(array.numpy(), want[name].numpy())


@pytest.mark.parametrize("total", [10**12, 1, "x"])
def test_accident_num_partitions(total: Any) -> None:
    """One node's word for their number does not count: nobody waits, N is what most nodes say."""
    strategy = played(with_config("num-partitions", total), kinds=["query.flwr_regs"])
    assert {e["population"] for e in strategy.history} <= {3, 4}
    assert strategy.training.population.size == 4


def test_accident_another_protocol() -> None:
    """The client sees the protocol that the server speaks, and refuses it."""
    case = CASES["FedFOR"]
    inner = InProcessGrid(case.app(), 4)

    class Older(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for m in messages:
                config = m.content.config_records.get("config", ConfigRecord())
                if m.metadata.dst_node_id == 1000 + BAD and "regs.protocol" in config:
                    content = RecordDict(dict(m.content))
                    content["config"] = ConfigRecord({**config, "regs.protocol": 1})
                    m.content = content
            return super().push_messages(messages)

    grid = Older(inner._app, 4)
    strategy = case.start(grid)
    assert [e["replies"] for e in strategy.history] == [OTHERS, OTHERS]
    assert "speaks protocol 3, but the strategy speaks 1" in strategy.history[0]["failures"][BAD]


def test_accident_comes_late() -> None:
    """A reply to an earlier round is not taken for one of this round."""

    class Late(Playback):
        held: tuple[str, Message] | None = None

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            late = [r for r in replies if r.metadata.src_node_id == 1000 + BAD]
            mine = [r for r in late if r.metadata.message_type == "train"]
            return [r for r in replies if r not in mine]  # it is there when nobody asks any more

    strategy = CASES["FedFOR"].start(Late(recorded("FedFOR")[0], lambda k, n, content: content))
    assert [e["replies"] for e in strategy.history] == [OTHERS, OTHERS]
    assert strategy.history[0]["failures"] == {BAD: "no reply in time"}


def test_accident_lost_its_state() -> None:
    """A compressing client that forgot its residual says so; it is named, and used."""
    case = CASES["EFL"]

    class Forgetful(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            self._contexts[1000 + BAD].state = RecordDict()
            return super().push_messages(messages)

    strategy = case.start(Forgetful(case.app(), 4), rounds=3)
    assert [e["replies"] for e in strategy.history] == [[0, 1, 2, 3]] * 3
    assert [e["lost_state"] for e in strategy.history] == [[], [BAD], [BAD]]


# The same through an evaluation, and through the first exchange of rFedAvg+

EVALUATIONS: dict[str, tuple[Change, str]] = {
    "raises": (lambda _: "ValueError: disk on fire", "disk on fire"),
    "n": (with_metric("num-examples", 0), "'num-examples' must be a number from"),
    "huge-n": (with_metric("num-examples", 10**18), "'num-examples' must be a number from"),
    "list": (with_metric("num-examples", [1, 2]), "'num-examples' must be a number from"),
    "nothing": (lambda _: RecordDict(), "must hold a MetricRecord"),
    "silent": (lambda _: None, "no reply"),
    "many": (
        lambda c: RecordDict(
            {
                "metrics": MetricRecord(
                    {**c.metric_records["metrics"], **{f"{i}": i for i in range(2000)}}
                )
            }
        ),
        "expected at most 1000",
    ),
}


@pytest.mark.parametrize("what", EVALUATIONS)
def test_accident_in_an_evaluation(what: str) -> None:
    change, reason = EVALUATIONS[what]
    strategy = played(change, kinds=["evaluate"])
    for entry in strategy.history:
        assert reason in entry["evaluate"]["failures"][BAD]
        assert sorted(entry["evaluate"]["clients"]) == OTHERS


@pytest.mark.parametrize("loss", [[1.0, 2.0], None, float("nan"), 1e300], ids=str)
def test_accident_an_evaluation_without_a_usable_loss(loss: Any) -> None:
    """Others' metrics stay; the mean is theirs; what was left out is named."""
    means: list[Any] = []

    def keep(records: list[RecordDict], by: str) -> MetricRecord:
        means.append([r.metric_records["metrics"]["loss"] for r in records])
        return MetricRecord({"loss": 1.0})

    def how(kind: str, number: int, content: RecordDict) -> RecordDict | str | None:
        change = with_metric("loss", loss)
        if kind == "evaluate":
            content.metric_records["metrics"]["odd"] = 1.0
            return change(content)
        return content

    case = CASES["FedFOR"]
    grid = Playback(recorded("FedFOR")[0], how)
    strategy = fr.FedFOR(alpha=0.5, seed=3, evaluate_metrics_aggr_fn=keep, wait_timeout=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(case.model().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 2}),
    )
    assert [len(m) for m in means] == [3]
    assert strategy.history[0]["evaluate"]["metrics_left_out"] == {BAD: ["loss", "odd"]}


PROBES: dict[str, tuple[Change, str]] = {
    "raises": (lambda _: "ValueError: disk on fire", "disk on fire"),
    "short": (lambda c: with_delta(c, np.ones(1)), "'delta' has 1 entries"),
    "long": (lambda c: with_delta(c, np.ones(7)), "'delta' has 7 entries"),
    "matrix": (lambda c: with_delta(c, np.ones((6, 1))), "expected one vector of floats"),
    "integers": (lambda c: with_delta(c, np.ones(6, int)), "expected one vector of floats"),
    "empty": (lambda c: with_delta(c, np.ones(0)), "expected one vector of floats"),
    "nan": (lambda c: with_delta(c, np.full(6, np.nan)), "holds NaN or infinity"),
    "huge": (lambda c: with_delta(c, np.full(6, 1e16)), "holds values beyond ±1e+15"),
    "zip": (lambda c: with_delta(c, NOT_ARRAYS["zip"]), "it is not numpy's .npy format"),
    "none": (lambda _: RecordDict(), "arrays [], expected one vector 'delta'"),
    "silent": (lambda _: None, "no reply"),
}


def with_delta(content: RecordDict, delta: Any) -> RecordDict:
    """Exchange the δ of a reply."""
    name = next(n for n in content.array_records if n.endswith(".upload"))
    labels = ("float64", (6,), "numpy.ndarray")
    array = Array(*labels, delta) if isinstance(delta, bytes) else Array(delta)
    content[name] = ArrayRecord({"delta": array})
    return content


@pytest.mark.parametrize("what", PROBES)
def test_accident_in_a_first_exchange(what: str) -> None:
    change, reason = PROBES[what]
    costs_only_its_client(change, reason, "RFedAvgPlus", ["query.flwr_regs_probe"])


def test_accident_a_message_that_flower_cannot_read() -> None:
    """Flower's grid raises for all replies that it pulls, if one has bytes that are no message."""

    class Unreadable(Playback):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = list(message_ids)
            if any(i.startswith(f"{1000 + BAD}.train") for i in ids):
                raise ValueError("no such object")
            return super().pull_messages(ids)

    class Last(Unreadable):
        """It comes when all others have come."""

        replies_at_once = False

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids = list(message_ids)
            others = [i for i in ids if not i.startswith(f"{1000 + BAD}.train")]
            return super().pull_messages(others or ids)

    def played(kind: type[Playback]) -> fr.RegStrategy:
        return CASES["FedFOR"].start(kind(recorded("FedFOR")[0], lambda k, n, c: c))

    strategy = played(Unreadable)
    for run in (strategy, played(Last)):
        assert [e["replies"] for e in run.history] == [OTHERS, OTHERS]
    assert (
        "its reply cannot be read: ValueError: no such object"
        in (strategy.history[0]["failures"][BAD])
    )
