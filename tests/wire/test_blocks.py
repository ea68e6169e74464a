"""Work on blocks in threads, arrays that are filled in, and arrays that are mostly zeros."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from flwr_regs.wire import blocks
from flwr_regs.wire.npy import Blank, sealed, write_array
from flwr_regs.wire.sparse import Sparse, sparse


@pytest.mark.parametrize(("cores", "expected"), [("1", 1), ("3", 3), ("", 4)])
def test_each_job_is_done_once(cores: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    monkeypatch.setattr(blocks.os, "sched_getaffinity", lambda _: range(8), raising=False)
    started, done, together = list[int](), list[int](), threading.Barrier(expected, timeout=60)

    def worker() -> Callable[[int], None]:
        together.wait()  # as many as are expected have begun
        started.append(threading.get_ident())
        return done.append

    blocks.spread_over_threads(range(300), worker)
    assert sorted(done) == list(range(300))
    assert len(set(started)) == len(started) == expected


def test_few_jobs_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    names = list[str]()
    blocks.spread_over_threads(
        range(2 * blocks.WORTH_A_THREAD - 1),
        lambda: lambda _: names.append(threading.current_thread().name),
    )
    assert set(names) == {threading.current_thread().name}


@pytest.mark.parametrize("bad", [0, 299])
def test_an_error_in_a_thread_is_raised(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(blocks.os, "sched_getaffinity", lambda _: range(8), raising=False)

    def work(job: int) -> None:
        if job == bad:
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        blocks.spread_over_threads(range(300), lambda: work)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5), (3, 4, 5)], ids=str)
def test_a_filled_array_is_the_sealed_one(shape: tuple[int, ...], dtype: str, order: str) -> None:
    values = np.random.default_rng(0).normal(20, 9, shape)
    array = np.asarray(values).astype(dtype, order=order)  # type: ignore[call-overload]
    blank = Blank(array.dtype, array.shape, blocks.order_of(array) == "F")
    assert not blank.vector.any()
    blank.vector[:] = blocks.flat(array)
    found, expected = blank.seal(), sealed(array)
    np.testing.assert_array_equal(found, array)
    assert found.flags.f_contiguous == expected.flags.f_contiguous
    assert not found.flags.writeable
    assert write_array(found) == write_array(expected)


def test_a_filled_array_is_never_copied() -> None:
    tracemalloc.start()
    try:
        blank = Blank(np.dtype(np.float32), (1 << 20,))
        blank.vector[:] = 1
        found = blank.seal()
        assert write_array(found) is write_array(found)
        assert tracemalloc.get_traced_memory()[1] < 1.01 * found.nbytes
    finally:
        tracemalloc.stop()


def test_a_sparse_array_reads_as_the_dense_one() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        n: np.zeros(s, np.float32) for n, s in {"a": (40, 50), "b": (), "c": (3, 700)}.items()
    }
    for a in arrays.values():
        a[...] = np.where(rng.random(a.shape) < 0.05, rng.normal(size=a.shape), 0)
    found = sparse(arrays)
    assert found is not None
    for name, a in arrays.items():
        mine = found[name]
        assert isinstance(mine, Sparse)
        np.testing.assert_array_equal(mine.dense, a)
        assert (mine.dense.dtype, mine.dense.shape) == (a.dtype, a.shape)
        for width in (1, 7, 10**6):
            out = np.full(a.size, np.nan)
            for part in blocks.blocks(a.size, width):
                mine.read(part, out[part])
            np.testing.assert_array_equal(out, a.reshape(-1))


def test_an_array_that_is_not_mostly_zeros_stays_dense() -> None:
    a = np.zeros(80, np.float32)
    a[:10] = 1
    assert sparse({"a": a}) is not None
    a[10] = np.nan
    assert sparse({"a": a}) is None
