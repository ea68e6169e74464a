"""Commands that are stopped or killed: what ends with them, what is kept, and how they go on."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.run import engine
from flwr_regs.experiments.run.progress import Progress
from tests.conftest import ROOT, until
from tests.experiments.runs import runs_of
from tests.processes import pids_with

METHOD = "EFL(1.0, density_up=0.1, density_down=0.1)"  # the clients keep residuals, the server too
WORDS = ["num-clients=3", "rounds=3", "checkpoint-every=0.001", "fraction-train=0.7"]
WORDS += [f"methods={METHOD}", "examples-per-client=20"]
MAIN = "from flwr_regs.experiments.cli import script; script()"
MARK = "FLWR_REGS_TEST_MARK"
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@contextlib.contextmanager
def started(*line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, as at a terminal; all that it starts ends with it."""
    with Path("log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *line],
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(Path.cwd())},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        print(Path("log").read_text())
        for pid in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def processes(word: str = "") -> list[int]:
    """The processes of a command that hold a word: the workers' is spawn_main."""
    return pids_with(f"{MARK}={Path.cwd()}", word)


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def begun() -> bool:
    """Whether a run has a record."""
    return any(Path("here/runs").glob("*.jsonl"))


def test_a_checkpoint_without_its_record_is_not_used() -> None:
    out, handler = Path("out").resolve(), signal.getsignal(signal.SIGTERM)
    assert main(["run", *WORDS, f"out={out}"]) == 0
    assert not (out / "checkpoints").exists()
    assert signal.getsignal(signal.SIGTERM) is handler
    path = records.record_path(out, METHOD, 7)
    before = load_file(out / f"{path.stem}.safetensors")
    (out / "checkpoints" / path.stem / "round-000002").mkdir(parents=True)
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:2]))
    assert main(["run", "--resume", str(out)]) == 0
    after = load_file(out / f"{path.stem}.safetensors")
    assert all(np.array_equal(before[n], after[n]) for n in before)


SLOW = """
from pathlib import Path
import torch

class Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        if Path("slow").exists() and self.training == Path("slow-training").exists():
            Path("begun").touch()
            torch.linalg.svd(torch.arange(2.0**24).reshape(4096, 4096).sin())  # a minute, one call
        return super().forward(x.flatten(1))
"""


@linux
@pytest.mark.timeout(900)  # on a busy machine, Ray's processes take minutes to import torch
@pytest.mark.parametrize(
    ("options", "training", "number"),
    [
        ([], False, signal.SIGINT),
        pytest.param([], False, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(["--runner", "stacked"], True, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(["--workers", "2"], True, signal.SIGINT, marks=pytest.mark.full),
        pytest.param(["--runner", "ray"], True, signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_a_command_whatever_it_computes(
    options: list[str], training: bool, number: int
) -> None:
    """Rounds that were trained are kept, and `plot` shows them."""
    Path("mine.py").write_text(SLOW)
    if training:
        Path("slow-training").touch()
    line = ["run", "methods=FedAvg", "model=mine.py:Slow", "rounds=3000", "out=here", *options]
    with started(*line, "--seeds", "1,2") as process:
        until("a record", begun)
        Path("slow").touch()
        until("in the call", Path("begun").exists, 400)
        time.sleep(1)  # the call is under way
        # a terminal's Ctrl-C reaches the whole group
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(5) == 128 + number  # two, on a busy machine
        until("the end of all", lambda: not processes(), 5)
    text = Path("log").read_text()
    assert "pictures were not written; to make them: flwr-regs plot" in text
    assert "to resume: flwr-regs run --resume" in text
    assert "Traceback" not in text
    assert main(["plot", "here"]) == 0
    assert "FedAvg" in Path("here/summary.csv").read_text()


@linux
def test_a_worker_that_is_killed_says_how_to_go_on() -> None:
    line = ["run", "methods=FedAvg", "rounds=3000", "out=here", "--seeds", "1,2", "--workers", "2"]
    with started(*line) as process:
        until("a record", begun)
        os.kill(processes("spawn_main")[0], signal.SIGKILL)
        assert process.wait(30) == 1
        assert not processes("spawn_main")
    text = Path("log").read_text()
    assert "go on with --resume" in text
    assert "Traceback" not in text


@linux
@pytest.mark.full  # a grid's workers stand in tests/flower/test_workers.py
@pytest.mark.parametrize("options", [["--workers", "2"], ["--runner", "ray"]])
def test_what_a_command_starts_ends_with_it_when_it_is_killed(options: list[str]) -> None:
    """Else they and the command that resumes write into the same records."""
    with started("run", "methods=FedAvg", "rounds=3000", "out=here", *options) as process:
        until("a record", begun)
        assert len(processes()) > 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until("the end of all", lambda: not processes(), 20)


def test_a_pool_that_is_stopped_ends_its_own_workers_alone() -> None:
    """A notebook's other child processes go on."""

    class Stopped(Progress):
        def round(self, *_: object) -> None:
            raise KeyboardInterrupt

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    try:
        runs = runs_of(methods="FedAvg", rounds=3000, checkpoint_every=0.0)
        with pytest.raises(KeyboardInterrupt):
            engine.execute(runs, None, Stopped(), workers=2)
        assert multiprocessing.active_children() == [child]
        assert child.is_alive()
    finally:
        child.kill()
        child.join()


def test_what_a_worker_raises_the_asking_process_raises() -> None:
    jobs = [partial(sys.exit, 0)]  # as a user's code may
    with pytest.raises(ValueError, match=r"your code ends the process: SystemExit: 0$"):
        [*engine._in_processes(jobs, Progress(), workers=1, keep=False)]


WORKERS = ["--seeds", "1,2", "--workers", "2"]


@linux
@pytest.mark.parametrize("options", [[], pytest.param(WORKERS, marks=pytest.mark.full)])
def test_ctrl_c_while_it_starts_is_one_line(options: list[str]) -> None:
    """While its workers start, it shows no traceback."""
    with started("run", "rounds=3000", "out=here", *options) as process:
        loads, who = ("/numpy/", "spawn_main") if options else ("/torch/", "")
        until("loading", lambda: any(loads in maps_of(pid) for pid in processes(who)), pause=0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    said = [x for x in Path("log").read_text().splitlines() if not x.startswith("loading models")]
    assert said == ["flwr-regs: interrupted"] or options
    assert "Traceback" not in " ".join(said)


def test_an_interrupted_command_gives_a_session_its_handlers_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "execute", interrupted)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit, match="130"):
        main(["run", *WORDS, "out=here"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupted_command_does_not_wait_for_pythons_own_end() -> None:
    code = (
        "import atexit, time; from flwr_regs.experiments import cli; cli.main = lambda: 130; "
        "atexit.register(time.sleep, 60); cli.script()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=50).returncode == 130


def test_a_reader_that_has_enough_ends_the_command_without_a_word() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MAIN, "methods"], **pipes, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
