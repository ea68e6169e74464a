"""Sparse ternary compression, of a client's update and of the global step, with residuals; and its code.

``ST`` takes the whole update as one vector. It keeps the fraction q of largest magnitude and replaces each
kept entry by its sign times their mean magnitude μ. A residual holds the rest, which is sent later:

| *Upload*     ``Δ_k = R_k + v_k − w_t``; sends ``ST(Δ_k)``, keeps ``R_k = Δ_k − ST(Δ_k)``
| *Update*     ``Δ = R + Σ p_k ST(Δ_k)``; moves by ``ST(Δ)``, sends it, and keeps ``R = Δ − ST(Δ)``

Departures from the paper: the box of Alg. 2 thresholds T, which would lose the negative entries; we
threshold ``|T|``. It also keeps all entries that tie with the threshold; we keep exactly k, of equal ones
the first. The box of Alg. 1 moves the server's model by Δ and also keeps R, which would apply the residual
twice and let server and clients drift apart; our server moves by what it sends.

**The code** is a vector in {−μ, 0, +μ}ⁿ, entropy coded. A message of a million entries takes at most 64
bytes more than the entropy of its counts. For random signs and density q this entropy is ``n (H(q) + q)``
bits, where H is the binary entropy.

Wire format, little-endian, version 1. Names, shapes and dtypes do not travel, because both ends know them:

| bytes  | type   | what                                                                     |
|--------|--------|--------------------------------------------------------------------------|
| 0-2    | 3 s    | the magic ``b"STC"``                                                     |
| 3      | u8     | version                                                                  |
| 4-11   | u64    | n, the number of entries                                                 |
| 12-19  | u64    | n₊, how many are +μ                                                      |
| 20-27  | u64    | n₋, how many are −μ                                                      |
| 28-35  | f64    | μ: finite and positive, or 0 where n₊ = n₋ = 0                           |
| 36-43  | u64    | w, the number of words in the body                                       |
| 44-47  | u32    | CRC-32 of bytes 0-43 and the body                                        |
| 48-    | u32[w] | body: the entries in order, empty where n₊ = n₋ = 0                      |

constriction's ``AnsCoder`` makes the body from the symbols 0 (−μ), 1 (zero) and 2 (+μ) under
``Categorical([n₋, n − n₊ − n₋, n₊], perfect=False)``, the counts as float64. Each vector has exactly one
message, and bytes that decode are the message of a vector.

Source: Ma, Lu, Lu, Li, Yi, Cui, "Towards heterogeneous clients with elastic federated learning" (2021),
Alg. 1-2.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Compresses, TakesBack
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.once import warn_once
from flwr_regs.term import FRACTION, Ranges, Term
from flwr_regs.wire.arrays import all_finite, pieces

__all__ = ["SparseTernary"]

NDArrays = dict[str, np.ndarray]

DILUTED = "|diluted"
"""Entry of the server's slot once the warning was given; no parameter's name."""
SENT = "sent.."
"""Prefix of the update in the client's slot, beside the residual: it is added again if it was not used.
No parameter's name has two dots in a row."""
MAGIC = b"STC"
VERSION = 1
HEADER = struct.Struct("<3sBQQQdQ")
CRC = struct.Struct("<I")
MOSTLY_ZERO = 8
"""One entry in so many is not zero, at most."""
CHUNK = 1 << 18
"""Entries coded at a time. It bounds the working memory and does not change the message."""


