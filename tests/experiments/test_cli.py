"""The command line: what it prints and writes, what it refuses before anything trains, how it goes on."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.report import results
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.run import engine, estimate, flower_run, tuning
from flwr_regs.experiments.run.engine import Plan
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.settings.job import Job
from tests.conftest import ROOT

QUICK = ["rounds=2", "local-epochs=1", "num-clients=4"]
FLAT = "methods=FedAvg"
BAD = """from flwr_regs import Term


class Bad(Term):
    name = "bad"

    def correct(self, grads, params, ctx):
        raise KeyError("x")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own; one picture is drawn, the clients', since they take longer than the runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "PICTURES", {})


def run(*args: str) -> int:
    try:
        return cli.main([*args])
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def printed(*args: str) -> tuple[int, str]:
    """The status of a command, and its standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run(*args)
    return status, out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results of two methods over two seeds, and what the command said."""
    folder = tmp_path_factory.mktemp("trained") / "here"
    status, out = printed("run", *QUICK, f"out={folder}", "--seeds", "1,2")
    assert status == 0
    return folder, out


@pytest.fixture
def here(trained: tuple[Path, str]) -> Path:
    """A copy of these results, in the current folder."""
    return Path(shutil.copytree(trained[0], "here"))


def test_run_says_little_writes_all_and_is_traceable(trained: tuple[Path, str]) -> None:
    folder, out = trained
    assert len(out[: out.index("round")].splitlines()) <= 5
    assert re.search(r"FedFOR seed 2 round +2/2 +accuracy +\d", out)
    assert str(folder) in out
    assert (folder / "table.txt").read_text() in out
    written = {p.name for p in folder.iterdir()}
    for picture in ("accuracy", "megabytes", "seconds", "clients"):
        assert {f"{picture}.png", f"{picture}.pdf"} <= written
    assert {"table.csv", "table.tex", "history.json", "FedFOR-seed2.safetensors"} <= written
    saved = json.loads((folder / "settings.json").read_text())
    assert saved["command"] == ["flwr-regs", "run", *QUICK, f"out={folder}", "--seeds", "1,2"]
    assert saved["seeds"] == [1, 2]
    assert {"flwr", "torch", "numpy", "flwr-regs", "python"} <= saved["versions"].keys()
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert saved["commit"] is None or saved["commit"].startswith(head.stdout.strip())
    assert saved["runs"][0]["settings"]["local-epochs"] == 1
    history = json.loads((folder / "history.json").read_text())["methods"]
    assert list(history) == [f"{m}, seed {s}" for s in (1, 2) for m in ("FedAvg", "FedFOR")]


def test_results_are_not_overwritten_and_drawn_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", FLAT, *QUICK, "out=here") == 2
    assert "holds results: go on with --resume" in capsys.readouterr().err
    kept = (here / "clients.png").read_bytes()
    (here / "clients.png").unlink()
    assert run("plot", "here") == 0
    assert (here / "clients.png").read_bytes() == kept
    for command in (["plot"], ["run", "--resume"], ["bench", "--resume"]):
        assert run(*command, "nowhere") == 2
        assert "nowhere holds no " in capsys.readouterr().err


@pytest.mark.full
def test_what_is_missing_is_trained_by_workers_to_the_same_bits(
    here: Path, trained: tuple[Path, str]
) -> None:
    first = records.record_path(here, "FedFOR", 1)
    first.write_text("\n".join(first.read_text().splitlines()[:2]) + "\n")  # killed in round 1
    records.record_path(here, "FedFOR", 2).unlink()
    models = [f"FedFOR-seed{seed}.safetensors" for seed in (1, 2)]
    for model in models:
        (here / model).unlink()
    kept = records.record_path(here, "FedAvg", 1).stat().st_mtime_ns
    missing = [(label, job.seed) for label, job in Plan.load(here).missing(here)]
    assert missing == [("FedFOR", 1), ("FedFOR", 2)]
    assert run("run", "--resume", "here", "--workers", "2") == 0
    assert records.record_path(here, "FedAvg", 1).stat().st_mtime_ns == kept
    for seed, model in zip((1, 2), models, strict=True):
        assert (here / model).read_bytes() == (trained[0] / model).read_bytes()
        again, before = (
            records.read(records.record_path(f, "FedFOR", seed)) for f in (here, trained[0])
        )
        assert again is not None
        assert before is not None
        assert again.test == before.test


