"""What a client remembers: the rule, against a plain statement of it."""

import os
import random
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import flwr_regs as fr
from flwr_regs.abilities import TakesBack
from flwr_regs.chain import chain
from flwr_regs.client.memory import Folder, begin, end, label, latest
from flwr_regs.wire import keys
from tests.conftest import no_space


class IfUsed(fr.Term):
    name: ClassVar[str] = "if-used"


class Always(fr.Term):
    name: ClassVar[str] = "always"
    keeps: ClassVar[str] = "always"


class Back(fr.Term, TakesBack):
    """Notes which rounds were not used."""

    name: ClassVar[str] = "back"

    def unused(self, before: Any, after: Any) -> Any:
        return {"n": torch.cat([after["n"], -after["n"][-1:]])}


METHOD = chain([IfUsed(), Always(), Back()])
NAMES = ("if-used", "always", "back", "regs")
Course = list[tuple[int, float, bool]]
"""The rounds of a client whose replies came: (round, the id of its training, whether it was used)."""


def stated(course: Course) -> dict[str, list[float]]:
    """The state of round t is what the course of used rounds says."""
    came = [i for _, i, _ in course]
    back = [x for _, i, used in course for x in ([i] if used else [i, -i])]
    kept = [i for _, i, used in course if used]
    return {"if-used": kept, "always": came, "regs": came, "back": back}


def told(number: int, start: str = "a") -> dict[str, Any]:
    """The config of a client's round."""
    return {keys.ROUND_KEY: number, keys.START_KEY: start, keys.CLIENT_KEY: 0, keys.METHOD_KEY: "m"}


class Crash(BaseException):
    """The client's process dies."""


class Client:
    """One client of one training: a node's memory, and a folder if it has one."""

    def __init__(self, root: Path | None, start: str) -> None:
        self.root, self.start = root, start
        self.node: dict[str, bytes] = {}

    def train(self, number: int, course: Course, ident: float, crash: int = 0) -> Any:
        """Train a round; return what it began with. The process may die before its disk is written."""
        config = told(number, self.start)
        if course:
            used = max([n for n, _, u in course if u], default=0)
            config[keys.SNAPSHOTS_KEY] = [used, course[-1][0]]
        folder = None if self.root is None else Folder(self.root, config)
        held = self.node if folder is None else folder.completed(self.node, config)
        begun = begin(held, METHOD, config, withholds=True)
        slots = {**begun.slots, "regs": begun.private or {}}
        grown = {t: _grown(slots.get(t, {}), ident) for t in NAMES}
        private = grown.pop("regs")
        new = end(held, config, grown, private, "m")
        assert len(new) <= 3
        if folder is not None:
            with dying(crash):
                assert folder.write(new, config)
        self.node = new
        kept = latest(new, {**config, keys.SNAPSHOTS_KEY: [0, number]}, withholds=True)
        assert kept.lost == []
        assert kept.slots["always"]["n"][-1] == kept.private["n"][-1] == ident
        return begun


def _grown(slot: dict[str, Any], ident: float) -> dict[str, Any]:
    return {"n": torch.cat([slot.get("n", torch.zeros(0)), torch.tensor([ident])])}


class dying:
    """Raises Crash before the k-th change of the disk; 0: never."""

    def __init__(self, k: int) -> None:
        self.left, self.real = k, (os.replace, os.unlink)

    def __enter__(self) -> None:
        def counting(real: Any) -> Any:
            def change(*args: Any, **how: Any) -> Any:
                self.left -= 1
                if self.left == 0:
                    raise Crash
                return real(*args, **how)

            return change

        os.replace, os.unlink = map(counting, self.real)  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        os.replace, os.unlink = self.real


def found(begun: Any) -> dict[str, list[float]]:
    slots = {**begun.slots, "regs": begun.private or {}}
    return {t: [float(x) for x in slots.get(t, {}).get("n", ())] for t in NAMES}


FATES = ["used", "used", "unused", "lost", "failed", "absent", "crash", "other", "resume"]


@dataclass
class Server:
    """What the server knows of one client in one training; `saved` are its checkpoints."""

    client: Client
    course: Course
    number: int = 1
    resumed: bool = False
    saved: list[tuple[int, Course]] = field(default_factory=list)

    def next_round(self) -> None:
        self.number += 1
        self.saved.append((self.number, [*self.course]))

    def resume(self, at: int) -> None:
        """Go on from a checkpoint; the client may be ahead by many rounds."""
        self.number, course = self.saved[at]
        self.course, self.resumed = [*course], True
        del self.saved[at + 1 :]


