"""The command line: what it prints, what it writes, and what it refuses before anything trains."""

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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.run import tuning
from flwr_regs.experiments.run.engine import Plan
from tests.conftest import ROOT

QUICK = ["rounds=2", "local-epochs=1"]
FLAT = "methods=FedAvg"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> int:
    try:
        return cli.main([*args])
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def test_run_says_little_writes_all_and_is_traceable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", *QUICK, "out=here", "--seeds", "1,2"]
    assert run(*command) == 0
    out = capsys.readouterr().out
    before = out[: out.index("round")].splitlines()
    assert len(before) <= 5
    assert re.search(r"FedFOR seed 2 round +2/2 +accuracy +\d", out)
    folder = tmp_path / "here"
    assert str(folder) in out
    assert (folder / "table.txt").read_text() in out
    written = {p.name for p in folder.iterdir()}
    for picture in ("accuracy", "megabytes", "seconds", "clients"):
        assert {f"{picture}.png", f"{picture}.pdf"} <= written
    assert {"table.csv", "table.tex", "history.json", "FedFOR-seed2.safetensors"} <= written
    saved = json.loads((folder / "settings.json").read_text())
    assert saved["command"] == ["flwr-regs", *command]
    assert saved["seeds"] == [1, 2]
    assert {"flwr", "torch", "numpy", "flwr-regs", "python"} <= saved["versions"].keys()
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert saved["commit"] is None or saved["commit"].startswith(head.stdout.strip())
    assert saved["runs"][0]["settings"]["local-epochs"] == 1
    history = json.loads((folder / "history.json").read_text())["methods"]
    assert list(history) == [
        f"{method}, seed {seed}" for seed in (1, 2) for method in ("FedAvg", "FedFOR")
    ]


def test_results_are_not_overwritten_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", FLAT, *QUICK, "out=here") == 0
    assert run("run", FLAT, *QUICK, "out=here") == 2
    assert "holds results: go on with --resume" in capsys.readouterr().err
    kept = (tmp_path / "here" / "accuracy.png").read_bytes()
    (tmp_path / "here" / "accuracy.png").unlink()
    assert run("plot", "here") == 0
    assert (tmp_path / "here" / "accuracy.png").read_bytes() == kept
    assert run("plot", "nowhere") == 2
    assert "nowhere holds no results" in capsys.readouterr().err
    two = [words.out_folder(words.read_settings([])) for _ in range(3)]
    assert len({*two}) == 3  # in one second


def test_a_sweep_goes_on_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", "FedFOR.alpha", "--values", "0,0.5", "--seeds", "1,2", *QUICK]
    assert run(*line, "out=whole") == 0
    table = capsys.readouterr().out
    assert re.search(r"^ FedFOR.alpha +last 5 +final +to 85% +worst +MB +CPU s$", table, re.M)
    shutil.copytree("whole", "part")
    for name in ("0.5-seed1", "0.5-seed2"):
        path = tmp_path / "part" / "runs" / f"{name}.jsonl"
        path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")  # killed in round 1
    left = records.record_path(tmp_path / "part", "0", 1).stat().st_mtime_ns
    assert [(label, j.seed) for label, j in Plan.load(Path("part")).missing(Path("part"))] == [
        ("0.5", 1),
        ("0.5", 2),
    ]
    assert run("sweep", "--resume", "part") == 0
    assert records.record_path(tmp_path / "part", "0", 1).stat().st_mtime_ns == left
    for name in ("0", "0.5"):
        for seed in (1, 2):
            pair = [
                records.read(records.record_path(Path(f), name, seed)) for f in ("whole", "part")
            ]
            assert pair[0] is not None
            assert pair[1] is not None
            assert pair[0].test == pair[1].test
    assert run("sweep", "--resume", "part", "lr=1") == 2
    assert "--resume takes its settings from the folder" in capsys.readouterr().err
    assert run("sweep", "--resume", str(tmp_path)) == 2
    assert "holds no results" in capsys.readouterr().err


