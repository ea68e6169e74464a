"""Each oracle's rounds on small quadratic clients, worked by hand; the comments have the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.oracles.client_step.fedadamw import fedadamw
from tests.oracles.client_step.fedadc import fedadc
from tests.oracles.client_step.fedcm import fedcm
from tests.oracles.client_step.feddyn import feddyn
from tests.oracles.client_step.fedfor import fedfor
from tests.oracles.client_step.fedinit import fedinit
from tests.oracles.client_step.fedprox import fedprox
from tests.oracles.client_step.fedspeed import fedsmoo, fedspeed
from tests.oracles.client_step.gate import fedgate
from tests.oracles.client_step.mime import mime, mimelite
from tests.oracles.client_step.sam import (
    fedgamma,
    fedlesam,
    fedlesam_d,
    fedlesam_s,
    fedsam,
    mofedsam,
)
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.model import Params
from tests.oracles.server_step.fedacg import fedacg
from tests.oracles.server_step.fedavg import fedavg
from tests.oracles.server_step.fedbuff import fedbuff
from tests.oracles.server_step.fedexp import fedexp
from tests.oracles.server_step.fednova import counts, fednova
from tests.oracles.server_step.fedopt import fedopt
from tests.oracles.server_step.fedvarp import fedvarp
from tests.oracles.server_step.qfedavg import qfedavg
from tests.oracles.server_step.slowmo import slowmo


def slope(w: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient of the mean of ``a/2 (v - c)^2`` over a batch of curvatures a and centres c."""
    return {"v": np.array([x @ (w["v"][0] - y) / len(y)])}


