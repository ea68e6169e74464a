"""Accidents that a client can cause: the run goes on, the client is named, the others make the model.

Messages are real; client 3's replies are exchanged for what the accident makes of them (damage.py).
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import flwr_regs as fr
from tests.conftest import Log, make_model
from tests.flower.clients.test_plain_clients import plain_app
from tests.server.exchange.damage import ANSI, BAD, CASES, DEEP, NOT_ARRAYS, Playback, npy
from tests.server.exchange.test_fuzz import recorded

Change = Callable[[RecordDict], RecordDict | str | None]
OTHERS = [0, 1, 2]
MEGABYTES = "A" * 20_000_000


def played(change: Change, method: str = "FedFOR", kinds: Iterable[str] = ("train",)) -> Any:
    """Return a strategy after two rounds in which `change` made client 3's replies."""

    def how(kind: str, number: int, content: RecordDict) -> RecordDict | str | None:
        return change(content) if kind in kinds else content

    return CASES[method].start(Playback(recorded(method)[0], how))


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


def with_entry(record: str, name: str, value: Any = None) -> Change:
    """Return a change of one entry of a record; None removes it."""

    def change(content: RecordDict) -> RecordDict:
        if record == "config":
            content[record] = content.config_records.get(record, ConfigRecord())
        entries: Any = content[record]
        entries.pop(name, None)
        if value is not None:
            entries[name] = value
        return content

    return change


with_metric, with_config = partial(with_entry, "metrics"), partial(with_entry, "config")


def with_bytes(name: str) -> Change:
    """Return a change of one array to bytes that are no array."""
    return with_arrays(lambda _: NOT_ARRAYS[name])


def without(record: str) -> Change:
    """Return a change that takes a record away."""

    def change(content: RecordDict) -> RecordDict:
        del content[record]
        return content

    return change


def renamed(content: RecordDict) -> RecordDict:
    record = content.array_records["arrays"]
    record["other\x1b"] = record.pop("0.weight")
    return content


def twice(prefix: str) -> Change:
    """Return a change that sends an array under another name, too."""

    def change(content: RecordDict) -> RecordDict:
        record = content.array_records["arrays"]
        record[f"{prefix}0.weight"] = Array(100.0 * record["0.weight"].numpy())
        return content

    return change


LABELLED = Array("float64", (2**40, 2), "numpy.ndarray", npy(np.ones((6, 4))))
NOT_NPY = "it is not numpy's .npy format"
REPLIES: dict[str, tuple[Change, str]] = {
    "raises": (lambda _: "ValueError: disk on fire", "disk on fire"),
    "never answers": (lambda _: None, "no reply"),
    "nan": (with_arrays(lambda a: a * np.nan), "'0.weight' holds NaN or infinity"),
    "weights of 3e38": (with_arrays(lambda a: 0 * a + 3e38), "'0.weight' holds values beyond ±1e+"),
    "wrong names": (renamed, r"missing ['0.weight'], unexpected ['other\\x1b']"),
    "turned round": (with_arrays(lambda a: a.T), "has shape (4, 6), expected (6, 4)"),
    "integers": (with_arrays(lambda a: a.astype("i8")), "dtype int64, expected float64"),
    "wrong labels": (
        with_entry("arrays", "0.weight", LABELLED),
        "has shape (6, 4), but is labelled [1099511627776,",
    ),
    "too few arrays": (with_entry("arrays", "2.bias"), "missing ['2.bias'], unexpected []"),
    "no arrays": (without("arrays"), "holds no ArrayRecord 'arrays'"),
    "no metrics": (without("metrics"), "holds no MetricRecord 'metrics', only ['arrays', "),
    "pickle": (with_bytes("pickle"), NOT_NPY),
    "objects": (with_bytes("objects"), "its dtype is '|O', expected"),
    **{
        f"not trained: {value!r:.40}": (
            with_config("regs.not-trained", value),
            "'regs.not-trained' must list arrays of the model",
        )
        for value in (
            *(DEEP, b"\0", [1], ["other"], ["0.bias"] * 2, ["0.bias"] * 9),
            *(["0.bias=2.bias"], ["0.bias=other"], ["0.bias=0.bias"], ["0.bias=2.bias", "2.bias"]),
        )
    },
    "round -1": (with_config("server-round", -1), "belongs to round -1, not to "),
    "no round": (with_config("server-round"), "belongs to round None, not to "),
    "another training": (with_config("regs.start", "00ff"), "belongs to training '00ff', not to "),
    "a name twice": (twice("_orig_mod."), "'0.weight' cannot be read: it came twice"),
    "a name twice, of DDP": (twice("module."), "missing [], unexpected ['module.0.weight']"),
    "more steps": (with_metric("local-steps", 10**6), "1000000 local steps of"),
    "nan steps": (with_metric("planned-steps", float("nan")), "local steps of nan"),
    "another method": (with_config("regs.method", "FedAvg"), "from FedAvg; use flwr_regs.FedFOR"),
    "a code": (with_config("regs.steps", [b"STC"]), "the method has no code for updates"),
    **{
        f"n = {n}": (with_metric("num-examples", n), "'num-examples' must be a number from 1e-15")
        for n in (0, -0.0, -1.0, 5e-324, 2e15, float("nan"), float("inf"), [1, 2], None)
    },
}