def test_workers_give_the_bits_of_one_process(tmp_path: Path) -> None:
    line = ["run", "methods=FedFOR", *QUICK, "--seeds", "1,2"]
    assert run(*line, "out=one") == 0
    assert run(*line, "out=two", "--workers", "2") == 0
    for seed in (1, 2):
        name = f"FedFOR-seed{seed}.safetensors"
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_one_seed_that_diverges_does_not_void_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", "lr", FLAT, *QUICK, "--values", "0.05,1e30", "--seeds", "1", "out=here"]
    assert run(*line) == 0
    table = (tmp_path / "here" / "table.txt").read_text()
    assert re.search(r"^ 1e30 +–", table, re.M)
    assert "1e30: 1 of 1 seed diverged" in table
    assert run("sweep", "lr", FLAT, *QUICK, "--values", "1e30,2e30", "--seeds", "1") == 1
    assert run("run", FLAT, *QUICK, "lr=1e30") == 0  # a result, which the table tells


def test_a_users_error_names_the_line_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom flwr_regs import Term\n\n\n"
        "@dataclass(frozen=True)\nclass Bad(Term):\n    name: ClassVar[str] = 'bad'\n\n"
        "    def correct(self, grads, params, ctx):\n        return {n: g / 0 for n, g in grds.items()}\n"
    )
    assert run("run", "methods=FedAvg, mine.py:Bad", *QUICK, "out=here") == 1
    captured = capsys.readouterr()
    assert "NameError" in captured.err
    assert "mine.py" in captured.err
    assert "Traceback" not in captured.err + captured.out
    assert len((captured.out + captured.err).splitlines()) < 40
    assert re.search(r"^ FedAvg +\d", captured.out, re.M)  # the other method has its row
    assert [label for label, _ in Plan.load(Path("here")).missing(Path("here"))] == ["mine.py:Bad"]


def test_cases_and_two_methods_in_a_sweep_have_rows_of_their_own(tmp_path: Path) -> None:
    cases = [
        "--case",
        "dense: methods=FedAvg",
        "--case",
        "small: methods=EFL(0, 0.01, density_down=0.01)",
    ]
    assert run("sweep", "rounds=6", "--seeds", "1", *cases, "out=here") == 0
    dense, small = Plan.load(Path("here")).results(Path("here")).rows()
    assert (dense["method"], small["method"]) == ("dense", "small")
    assert dense["mb"] > 5 * small["mb"]
    line = ["sweep", "lr", *QUICK, "--values", "0.1,0.2", "--seeds", "1"]
    args = cli._parser().parse_args(line)
    labels = [label for label, _ in words.plan_of(args).jobs]
    assert labels == ["0.1, FedAvg", "0.1, FedFOR", "0.2, FedAvg", "0.2, FedFOR"]


def test_bench_tunes_with_equal_trials_on_data_that_the_test_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", *QUICK, "--tune", "lr=0.02..2", "--tune", "FedFOR.alpha=0.01..1"]
    line += ["--trials", "3", "--seeds", "1,2", "--tuning-seeds", "9", "out=here"]
    status = run(*line)
    out = capsys.readouterr().out
    bench = tuning.Bench.load(Path("here"))
    trials = Plan.load(Path("here/tuning"))
    assert len(trials.jobs) == 6
    assert all(j.seed == 9 and j.held_out_share == 0.2 for _, j in trials.jobs)
    assert len({(j.methods, j.lr) for _, j in trials.jobs}) == 6
    runs = trials.recorded(Path("here/tuning"))
    best: dict[str, Any] = {}
    for r in runs:
        name = r.label.partition(" ")[0]
        score = np.mean([p["accuracy"] for p in r.test if p["round"]][-5:])
        if name not in best or score > best[name][0]:
            best[name] = (score, r.job["lr"], r.job["methods"])
    test = Plan.load(Path("here"))
    assert all(j.held_out_share == 0 for _, j in test.jobs)
    for label, job in test.jobs:
        assert (job.lr, job.methods) == best[label][1:]
    assert "vs FedAvg" in out
    assert "95 % interval" in out
    assert "NOTE: FedFOR: lr = " in out
    assert status == (1 if "collapsed" in out or "diverge" in out or "rejected" in out else 0)
    shutil.rmtree("here/runs")
    assert run("bench", "--resume", "here") == status
    assert len(test.missing(Path("here"))) == 0
    assert bench.methods == ["FedAvg", "FedFOR"]


