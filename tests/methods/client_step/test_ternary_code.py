"""The codec of sparse ternary updates: exact, near the entropy bound, and no message misread."""

import os
import struct
import sys
import zlib

import numpy as np
import pytest

from flwr_regs.methods.parts import ternary as codec
from flwr_regs.methods.parts.ternary import CodecError, decode, encode

FLOATS = (np.float16, np.float32, np.float64)
FUZZ = int(os.environ.get("FUZZ", "1"))  # random messages, in multiples of what a usual run tries


def ternary(n, density, rng, dtype=np.float32, mu=0.0371, positive=0.5):
    """Return a vector of exactly ``round(n density)`` non-zero entries at random positions."""
    a = np.zeros(n, dtype)
    at = rng.permutation(n)[: round(n * density)]
    a[at] = np.where(rng.random(at.size) < positive, 1, -1) * dtype(mu)
    return a


def equal(got, want):
    """True if names, order, dtypes, shapes and bits agree, −0.0 of `want` being 0."""
    return list(got) == list(want) and all(
        got[k].dtype == want[k].dtype
        and got[k].shape == want[k].shape
        and got[k].tobytes() == (want[k] + 0.0).astype(want[k].dtype).tobytes()
        for k in want
    )


def forge(body=None, payload=None, **fields):
    """Return a message with fields or body replaced, word count and CRC made to fit."""
    payload = encode({"a": SMALL}) if payload is None else payload
    names = ("magic", "version", "n", "plus", "minus", "mu", "words")
    values = dict(zip(names, codec.HEADER.unpack_from(payload), strict=True))
    body = payload[48:] if body is None else body
    values |= {"words": len(body) // 4} | fields
    head = codec.HEADER.pack(*(values[k] for k in names))
    return head + struct.pack("<I", zlib.crc32(head + body)) + body


SMALL = ternary(200, 0.3, np.random.default_rng(0))
LIKE = {"a": SMALL}


def test_a_lacking_library_is_named_before_a_round(monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    codec.SparseTernary()
    with pytest.raises(ImportError, match="needs the package 'constriction'"):
        codec.SparseTernary(density_up=0.1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("density", [0, 1e-5, 0.003, 0.1, 0.5, 0.9, 1])
def test_round_trip(dtype, density):
    rng = np.random.default_rng(1)
    for n in (0, 1, 2, 3, 31, 1000, codec.CHUNK, codec.CHUNK + 1):
        for positive in (0.0, 0.5, 1.0):
            arrays = {"a": ternary(n, density, rng, dtype, rng.random() + 0.01, positive)}
            assert equal(decode(encode(arrays), arrays), arrays)


def test_round_trip_of_many_arrays_and_dtypes():
    rng = np.random.default_rng(4)
    for _ in range(200 * FUZZ):
        mu, arrays = (rng.random() + 0.1) * 10.0 ** rng.integers(-3, 4), {}
        # at random some are all zero, so that which is the widest varies
        filled = [d for d in FLOATS if rng.random() < 0.7]
        if filled:
            mu = filled[-1](mu)
        for i, dtype in enumerate(rng.permutation(np.array(FLOATS, object))):
            density = rng.random() ** 3 if dtype in filled else 0.0
            shape = tuple(rng.integers(0, 6, rng.integers(0, 4)))
            arrays[f"{i}"] = ternary(int(np.prod(shape)), density, rng, dtype, mu).reshape(shape)
        got = decode(encode(arrays), arrays)
        assert equal(got, arrays)
        assert all(a.flags.writeable and a.flags.owndata for a in got.values())
    arrays = {"a": np.array([0.1], np.float16), "b": np.array([0.1]), "c": np.zeros(2, np.float32)}
    assert codec.HEADER.unpack_from(encode(arrays))[5] == 0.1
    for mu in (5e-324, 2.3e-308, 1.7976931348623157e308):
        arrays = {"b": np.array([0, mu, -mu]), "c": np.zeros(2, np.float32)}
        assert equal(decode(encode(arrays), arrays), arrays)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_size_is_near_the_entropy_bound(density):
    n = 10**6
    a = ternary(n, density, np.random.default_rng(5))
    payload = encode({"a": a})
    h = -density * np.log2(density) - (1 - density) * np.log2(1 - density)
    assert len(payload) * 8 / n <= 1.02 * (h + density) + 64 * 8 / n
    assert equal(decode(payload, {"a": a}), {"a": a})


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (np.array([0, 1, 2.0]), "array 'b'"),
        (np.array([1, 0, np.nan]), "array 'b'"),
        (np.array([1, 0, -1]), "array 'b'"),
        (np.zeros(2, np.longdouble), "array 'b'"),
        (np.array([*ternary(codec.CHUNK, 0.01, np.random.default_rng(7)), 1.0]), "array 'b'"),
        (np.array([0, 2.0], np.float32), "array 'b' is not ternary with the others"),
        (np.array([0.1], np.float64), "array 'a'"),  # b is wider, so a ought to hold 0.1
        (np.array([np.nextafter(np.float32(1), np.float32(2))]), "array 'b'"),
        (np.array([*[0.0] * codec.CHUNK, -np.inf]), "array 'b' holds NaN or infinity"),
    ],
)
def test_encode_names_the_array_that_is_not_ternary_or_of_another_magnitude(b, message):
    with pytest.raises(CodecError, match=message):
        encode({"a": np.array([1, 0], np.float32), "b": b})


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_every_damaged_byte_is_seen(density):
    a = {"a": ternary(100, density, np.random.default_rng(8))}
    payload = encode(a)
    for i in range(len(payload)):
        for bit in range(8):
            bad = bytearray(payload)
            bad[i] ^= 1 << bit
            with pytest.raises(CodecError):
                decode(bytes(bad), a)


def test_every_truncation_and_extension_is_seen():
    with pytest.raises(CodecError, match="must be bytes, not int"):
        decode(5, LIKE)
    payload = encode(LIKE)
    assert len(payload) > 60
    for i in range(len(payload)):
        with pytest.raises(CodecError, match="truncated"):
            decode(payload[:i], LIKE)
    for extra in (b"\0", b"\0" * 4, b"x", payload):
        with pytest.raises(CodecError, match="trailing bytes"):
            decode(payload + extra, LIKE)
        with pytest.raises(CodecError):
            decode(extra[:47] + payload, LIKE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"PK\x03"}, "starts with"),
        ({"version": 2}, "version 2"),
        ({"n": 2**64 - 1}, "entries, expected 200"),
        ({"plus": 201, "minus": 0}, "more than all 200"),
        ({"plus": 2**64 - 1, "minus": 2**64 - 1}, "more than all 200"),
        ({"plus": 0, "minus": 0}, "mu is 0 and the body empty"),
        ({"plus": 0, "minus": 0, "body": b""}, "mu is 0 and the body empty"),
        ({"plus": 0, "minus": 0, "mu": -0.0, "body": b""}, "mu is 0 and the body empty"),
        ({"mu": 0.0}, "finite and positive"),
        ({"mu": float("nan")}, "finite and positive"),
        ({"mu": 1e39}, "becomes inf in float32 of array 'a'"),
        ({"mu": 1e-50}, "becomes 0.0 in float32 of array 'a'"),
        ({"mu": 0.1}, "not a number of float32"),
        ({"body": b""}, "the body"),
        ({"body": bytes(4)}, "zero word"),
    ],
)
def test_decode_says_what_is_wrong(fields, message):
    """The CRC fits each of these, so the check named is the one that sees it."""
    with pytest.raises(CodecError, match=message):
        decode(forge(**fields), LIKE)