@pytest.mark.parametrize("what", REPLIES)
def test_accident_in_a_reply(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs_only_its_client(*REPLIES[what])
    assert "unpickled" not in capsys.readouterr().out


def test_a_message_that_is_given_to_another_round_is_none_of_its_replies() -> None:
    """Also where the client names no round, as Flower's own do not."""
    grid, arrays = fr.InProcessGrid(plain_app(), 2), ArrayRecord(make_model().state_dict())
    strategy, config = fr.FedAvg(min_available_nodes=2, min_replies=1), ConfigRecord()
    strategy.prepare(2)
    first: list[Message] = []
    for number in (1, 2):
        sent = list(strategy.configure_train(number, arrays, config, grid))
        replies = list(grid.send_and_receive(sent))
        first = first or replies
        arrays = strategy.aggregate_train(number, [first[0], replies[1]])[0] or arrays
    assert [len(e["replies"]) for e in strategy.history] == [2, 1]
    (why,) = strategy.history[1]["failures"].values()
    assert why == "no reply (a reply to another message came)"


def test_accident_20_megabytes_of_text(log: Log) -> None:
    costs_only_its_client(lambda _: MEGABYTES, "AAAA … AAAA")
    costs_only_its_client(with_config("regs.method", MEGABYTES), "does not come from a FedFOR")
    costs_only_its_client(with_config("regs.not-trained", [MEGABYTES]), "must list arrays of")
    strategy = played(with_config("regs.output-layer", MEGABYTES))
    assert len(json.dumps(strategy.history)) < 20_000
    assert max(map(len, log())) < 2000


def test_a_list_of_an_evaluation_that_is_too_long_is_named() -> None:
    strategy = played(with_metric("long", [0.0] * 1001), kinds=["evaluate"])
    told = strategy.history[0]["evaluate"]
    assert told["metrics_left_out"] == {BAD: ["long"]}
    assert "long" not in told["clients"][BAD]


def test_accident_ansi_codes(log: Log) -> None:
    costs_only_its_client(lambda _: ANSI, r"\x1b[31m\x1b[2J\x07 run failed\u202e\u200b\x00")
    costs_only_its_client(with_config("regs.method", ANSI), r"but from \x1b[31m")
    strategy = played(with_metric(ANSI, 1.0), kinds=["train", "evaluate"])
    left = strategy.history[0]["metrics_left_out"]
    assert list(left) == [BAD]
    assert left[BAD][0].startswith(r"\x1b[31m")
    assert left[BAD][0].isprintable()
    assert re.sub(r"\n  |\t[>└├]", "", "".join(log())).isprintable()  # ours


@pytest.mark.parametrize(
    ("unreadable", "reason"),
    [
        (False, "no reply in time"),  # it is there when nobody asks any more
        (True, "its reply cannot be read: ValueError: no such object"),
    ],
)
def test_accident_in_the_grid(unreadable: bool, reason: str) -> None:
    """A late reply is not taken for one of this round; Flower raises for a pull if one is no message."""

    class Odd(Playback):
        replies_at_once = not unreadable

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            good = [i for i in message_ids if not i.startswith(f"{1000 + BAD}.train")]
            came = super().pull_messages(good)  # the SuperLink forgets what it hands out
            if unreadable and good != [*message_ids]:
                raise ValueError("no such object")
            return came

    strategy = CASES["FedFOR"].start(Odd(recorded("FedFOR")[0], lambda k, n, content: content))
    assert [e["replies"] for e in strategy.history] == [OTHERS, OTHERS]
    assert reason in strategy.history[0]["failures"][BAD]


# The same through an evaluation, and through the first exchange of rFedAvg+

MANY = {f"{i}": i for i in range(2000)}
EVALUATIONS: dict[str, tuple[Change, str]] = {
    "raises": (lambda _: "ValueError: disk on fire", "disk on fire"),
    "n": (with_metric("num-examples", 0), "'num-examples' must be a number from"),
    "nothing": (lambda _: RecordDict(), "holds no MetricRecord"),
    "silent": (lambda _: None, "no reply"),
    "many": (lambda _: RecordDict({"metrics": MetricRecord(MANY)}), "more than 1000"),
    "many entries": (lambda c: RecordDict({**c, "config": ConfigRecord(MANY)}), "more than 1000"),
    "another round": (with_config("server-round", 7), "evaluation of client 3 belongs to round 7"),
}


@pytest.mark.parametrize("what", EVALUATIONS)
def test_accident_in_an_evaluation(what: str) -> None:
    change, reason = EVALUATIONS[what]
    strategy = played(change, kinds=["evaluate"])
    for entry in strategy.history:
        assert reason in entry["evaluate"]["failures"][BAD]
        assert sorted(entry["evaluate"]["clients"]) == OTHERS


PROBES: dict[str, tuple[Change, str]] = {
    "another training": (with_config("regs.start", "00ff"), "belongs to training '00ff', not to "),
    "long": (lambda c: with_delta(c, np.ones(7)), "'delta' has 7 entries"),
    "short": (lambda c: with_delta(c, np.ones(1)), "'delta' has 1 entries, but"),  # not broadcast
    "matrix": (lambda c: with_delta(c, np.ones((6, 1))), "expected floats (6,)"),
    "nan": (lambda c: with_delta(c, np.full(6, np.nan)), "holds NaN or infinity"),
    "huge": (lambda c: with_delta(c, np.full(6, 1e16)), "holds values beyond ±1e+15"),
    "none": (lambda _: RecordDict(), "arrays [], expected ['delta']"),
}


def with_delta(content: RecordDict, delta: Any) -> RecordDict:
    """Exchange the δ of a reply."""
    name = next(n for n in content.array_records if n.endswith(".upload"))
    content[name] = ArrayRecord({"delta": Array(delta)})
    return content


@pytest.mark.parametrize("what", PROBES)
def test_accident_in_a_first_exchange(what: str) -> None:
    change, reason = PROBES[what]
    costs_only_its_client(change, reason, "RFedAvgPlus", ["query.flwr_regs_probe"])
