"""What a client keeps to itself: entries that no server gets, and state on the client's own disk."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from torch import nn

import flwr_regs as fr
from flwr_regs.abilities import Withholds
from flwr_regs.flower.compat import recorddict_to_proto
from flwr_regs.flower.node import NodeState, check_incoming
from flwr_regs.term import Term
from flwr_regs.testing.problem import SerialisingGrid, app_of
from flwr_regs.wire import files, keys
from flwr_regs.wire.arrays import ProtocolError
from tests.conftest import close, make_clients, no_space, remembered, run, still
from tests.conftest import norm_model as model
from tests.flower.clients.test_own_loop import own_app

PINS = "3.*"
LAYER = {"3.weight", "3.bias"}


class Tapped(SerialisingGrid):
    """Keeps the bytes and the errors of every reply."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replies: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for m in messages:
            self.change(m)
        ids = list(super().push_messages(messages))
        self.replies += [self._replies[i] for i in ids]
        return ids

    def change(self, message: Message) -> None:
        """Change a message before it is served, or the place where it is."""

    @property
    def sent(self) -> bytes:
        """All that left the clients."""
        good = [m for m in self.replies if not m.has_error()]
        errors = [m.error.reason or "" for m in self.replies if m.has_error()]
        parts = [recorddict_to_proto(m.content).SerializeToString() for m in good]
        return b"".join(parts) + "".join(errors).encode()


def grid_of(
    client: Any,
    build: Callable[[], nn.Module] = model,
    kind: Any = Tapped,
    n: int = 3,
    **settings: Any,
) -> Any:
    return kind(app_of(client, make_clients(n), build, **settings), n)


def leaked(sent: bytes, values: Iterable[np.ndarray]) -> bool:
    """Whether any entry of the arrays is among the bytes, in double or single precision."""
    entries = [x for a in values for x in np.asarray(a, np.float64).ravel() if abs(x) > 1e-3]
    assert entries
    return any(x.tobytes() in sent or np.float32(x).tobytes() in sent for x in entries)


def pinned_values() -> list[np.ndarray]:
    return [v.numpy() for n, v in model().state_dict().items() if n in LAYER]


def tied() -> nn.Module:
    """The pinned entries under another name."""
    m = model()
    m.add_module("other", m[3])
    return m


HOSTILE: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    # the strategy, the client, its model
    "FedAvg": (fr.FedAvg, fr.FedAvgClient, model),
    "FedAvg for a FedPer client": (fr.FedAvg, fr.FedPerClient, model),
    "a narrower list": (lambda **o: fr.FedPer("3.weight", **o), fr.FedPerClient, model),
    "another list": (lambda **o: fr.FedPer("0.*", **o), fr.FedPerClient, model),
    "BatchNorm alone": (fr.FedBN, fr.FedBNClient, model),
    "Fisher sums": (lambda **o: fr.EFL(0.1, **o), fr.EFLClient, model),
    "a probe": (lambda **o: fr.RFedAvgPlus(0.1, **o), fr.RFedAvgPlusClient, model),
    "frozen": (fr.FedAvg, fr.FedAvgClient, lambda: still(model(), "3")),
    "half of tied weights": (lambda **o: fr.FedPer("3.*", **o), fr.FedPerClient, tied),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_round_that_asks_for_a_pinned_entry_is_refused(case: str) -> None:
    strategy, client, build = HOSTILE[case]
    grid = grid_of(client, build, private=PINS)
    hostile = strategy(seed=1)
    with pytest.raises((fr.RoundFailed, ValueError)) as raised:
        run(hostile, client, rounds=1, model=build, grid=grid)
    trained = [m for m in grid.replies if m.has_error()]
    assert len(trained) == 3
    for m in trained:
        assert "keeps [" in m.error.reason or "FedPerClient" in m.error.reason
    assert "3.weight" in str(raised.value) or "FedPer" in str(raised.value)
    if "one parameter" not in str(raised.value):
        assert set(hostile.history[-1]["failures"]) == {0, 1, 2}
    assert not leaked(grid.sent, pinned_values())


