"""The command line: how fast it answers, what it writes, and how it goes on.

commands.txt has what it prints, and what it refuses.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.commands import chosen_of
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.report.run_records import RunRecord, missing, record_path, recorded
from flwr_regs.experiments.settings import DEFAULTS
from flwr_regs.experiments.space import Space, points
from tests.conftest import ROOT
from tests.experiments.test_user_code import OWN

QUICK = ["rounds=2", "local-epochs=1", "num-clients=4"]
OURS = "methods=FedAvg, FedFOR+mine.py:Decay"


def run(*args: str) -> int:
    return cli.main([*args])


def printed(*args: str) -> tuple[int, str]:
    """The status of a command, and its standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = run(*args)
    return status, out.getvalue()


def kept(folder: str) -> tuple[list[Run], list[RunRecord]]:
    """The runs of a results' folder, and their records so far."""
    experiment, _ = card_files.of_folder(Path(folder))
    (panel,) = experiment.panels
    tests = experiment.tests(panel, chosen_of(experiment, Path(folder)))
    return tests, [*recorded(tests, Path(folder)).values()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results of two methods over two seeds, one of them a user's own, and what the command said."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(OWN)
    line = ["run", OURS, *QUICK, f"code-dir={folder}", f"out={folder / 'here'}", "--seeds", "1,2"]
    status, out = printed(*line)
    assert status == 0
    return folder / "here", out


@pytest.fixture
def here(trained: tuple[Path, str]) -> Path:
    """A copy of these results, in the current folder."""
    return Path(shutil.copytree(trained[0], "here"))


ANSWERS = r"""
--version
methods FedADC
protocols
run methods=FedFOR(alpha=-1)
run methods=FedAvg(aggregator=Krum(x=1))
run methods=FedAvg dp-clip-norm=1
methods SparseTernary
run dp-noise=2
run --resume nowhere
run --resume damaged
reproduce damaged
run methods=nowhere.py:Clip
run out=/dev/null/results
bench fedadc-t1 --smoke --methods FedAvg,FedProx(nu=1)
bench --tune FedFOR.alfa=1..2
bench --tune lr=0.1..1 held-out-share=0
"""


def test_what_lists_and_what_refuses_loads_neither_torch_nor_flower() -> None:
    """So it answers at once."""
    experiment = Experiment.of_methods({})
    Path("damaged/runs").mkdir(parents=True)
    Path("damaged", card_files.FILE).write_text(card_files.text(experiment, {"commit": "0"}))
    record_path(Path("damaged"), *experiment.ends[0].key).write_text("{")
    code = (
        "import contextlib, sys\n"
        "from flwr_regs.experiments import cli\n"
        f"for line in {ANSWERS.strip().splitlines()}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        assert cli.main(line.split()) in (0, 2), line\n"
        "    loaded = {'torch', 'flwr', 'pandas', 'matplotlib', 'scipy'} & {*sys.modules}\n"
        "    assert not loaded, (line, loaded)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module = [sys.executable, "-m", "flwr_regs", "--version"]
    assert subprocess.check_output(module, env=env, text=True).startswith("flwr-regs ")


@pytest.mark.parametrize("command", ["run", "sweep", "bench"])
def test_help_says_what_runs_by_default_and_has_an_example_that_parses(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    told = " ".join((text := capsys.readouterr().out).split())
    assert DEFAULTS["methods"].replace(",", " and ") in told
    assert DEFAULTS["dataset"] in told
    (example,) = re.findall(r"^Example: flwr-regs (.*)$", text, re.M)
    args = cli.parsed(shlex.split(example))
    assert args.command == command
    words.experiment_of(args)[0].checked()


def test_run_says_little_writes_all_and_is_traceable(trained: tuple[Path, str]) -> None:
    folder, out = trained
    assert re.search(r"Decay seed 2 round +2/2 +accuracy +\d", out)
    assert (folder / "table.txt").read_text() in out
    written = {p.name for p in folder.iterdir()}
    for picture in ("accuracy", "megabytes", "seconds", "clients"):
        assert {f"{picture}.png", f"{picture}.pdf"} <= written
    saved = tomllib.loads((folder / "experiment.toml").read_text())
    made = saved["made"]
    assert made["command"][:3] == ["flwr-regs", "run", OURS]
    assert {"flwr", "torch", "numpy", "flwr-regs", "python"} <= made["versions"].keys()
    assert made["partitions"].keys() == {"1", "2"}
    assert (saved["seeds"], saved["settings"]["local-epochs"]) == ([1, 2], 1)


def test_one_run_of_results_is_trained_again_and_compared(here: Path) -> None:
    """From a folder or an archive of it, to the bit on this machine; elsewhere within a tolerance."""
    assert run("reproduce", "here", "--seeds", "2") == 0  # a user's code is where it was
    choice = ["--methods", "FedAvg", "--seeds", "2"]
    status, out = printed("bench", "--verify", "here", *choice)
    assert (status, out.splitlines()[-1]) == (0, "FedAvg, seed 2: all 2 rounds are the same")
    assert "FedAvg, seed 2; one of 1 runs" in out
    with tarfile.open("page.tar.gz", "w:gz") as archive:
        archive.add("here", ".")
    status, out = printed("bench", "--verify", "page.tar.gz", "--seeds", "1")
    assert status == 0
    assert re.search(r"(FedAvg|Decay), seed 1; one of 2 runs", out)
    path = record_path(here, "FedAvg", 2)
    path.write_text(re.sub(r', "check": "\w+"', "", path.read_text()))
    true = json.loads(path.read_text().splitlines()[-2])["test"]
    path.write_text(path.read_text().replace(f"{true['loss']}", f"{true['loss'] + 1e-9}"))
    status, out = printed("bench", "--verify", "here", *choice)
    assert (status, "DIFFERS" in out) == (1, True)  # a billionth is not the same
    assert run("bench", "--verify", "here", "--methods", "FedAvg", "--seeds", "1") == 0

    path.unlink()
    assert run("run", "--resume", "here", "--runner", "stacked") == 0
    assert "all 2 rounds are the same" in printed("bench", "--verify", "here", *choice)[1]
    card = here / "experiment.toml"
    text = card.read_text()
    card.write_text(text.replace('commit = "', 'commit = "0'))  # a stack rounds otherwise then
    status, out = printed("bench", "--verify", "here", *choice)
    assert (status, "commit 0" in out, "must agree within" in out) == (0, True, True)
    card.write_text(text.replace('platform = "', 'platform = "Another '))
    status, out = printed("bench", "--verify", "here", *choice)
    assert (status, "must agree within 3 points" in out) == (0, True)
    text = re.sub(r', "check": "\w+"', "", path.read_text()).replace('"stacked"', '""')
    path.write_text(text.replace('"accuracy": 0.', '"accuracy": 0.0'))
    status, out = printed("bench", "--verify", "here", *choice)
    assert (status, "runner ? there, process here" in out) == (1, True)  # an older record
    assert printed("bench", "--verify", "here", *choice, "--tolerance", "100")[0] == 0


@pytest.mark.full
def test_workers_train_what_is_missing_to_the_same_bits(
    here: Path, trained: tuple[Path, str]
) -> None:
    tests, before = kept(str(trained[0]))
    label = tests[-1].label
    model = f"{record_path(here, label, 2).stem}.safetensors"
    for path in (here / model, *(record_path(here, label, seed) for seed in (1, 2))):
        path.unlink()
    assert [(one.label, one.seed) for one in missing(tests, here)] == [(label, 1), (label, 2)]
    assert run("run", "--resume", "here", "--workers", "2") == 0
    assert [record.test for record in kept("here")[1]] == [record.test for record in before]
    assert (here / model).read_bytes() == (trained[0] / model).read_bytes()


def test_bench_tunes_on_data_that_the_test_has_not_and_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["bench", *QUICK, "--tune", "lr=0.02..2", "--tune", "FedFOR.alpha=0.01..1"]
    line += ["--trials", "3", "--seeds", "1,2", "--tuning-seeds", "9", "out=here"]
    status = run(*line)
    experiment, made = card_files.of_folder(Path("here"))
    trials = experiment.trial_runs(*experiment.panels)
    assert len(trials) == len({(one.method, one.settings.lr) for one in trials}) == 6
    assert all(one.seed == 9 and one.settings.held_out_share == 0.2 for one in trials)
    best: dict[str, tuple[float, Run]] = {}
    for one, record in zip(trials, recorded(trials, Path("here/tuning")).values(), strict=True):
        name, score = one.label.partition(" ")[0], float(np.mean(record.accuracy))
        if name not in best or score > best[name][0]:
            best[name] = score, one
    tests, records = kept("here")
    for one, record in zip(tests, records, strict=True):
        chosen = best[one.label][1]
        assert (one.settings.lr, one.method) == (chosen.settings.lr, chosen.method)
        assert (record.job["lr"], record.method) == (chosen.settings.lr, chosen.method)
        assert one.settings.held_out_share == 0
    card = Path("here/experiment.toml")
    text = card.read_text()
    killed = {key: of for key, of in made.items() if key not in ("chosen", "tuning")}
    card.write_text(card_files.text(experiment.given({"batch-size": 16}), killed))
    assert run("bench", "--resume", "here") == 2  # other trials than it would train
    assert "-seed9.jsonl is of another experiment: it differs in batch" in capsys.readouterr().err
    card.write_text(text)
    shutil.rmtree("here/tuning")  # what it chose stands in experiment.toml
    Path("here/runs/FedAvg-seed2.jsonl").unlink()
    assert run("bench", "--resume", "here", "code-dir=.") == status
    assert card_files.of_folder(Path("here"))[1]["command"] == made["command"]
    card.write_text(text.replace("[methods]", '[methods]\nNew = "FedProx(mu=0.1)"'))
    run("bench", "--resume", "here")
    chosen = card_files.of_folder(Path("here"))[1]["chosen"]
    assert chosen == made["chosen"] | {"FedProx(mu=0.1)": chosen.get("FedProx(mu=0.1)")}


def test_own_code_that_was_moved_is_found_also_where_its_argument_without_a_name_was_tuned() -> (
    None
):
    code = "import flwr_regs\n\nclass Mine(flwr_regs.FedProx):\n    pass\n"
    for folder in ("old", "new"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text(code)
    line = ["bench", "methods=mine.py:Mine(0.5)", *QUICK, "--tune", "mine.py:Mine.mu=0.1,0.3"]
    line += ["--seeds", "1", "--tuning-seeds", "9", "code-dir=old", "out=here"]
    status = run(*line)
    shutil.rmtree("old")
    assert run("bench", "--resume", "here", "code-dir=new") == status
    assert run("reproduce", "here", "code-dir=new") == 0
    assert run("plot", "here", "code-dir=new") == 0


def test_what_is_tuned_and_where_own_code_is_are_not_in_the_name_of_a_row() -> None:
    methods = "FedProx(mu=0.1); EFL(lam=1, density_up=0.1); FedADC(beta=0.6); FedADC(beta=0.9); "
    methods += "mine.py:Mine(); FedAvg+mine.py:Two(x=1); a.py:Same; b.py:Same"
    spaces = tuple(map(Space.read, ("FedProx.mu=0.1,1", "EFL.lam=0.1..1", "FedADC.beta=0.3,0.6")))
    bench = Experiment.of_methods({"methods": methods}, tune=spaces)
    rows = ["FedProx", "EFL(density_up=0.1)", "FedADC(beta=0.6)", "FedADC(beta=0.9)"]
    rows += ["Mine", "FedAvg+Two(x=1)", "a.py:Same", "b.py:Same"]
    assert [*bench.rows_of(*bench.panels)] == rows
    own = replace(bench.rows[5], tune=(Space.read("mine.py:Two.x=1,2"),))
    assert [*replace(bench, rows=(own,)).rows_of(*bench.panels)] == ["FedAvg+Two"]


def test_tuning_tries_different_points_of_the_right_kinds() -> None:
    spaces = ("local-epochs=1..40", "restart-lr=true,false", "lr=0.1..1")
    tried = points([*map(Space.read, spaces)], 4)
    assert len({str(point) for point in tried}) == len(tried) == 4
    for point in tried:
        assert point["local-epochs"] in range(1, 41)
        assert type(point["restart-lr"]) is bool
        assert 0.1 <= point["lr"] <= 1
    few = points([Space.read("local-epochs=1..3")], 3)
    assert {point["local-epochs"] for point in few} == {1, 2, 3}
    line = "--tune lr=0.1,0.2 --tune FedFOR.alpha=1,2 --trials 4 held-out-share=0.3 --seeds 1"
    given = cli.parsed(["bench", "methods=FedFOR(0.5)", *line.split()])
    experiment, _ = words.experiment_of(given)
    runs = [*experiment.trial_runs(experiment.panel), *experiment.tests(experiment.panel)]
    trials = [one for one in runs if one.seed == 101]  # the whole grid, of a positional argument
    grid = {(lr, f"FedFOR({alpha})") for lr in (0.1, 0.2) for alpha in (1, 2)}
    assert {(one.settings.lr, one.method) for one in trials} == grid
    assert {(one.seed, one.settings.held_out_share) for one in runs} == {(101, 0.3), (1, 0.0)}