@dataclass(frozen=True)
class SparseTernary(Term, Compresses, TakesBack):
    """Sparse ternary compression ST with residuals (Alg. 2); composes with any method, as the last term.

    With `density_down`, clients must hold the model that the step changes: the strategy then uses the
    ``"delta"`` downlink. A client that missed rounds gets the missed steps, or the model if that is
    smaller.

    With `density_down`, FedADC's clients get the ``m_t`` of the step as it was sent, since they derive it
    from the last global step, ``ST(Δ)``. What waits in the server's residual is not in it. The server's
    own share, ``(β_g − β_l) m_t``, is of the momentum before compression.

    Parameters
    ----------
    density_up, density_down : float, optional
        Fraction of entries kept, in (0, 1], of a client's update and of the global step. None: dense,
        uncompressed. 1 keeps all entries, but still only their signs. Exactly ``k = max(⌊n q⌋, 1)``
        entries are kept; of equal ones, the first. If fewer are not zero, μ averages zeros too and becomes
        smaller: for the global step this is logged once.
    """

    name: ClassVar[str] = "ternary"
    ranges: ClassVar[Ranges] = {"density_up": FRACTION, "density_down": FRACTION}
    density_up: float | None = None
    density_down: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.density_up, self.density_down) != (None, None):
            _library()  # its absence is said before a round is lost

    def acts(self, hook: str) -> bool:
        densities = {"finish": self.density_up, "release": self.density_down}
        return super().acts(hook) and densities.get(hook, 1.0) is not None

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        if self.density_up is None:
            return delta, {}, {}
        r = ctx.client
        total = {n: r[n] + d if n in r else d for n, d in delta.items()}
        sent = sparse_ternary(total, self.density_up)
        residual = {n: total[n] - sent[n] for n in total}
        return sent, {}, residual | {f"{SENT}{n}": s for n, s in sent.items()}

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> ServerStep:
        if self.density_down is None:
            return server, step
        sums = {n: server[n] + s if server else s for n, s in step.items()}
        total = {n: torch.from_numpy(np.asarray(s)) for n, s in sums.items()}
        sent = sparse_ternary(total, self.density_down)
        rounded = {n: s.numpy().astype(ctx.params[n].dtype) for n, s in sent.items()}
        residual = {n: total[n].numpy() - rounded[n] for n in total}
        size = sum(t.numel() for t in total.values())
        filled = sum(int(t.count_nonzero()) for t in total.values())
        dilutes = 0 < filled < entries_kept(size, self.density_down)  # zeros are kept too
        text = (
            f"density_down={self.density_down:g} keeps more entries of the global step than are not "
            "zero: μ, the mean magnitude of all that are kept, is diluted; use a smaller density_down"
        )
        return residual | warn_once(DILUTED, server, text if dilutes else ""), rounded

    def unused(self, before: Slot, after: Slot) -> Slot:
        sent = {n: s for n in after if (s := after.get(f"{SENT}{n}")) is not None}
        return {n: after[n] + s for n, s in sent.items()}  # R_k + ST(Δ_k): nothing is lost

    def encode(self, update: Mapping[str, Any]) -> bytes:
        return encode(update)

    def decode(self, data: bytes, like: Mapping[str, Any]) -> NDArrays:
        return decode(data, like)


def sparse_ternary(update: Arrays, density: float) -> Arrays:
    """Return ST of `update`, torch tensors by name, taken as one vector in their order (Alg. 2).

    Exactly ``k = max(⌊n q⌋, 1)`` entries of largest magnitude are kept; among equal ones, the first.
    """
    flat = torch.cat([t.reshape(-1) for t in update.values()])
    k = entries_kept(flat.numel(), density)
    size = flat.abs()
    least = size.topk(k, sorted=False).values.min()
    tied = size == least
    keep = (size > least) | (tied & (tied.cumsum(0) <= k - (size > least).sum()))
    mu = ((size * keep).sum(dtype=torch.float64) / k).to(flat.dtype)
    # + 0 turns negative zero, which the codec cannot carry, into positive zero; one NaN makes all NaN
    sent = torch.where(keep, mu * flat.sign(), 0.0) + 0.0 * mu
    parts = torch.split(sent, [t.numel() for t in update.values()])
    shaped = zip(update.items(), parts, strict=True)
    return {n: part.reshape(t.shape).to(t.dtype) for (n, t), part in shaped}


def entries_kept(size: int, density: float) -> int:
    """Return k of `size` entries."""
    return max(int(size * density + 1e-9), 1)  # 1e-9: 0.29 * 100 is 28.999999999999996


