"""The reader of arrays that arrive reads what numpy writes, and refuses all else before it costs memory."""

import io
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from flwr_regs.server.exchange.replies import read_uploads
from flwr_regs.wire.arrays import ProtocolError, unpack
from flwr_regs.wire.npy import Unreadable, npy_bytes, read_header
from flwr_regs.wire.records import from_record, parcel_of, to_record, view_of
from tests.conftest import peak
from tests.server.exchange.damage import NOT_ARRAYS, npy


def read_array(data: Any) -> np.ndarray:
    return read_header(data).view(data)


DTYPES = ["?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.booleans(), st.sampled_from([(1, 0), (2, 0)]))
def test_it_reads_what_numpy_writes(data: Any, dtype: str, fortran: bool, version: Any) -> None:
    shape = arrays_of.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
    a = data.draw(arrays_of.arrays(np.dtype(dtype), shape))
    a = np.asfortranarray(a) if fortran and a.ndim else a
    file = io.BytesIO()
    np.lib.format.write_array(file, a, version=version)
    found = read_array(file.getvalue())
    assert (found.dtype, found.shape) == (a.dtype, a.shape)
    np.testing.assert_array_equal(found, a)
    assert not found.flags.writeable
    assert found.base is not None


@pytest.mark.parametrize("what", NOT_ARRAYS)
def test_it_refuses_all_else_and_spends_nothing(what: str) -> None:
    def said() -> str:
        with pytest.raises(Unreadable) as raised:
            read_array(NOT_ARRAYS[what])
        return str(raised.value)

    assert peak(said) < 500_000
    assert len(said()) < 400
    assert said().isprintable()
    assert ("has no end within" in said()) == (what in ("long-header", "header-beyond"))


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 200), st.integers(0, 255), st.integers(-3, 3), st.integers(0, 2))
def test_a_changed_byte_is_refused_or_is_another_array_of_the_same_bytes(
    at: int, value: int, longer: int, which: int
) -> None:
    whole = [npy(np.arange(6.0).reshape(2, 3)), npy(np.float32(1)), npy(np.zeros((2, 0), "i4"))]
    data = bytearray(whole[which])
    data[at % len(data)] = value
    data = data[:longer] if longer < 0 else data + b"\0" * longer
    try:
        found = read_array(bytes(data))
    except Unreadable:
        return
    assert found.nbytes <= len(data)
    assert longer == 0 or found.nbytes + 64 <= len(data)


def test_a_reply_s_arrays_are_views_and_a_term_gets_its_upload_as_copies() -> None:
    """A view costs nothing; a term may write to its upload, or hand it to torch."""
    record = ArrayRecord({"w": Array(np.ones(3))})
    parcel = parcel_of(RecordDict({"arrays": record, "t.upload": record}))
    assert not parcel.records["arrays"]["w"].flags.writeable
    assert not parcel.records["t.upload"]["w"].flags.writeable
    assert read_uploads("a reply", parcel)["t"]["w"].flags.writeable
    assert from_record(record)["w"].flags.writeable


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}xxx", "text", None])
def test_packed_arrays_that_are_none_are_a_protocol_error(data: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


GOOD = [
    np.asarray(1.5), np.zeros((0, 3)), np.tri(5, dtype="f2"), np.arange(24).reshape(2, 3, 4),
    np.asfortranarray(np.arange(12.0).reshape(3, 4))
]  # fmt: skip


@pytest.mark.parametrize("array", GOOD, ids=lambda a: str(a.shape))
def test_an_array_is_labelled_as_its_bytes_are(array: np.ndarray) -> None:
    ours = to_record({"w": array})["w"]
    assert (ours.dtype, tuple(ours.shape)) == (str(array.dtype), array.shape)
    assert len(ours.data) == npy_bytes(array)
    for labelled in (ours, Array("", (), "numpy.ndarray", ours.data)):
        view = view_of("w", labelled)
        np.testing.assert_array_equal(view, array)
        assert not view.flags.writeable
    with pytest.raises(ProtocolError, match="but is labelled 'float33'"):
        view_of("w", Array("float33", (), "numpy.ndarray", ours.data))
