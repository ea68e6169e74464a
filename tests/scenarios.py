"""Accidents of a real federation, each played from start to end, for tests and ``benchmarks.faults``.

Client 1 of three is the victim. The clients are those of accident_app.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from safetensors.numpy import load_file

from flwr_regs import FedAvg, InProcessGrid, client_app
from tests.accident_app import Plain
from tests.conftest import ROOT
from tests.federation import Federation, until

APP = ROOT / "docs/examples/deployment/app"
VICTIM = 1
OTHERS = [0, 2]
DEADLINE = 60.0
"""Seconds that a round waits in the cases with a deadline."""
TIMEOUT = 60.0
"""Seconds that an exchange waits in the case without one."""


@dataclass
class Outcome:
    """What an accident did.

    Parameters
    ----------
    sees : str
        The sentence in the log, the history or on the terminal.
    seconds : float
        From the accident until training goes on, or until the refusal.
    lost : str
        What was lost, in words, from the history.
    history : list of dict
        The entries of the run, or of the resumed one.
    model : dict of arrays
        Its final model.
    """

    sees: str
    seconds: float
    lost: str
    history: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, np.ndarray] = field(default_factory=dict)


class Play:
    """A run of the app on a federation, in which client 1 has an accident.

    Parameters
    ----------
    federation : Federation
        With its nodes running.
    folder : Path
        Does not exist yet; gets the app, the marks, the checkpoints and the results.
    kind : str
        ``"none"``, an accident of accident_app.py, or ``"hold"``: the client waits in that round.
    at : int
        The round of the accident.
    **config
        The app's run config.
    """

    def __init__(
        self, federation: Federation, folder: Path, kind: str = "none", at: int = 1, **config: Any
    ) -> None:
        self.federation, self.folder, self.at = federation, folder, at
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.app = folder / "app"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("accident_app.py"), self.app / "accident.py")
        project = self.app / "pyproject.toml"
        text = project.read_text().replace('"client:app"', '"accident:app"')
        own = f'marks = ""\naccident = "{kind}"\naccident-round = {at}\naccident-partition = {VICTIM}\n'
        project.write_text(text + own)
        if kind == "hold":
            self.hold(at, VICTIM)
        self.config = {"method": "FedAvg()", "rounds": 2, "fraction_evaluate": 0.0, **config}
        self.runs: list[int] = []
        self.start()

    def start(self, **config: Any) -> None:
        """Start a run, the first or another one."""
        config = {
            **self.config,
            "out": str(self.folder / "out"),
            "marks": str(self.marks),
            **config,
        }
        self.runs.append(self.federation.run(self.app, **config))

    def mark(self, number: int, client: int | str = "*", least: int = 1) -> float:
        """Wait until clients have begun to train in a round; return when the last of `least` did."""

        def found() -> list[float] | None:
            times = sorted(p.stat().st_mtime for p in self.marks.glob(f"{number}-{client}-*"))
            return times if len(times) >= least else None

        return until(f"training of client {client} in round {number}", found, 400)[least - 1]

    def accident(self) -> float:
        """Wait until the victim is in its round; return since when (as ``time.time``)."""
        return self.mark(self.at, VICTIM)

    def hold(self, number: int, client: int) -> None:
        """Let a client wait in a round until `release`."""
        (self.marks / f"hold-{number}-{client}").touch()

    def release(self) -> None:
        """Let the clients that wait go on."""
        for path in self.marks.glob("hold-*"):
            path.unlink()

    def end(self, expected: str = "finished:completed") -> None:
        """Wait for the end of the last run; AssertionError if it ends in another way."""
        status = self.federation.wait(self.runs[-1], 400)
        assert status[0] == expected, f"{status}\n{self.federation.log(self.runs[-1])}"

    def history(self) -> list[dict[str, Any]]:
        """Return the history, over all runs."""
        text = (self.folder / "out" / "history.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def model(self) -> dict[str, np.ndarray]:
        """Return the final model."""
        return dict(load_file(self.folder / "out" / "model.safetensors"))

    def outcome(self, since: float) -> Outcome:
        """Return what the history says of the accident, and when the next round began."""
        history = self.history()
        sees = str(history[self.at - 1]["failures"].get(str(VICTIM), "nothing"))
        sees = re.sub(r" \(/.*\)$", "", sees)  # the place in a temporary folder
        seconds = self.mark(self.at + 1) - since
        return Outcome(sees, seconds, lost(history), history, self.model())


def lost(history: list[dict[str, Any]]) -> str:
    """Return which replies of a history are missing, in words."""
    gone = [
        f"the reply of client {pid} in round {entry['round']}"
        for entry in history
        for pid in entry["cohort"]
        if pid not in entry.get("replies", ())
    ]
    return ", ".join(gone) or "nothing"


def initial() -> dict[str, np.ndarray]:
    """Return the app's initial model."""
    spec = importlib.util.spec_from_file_location("task", APP / "task.py")
    assert spec
    assert spec.loader
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    return {name: tensor.numpy() for name, tensor in task.build().state_dict().items()}