def test_an_evaluation_that_overwrites_a_pinned_entry_is_refused() -> None:
    grid = grid_of(fr.FedAvgClient, private=(PINS,))
    strategy = fr.FedAvg(seed=1, fraction_train=0.0)
    with pytest.raises(fr.RoundFailed, match=r"keeps \['3.bias', '3.weight'\] to itself"):
        run(strategy, fr.FedAvgClient, rounds=1, model=model, grid=grid)
    assert not leaked(grid.sent, pinned_values())


def test_a_strategy_that_withholds_more_is_served_and_gets_no_pinned_value() -> None:
    """Neither those of the start nor of any round, in training, probes, uploads and evaluation."""
    terms: list[fr.Term] = [fr.LeaveOneOutMean(0.1), fr.Elastic(0.1), fr.Private("1.*, 3.bias")]
    kinds = [type(t) for t in terms]
    ends = []
    for pins in ((), "3.bias,1.weight"):
        seen: list[np.ndarray] = [model().state_dict()["3.bias"].numpy()]

        class Watched(Tapped):
            def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
                ids = super().push_messages(messages)
                for k in range(3):
                    with contextlib.suppress(ValueError):  # nothing yet
                        seen.append(remembered(self, k)["regs"]["3.bias"].numpy())  # noqa: B023
                return ids

        grid = grid_of(fr.RegClient, kind=Watched, terms=kinds, private=pins)
        strategy = fr.RegStrategy(terms, seed=1)
        ends.append(run(strategy, fr.RegClient, rounds=3, model=model, grid=grid))
        assert len(seen) > 10
        assert not leaked(grid.sent, seen)
        trained = [m.content.array_records["arrays"] for m in grid.replies if "arrays" in m.content]
        assert leaked(grid.sent, [trained[-1]["3.weight"].numpy()])
    close(ends[0], ends[1], 0.0)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (keys.START_KEY, "../../etc", "hexadecimal digits"),
        (keys.START_KEY, "abc.regs", "hexadecimal digits"),
        (keys.START_KEY, "", "hexadecimal digits"),
        (keys.CLIENT_KEY, 7, "this node serves"),
        (keys.CLIENT_KEY, "../1", "must be a whole number"),
    ],
)
def test_a_message_that_reaches_for_a_nodes_state_is_refused(
    key: str, value: Any, why: str, tmp_path: Path
) -> None:
    grid = grid_of(fr.FedPerClient, private=PINS, save_private=tmp_path / "mine")

    def forge(message: Message) -> None:
        if message.metadata.message_type == "train":
            message.content.config_records["config"][key] = value

    grid.change = forge
    with pytest.raises(fr.RoundFailed, match=why):
        run(fr.FedPer(PINS, seed=1), fr.FedPerClient, rounds=1, model=model, grid=grid)
    assert not (tmp_path / "mine").exists()


def test_a_node_without_a_partition_takes_no_other_nodes_messages() -> None:
    """They would open the folder of another client of its machine."""
    context = Context(1, 2**63 + 5, {}, RecordDict(), {})
    check_incoming({keys.CLIENT_KEY: 5}, context)
    with pytest.raises(ProtocolError, match="for partition 6, but this node serves 5"):
        check_incoming({keys.CLIENT_KEY: 6}, context)


@pytest.mark.parametrize("entry", [keys.START_KEY, keys.METHOD_KEY])
def test_another_training_on_a_node_reads_nothing_of_the_first(entry: str) -> None:
    """A SuperNode's context lives through a run, which may train more than once."""
    context = Context(1, 1, {}, RecordDict(), {})
    first = {keys.METHOD_KEY: "SCAFFOLD", keys.START_KEY: "a1"}
    NodeState(context, first).remember({"slots": b"c_k"})
    assert NodeState(context, first).memory == {"slots": b"c_k"}
    assert not NodeState(context, {**first, entry: "b2"}).memory


class Misspelt(Term, Withholds):
    """A user's own: it names an entry that no model has."""

    name = "misspelt"

    def private(self, names: Any) -> set[str]:
        return {"3.wieght"}