def test_what_would_not_count_beside_resume_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--seeds", "4"], ["--seeds=4"], ["--app", "x"]):
        assert run("run", "--resume", "here", *more) == 2
        assert "--resume takes what --" in capsys.readouterr().err
    assert run("run", "--resume", "here", "lr=1") == 2
    assert "--resume takes its settings from the folder" in capsys.readouterr().err
    record = records.record_path(here, "FedAvg", 2)
    record.unlink()
    assert run("run", "--resume", "here", "--dry-run", "--workers", "2") == 0
    assert "in all 1 runs" in capsys.readouterr().out
    record.write_text('{"run": {"label": "FedAvg"}}\n')  # of another version
    assert run("plot", "here") == 2
    assert "FedAvg-seed2.jsonl is damaged, or of another version" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]"),
        '{"runs": [3], "heading": "method", "ordered": false}',
        '{"runs": [], "heading": "method", "ordered": false}',
        '{"runs": [{"label": "A", "settings": {"new": 1}}], "heading": "method", "ordered": false}',
    ],
)
def test_a_damaged_file_is_one_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(text)
    for command in (["run", "--resume"], ["plot"], ["reproduce"]):
        assert run(*command, str(tmp_path)) == 2
        said = capsys.readouterr().err
        assert "settings.json is damaged, or of another version" in said
        assert said.count("\n") == 1
    (tmp_path / "bench.json").write_text(text)
    assert run("bench", "--resume", str(tmp_path)) == 2
    assert "bench.json is damaged, or of another version" in capsys.readouterr().err


def test_results_are_reproduced_or_it_is_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = records.record_path(here, "FedFOR", 2)
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.9'))
    assert run("reproduce", "here", "--seeds", "2") == 1
    out = capsys.readouterr().out
    assert re.search(r"FedFOR, seed 2: 9.\.\d\d % there, \d\d\.\d\d % here  DIFFERS", out)
    assert re.search(r"FedAvg, seed 2: (\d\d\.\d\d %) there, \1 here$", out, re.M)
    assert "1 of 2 runs are equal within 0.5 points" in out
    assert run("reproduce", "here", "--seeds", "2", "--tolerance", "100") == 0
    assert run("reproduce", "here", "--seeds", "3") == 2
    assert run("reproduce", "here", "lr=1") == 2