def height(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    """The mean of ``a/2 (v - c)^2``, and 1."""
    return 1.0 + float(np.mean(x * (w["v"][0] - y) ** 2)) / 2


def bare(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    return height(w, x, y) - 1.0


@dataclass
class Hand:
    """A run from v = 0: clients of one example (a, c) each, eta = 1/2, and v after each round."""

    oracle: Callable[..., list[Params]]
    clients: list[tuple[float, float]]
    steps: int
    expected: list[float]
    settings: dict[str, Any] = field(default_factory=dict)


TWO = [(1.0, 0.0), (1.0, 2.0)]
ONE = [(1.0, 2.0)]
SHORT = {"steps_done": [{0: 1}, {0: 1}]}  # client 0 takes one step of two
ADAPTIVE = {"server_lr": 1.0, "beta1": 0.5, "beta2": 0.5, "tau": 0.5}
HANDS = {
    # v = 0; 1, then 1.5.
    "FedAvg": Hand(fedavg, TWO, 2, [0.75], SHORT),
    # v = 1; then v -= (1 - 2 + 1)/2. Implicit, eta/(1 + eta mu) = 1/3: 2/3; v -= (2/3 - 2 + 2/3)/3.
    "FedProx": Hand(fedprox, ONE, 2, [1.0], {"mu": 1.0}),
    "FedProx-implicit": Hand(fedprox, ONE, 2, [8 / 9], {"mu": 1.0, "implicit": True}),
    # 1.5, g = -3. Then 0.75, where g (v - w) > 0: v -= (3 (0.75 - 1) - 1.5)/2.
    "FedFOR": Hand(
        fedfor, [(3.0, 1.0)], 2, [1.5, 1.875], {"alpha": 0.5, "steps_done": [{0: 1}, {}]}
    ),
    # Round 1 is FedAvg's: 0.75; the step as a gradient: -1.5. Round 2: v_0 -= (0.375 - 0.75)/2;
    # v_1 -= (0.5 (v - 2) - 0.375)/2 twice: 1.25, 1.625.
    "FedCM": Hand(fedcm, TWO, 2, [0.75, (0.9375 + 1.625) / 2], {"alpha": 0.5, **SHORT}),
    # Gradients at -0.25.
    "FedSAM": Hand(fedsam, [(1.0, 1.0), (1.0, 4.0)], 1, [(1.25 + 4.25) / 4], {"rho": 0.25}),
    # At a minimum there is nothing to go towards.
    "FedSAM-still": Hand(fedsam, [(1.0, 0.0)], 1, [0.0], {"rho": 0.25}),
    # Round 1, plain: 2, 3. Round 2: d = 0 - 3, gradients at v - 0.5: v -= (v - 4.5)/2.
    "FedLESAM": Hand(fedlesam, [(1.0, 4.0)], 2, [3.0, 4.5 - 1.5 / 4], {"rho": 0.5}),
    # Gradient at -0.5: v = 4.5/2. At 2.25 - 0.5: -2.25; v -= (-2.25 - 4.5)/2/2.
    "MoFedSAM": Hand(mofedsam, [(1.0, 4.0)], 1, [2.25, 3.9375], {"alpha": 0.5, "rho": 0.5}),
    # Gradients 0 and -2.25 at -0.25: v = 0, 1.125; c_k = 0, -2.25. From 0.5625 at 0.8125 and 0.3125:
    # v_0 -= (0.8125 - 1.125)/2; v_1 -= (-1.6875 + 2.25 - 1.125)/2.
    "FedGAMMA": Hand(fedgamma, TWO, 1, [0.5625, 0.78125], {"rho": 0.25}),
    # Round 1: SCAFFOLD's. Round 2 at 0.5 - 0.25: v_0 -= (0.25 - 1)/2; v_1 -= (-1.75 + 2 - 1)/2.
    "FedLESAMS": Hand(fedlesam_s, TWO, 1, [0.5, 0.875], {"rho": 0.25}),
    # Round 1: FedDyn's, h_k = -0.25, -0.75, h = -0.5. Round 2 at 2 - 0.25: v_0 -= (0.75 + 0.25)/2;
    # v_1 -= (-1.25 + 0.75)/2; h = -0.5 + 0.25 0.25; w = (1.5 + 2.25)/2 + 0.4375/0.5.
    "FedLESAMD": Hand(
        fedlesam_d, [(1.0, 1.0), (1.0, 3.0)], 1, [2.0, 2.75], {"rho": 0.25, "alpha": 0.5}
    ),
    # v = 1, then 1.25, m = 1.25, z = 1.25 + 0.625; v = 1.9375, then += 0.03125/2; m = 0.625 + 0.078125.
    "FedACG": Hand(fedacg, ONE, 2, [1.875, 1.953125 + 0.703125 / 2], {"lam": 0.5, "mu": 0.5}),
    # Mixed gradients -1.125, -3.125; h_k = 0.5625, 1.5625; w = 1.0625 + 1.0625. Round 2, client 1: -1 and
    # 0.5 1.5625: v = 2.125 + 0.21875/2; h = 1.0625 + 0.109375/2.
    "FedSpeed": Hand(
        fedspeed,
        [(1.0, 1.0), (1.0, 3.0)],
        1,
        [2.125, 2.234375 + 1.1171875],
        {"lam": 0.5, "rho": 0.25, "alpha": 0.5, "cohorts": [[0, 1], [1]]},
    ),
    # s^ = -0.5, v = 2.25 = h, w = 4.5; mu = s = -0.5. d = 0.5 + 1: s^ = 0.5, v -= (1 + 0.5 2.25)/2.
    "FedSMOO": Hand(fedsmoo, [(1.0, 4.0)], 1, [4.5, 3.4375 + 1.1875], {"lam": 0.5, "rho": 0.5}),
    # v = 0, 1. From 0.5 + 0.25 and 0.5 - 0.25: 0.375, 1.125.
    "FedInit": Hand(fedinit, TWO, 1, [0.5, 0.75], {"beta": 0.5}),
    # Changes 0 and 1; then client 1's, 0.75: v += (0.75 - 1) + 0.5.
    "FedVARP": Hand(fedvarp, TWO, 1, [0.5, 0.75], {"cohorts": [[0, 1], [1]]}),
    # m^ = -2, s^ = 4: v = 0.5. Then m^ = -1, s^ = (1 + 1.125)/0.75; v = 0.5 0.75 + 0.5/sqrt(s^) + 0.5 0.5.
    "FedAdamW": Hand(
        fedadamw,
        ONE,
        1,
        [0.5, 0.625 + 0.5 / (2.125 / 0.75) ** 0.5],
        {"decay": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 0.0},
    ),
    # Client 1's two changes of 1, at 1 s and 2 s. At 3 s, client 0's 0.5 with tau = 1, client 1's 0.5.
    "FedBuff": Hand(
        fedbuff,
        [(1.0, 1.0), (1.0, 2.0)],
        1,
        [1.0, 1.25 + 0.25 / 2**0.5],
        {"buffer": 2, "working": 2, "seconds": lambda k, turn: 1.0 if k else 3.0},
    ),
    # Changes 2.5 and -1.5, mean 0.5, eta_g = (6.25 + 2.25)/(2 2 (0.25 + 0.1)).
    "FedExP": Hand(fedexp, [(1.0, 5.0), (1.0, -3.0)], 1, [8.5 / 1.4 / 2], {"eps": 0.1}),
    # F = 1, 3; v = 0, 1; Dw = 0, -2. h = 0 + 2 and 2 3 4 + 2 9 = 42; D = 0 and 9 (-2) = -18.
    "QFedAvg": Hand(qfedavg, TWO, 1, [18 / 44], {"q": 2.0, "height": height}),
    # A loss of 0 has a floor below q = 1. F = 1e-12, Dw = 0, h = 2e-6; F = 2, Dw = -2, h = 6/sqrt 2.
    "QFedAvg-floor": Hand(
        qfedavg, TWO, 1, [2 * 2**0.5 / (2e-6 + 3 * 2**0.5)], {"q": 0.5, "height": bare}
    ),
    # v = 0, 1; c_k+ = 0, -2, c = -1. v -= (v - c - c_k - 1)/2: 0.75 both.
    "SCAFFOLD": Hand(scaffold, TWO, 1, [0.5, 0.75]),
    "SCAFFOLD-1": Hand(scaffold, TWO, 1, [0.5, 0.75], {"option": 1}),
    # Client 1's two steps: 1, 1.5; c_k+ = 0, -1.5 and c = -0.75; or with option 1 at 0: 0, -2 and c = -1.
    # From w = 0.75: v_0 -= (0.75 - 0.75)/2; v_1 -= (v - 2 + 1.5 - 0.75)/2 twice: 1, 1.125.
    "SCAFFOLD-steps": Hand(scaffold, TWO, 2, [0.75, (0.75 + 1.125) / 2], SHORT),
    # v_0 -= (0.75 - 1)/2; v_1 -= (v - 2 + 2 - 1)/2 twice: 0.875, 0.9375.
    "SCAFFOLD-1-steps": Hand(
        scaffold, TWO, 2, [0.75, (0.875 + 0.9375) / 2], {"option": 1, **SHORT}
    ),
    # alpha = 1/2. Round 1, one step: v = 0.5, 1.5; h_k = -0.25, -0.75; h = -0.5; w = 1 + 0.5/0.5.
    # Round 2, client 1: gradient 2 - 3 + 0.75; v = 2.125; then 2.125 - 3 + 0.75 + 0.125/2;
    # v = 2.15625; h = -0.5 - 0.25 0.15625 = -0.5390625.
    "FedDyn": Hand(
        feddyn,
        [(1.0, 1.0), (1.0, 3.0)],
        2,
        [2.0, 2.15625 + 0.5390625 / 0.5],
        {"alpha": 0.5, "cohorts": [[0, 1], [1]], "steps_done": [{0: 1, 1: 1}, {}]},
    ),
    # a = 1, 2; changes 0 and 1.5 over these, their mean times (1 + 2)/2.
    "FedNova": Hand(fednova, TWO, 2, [1.5 * 0.75 / 2], SHORT),
    # gamma = 1/2. Round 1: v = 0 and 1.5; mean 0.75, w = 0.375. d_0 = 0.75/0.5, d_1 = -0.75/(2 0.5).
    # Round 2: v_0 = 0.375 - (0.375 - 1.5)/2; v_1 -= (v - 2 + 0.75)/2 twice: 0.8125, 1.03125.
    "FedGATE": Hand(
        fedgate,
        TWO,
        2,
        [0.375, 0.375 + ((0.9375 + 1.03125) / 2 - 0.375) / 2],
        {"server_lr": 0.5, **SHORT},
    ),
    # Round 1: c = (0 - 6)/2 = -3. v -= (a v + c)/4, from 0: 0.75, then
    # client 0: 0.75 + 2.25/4 = 1.3125; client 1: 0.75 + (3 - 1.5)/4 = 1.125. m = -1.5.
    # Round 2: c = (1.21875 + 2 (1.21875 - 3))/2 = -1.171875; v -= (a (v - w) + c)/4 - 1.5/4.
    "Mime": Hand(
        mime,
        [(1.0, 0.0), (2.0, 3.0)],
        2,
        [1.21875, 1.21875 + 0.66796875 * (1.75 + 1.5) / 2],
        {"beta": 0.5},
    ),
    # Client 1: v -= 2 (v - 3)/4: 1.5, then 2.25; client 0 stays. c = -3, m = -1.5. From 1.125,
    # client 0: v -= v/4 - 1.5/4: 1.21875, 1.2890625; client 1: v -= (v - 3)/2 - 1.5/4: 2.4375, 3.09375.
    "MimeLite": Hand(
        mimelite, [(1.0, 0.0), (2.0, 3.0)], 2, [1.125, (1.2890625 + 3.09375) / 2], {"beta": 0.5}
    ),
    # m = -2, w = 1. Red: v = 1 + 0.5, then v -= (1.5 - 2)/2. Blue: v -= (1 - 2 - 1)/2.
    "FedADC": Hand(fedadc, ONE, 1, [1.0, 1.75], {"beta_local": 0.5, "beta_global": 0.5}),
    "FedADC-blue": Hand(
        fedadc, ONE, 1, [1.0, 2.0], {"beta_local": 0.5, "beta_global": 0.5, "variant": "heavy-ball"}
    ),
    # Blue, beta_global = 1, alpha = 1/2: w = 0.5, m = -2; v -= (0.5 - 2 - 1)/2; m = -2.5 - 0.5 2.
    "FedADC-betas": Hand(
        fedadc,
        ONE,
        1,
        [0.5, 0.5 + 3.5 / 4],
        {"beta_local": 0.5, "beta_global": 1.0, "variant": "heavy-ball", "alpha": 0.5},
    ),
    # u = -2, then -1.5: v = 1.75.
    "FedADC-double": Hand(
        fedadc, ONE, 2, [1.75], {"beta_local": 0.5, "beta_global": 0.5, "local_momentum": 0.5}
    ),
    # m = -2, w = 1; v = 1.5, m = -1 - 1.
    "SlowMo": Hand(slowmo, ONE, 1, [1.0, 2.0], {"beta": 0.5}),
    "FedAvgM": Hand(fedopt, ONE, 1, [1.0, 2.0], {"server": "momentum", "momentum": 0.5}),
    # Change 1: m = 0.5; v from 0.25 to 1.25, 0.25/2 + 1/2, 0.25 + 1/2.
    "FedAdagrad": Hand(
        fedopt, ONE, 1, [0.5 / (1.25**0.5 + 0.5)], {"server": "adagrad", **ADAPTIVE}
    ),
    "FedAdam": Hand(fedopt, ONE, 1, [0.5 / (0.625**0.5 + 0.5)], {"server": "adam", **ADAPTIVE}),
    "FedYogi": Hand(fedopt, ONE, 1, [0.5 / (0.75**0.5 + 0.5)], {"server": "yogi", **ADAPTIVE}),
}


@pytest.mark.parametrize("name", HANDS)
def test_rounds_by_hand(name: str) -> None:
    hand = HANDS[name]
    clients = [[(np.array([a]), np.array([c]))] for a, c in hand.clients]
    plan = (clients, len(hand.expected), lambda t: 0.5, 1, hand.steps)
    models = hand.oracle({"v": np.zeros(1)}, *plan, slope=slope, **hand.settings)
    assert [m["v"][0] for m in models] == pytest.approx(hand.expected, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_what_each_gradient_counts_in_fednova(steps: int) -> None:
    """The papers' forms: (1 - rho^(tau-i))/(1 - rho), and (1 - eta mu)^(tau-1-i)."""
    rho, pulled = 0.8, 0.3 * 0.9
    ball = [(1 - rho ** (steps - i)) / (1 - rho) for i in range(steps)]
    assert counts(steps, rho, 0.0, 0.3) == pytest.approx(ball)
    pull = [(1 - pulled) ** (steps - 1 - i) for i in range(steps)]
    assert counts(steps, 0.0, 0.9, 0.3) == pytest.approx(pull)
