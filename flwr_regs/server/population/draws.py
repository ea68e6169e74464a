"""Random numbers that depend on a key and a client alone, for many clients at once.

They are numpy's own, to the bit: ``SeedSequence((*key, client), spawn_key=purpose)`` and the first number
of a ``default_rng`` from it. numpy makes them for one client at a time, in some 15 µs; a cohort asks for
those of a whole population in each round. numpy keeps both streams the same in all versions (NEP 19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Words = list[Any]
"""Numbers of 32 bits, each the same for all clients or an array with one for each."""
_MASK, _HALF = 0xFFFFFFFF, np.uint64(32)
_POOL = 4
_MULT = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64


def uniforms(
    clients: Sequence[int], key: tuple[int, ...], purpose: tuple[int, ...] = ()
) -> np.ndarray:
    """Return one number from 0 to below 1 for each client: ``default_rng(SeedSequence(...)).random()``."""
    out = np.empty(len(clients))
    if not len(clients):
        return out
    for outermost in (min(clients), max(clients)):
        if not 0 <= outermost < 1 << 64:
            raise ValueError(f"a client's number is from 0 to below 2^64, not {outermost}")
    numbers = np.array(clients, np.uint64)
    long = numbers > np.uint64(_MASK)  # ids of more than 32 bits make longer keys
    for length, mine in ((1, ~long), (2, long)):
        if not mine.any():
            continue
        ids = numbers[mine]
        words = [((ids >> np.uint64(32 * j)) & np.uint64(_MASK)) for j in range(length)]
        pool = _pool(
            [w for k in key for w in _words(k)] + [w.astype(np.uint32) for w in words], purpose
        )
        out[mine] = _first(_state(pool, 8))
    return out


def _words(number: int) -> list[int]:
    """Return a number's words of 32 bits, the lowest first."""
    if number < 0:
        raise ValueError(f"a key has no negative numbers: {number}")
    words = [number & _MASK]
    while number := number >> 32:
        words.append(number & _MASK)
    return words


def _pool(entropy: Words, purpose: tuple[int, ...]) -> Words:
    """Return a SeedSequence's pool."""
    if purpose:
        entropy = entropy + [0] * max(0, _POOL - len(entropy))
        entropy = entropy + [w for p in purpose for w in _words(p)]
    constant = 0x43B0D7E5

    def hashed(value: Any) -> Any:
        nonlocal constant
        value = np.bitwise_xor(
            np.uint32(value) if isinstance(value, int) else value, np.uint32(constant)
        )
        constant = constant * 0x931E8875 & _MASK
        value = value * np.uint32(constant)
        return value ^ (value >> np.uint32(16))

    def mixed(x: Any, y: Any) -> Any:
        value = np.uint32(0xCA01F9DD) * x - np.uint32(0x4973F715) * y
        return value ^ (value >> np.uint32(16))

    with np.errstate(over="ignore"):
        pool = [hashed(entropy[i] if i < len(entropy) else 0) for i in range(_POOL)]
        for source in range(_POOL):
            for i in range(_POOL):
                if i != source:
                    pool[i] = mixed(pool[i], hashed(pool[source]))
        for more in entropy[_POOL:]:
            for i in range(_POOL):
                pool[i] = mixed(pool[i], hashed(more))
    return pool


def _state(pool: Words, size: int) -> Words:
    """Return a SeedSequence's state, in words of 32 bits."""
    constant, state = 0x8B51F9DD, []
    with np.errstate(over="ignore"):
        for i in range(size):
            value = pool[i % _POOL] ^ np.uint32(constant)
            constant = constant * 0x58F38DED & _MASK
            value = value * np.uint32(constant)
            state.append(value ^ (value >> np.uint32(16)))
    return state


def _first(state: Words) -> np.ndarray:
    """Return the first double of a PCG64 that was seeded with a state of 8 words."""
    wide = [np.asarray(word, np.uint64) for word in state]
    high, low, i_high, i_low = (wide[2 * j] | wide[2 * j + 1] << _HALF for j in range(4))
    one = np.uint64(1)
    with np.errstate(over="ignore"):
        step = i_high << one | i_low >> np.uint64(63), i_low << one | one
        now = _plus(step, (high, low))  # from state 0: a step, the seed, a step
        now = _plus(_times(now), step)
        now = _plus(_times(now), step)  # the first number is drawn after one more
        value, turn = now[0] ^ now[1], now[0] >> np.uint64(58)
        value = value >> turn | value << (np.uint64(64) - turn & np.uint64(63))
    return np.asarray((value >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _plus(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the sum of two numbers of 128 bits: (high, low)."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(np.uint64), low


def _times(a: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the product of a number of 128 bits with PCG64's multiplier."""
    (high, low), mask = a, np.uint64(_MASK)
    m_high, m_low = np.uint64(_MULT >> 64), np.uint64(_MULT & (1 << 64) - 1)
    b0, b1 = m_low & mask, m_low >> _HALF
    a0, a1 = low & mask, low >> _HALF
    cross = (a0 * b0 >> _HALF) + (a0 * b1 & mask) + (a1 * b0 & mask)
    carry = a1 * b1 + (a0 * b1 >> _HALF) + (a1 * b0 >> _HALF) + (cross >> _HALF)
    return carry + high * m_low + low * m_high, low * m_low
