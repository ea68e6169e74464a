"""Robust aggregators from their papers, in plain loops over lists of floats.

Each takes n vectors, lists of d floats, and returns one; sources as in aggregators.py of the server.
"""

import math
from collections.abc import Sequence

Vector = list[float]


def norm(x: Sequence[float]) -> float:
    """‖x‖₂."""
    return math.sqrt(math.fsum(v * v for v in x))


def apart(x: Sequence[float], y: Sequence[float]) -> float:
    """‖x − y‖₂."""
    return norm([a - b for a, b in zip(x, y, strict=True)])


def middle(values: Sequence[float]) -> float:
    """The median; of an even number, the mean of the middle two."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mean(xs: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
    """Σ p_k x_k; without weights, p_k = 1/n."""
    p = weights or [1 / len(xs)] * len(xs)
    return [math.fsum(p[k] * x[j] for k, x in enumerate(xs)) for j in range(len(xs[0]))]


def coordinate_median(xs: Sequence[Vector]) -> Vector:
    """Yin et al. 2018, Definition 1."""
    return [middle([x[j] for x in xs]) for j in range(len(xs[0]))]


def trimmed_mean(xs: Sequence[Vector], share: float) -> Vector:
    """Yin et al. 2018, Definition 2: without the b smallest and the b largest."""
    b, out = int(share * len(xs)), []
    for j in range(len(xs[0])):
        left = sorted(x[j] for x in xs)
        for _ in range(b):
            left.remove(min(left))
            left.remove(max(left))
        out.append(math.fsum(left) / len(left))
    return out


def krum(xs: Sequence[Vector], byzantine: int, keep: int) -> tuple[Vector, list[int]]:
    """Blanchard et al. 2017, Sec. 4: (the mean of those with the least scores, which they are)."""
    scores = []
    for i, x in enumerate(xs):
        others = sorted(apart(x, y) ** 2 for j, y in enumerate(xs) if j != i)
        scores.append((math.fsum(others[: len(xs) - byzantine - 2]), i))
    kept = sorted(i for _, i in sorted(scores)[:keep])
    return mean([xs[i] for i in kept]), kept


def geometric_median(xs: Sequence[Vector], steps: int = 100, nu: float = 1e-6) -> Vector:
    """Pillutla et al. 2022, Alg. 2: the smoothed Weiszfeld algorithm."""
    z = coordinate_median(xs)
    for _ in range(steps):
        beta = [1 / max(nu, apart(x, z)) for x in xs]
        z = mean(xs, [b / math.fsum(beta) for b in beta])
    return z


def clipped(x: Vector, most: float) -> Vector:
    """x min(1, most / ‖x‖)."""
    return [v * min(1.0, most / norm(x)) if norm(x) else v for v in x]


def norm_bound(xs: Sequence[Vector], most: float | None) -> Vector:
    """Sun et al. 2019, Sec. 4: the mean of updates whose norm is bounded."""
    bound = middle([norm(x) for x in xs]) if most is None else most
    return mean([clipped(x, bound) for x in xs])


def centered_clipping(xs: Sequence[Vector], radius: float | None, iters: int) -> Vector:
    """Karimireddy et al. 2021, Eq. 6, from v = 0."""
    tau = middle([norm(x) for x in xs]) if radius is None else radius
    v = [0.0] * len(xs[0])
    for _ in range(iters):
        moves = [clipped([a - b for a, b in zip(x, v, strict=True)], tau) for x in xs]
        v = [a + b for a, b in zip(v, mean(moves), strict=True)]
    return v


def cut_weights(weights: dict[int, float], most: float) -> dict[int, float]:
    """Cut what is above, spread it in proportion over those below, until none is above."""
    p = dict(weights)
    if most * len(p) <= 1:
        return {k: 1 / len(p) for k in p}
    for _ in range(10 * len(p)):
        above = [k for k in p if p[k] > most]
        excess = math.fsum(p[k] - most for k in above)
        below = {k: p[k] for k in p if p[k] < most}
        for k in above:
            p[k] = most
        for k in below:
            p[k] += excess * below[k] / math.fsum(below.values())
    return p