def unbroken(rounds: int) -> dict[str, np.ndarray]:
    """Return the final model of a run without accidents, in one process."""
    app = client_app(lambda context: Plain(int(context.node_config["partition-id"])))
    result = FedAvg(seed=7, fraction_evaluate=0.0).start(
        grid=InProcessGrid(app, 3),
        initial_arrays=ArrayRecord({name: Array(a) for name, a in initial().items()}),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
    )
    return {name: array.numpy() for name, array in result.arrays.items()}


def nothing(federation: Federation, folder: Path) -> Outcome:
    """No accident: how long a round takes."""
    play = Play(federation, folder)
    play.end()
    return play.outcome(play.mark(1))


def client_raises(federation: Federation, folder: Path) -> Outcome:
    """The client's code raises."""
    play = Play(federation, folder, "raise")
    play.end()
    return play.outcome(play.accident())


def client_dies(federation: Federation, folder: Path) -> Outcome:
    """The process of the client's code dies."""
    play = Play(federation, folder, "die")
    play.end()
    return play.outcome(play.accident())


def node_killed(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode is killed in a round; it is started again after the round, and takes part."""
    return _node(federation, folder, signal.SIGKILL)


def node_terminated(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode is stopped in a round, as a supervisor does; it is started again after the round."""
    return _node(federation, folder, signal.SIGTERM)


def _node(federation: Federation, folder: Path, how: signal.Signals) -> Outcome:
    play = Play(federation, folder, "hold", rounds=3)
    play.hold(2, OTHERS[0])
    play.accident()
    began = time.time()
    federation.end(f"node{VICTIM}", how)
    play.mark(2)  # the others are in the next round
    federation.start_node(VICTIM)
    federation.wait_for_node(VICTIM)
    play.release()
    play.end()
    return play.outcome(began)


def restarted_with_keys(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode is killed in a round and started again at once, as often as needed, with its key."""
    play = Play(federation, folder, "hold", deadline=2 * DEADLINE)
    play.accident()
    began = time.time()
    federation.end(f"node{VICTIM}")
    refusals = 0
    while not (federation.start_node(VICTIM) and federation.accepts(VICTIM)):
        refused = _said(federation, f"node{VICTIM}")
        refusals += 1
        time.sleep(5)
        assert time.time() - began < 200, refused
    accepted = time.time() - began
    play.release()
    play.end()
    found = play.outcome(began)
    if refusals:
        first = f"the node: {refused}, until it is accepted after {accepted:.0f} s; then: "
        found = replace(found, sees=first + found.sees)
    return found


def node_silent(federation: Federation, folder: Path) -> Outcome:
    """A client never replies; the round waits for the timeout of `start`, which is an hour by default."""
    return _silent(federation, folder, timeout=TIMEOUT)


def node_silent_deadline(federation: Federation, folder: Path) -> Outcome:
    """A client never replies, and the strategy has a deadline."""
    return _silent(federation, folder, deadline=DEADLINE)


def _silent(federation: Federation, folder: Path, **limit: float) -> Outcome:
    play = Play(federation, folder, "silent", **limit)
    play.end()
    return play.outcome(play.accident())


def serverapp_killed(federation: Federation, folder: Path) -> Outcome:
    """The ServerApp is killed in round 2; a new run goes on from the checkpoint of round 1."""
    checkpoints = str(folder / "checkpoints")
    play = Play(federation, folder, "hold", 2, rounds=3, checkpoint_dir=checkpoints)
    play.accident()
    began = time.time()
    federation.kill_serverapp()
    play.release()
    play.end("finished:failed")
    failed = time.time() - began
    sees = federation.status(play.runs[-1])[1]
    return _resumed(play, sees, failed)


def superlink_killed(federation: Federation, folder: Path) -> Outcome:
    """The SuperLink is killed in round 2, and started again with its database."""
    checkpoints = str(folder / "checkpoints")
    play = Play(federation, folder, "hold", 2, rounds=3, checkpoint_dir=checkpoints)
    play.accident()
    began = time.time()
    federation.end("superlink")
    play.release()
    federation.start_superlink()
    play.end("finished:failed")
    failed = time.time() - began
    sees = federation.status(play.runs[-1])[1]
    return _resumed(play, sees, failed)


def _resumed(play: Play, sees: str, seconds: float) -> Outcome:
    """Go on with a run that failed in round 2, in a new one."""
    play.federation.restart_nodes()
    play.start(resume=True)
    play.end()
    history = play.history()
    assert [entry["round"] for entry in history] == [1, 2, 3]
    again = len(list(play.marks.glob(f"2-{OTHERS[0]}-*"))) > 1
    words = "the work of round 2, which is trained again" if again else "nothing"
    return Outcome(sees, seconds, words, history, play.model())


def unknown_key(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode whose key nobody registered."""
    began = time.time()
    federation.start_node(9, federation.key("stranger"))
    return _refused(federation, "node9", began)


def clock_ahead(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode whose clock is 30 s ahead."""
    began = time.time()
    federation.end(f"node{VICTIM}", signal.SIGTERM)
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AHEAD)
    path = f"{folder}:{federation.env['PYTHONPATH']}"
    federation.start_node(VICTIM, PYTHONPATH=path)
    return _refused(federation, f"node{VICTIM}", began)


def _refused(federation: Federation, name: str, began: float) -> Outcome:
    """Wait until a node's process has ended; return what it and the SuperLink logged."""
    federation.processes[name].wait(90)
    seconds = time.time() - began
    requests = re.findall(r'"(POST /v1/fleet/\S+) HTTP/1.1" (4\d\d)', federation.tail("superlink"))
    answer = " ".join(requests[-1]) if requests else "no request"
    sees = f"the node: {_said(federation, name)}; the SuperLink: {answer}"
    return Outcome(sees, seconds, "nothing")


def _said(federation: Federation, name: str) -> str:
    """Return what a node that ended logged last, with its exit status."""
    said = re.findall(r"^.*(?:\[code: |terminated gracefully).*$", federation.tail(name), re.M)
    text = said[0].split(" :")[-1].strip() if said else "nothing"
    return f"{text} (exit status {federation.processes[name].wait(60)})"


def unsigned_app(federation: Federation, folder: Path) -> Outcome:
    """A SuperNode trusts only apps that a key has signed, and the app is a folder's."""
    folder.mkdir()
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "reviewer")]
    subprocess.run(words, check=True, timeout=60)
    public = (folder / "reviewer.pub").read_text().strip()
    (folder / "trusted.yaml").write_text(f"fpk_{uuid.uuid4()}: '{public}'\n")
    federation.end(f"node{VICTIM}", signal.SIGTERM)
    federation.start_node(VICTIM, options=["--trusted-entities", folder / "trusted.yaml"])
    federation.wait_for_node(VICTIM)
    began = time.time()
    play = Play(federation, folder / "play", rounds=1)
    status, _ = federation.wait(play.runs[-1])
    seconds = time.time() - began
    log = federation.log(play.runs[-1])
    sees = re.search(r"(?:node|client) \d+[^\n]*could not be verified\.\)?", log)
    history = play.history() if status == "finished:completed" else []
    gone = lost(history) if history else "the run"
    return Outcome(sees[0] if sees else log, seconds, gone, history)


def disk_full(federation: Federation, folder: Path) -> Outcome:
    """The disk with the checkpoints has no room. Mounts a small disk, which only root may."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]
    subprocess.run(mount, check=True, timeout=60)
    try:
        (disk / "other").write_bytes(bytes(100_000))
        play = Play(federation, folder / "play", checkpoint_dir=str(disk / "checkpoints"))
        play.end()
        found = re.search(r"[^\n]*goes on without this checkpoint", federation.log(play.runs[-1]))
        history = play.history()
        sees = found[0].split("WARNING :")[-1].strip() if found else "nothing"
        return Outcome(sees, 0.0, "the checkpoints that did not fit", history, play.model())
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=60)


AHEAD = """
import datetime, time

class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=30)

datetime.datetime = Ahead
"""

CASES: dict[str, Callable[[Federation, Path], Outcome]] = {
    f.__name__: f
    for f in (
        nothing,
        client_raises,
        client_dies,
        node_killed,
        node_terminated,
        restarted_with_keys,
        node_silent,
        node_silent_deadline,
        serverapp_killed,
        superlink_killed,
        unknown_key,
        clock_ahead,
        unsigned_app,
        disk_full,
    )
}
