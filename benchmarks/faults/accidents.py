"""Accidents of a real federation, each played from start to end, for tests and ``benchmarks.faults``.

Client 1 of three is the victim. The clients are those of accident_app.py.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.faults.federation import Federation
from benchmarks.faults.play import VICTIM, Outcome, Play, lost
from tests.processes import until

OTHERS = [0, 2]
DEADLINE = 60.0
"""Seconds that a round waits in the cases with a deadline."""
TIMEOUT = 60.0
"""Seconds that an exchange waits in the case without one."""


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
    done = play.outcome(began)
    if refusals:
        first = f"the node: {refused}, until it is accepted after {accepted:.0f} s; then: "
        done = replace(done, sees=first + done.sees)
    return done


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
    return _server_killed(federation, folder, federation.kill_serverapp)


def superlink_killed(federation: Federation, folder: Path) -> Outcome:
    """The SuperLink is killed in round 2, and started again with its database."""
    end = partial(federation.end, "superlink")
    return _server_killed(federation, folder, end, federation.start_superlink)


def _server_killed(
    federation: Federation,
    folder: Path,
    kill: Callable[[], object],
    restart: Callable[[], object] = lambda: None,
) -> Outcome:
    """Kill something of the server in round 2; then go on in a new run."""
    play = Play(federation, folder, "hold", 2, checkpoint_dir=str(folder / "checkpoints"))
    play.accident()
    play.mark(2, OTHERS[0])  # its work of the round is what is lost
    began = time.time()
    kill()
    restart()
    play.end("finished:failed")  # round 2 cannot end: the victim waits
    play.release()
    failed = time.time() - began
    sees = federation.status(play.runs[-1])[1]
    federation.restart_nodes()
    play.start(resume=True)
    play.end()
    history = play.history()
    assert [entry["round"] for entry in history] == [1, 2]
    again = len(list(play.marks.glob(f"2-{OTHERS[0]}-*"))) > 1
    words = "the work of round 2, which is trained again" if again else "nothing"
    return Outcome(sees, failed, words, history, play.model())


TASK = """
def strategy(method, **settings):
    terms = [flwr_regs.ControlVariates(1), flwr_regs.Private("2.*")]
    return flwr_regs.RegStrategy(terms, **settings)


def load(node_config):  # without scikit-learn, a message takes a second less
    rng = np.random.default_rng(int(node_config["partition-id"]))
    x, y = rng.normal(size=(64, 64)), rng.integers(10, size=64)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    return DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=32)
"""


def memory_lost(federation: Federation, folder: Path) -> Outcome:
    """A node is killed when it has trained and saved round 2; then the SuperLink in round 4, and all nodes.

    The clients keep slots and private entries on their disks.
    """
    disk = folder / "disk"
    kept = {"disk": str(disk), "checkpoint_dir": str(folder / "checkpoints")}
    play = Play(federation, folder, "trained", 2, TASK, rounds=4, fraction_evaluate=0.67, **kept)
    play.hold(3, OTHERS[0])
    play.hold(4, VICTIM)
    saved = f"partition-{VICTIM}/*/round-000002.safetensors"
    until("the victim's file of round 2", lambda: list(disk.glob(saved)), 400)
    began = time.time()
    federation.end(f"node{VICTIM}")
    play.mark(3)  # the others are in the next round
    federation.start_node(VICTIM)
    federation.wait_for_node(VICTIM)
    play.release(3)
    play.mark(4, VICTIM)
    federation.end("superlink")
    federation.start_superlink()
    play.end("finished:failed")  # round 4 cannot end: the victim waits
    play.release()
    federation.restart_nodes()
    play.start(resume=True)
    play.end()
    return play.outcome(began)


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
    if federation.served:  # else the run starts them anew, without the option
        federation.restart_nodes()
    federation.end(f"node{VICTIM}", signal.SIGTERM)
    federation.start_node(VICTIM, options=["--trusted-entities", folder / "trusted.yaml"])
    federation.wait_for_node(VICTIM)
    began = time.time()
    play = Play(federation, folder / "play", rounds=1, wait_timeout=30.0)
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
        (disk / "other").write_bytes(bytes(150_000))
        play = Play(federation, folder / "play", checkpoint_dir=str(disk / "checkpoints"))
        play.end()
        said = re.search(r"[^\n]*goes on without this checkpoint", federation.log(play.runs[-1]))
        history = play.history()
        sees = said[0].split("WARNING :")[-1].strip() if said else "nothing"
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
        memory_lost,
        unknown_key,
        clock_ahead,
        unsigned_app,
        disk_full,
    )
}
