"""Checkpoints on the disk: values come back to the bit, damage is refused, no failure loses the last."""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load

from flwr_regs.server.checkpoint import checkpoint
from flwr_regs.server.checkpoint.checkpoint import CheckpointError, Folder, latest, read, rounds_in
from flwr_regs.server.checkpoint.checkpoint import DamagedCheckpoint as Damaged
from flwr_regs.wire.arrays import pack
from tests.conftest import ROOT, Log

STATE: dict[str, Any] = {
    "model": {"w": np.arange(6, dtype=np.float32), "n": np.array(3)},
    "steps": {4: b"code", 5: b""},
    "loss": float("nan"),
}
HISTORY = [{"round": t, "failures": {0: "none", 2: "late"}} for t in (1, 2, 3)]


def same(a: Any, b: Any) -> bool:
    """Whether two values are of equal types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return repr((a.dtype, a.shape, a.tobytes(), a.flags.f_contiguous)) == repr(
            (b.dtype, b.shape, b.tobytes(), b.flags.f_contiguous)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


DTYPES = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?", "u2"])
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAYS = arrays_of.arrays(DTYPES, SHAPES)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
)
KEYS = st.text(max_size=3) | st.integers() | st.just("$array") | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | ARRAYS | ARRAYS.map(np.asfortranarray) | ARRAYS.map(lambda a: a.sum()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(max_size=2), max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(VALUES)
def test_a_value_comes_back_to_the_bit(value: Any) -> None:
    store: dict[str, np.ndarray] = {}
    text = json.dumps(checkpoint.to_json(value, store))
    found = checkpoint.from_json(json.loads(text), load(pack(store)))
    assert same(found, value), (found, value)


@pytest.mark.parametrize("value", [lambda: 0, np.array([{}], dtype=object), 1j, np.ones(2, "c8")])
def test_what_cannot_be_kept_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^the state\['terms'\]\[1\] is .*; only numbers"):
        checkpoint.to_json({"terms": [0, value]}, {}, "the state")


def written(folder: Path, *numbers: int) -> None:
    """Save checkpoints of some rounds."""
    mine = Folder(folder, latest(folder) if folder.exists() and rounds_in(folder) else None)
    for number in numbers:
        mine.save(number, {**STATE, "number": number}, HISTORY[:number])
    mine.close()


def test_the_last_two_are_kept_and_read_back(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "round-000002", "round-000003"]
    found = latest(tmp_path)
    assert (found.round, found.path) == (3, tmp_path / "round-000003")
    assert same(found.state, {**STATE, "number": 3})
    assert same(found.history, HISTORY)
    assert found.versions["numpy"] == np.__version__
    assert same(read(tmp_path / "round-000002").history, HISTORY[:2])
    assert (tmp_path / "round-000003").stat().st_mode & 0o777 == 0o600
    (tmp_path / "round-000003").rename(tmp_path / "round-000009")
    with pytest.raises(Damaged, match="-000009 is damaged: it holds round 3"):
        read(tmp_path / "round-000009")


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path, log: Log) -> None:
    written(tmp_path, 1, 2)
    (tmp_path / "round-000002").write_bytes(b"")
    assert latest(tmp_path).round == 1
    assert log("going back to round-000001")
    written(tmp_path, 2)  # the run goes on, and what is damaged is out of its way
    assert latest(tmp_path).round == 2
    assert list(tmp_path.glob("damaged-round-000002-*"))
    for number in (1, 2):
        (tmp_path / f"round-00000{number}").write_text("{}")
    with pytest.raises(CheckpointError, match=r"-000002 is damaged.*; .*-000001 is damaged"):
        latest(tmp_path)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", pack({"w": np.ones(2)})]
    + [pack({"manifest": np.frombuffer(m, np.uint8)}) for m in (b"[", b"{}", b"[" * 99999, b"[1]")],
    ids=["nothing", "JSON", "a model", "no JSON", "empty", "deep", "a list"],
)
def test_a_file_of_another_kind_gives_way_too(tmp_path: Path, body: bytes) -> None:
    """Even one that begins with the digest of its rest."""
    written(tmp_path, 1, 2)
    (tmp_path / "round-000002").write_bytes(sha256(body).hexdigest().encode() + b"\n" + body)
    assert latest(tmp_path).round == 1
    with pytest.raises(Damaged, match="-000002 is damaged: it holds no checkpoint"):
        read(tmp_path / "round-000002")


def stated(place: Path, **changes: Any) -> None:
    """Change a manifest as a writer would have written it."""
    body = load(place.read_bytes().partition(b"\n")[2])
    texts = {name: body.pop(name).tobytes().decode() for name in ("manifest", "state", "history")}
    texts["manifest"] = json.dumps({**json.loads(texts["manifest"]), **changes})
    place.write_bytes(b"".join(checkpoint.written(texts, body)))


def test_other_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        latest(tmp_path / "nowhere")
    (tmp_path / "model.pt").touch()
    with pytest.raises(CheckpointError, match=r"such as round-000012, only model\.pt"):
        latest(tmp_path)
    written(tmp_path, 1, 2)
    stated(tmp_path / "round-000002", format=checkpoint.FORMAT + 1)
    with pytest.raises(CheckpointError, match="format 2, written by flwr_regs"):
        latest(tmp_path)  # not the older one: nothing is damaged
    stated(tmp_path / "round-000002", format=1, kind="something else")
    with pytest.raises(CheckpointError, match="is a 'something else'"):
        latest(tmp_path)


def test_a_folder_is_for_one_run(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    code = f"from flwr_regs.server.checkpoint.checkpoint import Folder; Folder({str(tmp_path)!r})"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert f"another run (process {os.getpid()}) writes its checkpoints" in other.stderr
    with pytest.raises(CheckpointError, match="give each run a folder of its own"):
        Folder(tmp_path)
    first.save(1, STATE, HISTORY[:1])
    first.close()
    with pytest.raises(CheckpointError, match=r"holds .* \(round-000001\): go on .*resume_from"):
        Folder(tmp_path)
    one = latest(tmp_path)
    Folder(tmp_path, one).close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    with pytest.raises(CheckpointError, match="of another run"):
        Folder(tmp_path / "copy", one)
    written(tmp_path, 2)
    with pytest.raises(CheckpointError, match="round-000002, which is later than round-000001"):
        Folder(tmp_path, one)
    assert latest(tmp_path).round == 2


def test_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/here cannot be written \(Not a directory\)"):
        Folder(tmp_path / "file" / "here")
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"got cannot be written \(its .lock is a link\)"):
        Folder(tmp_path / "got")
    assert not (tmp_path / "mine").exists()  # nor overwritten
    fail_at(monkeypatch, 1, OSError(30, "Read-only file system"))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Folder(tmp_path)
    monkeypatch.undo()
    Folder(tmp_path).close()  # the lock is free


@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders, and has locks of its own")
def test_a_disk_that_syncs_no_folders_and_knows_no_locks_keeps_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "not implemented")))
    Folder(tmp_path).save(1, STATE, [])
    assert latest(tmp_path).round == 1


class Killed(BaseException):
    """The process ends here: nobody cleans up."""


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Let the `number`-th call that changes the disk fail, from 1; return the calls as they come."""
    calls: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            calls.append(name)
            if len(calls) == number:
                raise error
            if len(calls) > number and isinstance(error, Killed):
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in ("open", "fsync", "replace"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    if isinstance(error, Killed):
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    return calls


def test_a_failure_at_any_step_leaves_the_checkpoints_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call that makes, syncs or renames: an error of the disk, and the end of the process."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the calls count, not the disk
    with monkeypatch.context() as patch:
        calls = fail_at(patch, 0, OSError())
        written(tmp_path / "whole", 1, 2, 3)
    assert {"open", "fsync", "replace"} == {*calls}
    for error in (OSError(28, "No space left on device"), Killed()):
        again = 1
        while True:
            folder = tmp_path / f"{type(error).__name__}-{again}"
            written(folder, 1, 2)
            mine = Folder(folder, latest(folder))
            with monkeypatch.context() as patch:
                calls = fail_at(patch, again, error)
                with contextlib.suppress(type(error)):
                    mine.save(2, {**STATE, "number": 2}, HISTORY[:2])
                    mine.save(3, {**STATE, "number": 3}, HISTORY)
                done = len(calls) < again
            assert latest(folder).round in (2, 3)  # before anything is cleaned
            if isinstance(error, OSError):
                mine.save(3, {**STATE, "number": 3}, HISTORY)
                assert latest(folder).round == 3
                assert not list(folder.glob(".round-*"))
            mine.close()
            Folder(folder, latest(folder)).close()  # the next run cleans
            left = {p.name for p in folder.iterdir()} - {".lock"}
            assert left <= {"round-000001", "round-000002", "round-000003"}
            assert same(latest(folder).state, {**STATE, "number": latest(folder).round})
            if done:
                break
            again += 1
        assert again > 8


def test_the_last_entry_of_the_history_may_still_change(tmp_path: Path) -> None:
    mine, history = Folder(tmp_path), [{"round": 1}]
    mine.save(1, STATE, history)
    history[-1]["stopped"] = "so be it"  # type: ignore[assignment]
    mine.save(1, STATE, history)
    assert latest(tmp_path).history == [{"round": 1, "stopped": "so be it"}]
    with pytest.raises(TypeError, match="history of entry 1 holds arrays"):
        mine.save(2, STATE, [*history, {"round": 2, "loss": np.ones(2)}])


def test_what_a_full_disk_did_not_take_is_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, history = Folder(tmp_path), [{"round": 1}, {"round": 2}]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            mine.save(2, STATE, history)
    history[0]["loss"] = np.ones(2)  # type: ignore[assignment]
    mine.save(2, STATE, history)  # which would raise for the array