def test_a_term_that_withholds_what_the_model_lacks_is_refused() -> None:
    grid = grid_of(fr.RegClient, terms=[Misspelt])
    with pytest.raises(fr.RoundFailed, match=r"of misspelt: the model has no \['3.wieght'\], only"):
        run(fr.RegStrategy([Misspelt()], seed=1), fr.RegClient, rounds=1, model=model, grid=grid)
    assert not leaked(grid.sent, pinned_values())


def test_an_older_server_gets_no_pinned_entry() -> None:
    data = make_clients(1)[0]
    client = fr.FedPerClient(model(), data, private=PINS)
    with pytest.raises(PermissionError, match=r"\['3.bias', '3.weight'\] to itself"):
        client.get_parameters({})
    with pytest.raises(ValueError, match=r"'head\.\*' matches none of the model's arrays"):
        fr.FedPerClient(model(), data, private="head.*")
    with pytest.raises(ValueError, match="private must be a string of names"):
        fr.FedPerClient(model(), data, private=[3])  # type: ignore[list-item]


def at_of(message: Message) -> tuple[Any, int, str]:
    """The round of a message, its node, and its kind."""
    config = message.content.config_records.get("config", {})
    sent = message.metadata
    return config.get(keys.ROUND_KEY, 0), sent.dst_node_id, sent.message_type


class Wiping(Tapped):
    """Restarts nodes, which lose their contexts: client 1 before round 2, all from round 3 on."""

    def change(self, message: Message) -> None:
        number, node, _ = at_of(message)
        if number > 2 or (number, node) == (2, 1001):
            self._contexts[node].state = RecordDict()


SAVING: dict[str, tuple[Callable[..., Any], Any]] = {
    "FedBN": (fr.FedBN, fr.FedBNClient),
    "FedPer": (lambda **o: fr.FedPer(PINS, **o), fr.FedPerClient),
    "EFL": (lambda **o: fr.EFL(0.1, density_up=0.3, **o), fr.EFLClient),
    "Ditto": (fr.Ditto, fr.DittoClient),
}


@pytest.mark.parametrize("name", SAVING)
def test_a_node_that_was_restarted_goes_on_with_what_it_saved(name: str, tmp_path: Path) -> None:
    build, client = SAVING[name]
    unbroken, broken = build(seed=1), build(seed=1)
    expected = run(unbroken, client, rounds=4, model=model, grid=grid_of(client, kind=Tapped))
    restarting = grid_of(client, kind=Wiping, save_private=tmp_path)
    got = run(broken, client, rounds=4, model=model, grid=restarting)
    close(got, expected, 0.0)
    for a, b in zip(unbroken.history, broken.history, strict=True):
        assert a["evaluate"]["clients"] == b["evaluate"]["clients"]
        assert not b["lost_private"] + b["lost_state"]
        assert "lost_private" not in b["evaluate"]
    assert len(list(tmp_path.glob("partition-1/*/round-*"))) == 2


@pytest.mark.parametrize("name", ["FedBN", "EFL", "Ditto"])
def test_a_node_that_saved_nothing_is_named(name: str) -> None:
    build, client = SAVING[name]
    strategy = build(seed=1)
    run(strategy, client, rounds=3, model=model, grid=grid_of(client, kind=Wiping))
    kind = "lost_private" if name in ("FedBN", "FedPer") else "lost_state"
    assert [e[kind] for e in strategy.history] == [[], [1], [0, 1, 2]]
    assert strategy.history[2]["evaluate"][kind] == [0, 1, 2]


@cache
def usual() -> tuple[dict[str, np.ndarray], list[Any]]:
    """FedPer's model after four rounds, and the evaluations."""
    strategy, grid = fr.FedPer(PINS, seed=1), grid_of(fr.FedPerClient)
    arrays = run(strategy, fr.FedPerClient, rounds=4, model=model, grid=grid)
    return arrays, [e["evaluate"]["clients"] for e in strategy.history]


