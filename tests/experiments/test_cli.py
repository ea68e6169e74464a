"""The command line: how fast it answers, what it writes, what it refuses, and how it goes on."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.commands import chosen_of
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.report import results
from flwr_regs.experiments.report.run_records import RunRecord, missing, recorded
from flwr_regs.experiments.space import Space, points
from tests.conftest import ROOT
from tests.experiments.test_commands import MINE

QUICK = ["rounds=2", "local-epochs=1", "num-clients=4"]
FLAT = "methods=FedAvg"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own; one picture is drawn, the clients', since they take longer than the runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "PICTURES", {"clients": results.PICTURES["clients"]})


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


def planned(*line: str) -> list[Run]:
    """The runs that a command line asks for."""
    experiment, _ = words.experiment_of(cli.parsed(line))
    return experiment.runs


def kept(folder: str) -> tuple[list[Run], list[RunRecord]]:
    """The runs of a results' folder, and their records so far."""
    experiment, _ = card_files.of_folder(Path(folder))
    (panel,) = experiment.panels
    tests = experiment.tests(panel, chosen_of(experiment, Path(folder)))
    return tests, recorded(tests, Path(folder))


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


ANSWERS = [
    *(
        ["--version"],
        ["--help"],
        ["list", "settings"],
        ["list", "models"],
        ["methods"],
        ["protocols"],
    ),
    *(
        ["run", "lr=-1"],
        ["run", "lrr=1"],
        ["run", "methods=fedavg"],
        ["run", "dp-noise=2"],
        ["walk"],
    ),
    *(["bench", "fedadc-t2"], ["sweep", "lr"], ["run", "--data-dir", "x"], ["run", "model=nn"]),
    *(
        ["run", "optimizer=Adam", "momentum=0.9"],
        ["plot", "nowhere"],
        ["bench", "--tune", "lr=2..1"],
    ),
]


