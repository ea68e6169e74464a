"""A run on a real federation in which one client has an accident, and what came of it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.faults.federation import Federation
from tests.conftest import ROOT
from tests.processes import until

APP = ROOT / "docs/examples/deployment/app"
VICTIM = 1


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
        With its nodes running; if they have served a run, they are started anew.
    folder : Path
        Does not exist yet; gets the app, the marks, the checkpoints and the results.
    kind : str
        ``"none"``, an accident of accident_app.py, or the client waits in that round: ``"hold"`` before it
        trains, ``"trained"`` before it replies.
    at : int
        The round of the accident.
    task : str
        Code that is added to the app's task.py.
    **config
        The app's run config.
    """

    def __init__(
        self,
        federation: Federation,
        folder: Path,
        kind: str = "none",
        at: int = 1,
        task: str = "",
        **config: Any,
    ) -> None:
        if federation.served:
            federation.restart_nodes()
        self.federation, self.folder, self.at = federation, folder, at
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.app = folder / "app"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("accident_app.py"), self.app / "accident.py")
        with (self.app / "task.py").open("a") as file:
            file.write(task)
        project = self.app / "pyproject.toml"
        text = project.read_text().replace('"client:app"', '"accident:app"')
        own = f'marks = ""\naccident = "{kind}"\naccident-round = {at}\naccident-partition = {VICTIM}\n'
        own += 'disk = ""\n'
        project.write_text(text + own)
        if kind in ("hold", "trained"):
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

        def begun() -> list[float] | None:
            times = sorted(p.stat().st_mtime for p in self.marks.glob(f"{number}-{client}-*"))
            return times if len(times) >= least else None

        return until(f"training of client {client} in round {number}", begun, 400)[least - 1]

    def accident(self) -> float:
        """Wait until the victim is in its round; return since when (as ``time.time``)."""
        return self.mark(self.at, VICTIM)

    def hold(self, number: int, client: int) -> None:
        """Let a client wait in a round until `release`."""
        (self.marks / f"hold-{number}-{client}").touch()

    def release(self, number: int | str = "*") -> None:
        """Let the clients that wait, in a round or in all, go on."""
        for path in self.marks.glob(f"hold-{number}-*"):
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