def test_ray_goes_on_with_what_is_missing_of_a_seed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One method of the seed has ended; the bars know the other one alone."""
    records.record_path(here, "FedFOR", 2).unlink()
    plan = Plan.load(here)

    def runs_it(jobs: Any, *_: Any) -> None:
        for job in jobs:
            engine.train(plan, job.methods, job, here, lambda *_: None)

    monkeypatch.setattr(flower_run, "_run_seed", runs_it)
    monkeypatch.setattr(flower_run, "superlink", lambda *_: contextlib.nullcontext(1))
    missing = [(label, job.seed, job.rounds) for label, job in plan.missing(here)]
    assert [label for label, _, _ in missing] == ["FedFOR"]
    assert len(flower_run.execute(plan, here, Progress(missing))) == 4


def test_a_value_that_diverges_does_not_void_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "lr", FLAT, *QUICK, "--seeds", "1"]
    assert run(*line, "--values", "0.05,1e30", "out=here") == 0
    table = Path("here/table.txt").read_text()
    assert re.search(r"^ lr +last 5 +final +best +to 85% +worst +MB +CPU s$", table, re.M)
    assert re.search(r"^ 1e30 +–", table, re.M)
    assert "1e30: 1 of 1 seed diverged" in table
    assert run(*line, "--values", "1e30,2e30") == 1
    assert run("sweep", "--resume", "here", "--values", "1") == 2
    Path("here/runs/0.05-seed1.jsonl").unlink()
    assert run("run", "--resume", "here", "--runner", "ray") == 2
    assert "--runner ray trains methods" in capsys.readouterr().err


def test_cases_and_two_methods_in_a_sweep_have_rows_of_their_own() -> None:
    small = "small: methods=EFL(0, 0.01, density_down=0.01)"
    cases = ["--case", "dense: methods=FedAvg", "--case", small]
    assert run("sweep", *QUICK, "rounds=6", "--seeds", "1", *cases, "out=here") == 0
    dense, sparse = Plan.load(Path("here")).results(Path("here")).rows()
    assert (dense["method"], sparse["method"]) == ("dense", "small")
    assert dense["mb"] > 5 * sparse["mb"]
    for line, rows in (
        (["lr", "--values", "0.1,0.2"], [f"{v}, {m}" for v in (0.1, 0.2) for m in ("FedAvg", "FedFOR")]),
        (["FedFOR.alpha", "--values", "0;0.5"], ["0", "0.5"]),
    ):  # fmt: skip
        args = cli._parser().parse_args(["sweep", *line, "--seeds", "1"])
        assert [label for label, _ in words.plan_of(args).jobs] == rows
    assert {job.methods for _, job in words.plan_of(args).jobs} == {
        "FedFOR(alpha=0)",
        "FedFOR(alpha=0.5)",
    }


def test_a_users_error_names_the_line_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(BAD)
    assert run("run", "methods=FedAvg, mine.py:Bad", *QUICK, "out=here") == 1
    captured = capsys.readouterr()
    assert "KeyError: 'x'" in captured.err
    assert "mine.py" in captured.err
    assert "Traceback" not in captured.err + captured.out
    assert len((captured.out + captured.err).splitlines()) < 40
    assert re.search(r"^ FedAvg +\d", captured.out, re.M)  # the other method has its row
    assert [label for label, _ in Plan.load(Path("here")).missing(Path("here"))] == ["mine.py:Bad"]
    assert run("reproduce", "here") == 1
    assert "missing there, missing here  DIFFERS" in capsys.readouterr().out
    assert run("run", "methods=mine.py:Bad", *QUICK, "--dry-run") == 1
    assert "KeyError: 'x'" in capsys.readouterr().err


def test_clients_test_every_method_if_they_must_test_one() -> None:
    """FedBN's clients test on their own classes, which is easier than the server's test set."""
    line = ["methods=FedAvg, FedBN", "model=cnn-bn", "partition=iid", *QUICK, "rounds=1"]
    status, out = printed("run", *line, "out=here")
    assert status == 0
    assert "what the clients test, a mean over clients" in " ".join(out.split())
    plan = Plan.load(Path("here"))
    assert all(job.test_on_clients for _, job in plan.jobs)
    for made in plan.recorded(Path("here")):
        assert all("evaluate" in entry for entry in made.rounds), made.label
        assert [point["round"] for point in made.test] == [1]
    assert run("run", *line, "held-out-clients=2", "--dry-run") == 2


def test_bench_tunes_on_data_that_the_test_has_not_and_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["bench", *QUICK, "--tune", "lr=0.02..2", "--tune", "FedFOR.alpha=0.01..1"]
    line += ["--trials", "3", "--seeds", "1,2", "--tuning-seeds", "9", "out=here"]
    status = run(*line)
    out = capsys.readouterr().out
    trials, test = Plan.load(Path("here/tuning")), Plan.load(Path("here"))
    assert len(trials.jobs) == len({(job.methods, job.lr) for _, job in trials.jobs}) == 6
    assert all(job.seed == 9 and job.held_out_share == 0.2 for _, job in trials.jobs)
    best: dict[str, Any] = {}
    for r in trials.recorded(Path("here/tuning")):
        name = r.label.partition(" ")[0]
        score = np.mean([p["accuracy"] for p in r.test if p["round"]])
        if name not in best or score > best[name][0]:
            best[name] = (score, r.job["lr"], r.job["methods"])
    for label, job in test.jobs:
        assert (job.lr, job.methods) == best[label][1:]
        assert job.held_out_share == 0
    assert "vs FedAvg" in out
    assert "95 % interval" in out
    assert "NOTE: FedFOR: lr = " in out
    assert status == (1 if "collapsed" in out or "diverge" in out or "rejected" in out else 0)
    table, command = Path("here/table.txt").read_text(), test.more["command"]
    assert run("plot", "here") == 0
    assert Path("here/table.txt").read_text() == table  # it stays a benchmark
    assert run("run", "--resume", "here") == 2
    assert "holds a benchmark: flwr-regs bench --resume" in capsys.readouterr().err
    path = records.record_path(Path("here"), "FedAvg", 2)
    path.unlink()
    assert run("bench", "--resume", "here", "--dry-run") == 0
    assert "in all 1 runs" in capsys.readouterr().out
    assert run("bench", "--resume", "here") == status
    assert Plan.load(Path("here")).more["command"] == command
    assert run("bench", "--resume", "here", "--dry-run") == 0
    assert capsys.readouterr().out.endswith("nothing is missing\n")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["test"]["accuracy"], lines[3]["test"]["accuracy"] = 0.9, 0.1
    path.write_text("\n".join(map(json.dumps, lines)))
    assert (
        run("bench", "--resume", "here") == 1
    )  # it collapses; the mean of two rounds would hide it
    Path("here/settings.json").unlink()
    assert run("plot", "here") == 2
    assert "is still tuning: go on with flwr-regs bench --resume here" in capsys.readouterr().err


def test_what_is_tuned_is_not_in_the_name_of_a_row() -> None:
    methods = "FedProx(mu=0.1); EFL(lam=1); EFL(lam=1, density_up=0.1); FedADC(beta=0.6); FedADC(beta=0.9)"
    tune = ("FedProx.mu=0.1,1", "EFL.lam=0.1..1", "FedADC.beta=0.3,0.6")
    bench = tuning.Bench({"methods": methods}, tune, 2, (1,), (9,))
    assert [*bench.labels] == [
        *("FedProx", "EFL", "EFL(density_up=0.1)", "FedADC(beta=0.6)", "FedADC(beta=0.9)")
    ]


def test_bench_takes_whole_numbers_words_and_positional_arguments() -> None:
    def points(*tune: str, trials: int = 4, **settings: Any) -> Any:
        given = {"methods": "FedFOR(0.5)", **settings}
        bench = tuning.Bench(given, tune, trials, (1,), (101,))
        return bench, [job for _, job in bench.tuning().jobs]

    _, jobs = points("local-epochs=1..40", "restart-lr=true,false", "optimizer=SGD,Adam")
    assert len({*jobs}) == 4
    assert all(isinstance(job.local_epochs, int) and 1 <= job.local_epochs <= 40 for job in jobs)
    _, jobs = points("local-epochs=1..3", trials=3)
    assert sorted(job.local_epochs for job in jobs) == [1, 2, 3]
    _, jobs = points("lr=0.1,0.2", "FedFOR.alpha=1,2")  # the whole grid
    assert {(job.lr, job.methods) for job in jobs} == {
        (lr, f"FedFOR({alpha})") for lr in (0.1, 0.2) for alpha in (1, 2)
    }
    bench, jobs = points("FedFOR.alpha=0.1..1", **{"held-out-share": 0.3})
    assert all(re.fullmatch(r"FedFOR\(0\.\d+\)", job.methods) for job in jobs)
    assert {job.held_out_share for job in jobs} == {0.3}
    # the test is never on the data of tuning
    assert {job.held_out_share for _, job in bench.test({"FedFOR(0.5)": {}}).jobs} == {0.0}


def test_a_benchmark_whose_every_trial_diverges_failed(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", FLAT, *QUICK, "--tune", "lr=1e30,2e30", "--tuning-seeds", "9", "--seeds", "1"]
    assert run(*line, "out=here") == 1
    assert "every one of its 2 trials failed or diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "lr=-1"], "setting 'lr' must be a number above 0, not -1"),
        (["run", "learning-rate=1"], "unknown setting 'learning-rate'"),
        (["run", "lr"], "'lr' is not of the form key=value"),
        (["run", "methods=fedavg"], "did you mean 'FedAvg'"),
        (["run", "partition=shards-mcmahan", "num-clients=2000"], "2000"),
        (["run", "--seeds", "1,1"], "--seeds must be different whole numbers"),
        (["run", "--seeds", "99999999999999999999"], "--seeds must be different whole numbers"),
        (["run", "--app", "nowhere"], "holds no pyproject.toml"),
        (["run", "--data-dir", "DIR"], "--data-dir; data-dir is a setting: data-dir=..."),
        (["run", "--workers", "0"], "--workers must be at least 1, not 0"),
        (["run", "methods=mine.py:Thing"], "or a list of terms, not a value of type Thing"),
        (["sweep", "lr"], "sweep needs a key and --values"),
        (["sweep", "--case", "methods=FedAvg"], "--case must look like 'LABEL: key=value ...'"),
        (["sweep", "--case", "a: lr=0.1", "--case", "a: lr=1"], "a label of its own"),
        (["sweep", "lr", "--case", "a: lr=1"], "or --case: not both"),
        (["sweep", "--case", "a: seed=3"], "'seed' does not count beside --seeds"),
        (["bench", "--tune", "lr=2..1"], "a range is LOW..HIGH"),
        (["bench", "--tune", "lrr=1..2"], "unknown setting 'lrr'; did you mean 'lr'"),
        (["bench", "--tune", "FedFOO.alpha=1..2"], "none of FedAvg, FedFOR has this"),
        (["bench", "--tune", "lr=1..2", "--seeds", "101"], "both for tuning and for the test"),
        (["bench", "--tune", "FedFOR.alfa=1..2"], "did you mean 'alpha'"),
        (["bench", "--tune", "lr=1..2", "--tune", "lr=2..3"], "names a key twice"),
        (["bench", "--tune", "seed=1,2"], "the setting 'seed' cannot be tuned"),
        (["bench", "held-out-clients=2"], "leave held-out-clients out"),
        (["bench", "seed=3"], "'seed' does not count beside --seeds (1,2,3,4,5)"),
        (["plot", "partition", "out=mine.py/x"], "results cannot be written into"),
        (["walk"], "invalid choice: 'walk'"),
        (["methods", "FedFORR"], "there is no method 'FedFORR'; did you mean 'FedFOR'?"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_trains(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("class Thing:\n    pass\n")
    assert run(*args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_what_there_is_is_listed() -> None:
    for what, expected in (
        ("methods", "FedADCPlus"),
        ("datasets", "digits-domains"),
        ("models", "cnn-bn"),
        ("partitions", "dirichlet-hsu"),
        ("settings", "target-accuracy"),
        ("metrics", "final"),
    ):
        status, out = printed("list", what)
        assert status == 0
        assert re.search(rf"^ *{expected}  +\S", out, re.M)


def test_paths_are_kept_whole() -> None:
    Path("data").mkdir()
    job = words.read_settings(["data-dir=data", "code-dir=.", "out=x"])
    assert all(Path(p).is_absolute() for p in (job.data_dir, job.code_dir, job.out))


def test_the_version_and_a_dry_run_train_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"flwr-regs \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run("run", "rounds=2", "local-epochs=1", "--seeds", "1,2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^FedFOR +2 x \d+ s$", out, re.M)
    assert "2 rounds of about 5 local steps" in out
    assert re.search(r"in all 4 runs, about \d+ s", out)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_what_a_run_does() -> None:
    """Within a factor of four on a busy machine."""
    settings = {"methods": "FedAvg", "rounds": 8, "cohorts": "class-covering"}
    job = Job.from_run_config({**settings, "fraction-train": 0.6, "personalise": "plain"})
    about = estimate.seconds(job)
    run = engine.train(Plan([("A", job)]), "A", job, None, lambda *_: None)
    assert run.whole
    assert run.seconds / 4 < about < run.seconds * 4


def test_the_label_spread_is_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", "partition", "partition=classes", "num-clients=10", "out=here") == 0
    assert "labels a client: 2 to 2" in capsys.readouterr().out
    assert Path("here/partition.png").read_bytes().startswith(b"\x89PNG")
    assert Path("here/partition.pdf").read_bytes().startswith(b"%PDF")
