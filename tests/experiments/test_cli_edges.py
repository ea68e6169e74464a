"""The command line at its edges: resuming, benchmarks, labels, and processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flwr_regs.experiments import words
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.run import engine, estimate, flower_run, tuning
from flwr_regs.experiments.run.engine import Plan
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.settings.job import Job
from tests.conftest import ROOT
from tests.experiments.test_cli import FLAT, QUICK, run

BAD = """from flwr_regs import Term


class Bad(Term):
    name = "bad"

    def correct(self, grads, params, ctx):
        raise KeyError("x")
"""
MAIN = "import sys; from flwr_regs.experiments.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_clients_test_every_method_if_they_must_test_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FedBN's clients test on their own classes, which is easier than the server's test set."""
    line = ["run", "methods=FedAvg, FedBN", "model=cnn-bn", "partition=iid", *QUICK, "out=here"]
    assert run(*line) == 0
    assert "what the clients test, a mean over clients" in " ".join(capsys.readouterr().out.split())
    plan = Plan.load(Path("here"))
    assert all(job.test_on_clients for _, job in plan.jobs)
    for made in plan.recorded(Path("here")):
        assert all("evaluate" in entry for entry in made.rounds), made.label
        assert [point["round"] for point in made.test] == [1, 2]
    assert (
        run(
            "run",
            "methods=FedAvg, FedBN",
            "model=cnn-bn",
            "partition=iid",
            "held-out-clients=2",
            "--dry-run",
        )
        == 2
    )
    assert run("run", "methods=FedAvg", *QUICK, "out=alone") == 0
    assert not any(job.test_on_clients for _, job in Plan.load(Path("alone")).jobs)


def test_bench_takes_whole_numbers_words_and_positional_arguments(tmp_path: Path) -> None:
    def points(*tune: str, methods: str = "FedFOR(0.5)", trials: int = 4, **settings: Any) -> Any:
        bench = tuning.Bench({"methods": methods, **settings}, tune, trials, (1,), (101,))
        return bench, bench.tuning().jobs

    _, jobs = points("local-epochs=1..40", "restart-lr=true,false", "optimizer=SGD,Adam")
    assert len({job for _, job in jobs}) == 4
    assert all(isinstance(job.local_epochs, int) and 1 <= job.local_epochs <= 40 for _, job in jobs)
    _, jobs = points("local-epochs=1..3", trials=3)
    assert sorted(job.local_epochs for _, job in jobs) == [1, 2, 3]
    bench, jobs = points("FedFOR.alpha=0.1..1", **{"held-out-share": 0.3})
    assert all(re.fullmatch(r"FedFOR\(0\.\d+\)", job.methods) for _, job in jobs)
    assert {job.held_out_share for _, job in jobs} == {0.3}
    # the test is never on the data of tuning
    assert {job.held_out_share for _, job in bench.test({"FedFOR(0.5)": {}}).jobs} == {0.0}


def test_a_benchmark_whose_every_trial_diverges_failed(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", FLAT, *QUICK, "--tune", "lr=1e30,2e30", "--tuning-seeds", "9", "--seeds", "1"]
    assert run(*line, "out=here") == 1
    assert "every one of its 2 trials failed or diverged" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"bench": {"x": 1}}', '{"bench": []}', "{}"])
def test_a_damaged_benchmark_is_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.json").write_text(text)
    assert run("bench", "--resume", str(tmp_path)) == 2
    assert "bench.json is damaged, or of another version" in capsys.readouterr().err


def test_a_benchmark_stays_one_when_it_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", FLAT, *QUICK, "--tune", "lr=0.1,0.2", "--tuning-seeds", "9", "--seeds", "1,2"]
    assert run(*line, "out=here") == 0
    table = Path("here/table.txt").read_text()
    assert "NOTE: FedAvg: lr" in table
    assert "FedAvg [lr=0.2]" in Path("here/tuning/table.txt").read_text()
    assert run("plot", "here") == 0
    assert Path("here/table.txt").read_text() == table
    command = json.loads(Path("here/settings.json").read_text())["command"]
    shutil.rmtree("here/runs")
    assert run("run", "--resume", "here") == 2
    assert "holds a benchmark: flwr-regs bench --resume" in capsys.readouterr().err
    assert run("bench", "--resume", "here", "--dry-run") == 0
    assert "in all 2 runs" in capsys.readouterr().out
    assert run("bench", "--resume", "here") == 0
    assert json.loads(Path("here/settings.json").read_text())["command"] == command
    assert run("bench", "--resume", "here", "--dry-run") == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")
    Path("here/settings.json").unlink()
    assert run("plot", "here") == 2
    assert "is still tuning: go on with flwr-regs bench --resume here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"runs": 3}'),
        '{"runs": [3], "heading": "method", "ordered": false}',
        '{"runs": [], "heading": "method", "ordered": false}',
        '{"runs": [{"label": "A", "settings": {"new": 1}}], "heading": "method", "ordered": false}',
        '{"runs": [{"label": "A", "settings": "lr"}], "heading": "method", "ordered": false}',
    ],
)
def test_a_damaged_plan_is_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(text)
    for command in (["run", "--resume"], ["plot"], ["reproduce"]):
        assert run(*command, str(tmp_path)) == 2
        err = capsys.readouterr().err
        assert "settings.json is damaged, or of another version" in err
        assert err.count("\n") == 1


