"""The accidents that a user may meet, each with its tests: every one exists."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.conftest import ROOT

MESSAGES = "tests/test_accidents.py"
REAL = "tests/flower/test_deployment_accidents.py"
RESUME = "tests/flower/test_resume.py"
DISK = "tests/server/test_checkpoint.py"
ACCIDENTS: dict[str, dict[str, list[str]]] = {
    "a client raises": {MESSAGES: ["raises"], REAL: ["client_raises"]},
    "a client's process dies": {REAL: ["client_dies"]},
    "a client sends NaN": {MESSAGES: ["nan"]},
    "infinity": {MESSAGES: ["infinity"]},
    "wrong names": {MESSAGES: ["wrong_names"]},
    "wrong shapes": {MESSAGES: ["wrong_shapes"]},
    "wrong dtypes": {MESSAGES: ["wrong_dtypes"]},
    "too few arrays": {MESSAGES: ["too_few_arrays"]},
    "no metrics": {MESSAGES: ["no_metrics"]},
    "n = 0, NaN, 10^18": {MESSAGES: ["n"]},
    "weights of 3e38": {MESSAGES: ["weights_of_3e38"]},
    "an update times 10^6": {MESSAGES: ["a_million_times_the_update"]},
    "a zip": {MESSAGES: ["zip"]},
    "a .npz": {MESSAGES: ["npz"]},
    "a pickle": {MESSAGES: ["pickle", "array_of_objects"]},
    "a header of a terabyte": {MESSAGES: ["terabyte_header"]},
    "an empty array": {MESSAGES: ["empty_array"]},
    "deep JSON": {MESSAGES: ["deep_json"]},
    "20 MB of text": {MESSAGES: ["20_megabytes_of_text"]},
    "ANSI codes": {MESSAGES: ["ansi_codes"]},
    "a wrong, doubled, negative or textual partition id": {MESSAGES: ["partition_id"]},
    "another method": {MESSAGES: ["another_method"]},
    "another protocol": {MESSAGES: ["another_protocol"]},
    "a client never answers": {MESSAGES: ["never_answers"], REAL: ["node_silent_deadline"]},
    "a node is killed in a round": {REAL: ["node_killed", "node_terminated"]},
    "a client comes late": {MESSAGES: ["comes_late"]},
    "a client comes back without its state": {MESSAGES: ["lost_its_state"]},
    "the ServerApp is killed between rounds": {
        RESUME: ["test_ctrl_c_and_sigterm_save_the_last_finished_round_first"]
    },
    "the ServerApp is killed in a round": {
        REAL: ["serverapp_killed"],
        RESUME: ["test_broken_at_any_client_of_any_round"],
    },
    "the SuperLink is killed": {REAL: ["superlink_killed"]},
    "a node is started again with its key within 60 s": {REAL: ["restarted_with_keys"]},
    "a key is not registered": {REAL: ["unknown_key"]},
    "clocks are 30 s apart": {REAL: ["clock_ahead"]},
    "the disk is full": {
        REAL: ["disk_full"],
        RESUME: ["test_a_full_disk_is_named_and_the_run_goes_on"],
        DISK: ["test_a_full_disk_leaves_the_checkpoint_before"],
    },
    "the disk is read-only": {
        DISK: ["test_a_folder_that_cannot_be_written_is_refused_at_once"],
    },
    "two runs in one folder": {DISK: ["test_a_folder_is_for_one_run"]},
}


@cache
def names_in(file: str) -> set[str]:
    """The names of a file's test functions; without importing it."""
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"}


def full(name: str) -> str:
    return name if name.startswith("test_") else f"test_accident_{name}"


@pytest.mark.parametrize("what", ACCIDENTS)
def test_an_accident_has_its_tests(what: str) -> None:
    for file, names in ACCIDENTS[what].items():
        assert {full(name) for name in names} <= names_in(file)


def test_the_list_has_every_accident_of_a_real_federation() -> None:
    known = {full(name) for files in ACCIDENTS.values() for name in files.get(REAL, [])}
    found = {name for name in names_in(REAL) if name.startswith("test_accident_")}
    assert found == known
