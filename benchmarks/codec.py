"""Size and time of coded ternary updates against the entropy bound.

``python benchmarks/codec.py [--parameters 1000000] [--densities 0.001,0.01] [--repeats 5]``. Positions and
signs are random, the arrays float32; the bound is H(q) + q bits per parameter, the times are the least of
the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.methods.parts.ternary import decode, encode


def ternary(n: int, density: float) -> np.ndarray:
    """Return a vector of exactly ``round(n density)`` non-zero entries."""
    rng = np.random.default_rng(0)
    a = np.zeros(n, np.float32)
    at = rng.permutation(n)[: round(n * density)]
    a[at] = rng.choice(np.array([-0.01, 0.01], np.float32), at.size)
    return a


def least_time(repeats: int, call: Callable[[], Any]) -> float:
    """Return the least time of a call in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--densities", default="0.0001,0.001,0.003,0.01,0.03,0.1,0.3,0.667,1")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    n = args.parameters
    print(
        "| density | bits per parameter | bound | overhead % | encode s per million "
        "| decode s per million | dense float32 / coded bytes |\n|---|---|---|---|---|---|---|"
    )
    for density in map(float, args.densities.split(",")):
        arrays = {"a": ternary(n, density)}
        payload = encode(arrays)
        p = np.array([density, 1 - density])
        bound = -float(np.sum(p * np.log2(p, where=p > 0, out=np.zeros(2)))) + density
        bits = 8 * len(payload) / n
        encoding = least_time(args.repeats, partial(encode, arrays)) * 1e6 / n
        decoding = least_time(args.repeats, partial(decode, payload, arrays)) * 1e6 / n
        print(
            f"| {density:g} | {bits:.5f} | {bound:.5f} | {100 * (bits / bound - 1):.2f} "
            f"| {encoding:.3f} | {decoding:.3f} | {4 * n / len(payload):,.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