@pytest.mark.parametrize("seed", range(30))
def test_a_round_begins_with_what_the_course_of_used_rounds_says(seed: int, tmp_path: Path) -> None:
    """Whatever happens, in memory or on a disk, with two trainings in turn.

    Replies are lost or not used, rounds are repeated, tried again, or missed, the process dies between any
    two writes, the node restarts, the server resumes from any checkpoint. After that alone a client may
    lack what it needs, and then says so.
    """
    rng, disk = random.Random(seed), seed % 2 == 1
    root = tmp_path if disk else None
    servers = [Server(Client(root, start), [], saved=[(1, [])]) for start in ("a", "b")]
    at, ident = 0, 0.0
    for step in range(60):
        fate, server = rng.choice(FATES), servers[at]
        client = server.client
        if fate == "other":  # each training has a memory of its own
            at = 1 - at
        elif fate == "resume":
            server.resume(rng.randrange(len(server.saved)))
        elif fate == "absent":
            server.next_round()
        else:
            ident += 1
            crash = rng.randint(1, 6) if fate == "crash" and disk else 0
            try:
                begun = client.train(server.number, server.course, ident, crash)
            except Crash:
                client.node = {}
                continue
            if begun.lost:
                assert server.resumed
                other = Client(root, f"{step:x}")  # a training from its beginning
                servers[at] = Server(other, [], saved=[(1, [])])
                continue
            assert found(begun) == stated(server.course)
            if disk and rng.random() < 0.3:
                client.node = {}  # the node restarts
            if fate in ("used", "unused"):
                server.course.append((server.number, ident, fate == "used"))
            if fate in ("used", "unused", "lost"):
                server.next_round()  # else the server tries the round again


def test_a_client_far_ahead_of_a_resumed_server_says_what_it_lacks() -> None:
    client, course = Client(None, "a"), list[tuple[int, float, bool]]()
    for number in range(1, 6):
        client.train(number, course, number)
        course.append((number, number, True))
    broken = chain([type("Broken", (Back,), {"unused": lambda *_: 1 / 0})()])
    assert begin(client.node, broken, {keys.SNAPSHOTS_KEY: [4, 5]}).lost == ["state"]
    assert client.train(5, course[:4], 5).lost == []  # one round ahead
    assert client.train(3, course[:2], 3).lost == ["state", "private"]


def test_a_disk_that_fails_leaves_no_snapshot_of_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """A round is repeated, and what it leaves is not on the disk: then that is lost, and not stale."""
    config = told(1)
    folder, one = Folder(tmp_path, config), {"if-used": {"n": torch.ones(1)}}
    (home := tmp_path / "partition-0" / "a").mkdir(parents=True)
    (home / ".round-000001.safetensors.7.part").touch()  # of a crash
    assert folder.write(end({}, config, one, None, "m"), config)
    assert [p.name for p in home.iterdir()] == ["round-000001.safetensors"]

    with monkeypatch.context() as patch:
        patch.setattr("flwr_regs.client.memory.write_atomically", no_space)
        assert not folder.write(end({}, config, one, None, "m"), config)
        assert log(f"state is not on the disk, in {home}: OSError")
    later = {**config, keys.ROUND_KEY: 2, keys.SNAPSHOTS_KEY: [1, 1]}
    assert begin(folder.completed({}, later), METHOD, later).lost == ["state"]
    assert folder.write(end(end({}, config, one, None, "m"), later, one, None, "m"), later)
    assert begin(folder.completed({}, later), METHOD, later).lost == []  # the node still had it


def test_an_evaluation_sees_the_round_that_came_if_only_the_disk_has_it(tmp_path: Path) -> None:
    """The process died when it had written what it kept, and before the node had it.

    What a failed attempt, or a round beyond a checkpoint, has left does not count.
    """
    node: Any = {}
    for number in (1, 2):
        config = {**told(number), keys.SNAPSHOTS_KEY: [number - 1] * 2}
        folder, before = Folder(tmp_path, config), node
        node = end(before, config, {"if-used": {"n": torch.full((1,), number)}}, None, "m")
        assert folder.write(node, config)
    for held, came in product((before, {}, node), (1, 2)):
        config[keys.SNAPSHOTS_KEY] = [came, came]
        assert latest(folder.completed(held, config), config).slots["if-used"]["n"] == came


def test_what_a_first_exchange_keeps_belongs_to_its_round() -> None:
    one = {"if-used": {"n": torch.ones(1)}}
    probe = {keys.ROUND_KEY: 2, keys.PROBE_KEY: True, keys.SNAPSHOTS_KEY: [1, 1]}
    train = {k: v for k, v in probe.items() if k != keys.PROBE_KEY}
    held = end({}, {keys.ROUND_KEY: 1}, {"if-used": {"n": torch.zeros(1)}})
    asked = end(held, probe, one)
    one["if-used"]["n"].zero_()
    assert begin(asked, METHOD, probe).slots["if-used"]["n"] == 0
    for _ in range(2):  # a repeated message, too
        assert begin(asked, METHOD, train).slots["if-used"]["n"] == 1
        asked = end(asked, train, {})
    later = {**train, keys.ROUND_KEY: 3}
    assert begin(asked, METHOD, later).slots["if-used"]["n"] == 0
    assert set(end(asked, later, {})) == {label(1), label(3)}
    assert set(end({}, later, {})) == {label(3)}  # it has lost the others, and now is empty
    assert set(end(held, {keys.ROUND_KEY: 3}, {})) == {label(3)}
