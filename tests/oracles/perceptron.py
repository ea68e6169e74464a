"""A small perceptron with unequal clients, and arithmetic on its parameters, for checks of the oracles."""

import numpy as np

from tests.oracles.model import Client, Params

D, H, C = 3, 4, 3


SIZE = H * D + H + C * H + C


def model(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    return {
        "0.weight": rng.normal(size=(H, D)),
        "0.bias": rng.normal(size=H),
        "2.weight": rng.normal(size=(C, H)),
        "2.bias": rng.normal(size=C),
    }


def client(seed: int, sizes: list[int]) -> Client:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(b, D)), rng.integers(0, C, size=b)) for b in sizes]


CLIENTS = [client(1, [4, 4, 1]), client(2, [5, 2]), client(3, [3])]


def lr(t: int) -> float:
    return 0.3 / t


def lr_first_round_only(t: int) -> float:
    return 0.3 if t == 1 else 0.0


def vector(w: Params) -> np.ndarray:
    return np.concatenate([value.ravel() for value in w.values()])


def minus(a: Params, b: Params) -> Params:
    return {name: a[name] - b[name] for name in a}


def same(a: Params, b: Params) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


def nudged(w: Params, name: str, index: tuple[int, ...], step: float) -> Params:
    moved = {key: value.copy() for key, value in w.items()}
    moved[name][index] += step
    return moved