def test_what_is_tuned_is_not_in_the_name_of_a_row() -> None:
    methods = "FedProx(mu=0.1); EFL(lam=1); EFL(lam=1, density_up=0.1); FedADC(beta=0.6); FedADC(beta=0.9)"
    tune = ("FedProx.mu=0.1,1", "EFL.lam=0.1..1", "FedADC.beta=0.3,0.6")
    bench = tuning.Bench({"methods": methods}, tune, 2, (1,), (9,))
    assert [*bench.labels] == [
        *("FedProx", "EFL", "EFL(density_up=0.1)", "FedADC(beta=0.6)", "FedADC(beta=0.9)")
    ]


def test_bench_fails_when_a_method_collapses(tmp_path: Path) -> None:
    line = ["bench", FLAT, *QUICK, "--tune", "lr=0.1,0.2", "--tuning-seeds", "9", "--seeds", "1,2"]
    assert run(*line, "out=here") == 0
    path = records.record_path(Path("here"), "FedAvg", 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["test"]["accuracy"] = 0.9
    lines[3]["test"]["accuracy"] = 0.1
    path.write_text("\n".join(map(json.dumps, lines)))
    # two rounds: the mean of both would hide it
    lines[2]["round"]["failures"] = {"3": "array 'w' holds NaN or infinity"}
    path.write_text("\n".join(map(json.dumps, lines)))
    assert run("bench", "--resume", "here") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "lr=-1"], "setting 'lr' must be a number above 0, not -1"),
        (["run", "learning-rate=1"], "unknown setting 'learning-rate'"),
        (["run", "lr"], "'lr' is not of the form key=value"),
        (["run", "dataset=cifar"], "one of digits, mnist"),
        (["run", "methods=fedavg"], "did you mean 'FedAvg'"),
        (["run", "partition=shards-mcmahan", "num-clients=2000"], "2000"),
        (["run", "--seeds", "1,1"], "--seeds must be different whole numbers"),
        (["run", "methods=FedAvg, FedAvg()", "--app", "nowhere"], "holds no pyproject.toml"),
        (["sweep", "lr"], "sweep needs a key and --values"),
        (["sweep", "--case", "methods=FedAvg"], "--case must look like 'LABEL: key=value ...'"),
        (["sweep", "--case", "a: lr=0.1", "--case", "a: lr=1"], "a label of its own"),
        (["sweep"], "or a --case"),
        (["sweep", "lr", "--case", "a: lr=1"], "or --case: not both"),
        (["bench", "--tune", "lr=2..1"], "a range is LOW..HIGH"),
        (["bench", "--tune", "lrr=1..2"], "unknown setting 'lrr'; did you mean 'lr'"),
        (["bench", "--tune", "FedFOO.alpha=1..2"], "none of FedAvg, FedFOR has this"),
        (["bench", "--tune", "lr=1..2", "--seeds", "101"], "both for tuning and for the test"),
        (["bench", "--tune", "FedFOR.alfa=1..2"], "did you mean 'alpha'"),
        (["bench", "--tune", "lr=1..2", "--tune", "lr=2..3"], "names a key twice"),
        (["bench", "--tune", "seed=1,2"], "the setting 'seed' cannot be tuned"),
        (["bench", "held-out-clients=2"], "leave held-out-clients out"),
        (["bench", "seed=3"], "'seed' does not count beside --seeds (1,2,3,4,5)"),
        (["sweep", "lr", "--values", "1", "seed=3"], "'seed' does not count beside --seeds"),
        (["sweep", "seed", "--values", "1,2"], "'seed' does not count beside --seeds"),
        (["sweep", "--case", "a: seed=3"], "'seed' does not count beside --seeds"),
        (["run", "--seeds", "99999999999999999999"], "--seeds must be different whole numbers"),
        (["run", "--data-dir", "DIR"], "--data-dir; data-dir is a setting: data-dir=..."),
        (["run", "methods=mine.py:Thing"], "or a list of terms, not a value of type Thing"),
        (["plot", "partition", "out=mine.py/x"], "results cannot be written into"),
        (["plot", "partition", "dirichlet-alpha=0"], "'dirichlet-alpha' must be a number above 0"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_trains(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("class Thing:\n    pass\n")
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions", "settings"])
def test_what_there_is_is_listed(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", what) == 0
    out = capsys.readouterr().out
    expected = {
        "methods": "FedADCPlus",
        "datasets": "digits-domains",
        "models": "cnn-bn",
        "partitions": "dirichlet-hsu",
        "settings": "target-accuracy",
    }
    assert re.search(rf"^ *{expected[what]}  +\S", out, re.M)


def test_results_are_reproduced_or_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", *QUICK, "out=here", "--seeds", "1,2") == 0
    assert run("reproduce", "here", "--seeds", "2") == 0
    out = capsys.readouterr().out
    assert "2 of 2 runs are equal within 0.5 points" in out
    path = records.record_path(Path("here"), "FedFOR", 2)
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.9'))
    assert run("reproduce", "here", "--seeds", "2") == 1
    out = capsys.readouterr().out
    assert re.search(r"FedFOR, seed 2: 9.\.\d\d % there, \d\d\.\d\d % here  DIFFERS", out)
    assert "1 of 2 runs are equal" in out
    assert run("reproduce", "here", "--seeds", "3") == 2
    assert run("reproduce", "here", "lr=1") == 2


def test_the_version_and_a_dry_run_train_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"flwr-regs \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run("run", *QUICK, "--seeds", "1,2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^FedFOR +2 x \d+ s$", out, re.M)
    assert "2 rounds of about 5 local steps" in out
    assert re.search(r"in all 4 runs, about \d+ s", out)
    assert not list(tmp_path.iterdir())


def test_the_label_spread_is_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", "partition", "partition=classes", "num-clients=10", "out=here") == 0
    assert "labels a client: 2 to 2" in capsys.readouterr().out
    assert Path("here/partition.png").read_bytes().startswith(b"\x89PNG")
    assert Path("here/partition.pdf").read_bytes().startswith(b"%PDF")


def environment(proc: Path) -> bytes:
    try:
        return (proc / "environ").read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.parametrize(
    "line",
    [
        ["run", "methods=FedAvg"],
        ["sweep", "lr", FLAT, "--values", "0.05,0.1,0.2", "--seeds", "1,2", "--workers", "2"],
    ],
)
def test_one_press_of_ctrl_c_ends_all_at_once_and_loses_nothing(
    line: list[str], tmp_path: Path
) -> None:
    """A whole process group, as at a terminal; found by a mark that every process inherits."""
    code = "import sys; from flwr_regs.experiments.cli import main; sys.exit(main())"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *line, "rounds=3000", "out=here"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "FLWR_REGS_TEST_MARK": str(tmp_path)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        found: list[records.Run | None] = []
        for _ in range(1500):
            found = [records.read(p) for p in (tmp_path / "here/runs").glob("*.jsonl")]
            if sum(len(r.accuracy) for r in found if r) >= 4 or process.poll() is not None:
                break
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        pressed = time.monotonic()
        assert process.wait(60) == 130, (tmp_path / "log").read_text()[-3000:]
        took = time.monotonic() - pressed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert "go on with: flwr-regs" in text
    assert json.loads((tmp_path / "here/history.json").read_text())["methods"]
    assert "Traceback" not in text
    assert took < 20, took  # below 3 s on a free machine
    mark = f"FLWR_REGS_TEST_MARK={tmp_path}".encode()
    for _ in range(100):  # Python's own helper processes end a moment after the one they help
        left = [p for p in Path("/proc").glob("[0-9]*") if mark in environment(p)]
        if not left:
            break
        time.sleep(0.1)
    assert not left, [(p / "cmdline").read_text() for p in left]
    after = [records.read(p) for p in (tmp_path / "here/runs").glob("*.jsonl")]
    assert sum(len(r.accuracy) for r in after if r) >= 4
    assert not any(r.ended for r in after if r)
    assert Plan.load(tmp_path / "here").missing(tmp_path / "here")
