"""Central differential privacy: every client's update clipped, their mean noised, on the server.

| *Clip*       ``Δ_k = v_k − w_t`` of all trained parameters as one vector;
|              ``Δ̂_k = Δ_k · min(1, C / ‖Δ_k‖₂)`` (flat clipping)
| *Mean*       ``Δ = (1/m) Σ_k Δ̂_k``, m the size of the cohort that was drawn: a client that failed, or
|              whose reply cannot be used, counts as zero, so who failed does not change the sensitivity
| *Noise*      ``Δ + N(0, (z C / m)² I)``

Whatever the method makes of Δ then (momentum, adaptive steps, compression) is post-processing. That is
what Flower's wrappers cannot give, which add their noise once the strategy has made its step.

**Sensitivity.** A client that is replaced by another moves the sum of the clipped updates by up to 2 C; one
that drops out of it (its place in the cohort stays empty and counts as zero) by up to C. An accountant's
noise multiplier is the noise's standard deviation over the sensitivity: z/2 under replace-one, z under
add-or-remove-one. dp-accounting does not make that difference itself: it takes the number as it is under
either relation.

The noise comes from a generator seeded anew each round from the operating system's entropy, never from the
run's seed, which others may know: such runs do not repeat to the bit.

Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models"
(2018), Alg. 1 (DP-FedAvg) with flat clipping and the fixed-denominator estimator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flwr_regs.server.aggregation import Reply

if TYPE_CHECKING:
    from flwr.serverapp import PrivacyAccountant


@dataclass(frozen=True)
class CentralDP:
    """Central differential privacy for the clients, as the `privacy` of any strategy.

    Parameters
    ----------
    clip_norm : float
        C > 0, the L2 norm that a client's whole update is clipped to, in the units of the parameters.
    noise_multiplier : float
        z ≥ 0: the noise on the mean has the standard deviation ``z C / m``. 0 clips alone and
        protects nobody.
    accountant : PrivacyAccountant, optional
        ``flwr.serverapp.RdpAccountant(PrivacyConfig(...))``, from ``pip install 'flwr-regs[privacy]'``:
        counts the epsilon spent, and stops the training before a round that would pass its
        `max_epsilon`. With ``WITHOUT_REPLACEMENT`` and ``REPLACE_ONE`` the random draw of the cohorts
        counts too; they are then drawn from the operating system's entropy, not from the seed. With
        ``NO_AMPLIFICATION`` and ``ADD_OR_REMOVE_ONE`` who was drawn may be known.

    Raises
    ------
    ValueError
        A number out of range, an accountant without noise, or one for Poisson sampling.
    """

    clip_norm: float
    noise_multiplier: float
    accountant: PrivacyAccountant | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be a positive number, not {self.clip_norm}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be a number of at least 0, not {self.noise_multiplier}"
            )
        if self.accountant is None:
            return
        if self.noise_multiplier == 0:
            raise ValueError("without noise epsilon is infinite: leave out the accountant")
        if self.accountant.config.sampling_method.value == "poisson":
            raise ValueError(
                "cohorts have a fixed size, so Poisson sampling does not describe them: the accountant "
                "needs SamplingMethod.WITHOUT_REPLACEMENT or NO_AMPLIFICATION"
            )

    @property
    def amplified(self) -> bool:
        """Whether the accountant counts on nobody's knowing who was drawn."""
        return (
            self.accountant is not None
            and self.accountant.config.sampling_method.value == "without-replacement"
        )

    @property
    def accounted_multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity, which is what an accountant counts in."""
        if self.accountant is None:
            raise ValueError("there is no accountant to count for")
        replaced = self.accountant.config.neighboring_relation.value == "replace-one"
        return self.noise_multiplier / (2 if replaced else 1)


def private_mean(
    base: Mapping[str, np.ndarray],
    replies: Mapping[int, Reply],
    trained: Collection[str],
    dp: CentralDP,
    cohort_size: int,
) -> tuple[dict[str, np.ndarray], float]:
    """Return (the noisy mean of the clipped updates, the share of the replies that were clipped).

    Computed in float64, in the order of `replies`; each array comes back in the dtype it has in `base`,
    the global model. Arrays that are not `trained` do not move.
    """
    names = sorted(trained)
    total = np.zeros(sum(base[n].size for n in names))
    clipped = 0
    for reply in replies.values():
        update = _update(base, reply, names)
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(update))
        clipped += norm > dp.clip_norm
        if math.isfinite(norm):  # one that overflows counts as zero
            total += update * min(1.0, dp.clip_norm / max(norm, 1e-300))
    mean = total / cohort_size
    if dp.noise_multiplier > 0:
        std = dp.noise_multiplier * dp.clip_norm / cohort_size
        mean += np.random.default_rng().normal(0.0, std, mean.size)  # from the system's entropy
    out = {n: np.zeros_like(w, dtype=np.float64) for n, w in base.items() if n not in trained}
    for n in names:
        w, part, mean = base[n], mean[: base[n].size], mean[base[n].size :]
        out[n] = part.reshape(w.shape).astype(w.dtype if w.dtype.kind == "f" else np.float64)
    return out, clipped / max(len(replies), 1)


def _update(base: Mapping[str, np.ndarray], reply: Reply, names: Collection[str]) -> np.ndarray:
    """Return ``v_k − w_t`` of the named arrays as one vector, in float64; zero where nothing came."""
    parts = [np.zeros(0)]
    for n in names:
        w = base[n].astype(np.float64).ravel()
        if n in reply.delta:
            parts.append(reply.delta[n].astype(np.float64).ravel())
        elif n in reply.arrays:
            v = reply.arrays[n].astype(np.float64).ravel()
            same = v == w  # an infinite constant too, whose difference would be NaN
            parts.append(np.where(same, 0.0, v - np.where(same, 0.0, w)))
        else:
            parts.append(np.zeros(w.size))
    return np.concatenate(parts)
