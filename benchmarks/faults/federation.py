"""A real federation on this machine: a SuperLink with TLS, node keys and a database, and SuperNodes.

Each process belongs to the federation by a variable of its environment, which its children inherit. So all
of them can be found and stopped by their ids, also those that Flower starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from tests.conftest import ROOT
from tests.processes import BIN, environment, free_port, until

CONNECTION = "lab"
"""The SuperLink's name in ``config.toml``."""
MARK = "TEST_FEDERATION"
"""The variable by which the processes of a federation are found."""
CERTIFICATES = ROOT / "docs/examples/deployment/certificates.sh"


def plain(text: str) -> str:
    """Return a log without its colours."""
    return re.sub(r"\x1b\[\d+m", "", text)


class Federation:
    """A SuperLink and SuperNodes of partitions 0 … `nodes` − 1, stopped at the end.

    Parameters
    ----------
    folder : Path
        Empty; gets certificates, keys, the database, Flower's homes and the processes' logs.
    nodes : int
        SuperNodes that are started with the federation.

    Attributes
    ----------
    processes : dict
        The processes of ``"superlink"`` and ``"node<partition>"``, each as it was last started.
    served : bool
        Whether there was a run since the nodes were last started together.
    logs : dict
        Their logs, by the same names. Children of a killed process write on into its log, so each start
        has a file of its own.
    """

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder, self.nodes = folder, nodes
        self.port = free_port()
        self.mark = uuid.uuid4().hex
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.served = False
        self.logs: dict[str, Path] = {}
        self.env = {
            **environment(folder / "home"),
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            MARK: self.mark,
        }

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.start_superlink()
            for partition in range(self.nodes):
                self.register(self.key(partition))
                self.start_node(partition)
            for partition in range(self.nodes):
                self.wait_for_node(partition)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Processes

    def start_superlink(self) -> None:
        """Start the SuperLink, on its port and database, and wait until it listens."""
        self._launch(
            "superlink",
            BIN / "flower-superlink",
            *("--ssl-ca-certfile", self.folder / "ca.crt"),
            *("--ssl-certfile", self.folder / "server.crt"),
            *("--ssl-keyfile", self.folder / "server.key"),
            "--enable-supernode-auth",
            *("--database", self.folder / "superlink.db"),
            *("--host", "127.0.0.1", "--port", self.port),
        )
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

        def listens() -> bool:
            assert self.processes["superlink"].poll() is None, self.tail("superlink")
            with (
                contextlib.suppress(OSError),
                urlopen(f"https://127.0.0.1:{self.port}/health", timeout=2, context=context),
            ):
                return True
            return False

        until("a SuperLink that listens", listens)

    def start_node(
        self, partition: int, key: Path | None = None, options: Sequence[Any] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a partition with its key, or with `key`; return its process."""
        name = f"node{partition}"
        return self._launch(
            name,
            BIN / "flower-supernode",
            *("--root-certificates", self.folder / "ca.crt"),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--host", "127.0.0.1", "--port", free_port()),
            *("--auth-supernode-private-key", key or self.key(partition)),
            *("--node-config", f"partition-id={partition} num-partitions={self.nodes}"),
            *options,
            **{"FLWR_HOME": str(self.folder / name), **variables},
        )

    def accepts(self, partition: int) -> bool:
        """Wait until the SuperLink has accepted a node that was started, or its process has ended."""
        name = f"node{partition}"
        process = self.processes[name]

        def known() -> bool:
            return process.poll() is not None or "SuperNode ID" in self.tail(name)

        until(f"{name} accepted or refused", known)
        return process.poll() is None

    def wait_for_node(self, partition: int) -> None:
        """Wait until the SuperLink has accepted a node; AssertionError if it refuses it."""
        assert self.accepts(partition), self.tail(f"node{partition}")

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to ``"superlink"`` or ``"node<partition>"``, and wait until it is gone.

        Its children live on for a while, as they would: those of a killed process see that it is gone.
        """
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(60)

    def restart_nodes(self) -> None:
        """Restart all nodes.

        A SuperNode that was busy with a message of a run that ended sends its later replies one message
        late (Flower 1.41).
        """
        for name in [n for n in self.processes if n != "superlink"]:
            self.end(name, signal.SIGTERM)
        self.served = False
        for partition in range(self.nodes):
            self.start_node(partition)
        for partition in range(self.nodes):
            self.wait_for_node(partition)

    def kill_serverapp(self) -> int:
        """Kill the process that runs the ServerApp; return its id."""
        (pid,) = until("a ServerApp's process", lambda: self.pids("flwr-serverapp"))
        os.kill(pid, signal.SIGKILL)
        until("the end of the ServerApp's process", lambda: pid not in self.pids("flwr-serverapp"))
        return pid

    def pids(self, program: str = "") -> list[int]:
        """Return the ids of this federation's living processes, or of those that run a program."""
        ids = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = f"{MARK}={self.mark}".encode() in (proc / "environ").read_bytes().split(
                    b"\0"
                )
                words = (proc / "cmdline").read_bytes().split(b"\0")[:2]
                if ours and any(w.endswith(program.encode()) for w in words):
                    ids.append(int(proc.name))
        return sorted(ids)

    def stop(self) -> None:
        """Stop every process of the federation, also those that Flower started."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait(10)
        self.processes.clear()
        until("the end of all processes", lambda: not self.pids(), 30)

    # Keys

    def key(self, name: int | str) -> Path:
        """Return a node's private key; the public one is beside it, with the ending ``.pub``."""
        path = self.folder / f"key-{name}"
        if not path.exists():
            words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)]
            subprocess.run(words, check=True, capture_output=True, timeout=60)
        return path

    def register(self, key: Path) -> None:
        """Tell the SuperLink a node's public key."""
        self.flwr("supernode", "register", f"{key}.pub", CONNECTION, "--name", key.name)

    # Runs

    def run(self, app: Path, **config: Any) -> int:
        """Start a run of an app and return its id; `config` is its run config, with _ for -."""
        words = [f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items()]
        options = ["-c", " ".join(words)] if words else []
        self.served = True
        return int(self._json("run", app, CONNECTION, "--format", "json", *options)["run-id"])

    def status(self, run: int) -> tuple[str, str]:
        """Return a run's status, such as ``finished:completed``, and Flower's details on it."""
        listed = self._json("ls", CONNECTION, "--run-id", run, "--format", "json")
        (entry,) = listed["runs"]
        return entry["status"], entry.get("status-details", "")

    def runs(self) -> list[int]:
        """Return the ids of all runs."""
        return [
            int(run["run-id"]) for run in self._json("ls", CONNECTION, "--format", "json")["runs"]
        ]

    def wait(self, run: int, seconds: float = 600) -> tuple[str, str]:
        """Wait until a run has ended; return its status and details."""
        end, words = time.monotonic() + seconds, ("log", run, CONNECTION, "--stream")
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it returns when the run ends
                line = [str(word) for word in (BIN / "flwr", *words)]
                subprocess.run(line, env=self.env, capture_output=True, timeout=left, check=False)
            if (state := self.status(run))[0].startswith("finished"):
                return state
        raise AssertionError(f"after {seconds:.0f} s: run {run} is {state}\n{self.log(run)}")

    def log(self, run: int) -> str:
        """Return what the ServerApp of a run has logged so far."""
        done = self.flwr("log", run, CONNECTION, "--show")
        return plain(done.stdout + done.stderr)

    def flwr(self, *words: Any) -> subprocess.CompletedProcess[str]:
        """Run a ``flwr`` command; AssertionError if it fails."""
        done = subprocess.run(
            [str(w) for w in (BIN / "flwr", *words)],
            env=self.env,
            cwd=self.folder,
            text=True,
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (
            f"flwr {words}: {done.stdout}{done.stderr}{self.tail('superlink')}"
        )
        return done

    def tail(self, name: str, characters: int = 4000) -> str:
        """Return the end of a process's log since it was last started."""
        return plain(self.logs[name].read_text(errors="replace"))[-characters:]

    def _json(self, *words: Any) -> Any:
        told = json.loads(self.flwr(*words).stdout)
        assert told.get("success"), told
        return told

    def _prepare(self) -> None:
        """Make certificates, and the connection of the command line."""
        home = self.folder / "home"
        home.mkdir(parents=True)
        words = ["bash", str(CERTIFICATES), "localhost", "127.0.0.1"]
        subprocess.run(words, cwd=self.folder, check=True, capture_output=True, timeout=60)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.folder / "ca.crt"}"\n'
        )

    def _launch(self, name: str, *words: Any, **variables: str) -> subprocess.Popen[bytes]:
        self.logs[name] = self.folder / f"{name}-{uuid.uuid4().hex[:4]}.log"
        with self.logs[name].open("w") as sink:
            self.processes[name] = subprocess.Popen(
                [str(w) for w in words],
                env={**self.env, **variables},
                cwd=self.folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        return self.processes[name]