def test_counts_and_leftovers_of_the_body():
    payload = encode(LIKE)
    plus, minus = codec.HEADER.unpack_from(payload)[3:5]
    with pytest.raises(CodecError, match="but the header says"):
        decode(forge(plus=minus, minus=plus), LIKE)
    # one entry more than the header says, and that one the first: all that `like` asks for is there
    model = codec._model(200, plus, minus)
    coder = codec._library().stack.AnsCoder()
    coder.encode_reverse(np.r_[np.sign(SMALL) + 1, 2].astype(np.int32), model)
    with pytest.raises(CodecError, match="more than the header's number of entries"):
        decode(forge(body=coder.get_compressed().astype("<u4").tobytes()), LIKE)


def test_a_like_that_does_not_fit():
    payload = encode(LIKE)
    for like in ({}, {"a": SMALL[1:]}, LIKE | {"b": np.zeros(1)}):
        with pytest.raises(CodecError, match="200 entries, expected"):
            decode(payload, like)
    with pytest.raises(CodecError, match="array 'a' has dtype int64"):
        decode(payload, {"a": np.zeros(200, np.int64)})


def test_what_decodes_is_what_encode_writes():
    """Random counts and bodies under a right CRC: refused, or the one message of what comes out."""
    rng = np.random.default_rng(10)
    accepted = 0
    for _ in range(20000 * FUZZ):
        n = int(rng.integers(0, 7))
        like = {"a": np.zeros(n, rng.choice(np.array(FLOATS, object)))}
        plus, minus = (int(x) for x in rng.integers(0, 4, 2))
        words = rng.integers(0, 2**32, rng.integers(0, 3), dtype=np.uint32)
        words >>= rng.integers(0, 32, words.size, dtype=np.uint32)  # small ones, too
        payload = forge(
            payload=encode(like),
            body=words.astype("<u4").tobytes(),
            plus=plus,
            minus=minus,
            mu=float(rng.choice([0.0, -0.0, 0.5, 0.1, 1e300])),
        )
        try:
            got = decode(payload, like)
        except CodecError:
            continue
        accepted += 1
        assert encode(got) == payload
    assert accepted > 50
