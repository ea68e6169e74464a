"""A run's record: there after each round, whatever stops the run; and what cannot be read or written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.folders import CannotWrite, writing
from flwr_regs.experiments.report.run_records import Recorder
from tests.experiments.report.test_results import GOOD, run
from tests.experiments.runs import runs_of


def test_a_record_is_there_after_each_round_and_when_a_line_is_torn(tmp_path: Path) -> None:
    whole = run("A+B(x='1')", GOOD)
    record = run(whole.label, [], test=[], ended=False)
    recorder = Recorder(tmp_path, record)
    path = records.record_path(tmp_path, record.label, record.seed)
    for t, entry in enumerate(whole.rounds, start=1):
        record.rounds.append(entry)
        record.test.append(whole.test[t])
        recorder.round(record)
        kept = records.read(path)
        assert kept.accuracy == whole.accuracy[:t]
        assert (len(kept.rounds), kept.ended) == (t, False)
    text = path.read_text()
    path.write_text(text[:-7])  # killed while it wrote
    assert records.read(path).accuracy == whole.accuracy[:-1]
    path.write_text(text)
    record.ended, record.seconds, record.per_client = True, math.inf, {"clients": [math.nan]}
    recorder.end(record)
    strict = [
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    ]
    assert strict[-1]["end"]["ended"] is True
    assert strict[-1]["end"]["seconds"] is None
    # a bookkeeping that depends on the keys being numbers would fail here
    assert records.read(path).megabytes == whole.megabytes
    again = Recorder(tmp_path, records.read(path))  # a run that goes on
    again.end(record)
    assert records.read(path).rounds == json.loads(json.dumps(whole.rounds))


@pytest.mark.parametrize(
    "damage", ["", "{", "{}\n", "[1]\n", '{"run": {"label": "A"}}\n', "middle"]
)
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    (one,) = runs_of(methods="FedAvg")
    record = run("FedAvg", GOOD, 7)
    Recorder(tmp_path, record).end(record)
    path = records.record_path(tmp_path, "FedAvg", 7)
    assert records.missing([one], tmp_path) == []
    path.write_text(
        path.read_text().replace('"round"', '"round', 1) if damage == "middle" else damage
    )
    with pytest.raises(
        ValueError, match=r"FedAvg-seed7.jsonl is damaged .*--resume trains the run again"
    ):
        records.recorded([one], tmp_path)
    path.unlink()
    assert records.missing([one], tmp_path) == [one]


def test_a_full_disk_names_the_file_and_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    said = f"{path} cannot be written .No space left.*--resume"
    with pytest.raises(CannotWrite, match=said), writing(path):
        raise OSError(28, "No space left on device")


def test_labels_have_files_of_their_own_that_systems_take(tmp_path: Path) -> None:
    labels = ["A b", "A_b", "A/b", "..", "字" * 120, "字" * 121, "x" * 300, "FedFOR(alpha=0.5)"]
    paths = [records.record_path(tmp_path, label, 1) for label in labels]
    assert len({*paths}) == len(labels)
    for label, path in zip(labels, paths, strict=True):
        Recorder(tmp_path, run(label, []))
        assert path.parent == tmp_path / "runs"
        assert path.is_file()