def test_what_lists_and_what_refuses_loads_neither_torch_nor_flower() -> None:
    """So it answers at once; a second is generous on a busy machine."""
    code = (
        "import contextlib, io, sys\n"
        "from flwr_regs.experiments import cli\n"
        f"for line in {ANSWERS}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            assert cli.main(line) in (0, 2), line\n"
        "    loaded = {'torch', 'flwr', 'pandas', 'matplotlib', 'scipy'} & {*sys.modules}\n"
        "    assert not loaded, (line, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_run_says_little_writes_all_and_is_traceable(trained: tuple[Path, str]) -> None:
    folder, out = trained
    assert len(out[: out.index("round ")].splitlines()) <= 6
    assert re.search(r"FedFOR seed 2 round +2/2 +accuracy +\d", out)
    assert (folder / "table.txt").read_text() in out
    written = {p.name for p in folder.iterdir()}
    for picture in ("accuracy", "megabytes", "seconds", "clients"):
        assert {f"{picture}.png", f"{picture}.pdf"} <= written
    saved = tomllib.loads((folder / "experiment.toml").read_text())
    made = saved["made"]
    assert made["command"] == ["flwr-regs", "run", *QUICK, f"out={folder}", "--seeds", "1,2"]
    assert {"flwr", "torch", "numpy", "flwr-regs", "python"} <= made["versions"].keys()
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert made.get("commit", head.stdout).startswith(head.stdout.strip())
    assert made["partitions"].keys() == {"1", "2"}
    assert (saved["seeds"], saved["settings"]["local-epochs"]) == ([1, 2], 1)


def test_results_need_their_folder_alone(
    here: Path, trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are drawn again, made again as a card, and not written over."""
    assert run("run", FLAT, *QUICK, "out=here") == 2
    assert "holds results: go on with --resume" in capsys.readouterr().err
    for name in ("clients.png", "table.txt"):
        (here / name).unlink()
    assert run("plot", "here") == 0
    for name in ("clients.png", "table.txt"):
        assert (here / name).read_bytes() == (trained[0] / name).read_bytes()
    assert run("bench", "here/experiment.toml", "out=again") == 0
    (tests, one), (others, other) = kept("here"), kept("again")
    assert tests == others
    assert [record.test for record in one] == [record.test for record in other]
    for command in (["plot"], ["run", "--resume"], ["bench", "--resume"]):
        assert run(*command, "nowhere") == 2
        assert "nowhere holds no results" in capsys.readouterr().err
    assert run("bench", "--resume", "here") == 2
    assert "here holds a comparison: flwr-regs run --resume" in capsys.readouterr().err


@pytest.mark.full
def test_what_is_missing_is_trained_by_workers_to_the_same_bits(
    here: Path, trained: tuple[Path, str]
) -> None:
    names = ["FedFOR-seed1", "FedFOR-seed2"]
    first, second = (here / "runs" / f"{name}.jsonl" for name in names)
    first.write_text("\n".join(first.read_text().splitlines()[:2]) + "\n")  # killed in round 1
    second.unlink()
    for name in names:
        (here / f"{name}.safetensors").unlink()
    tests, before = kept(str(trained[0]))
    assert [(lacking.label, lacking.seed) for lacking in missing(tests, here)] == [
        ("FedFOR", 1),
        ("FedFOR", 2),
    ]
    assert run("run", "--resume", "here", "--workers", "2") == 0
    assert [record.test for record in kept("here")[1]] == [record.test for record in before]
    for name in names:
        model = f"{name}.safetensors"
        assert (here / model).read_bytes() == (trained[0] / model).read_bytes()


def test_what_would_not_count_beside_resume_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--seeds", "4"], ["--seeds=4"], ["--app", "x"]):
        assert run("run", "--resume", "here", *more) == 2
        assert "--resume takes what --" in capsys.readouterr().err
    (here / "runs" / "FedAvg-seed2.jsonl").unlink()
    assert run("run", "--resume", "here", "--dry-run", "--workers", "2") == 0
    assert "in all 1 runs" in capsys.readouterr().out
    for line, message in (
        (["--gpus-per-client", "1"], "--gpus-per-client goes with --runner ray"),
        (["--runner", "ray", "--workers", "2"], "--workers does not go with --runner ray"),
    ):
        assert run("run", "--resume", "here", *line) == 2
        assert message in capsys.readouterr().err


def test_what_is_damaged_or_foreign_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = here / "runs" / "FedAvg-seed2.jsonl"
    shutil.copy(record, here / "runs" / "Other-seed2.jsonl")
    assert run("plot", "here") == 0
    assert "NOTE: no run of experiment.toml: runs/Other-seed2.jsonl" in capsys.readouterr().out
    whole = record.read_text()
    lines = whole.splitlines(keepends=True)
    other = whole.replace('"local-epochs": 1', '"local-epochs": 2')
    for text in ("", "{\n", lines[0] + "]\n" + "".join(lines[2:]), other):
        record.write_text(text)
        for command in (["plot"], ["run", "--resume"], ["reproduce"]):
            assert run(*command, "here") == 2, (command, text)
            assert "FedAvg-seed2.jsonl" in capsys.readouterr().err
    record.write_text("".join(lines[:2]) + lines[2][:9])  # the process ended while it wrote
    assert run("plot", "here") == 0
    for text in ("{", "", "made = 3", "[made]\n[settings]\n[methods]\nA = 'nothing'"):
        (here / "experiment.toml").write_text(text)
        for command in (["run", "--resume"], ["plot"], ["reproduce"], ["bench", "--resume"]):
            assert run(*command, "here") == 2
            said = capsys.readouterr().err
            assert "experiment.toml is damaged, or of another version" in said
            assert said.count("\n") == 1


def test_results_are_reproduced_or_it_is_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "runs" / "FedFOR-seed2.jsonl"
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.9'))
    assert run("reproduce", "here", "--seeds", "2") == 1
    out = capsys.readouterr().out
    assert re.search(r"FedFOR, seed 2: 9.\.\d\d % there, \d\d\.\d\d % here  DIFFERS", out)
    assert re.search(r"FedAvg, seed 2: (\d\d\.\d\d %) there, \1 here$", out, re.M)
    assert "1 of 2 runs are equal within 0.5 points" in out
    assert run("reproduce", "here", "--seeds", "2", "--tolerance", "100") == 0
    assert run("reproduce", "here", "--seeds", "3") == 2


def test_a_run_of_which_all_diverges_fails(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "lr", FLAT, *QUICK, "--seeds", "1"]
    assert run(*line, "--values", "0.05,1e30", "out=here") == 0
    table = Path("here/table.txt").read_text()
    assert re.search(r"^ lr +last 5 +final +best +to 85% +worst +MB +CPU s$", table, re.M)
    assert "1e30: 1 of 1 seed diverged" in table
    assert run("run", FLAT, *QUICK, "lr=1e30") == 1
    assert run("sweep", "--resume", "here", "--values", "1") == 2
    assert run("run", "--resume", "here", "--runner", "ray") == 2
    assert "--runner ray trains methods" in capsys.readouterr().err


def test_the_rows_of_a_sweep_have_names() -> None:
    both = [f"{value}, {method}" for value in (0.1, 0.2) for method in ("FedAvg", "FedFOR")]
    for line, rows in (
        (["lr", "--values", "0.1,0.2"], both),
        (["FedFOR.alpha", "--values", "0;0.5"], ["0", "0.5"]),
        (["-c", "a: methods=EFL(0, 0.01)", "-c", "b: lr=1", FLAT], ["a", "b"]),
    ):
        runs = planned("sweep", *line, "--seeds", "1")
        assert [one.label for one in runs] == rows
    assert [(one.method, one.settings.lr) for one in runs] == [
        ("EFL(0, 0.01)", 0.05),
        ("FedAvg", 1.0),
    ]
    runs = planned("sweep", "FedFOR.alpha", "methods=FedAvg+FedFOR", "--values", "1,2")
    assert [one.seed for one in runs] == [1, 1, 2, 2, 3, 3]  # whole comparisons first
    assert [one.method for one in runs][:2] == ["FedAvg+FedFOR(alpha=1)", "FedAvg+FedFOR(alpha=2)"]


def test_a_users_error_names_the_line_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert run("run", "methods=FedAvg, mine.py:Bad", *QUICK, "out=here") == 1
    captured = capsys.readouterr()
    assert re.search(r"KeyError: 'x' .*mine.py, line 16", captured.err)
    assert "Traceback" not in captured.err + captured.out
    assert re.search(r"^ FedAvg +\d", captured.out, re.M)  # the other method has its row
    tests, _ = kept("here")
    assert [lacking.label for lacking in missing(tests, Path("here"))] == ["mine.py:Bad"]
    assert run("reproduce", "here") == 1
    assert "missing there, missing here  DIFFERS" in capsys.readouterr().out
    assert run("run", "methods=mine.py:Bad", *QUICK, "--dry-run") == 1
    assert "KeyError: 'x'" in capsys.readouterr().err


def test_bench_tunes_on_data_that_the_test_has_not_and_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["bench", *QUICK, "--tune", "lr=0.02..2", "--tune", "FedFOR.alpha=0.01..1"]
    line += ["--trials", "3", "--seeds", "1,2", "--tuning-seeds", "9", "out=here"]
    status = run(*line)
    out = capsys.readouterr().out
    experiment, made = card_files.of_folder(Path("here"))
    trials = experiment.trial_runs(*experiment.panels)
    assert len(trials) == len({(one.method, one.settings.lr) for one in trials}) == 6
    assert all(one.seed == 9 and one.settings.held_out_share == 0.2 for one in trials)
    best: dict[str, tuple[float, Run]] = {}
    for one, record in zip(trials, recorded(trials, Path("here/tuning")), strict=True):
        name, score = one.label.partition(" ")[0], float(np.mean(record.accuracy))
        if name not in best or score > best[name][0]:
            best[name] = score, one
    tests, records = kept("here")
    for one, record in zip(tests, records, strict=True):
        chosen = best[one.label][1]
        assert (one.settings.lr, one.method) == (chosen.settings.lr, chosen.method)
        assert (record.job["lr"], record.method) == (chosen.settings.lr, chosen.method)
        assert one.settings.held_out_share == 0
    assert "95 % interval" in out
    assert "NOTE: FedFOR: lr = " in out
    assert status == (1 if "collapsed" in out or "diverge" in out or "rejected" in out else 0)
    table = Path("here/table.txt").read_text()
    shutil.rmtree("here/tuning")  # what it chose stands in experiment.toml
    assert run("plot", "here") == 0
    assert Path("here/table.txt").read_text() == table
    assert run("run", "--resume", "here") == 2
    assert "holds a benchmark: flwr-regs bench --resume" in capsys.readouterr().err
    path = Path("here/runs/FedAvg-seed2.jsonl")
    path.unlink()
    assert run("bench", "--resume", "here") == status
    assert card_files.of_folder(Path("here"))[1]["command"] == made["command"]
    text = Path("here/experiment.toml").read_text()
    Path("here/experiment.toml").write_text(text.partition("[made.chosen")[0])
    assert run("plot", "here") == 2
    assert "is still tuning: go on with flwr-regs bench --resume here" in capsys.readouterr().err


def test_what_is_tuned_is_not_in_the_name_of_a_row() -> None:
    methods = "FedProx(mu=0.1); EFL(lam=1); EFL(lam=1, density_up=0.1); FedADC(beta=0.6); FedADC(beta=0.9)"
    spaces = tuple(map(Space.read, ("FedProx.mu=0.1,1", "EFL.lam=0.1..1", "FedADC.beta=0.3,0.6")))
    bench = Experiment.of_methods({"methods": methods}, tune=spaces)
    assert [*bench.rows_of(*bench.panels)] == [
        *("FedProx", "EFL", "EFL(density_up=0.1)", "FedADC(beta=0.6)", "FedADC(beta=0.9)")
    ]


def test_tuning_tries_different_points_of_the_right_kinds() -> None:
    tried = points(
        [*map(Space.read, ("local-epochs=1..40", "restart-lr=true,false", "lr=0.1..1"))], 4
    )
    assert len({str(point) for point in tried}) == len(tried) == 4
    for point in tried:
        assert point["local-epochs"] in range(1, 41)
        assert type(point["restart-lr"]) is bool
        assert 0.1 <= point["lr"] <= 1
    assert sorted(p["local-epochs"] for p in points([Space.read("local-epochs=1..3")], 3)) == [
        1,
        2,
        3,
    ]
    line = [
        "--tune",
        "lr=0.1,0.2",
        "--tune",
        "FedFOR.alpha=1,2",
        "--trials",
        "4",
        "held-out-share=0.3",
    ]
    runs = planned("bench", "methods=FedFOR(0.5)", *line, "--seeds", "1")
    trials = [one for one in runs if one.seed == 101]  # the whole grid, of a positional argument
    assert {(one.settings.lr, one.method) for one in trials} == {
        (lr, f"FedFOR({alpha})") for lr in (0.1, 0.2) for alpha in (1, 2)
    }
    assert {(one.seed, one.settings.held_out_share) for one in runs} == {(101, 0.3), (1, 0.0)}


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
    assert printed("methods", "Proximal")[1].startswith("Proximal(mu")


def test_paths_are_kept_whole() -> None:
    Path("data").mkdir()
    given = words.read_words(["data-dir=data", "code-dir=.", "out=x"])
    assert all(Path(path).is_absolute() for path in given.values())
    assert planned("run", FLAT)[0].settings.code_dir == str(Path.cwd())