def test_what_would_not_count_beside_resume_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", "lr", "--values", "0.1", FLAT, *QUICK, "--seeds", "1,2", "out=here"]
    assert run(*line) == 0
    for more in (["--seeds", "4"], ["--seeds=4"], ["--values", "1"], ["--app", "x"]):
        assert run("sweep", "--resume", "here", *more) == 2
        assert "--resume takes what --" in capsys.readouterr().err
    Path("here/runs/0.1-seed2.jsonl").unlink()
    assert run("run", "--resume", "here", "--runner", "ray") == 2
    assert "--runner ray trains methods" in capsys.readouterr().err
    assert run("sweep", "--resume", "here", "--dry-run", "--workers", "2") == 0
    assert "in all 1 runs" in capsys.readouterr().out
    # of another version, or a run of another program
    Path("here/runs/0.1-seed2.jsonl").write_text('{"run": {"label": "0.1"}}\n')
    assert run("plot", "here") == 2
    assert "0.1-seed2.jsonl is damaged, or of another version" in capsys.readouterr().err


def test_a_run_that_is_missing_is_equal_to_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(BAD)
    assert run("run", "methods=mine.py:Bad", *QUICK, "out=here") == 1
    assert run("reproduce", "here") == 1
    assert "missing there, missing here  DIFFERS" in capsys.readouterr().out


def test_paths_are_kept_whole() -> None:
    Path("data").mkdir()
    job = words.read_settings(["data-dir=data", "code-dir=.", "out=x"])
    assert all(Path(p).is_absolute() for p in (job.data_dir, job.code_dir, job.out))


@contextlib.contextmanager
def started(*line: str) -> Any:
    """A command in a process group of its own, as at a terminal; the group's processes end with it."""
    with Path("log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *line],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def workers_of(group: int) -> list[int]:
    """The processes of a group that train."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (proc / "cmdline").read_text()
            pid = int(proc.name)
            if "spawn_main" in command and os.getpgid(pid) == group:
                found.append(pid)
    return found


def until(there: Callable[[], bool], seconds: float = 150) -> bool:
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.1)
    return there()


LONG = ["run", FLAT, "rounds=3000", "out=here", "--seeds", "1,2,3", "--workers", "2"]


def both_train() -> bool:
    found = [records.read(path) for path in Path("here/runs").glob("*.jsonl")]
    return sum(bool(r and r.accuracy) for r in found) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Else they and the command that resumes write into the same records."""
    with started(*LONG) as process:
        assert until(both_train), Path("log").read_text()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert until(lambda: not workers_of(process.pid), 20)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_that_is_killed_says_how_to_go_on() -> None:
    with started(*LONG) as process:
        assert until(both_train), Path("log").read_text()
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
        assert process.wait(30) == 1
        assert not workers_of(process.pid)
    text = Path("log").read_text()
    assert "go on with --resume" in text
    assert "Traceback" not in text


def test_ctrl_c_while_it_starts_is_one_line() -> None:
    with started("list", "methods") as process:
        assert until(lambda: loads_torch(process.pid))
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(30)
    assert (status, Path("log").read_text()) == (130, "flwr-regs: interrupted\n")


def loads_torch(pid: int) -> bool:
    return "/torch/" in Path(f"/proc/{pid}/maps").read_text()


def test_ray_goes_on_with_what_is_missing_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One method of the seed has ended; the bars know the other one alone."""
    assert run("run", *QUICK, "out=here") == 0
    Path("here/runs/FedFOR-seed7.jsonl").unlink()
    plan, folder = Plan.load(Path("here")), Path("here")

    def runs_it(jobs: Any, *_: Any) -> None:
        for job in jobs:
            engine.train(plan, job.methods, job, folder, lambda *_: None)

    monkeypatch.setattr(flower_run, "_run_seed", runs_it)
    monkeypatch.setattr(flower_run, "superlink", lambda *_: contextlib.nullcontext(1))
    missing = [(label, job.seed, job.rounds) for label, job in plan.missing(folder)]
    assert [label for label, _, _ in missing] == ["FedFOR"]
    assert len(flower_run.execute(plan, folder, Progress(missing))) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"personalise": "plain"},
        {"cohorts": "class-covering", "fraction-train": 0.6},
        {"methods": "FedBN", "model": "cnn-bn", "partition": "iid"},
    ],
)
def test_a_dry_run_counts_what_a_run_does(settings: dict[str, Any]) -> None:
    """Within a factor of three on a busy machine, in processor seconds."""
    job = Job.from_run_config({"methods": "FedAvg", "rounds": 8, "local-epochs": 3, **settings})
    about = estimate.seconds(job)
    began = time.monotonic()
    run = engine.train(Plan([("A", job)]), "A", job, None, lambda *_: None)
    assert run.whole
    took = time.monotonic() - began
    assert took / 3 < about < took * 3


def test_a_dry_run_of_what_fails_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(BAD)
    assert run("run", "methods=mine.py:Bad", *QUICK, "--dry-run") == 1
    assert "KeyError: 'x'" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_without_a_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "methods"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