class CodecError(ValueError):
    """Arrays that are not a ternary vector, or bytes that are not the message of one."""


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the message of a ternary vector: the arrays, concatenated in their order.

    Arrays are float16, float32 or float64; −0.0 counts as 0. With mixed dtypes, μ is taken from the widest
    array that has a non-zero entry; narrower arrays must hold it rounded to their dtype. Raises a
    CodecError that names the first array that cannot be coded.
    """
    flats: NDArrays = {name: np.asarray(a).reshape(-1) for name, a in arrays.items()}
    n, dtypes = sum(flat.size for flat in flats.values()), {flat.dtype for flat in flats.values()}
    if len(flats) > 1 == len(dtypes) and n <= CHUNK:  # many small arrays cost more than one
        with suppress(CodecError):  # which array it is shows below
            return encode({"": np.concatenate([*flats.values()])})
    surveys = {name: _survey(name, flat) for name, flat in flats.items()}
    plus = sum(count for _, count, _ in surveys.values())
    minus = sum(count for _, _, count in surveys.values())
    sizes = {name: size for name, (size, _, _) in surveys.items() if size}
    widest = max(sizes, key=lambda name: sizes[name].itemsize, default=None)
    mu = 0.0 if widest is None else float(sizes[widest])
    for name, size in sizes.items():
        if size != _cast(mu, size.dtype):
            raise CodecError(
                f"array '{name}' is not ternary with the others: its entries have magnitude "
                f"{size!s} ({size.dtype}), those of '{widest}' {mu!r}"
            )
    body = b""
    if plus + minus:
        coder, model = _library().stack.AnsCoder(), _model(n, plus, minus)
        for flat in reversed(flats.values()):  # the coder is a stack: last in, first out
            for part in reversed(list(pieces(flat.size, CHUNK))):
                sign = (flat[part] > 0).view(np.int8) - (flat[part] < 0).view(np.int8)
                coder.encode_reverse(sign.astype(np.int32) + 1, model)
        body = coder.get_compressed().astype("<u4").tobytes()
    header = HEADER.pack(MAGIC, VERSION, n, plus, minus, mu, len(body) // 4)
    return header + CRC.pack(zlib.crc32(body, zlib.crc32(header))) + body


def decode(payload: bytes, like: Mapping[str, np.ndarray]) -> NDArrays:
    """Return the arrays that :func:`encode` took; names, order, shapes and dtypes are those of `like`.

    Raises CodecError if the message is damaged, has another number of entries, or has a μ that `like`'s
    dtypes cannot represent.
    """
    if not isinstance(payload, bytes):
        raise CodecError(f"a message must be bytes, not {type(payload).__name__}")
    for name, a in like.items():
        _check_dtype(name, np.asarray(a).dtype)
    n = sum(np.size(a) for a in like.values())
    plus, minus, mu, body = _parse(payload, n)
    out: NDArrays = {name: np.zeros(np.shape(a), np.asarray(a).dtype) for name, a in like.items()}
    if plus + minus == 0:
        return out
    words = np.frombuffer(body, dtype="<u4").astype(np.uint32)
    if words.size and words[-1] == 0:
        raise CodecError("the body ends in a zero word, which the coder never writes")
    coder, model = _library().stack.AnsCoder(words), _model(n, plus, minus)
    counts = {name: np.zeros(3, int) for name in out}  # of −μ, 0 and +μ; zeros are not counted
    for name, a in out.items():
        flat, values = a.reshape(-1), _cast(np.array([-mu, 0.0, mu]), a.dtype)
        for part in pieces(flat.size, CHUNK):
            symbols = coder.decode(model, part.stop - part.start)
            filled = np.flatnonzero(symbols != 1)  # most are zero, as `flat` is
            flat[part][filled] = values[symbols[filled]]
            counts[name] += np.bincount(symbols[filled], minlength=3)
        if counts[name].any() and not 0 < values[2] < np.inf:
            raise CodecError(f"mu {mu!r} becomes {values[2]!s} in {a.dtype} of array '{name}'")
    below, _, above = np.sum([*counts.values()], axis=0)
    if (above, below) != (plus, minus):
        found = f"{above} positive and {below} negative entries"
        raise CodecError(f"the body holds {found}, but the header says {plus} and {minus}")
    if not coder.is_empty():  # with correct counts, only encode's own output passes this check
        raise CodecError("the body holds more than the header's number of entries")
    widest = max((name for name in out if counts[name].any()), key=lambda name: out[name].itemsize)
    if float(_cast(mu, out[widest].dtype)) != mu:
        raise CodecError(
            f"mu {mu!r} is not a number of {out[widest].dtype}, the dtype of array '{widest}': "
            "the sender's arrays had a wider one"
        )
    return out


def _parse(payload: bytes, n: int) -> tuple[int, int, float, bytes]:
    """Return (n₊, n₋, μ, body) of a message of `n` entries; checks all but the body's content."""
    start, size = HEADER.size + CRC.size, len(payload)
    if size < start:
        raise CodecError(f"truncated: a message has at least {start} bytes, but this has {size}")
    magic, version, count, plus, minus, mu, words = HEADER.unpack_from(payload)
    (crc,), body = CRC.unpack_from(payload, HEADER.size), payload[start:]
    actual = zlib.crc32(body, zlib.crc32(payload[: HEADER.size]))
    expected, zero = start + 4 * words, plus + minus == 0
    what = "truncated" if size < expected else "trailing bytes"
    wrong = {
        f"not a sparse ternary message: it starts with {magic!r}, not {MAGIC!r}": magic != MAGIC,
        f"version {version} of the format, expected {VERSION}": version != VERSION,
        f"{what}: the message has {size} bytes, expected {expected}": size != expected,
        f"damaged: the CRC-32 is {actual:08x}, expected {crc:08x}": actual != crc,
        f"the message has {count} entries, expected {n}": count != n,
        f"{plus} positive and {minus} negative entries are more than all {n}": plus + minus > n,
        f"without non-zero entries mu is 0 and the body empty, not {mu!r} and {words} words": zero
        and (repr(mu) != "0.0" or words),
        f"mu must be finite and positive, but is {mu!r}": not zero and not 0 < mu < np.inf,
    }
    for sentence, is_so in wrong.items():
        if is_so:
            raise CodecError(sentence)
    return plus, minus, mu, body


