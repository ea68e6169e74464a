"""The accidents that a user may meet, each with its tests: every one exists."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.conftest import ROOT

MESSAGES = "tests/test_accidents.py"
REAL = "tests/flower/test_deployment_accidents.py"
JOINED = "tests/flower/test_deployment.py"
FOLDERS = "tests/flower/test_checkpoints.py"
ACCIDENTS: dict[str, list[tuple[str, str]]] = {
    "a client raises": [(MESSAGES, "raises"), (REAL, "client_raises")],
    "a client's process dies": [(REAL, "client_dies")],
    "a client sends NaN": [(MESSAGES, "nan")],
    "… infinity": [(MESSAGES, "infinity")],
    "… wrong names": [(MESSAGES, "wrong_names")],
    "… wrong shapes": [(MESSAGES, "wrong_shapes")],
    "… wrong dtypes": [(MESSAGES, "wrong_dtypes")],
    "… too few arrays": [(MESSAGES, "too_few_arrays")],
    "… no metrics": [(MESSAGES, "no_metrics")],
    "… n = 0": [(MESSAGES, "n_0")],
    "… n = NaN": [(MESSAGES, "n_nan")],
    "… n = 10^18": [(MESSAGES, "n_huge")],
    "… weights of 3e38": [(MESSAGES, "weights_of_3e38")],
    "… updates times 10^6": [(MESSAGES, "times_a_million")],
    "… a zip": [(MESSAGES, "zip")],
    "… a .npz": [(MESSAGES, "npz")],
    "… a pickle": [(MESSAGES, "pickle")],
    "… a header of a terabyte": [(MESSAGES, "terabyte_header")],
    "… an empty array": [(MESSAGES, "empty_array")],
    "… deep JSON": [(MESSAGES, "deep_json")],
    "… 20 MB of text": [(MESSAGES, "long_text")],
    "… ANSI codes": [(MESSAGES, "ansi_codes")],
    "… a partition id that is wrong, doubled, negative or text": [(MESSAGES, "partition_id")],
    "a client is of another method or protocol": [(MESSAGES, "other_method")],
    "a client never answers": [(MESSAGES, "never_answers"), (REAL, "node_silent_deadline")],
    "a client is killed in a round": [(REAL, "node_killed"), (REAL, "node_terminated")],
    "a client comes late": [(MESSAGES, "late")],
    "a client comes back and has lost its state": [(MESSAGES, "lost_state")],
    "the ServerApp is killed in a round": [(REAL, "serverapp_killed")],
    "the SuperLink is killed": [(REAL, "superlink_killed")],
    "a node is started again with its key within 60 s": [(REAL, "restarted_with_keys")],
    "a key is not registered": [(REAL, "unknown_key"), (JOINED, "unknown_key")],
    "clocks are 30 s apart": [(REAL, "clock_ahead")],
    "the disk is full": [(REAL, "disk_full")],
}


@cache
def tests_of(file: str) -> set[str]:
    """The names of a file's test functions; without importing it."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("what", ACCIDENTS)
def test_an_accident_has_its_tests(what: str) -> None:
    for file, slug in ACCIDENTS[what]:
        assert f"test_accident_{slug}" in tests_of(file), what


def test_no_accident_is_forgotten() -> None:
    listed = {entry for entries in ACCIDENTS.values() for entry in entries}
    for file in {file for file, _ in listed}:
        for name in tests_of(file):
            slug = name.removeprefix("test_accident_")
            assert slug == name or (file, slug) in listed, name