@pytest.mark.parametrize("step", ["open", "replace", "sync_folder", "iterdir"])
def test_a_disk_that_fails_is_named(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 3 alone; before and after it all files are whole."""
    where: Any = {"sync_folder": files, "iterdir": Path}.get(step, os)

    def fault(message: Message) -> None:
        monkeypatch.undo()
        number, _, kind = at_of(message)
        if (number, kind) == (3, "train"):
            monkeypatch.setattr(where, step, no_space)

    grid = grid_of(fr.FedPerClient, save_private=tmp_path)
    grid.change = fault
    strategy = fr.FedPer(PINS, seed=1)
    got = run(strategy, fr.FedPerClient, rounds=4, model=model, grid=grid)
    monkeypatch.undo()
    close(got, usual()[0], 0.0)
    assert [e.get("not_saved", []) for e in strategy.history] == [[], [], [0, 1, 2], []]
    for pid in range(3):
        (folder,) = tmp_path.glob(f"partition-{pid}/*")
        assert sorted(p.name for p in folder.iterdir())[-1] == "round-000004.safetensors"
        fr.load_private(tmp_path, pid)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-9]),
    "a value": lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x01"),
    "a round": lambda p: p.write_bytes(p.read_bytes().replace(b"round-000002", b"round-000003")),
    "another round": lambda p: p.write_bytes(p.with_name("round-000001.safetensors").read_bytes()),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "no JSON": lambda p: p.write_bytes(b"\xff" * 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_named_loss(damage: str, tmp_path: Path) -> None:
    class Damaging(Wiping):
        def change(self, message: Message) -> None:
            super().change(message)
            if at_of(message) == (3, 1001, "train"):
                (newest,) = tmp_path.glob("partition-1/*/round-000002.safetensors")
                DAMAGE[damage](newest)

    strategy = fr.RegStrategy([fr.Private(PINS), fr.SparseTernary(0.5)], seed=1)
    kinds = [fr.Private, fr.SparseTernary]
    grid = grid_of(fr.RegClient, kind=Damaging, terms=kinds, save_private=tmp_path)
    run(strategy, fr.RegClient, rounds=3, model=model, grid=grid)
    assert [e["lost_private"] for e in strategy.history] == [[], [], [1]]
    assert [e["lost_state"] for e in strategy.history] == [[], [], [1]]


def test_personal_parts_are_the_owners_alone_and_have_an_address(tmp_path: Path) -> None:
    strategy = fr.FedPer(PINS, seed=1)
    grid = grid_of(fr.FedPerClient, save_private=tmp_path)
    run(strategy, fr.FedPerClient, rounds=3, model=model, grid=grid)
    assert fr.load_private(tmp_path, 1).keys() == LAYER
    (start,) = [p.name for p in (tmp_path / "partition-1").iterdir()]
    assert fr.load_private(tmp_path, 1, start).keys() == LAYER
    with pytest.raises(FileNotFoundError, match=r"partition-9 has the trainings \[\]"):
        fr.load_private(tmp_path, 9)
    with pytest.raises(FileNotFoundError, match=f"{start}.*, not 'abc'"):
        fr.load_private(tmp_path, 1, "abc")
    paths = [tmp_path / "partition-1", *tmp_path.glob("partition-1/**/*")]
    modes = {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_file()} == {0o600}
    assert sorted(p.name[:8] for p in paths if p.is_file()) == ["round-00"] * 2


def test_an_own_loop_pins_and_saves(tmp_path: Path) -> None:
    """The same bits as the package's client, with nodes that are restarted."""
    keeping = {"private": PINS, "save_private": tmp_path}
    app = own_app(fr.FedPerClient, model=model, n=3, keeping=keeping)
    strategy = fr.FedPer(PINS, seed=1)
    got = run(strategy, fr.FedPerClient, rounds=4, model=model, grid=Wiping(app, 3))
    arrays, evaluations = usual()
    close(got, arrays, 0.0)
    for entry, clients in zip(strategy.history, evaluations, strict=True):
        for pid, told in entry["evaluate"]["clients"].items():
            assert told["loss"] == pytest.approx(clients[pid]["loss"], abs=1e-12)
    with pytest.raises(fr.RoundFailed, match=r"keeps \['3.bias', '3.weight'\] to itself"):
        run(fr.FedPer("0.*", seed=1), fr.FedPerClient, rounds=1, model=model, grid=Wiping(app, 3))
