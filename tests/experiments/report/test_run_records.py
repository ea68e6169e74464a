"""A run's record: there after each round, whatever stops the run; and what cannot be read or written."""

import json
import math
import os
import re
import time
from pathlib import Path

import pytest

from flwr_regs.experiments.cli import main
from flwr_regs.experiments.report import folders
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.folders import CannotWrite, locked, new_folder, write
from flwr_regs.experiments.report.run_records import Recorder
from tests.conftest import no_space
from tests.experiments.report.test_results import GOOD, run


def test_a_record_is_there_after_each_round_and_when_a_line_is_torn(tmp_path: Path) -> None:
    whole = run("A+B(x='1')", GOOD)
    record = run(whole.label, [], test=[], ended=False)
    recorder = Recorder(tmp_path, record)
    path = records.record_path(tmp_path, record.label, record.seed)
    for t, entry in enumerate(whole.rounds, start=1):
        record.rounds.append(entry)
        record.test.append(whole.test[t])
        recorder.round()
        kept = records.read(path)
        assert (kept.accuracy, len(kept.rounds), kept.ended) == (whole.accuracy[:t], t, False)
    text = path.read_text()
    path.write_text(text[:-7])  # killed while it wrote
    cut = records.read(path)
    assert (cut.accuracy, cut.torn) == (whole.accuracy[:-1], True)
    path.unlink()
    with pytest.raises(CannotWrite):  # a disk is full
        recorder.end()
    path.write_text(text + text[:9])  # has torn a line, and has room again
    record.ended, record.seconds, record.per_client = True, math.inf, {"clients": [math.nan]}
    recorder.end()
    last = json.loads(path.read_text().splitlines()[-1], parse_constant=pytest.fail)["end"]
    assert (last["ended"], last["seconds"], last["per_client"]) == (True, None, {"clients": [None]})
    # a bookkeeping that depends on the keys being numbers would fail here
    assert records.read(path).megabytes == whole.megabytes
    Recorder(tmp_path, records.read(path)).end()  # a run that goes on
    assert records.read(path).rounds == json.loads(json.dumps(whole.rounds))


def test_labels_have_files_of_their_own_that_systems_take(tmp_path: Path) -> None:
    labels = ["A b", "A_b", "A/b", ".", "..", "字" * 120, "字" * 121, "x" * 300, "A(b=0.5)"]
    for label in labels:
        Recorder(tmp_path, run(label, []))
        assert records.record_path(tmp_path, label, 1).is_file()
        assert (tmp_path / records.file_name(label)).resolve().parent == tmp_path  # a panel's
    assert len([*(tmp_path / "runs").iterdir()]) == len(labels)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write(path, "half \ud800")
    assert path.read_text() == "first"


def test_runs_of_one_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    assert [new_folder(tmp_path).name for _ in range(3)] == ["now", "now.2", "now.3"]


def test_a_folder_that_is_in_use_or_on_a_full_disk_gets_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert main(["run", "rounds=1", "num-clients=2", "methods=FedAvg", f"out={out}"]) == 0
    with locked(out):
        assert main(["run", "--resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out} is being written by another run (process {os.getpid()})" in said
    assert main(["run", "--resume", str(out)]) == 0

    monkeypatch.setattr(folders, "write_atomically", no_space)
    why = "cannot be written (No space left on device: make room); all written before is kept"
    for command, ends in (("run --resume", f": go on with --resume {out}\n"), ("plot", "\n")):
        assert main([*command.split(), str(out)]) == 2
        where = re.escape(str(out))
        assert re.search(rf"{where}\S+ {re.escape(why + ends)}\Z", capsys.readouterr().err)


def test_a_run_diverged_if_half_of_its_clients_left_the_numbers() -> None:
    far = "its update is 9e+05 long, over 1333.33 times its cohort's median (2)"
    failures = {0: far, 1: "Expected more than 1 value per channel"}
    assert records.diverged("0 usable replies: NaN", [{"failures": failures}])
    failures[2] = "no memory"
    assert not records.diverged("0 usable replies: NaN", [{"failures": failures}])