def _survey(name: str, flat: np.ndarray) -> tuple[np.floating[Any], int, int]:
    """Return (μ, n₊, n₋) of one array; μ has its dtype, and is 0 if all entries are zero."""
    _check_dtype(name, flat.dtype)
    if not all_finite(flat):
        raise CodecError(f"array '{name}' holds NaN or infinity")
    filled = flat != 0
    if not filled.any():
        return flat.dtype.type(0), 0, 0
    mu = abs(flat[filled.argmax()])
    plus, minus = int(np.count_nonzero(flat == mu)), int(np.count_nonzero(flat == -mu))
    if plus + minus != np.count_nonzero(filled):
        other = abs(flat[filled & (abs(flat) != mu)][0])
        raise CodecError(f"array '{name}' is not ternary: it has magnitudes {mu!s} and {other!s}")
    return mu, plus, minus


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise CodecError(f"array '{name}' has dtype {dtype}, expected float16, float32 or float64")


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return `value` rounded to a dtype; the caller checks for infinity and 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(value, dtype=np.float64).astype(dtype)


def _model(n: int, plus: int, minus: int) -> Any:
    # perfect=False: plain float64 arithmetic, the same on every machine; perfect=True uses logarithms.
    # lazy changes the time alone: where most are zero, it is twice as fast as a search in a table
    counts = np.array([minus, n - plus - minus, plus], dtype=np.float64)
    lazy = MOSTLY_ZERO * (plus + minus) < n
    return _library().model.Categorical(counts, perfect=False, lazy=lazy)


def _library() -> Any:
    # imported on first use: only ternary updates need this package
    try:
        import constriction  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "coding ternary updates needs the package 'constriction', which is not installed: "
            "pip install constriction; it has no wheels for Linux on ARM"
        ) from error
    return constriction.stream
