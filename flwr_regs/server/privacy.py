"""Central differential privacy: the server clips each client's update and adds noise to the mean.

| *Clip*       ``Δ_k = v_k − w_t`` of all trained parameters as one vector;
|              ``Δ̂_k = Δ_k · min(1, C / ‖Δ_k‖₂)`` (flat clipping)
| *Mean*       ``Δ = (1/m) Σ_k Δ̂_k``, m the size of the cohort that was drawn; a client without a usable
|              reply counts as zero, so that failures do not change the sensitivity
| *Noise*      ``Δ + N(0, (z C / m)² I)``

The method then uses Δ (momentum, adaptive steps, compression); that is post-processing and costs no
privacy. Flower's wrappers cannot do that: they add noise after the strategy has made its step.

**Sensitivity.** Replacing a client changes the sum of the clipped updates by up to 2 C. Removing one (its
place in the cohort stays empty and counts as zero) changes the sum by up to C. An accountant's noise
multiplier is the noise's standard deviation over the sensitivity: z/2 under replace-one, z under
add-or-remove-one. dp-accounting does not divide by the sensitivity itself: it uses the number as given,
under either relation.

Each round's noise generator is seeded from the operating system's entropy, never from the run's seed, which
others may know. So runs with noise do not repeat to the bit.

Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models"
(2018), Alg. 1 (DP-FedAvg) with flat clipping and the fixed-denominator estimator.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flwr_regs.server.aggregate.updates import Updates, in_shape, update_of
from flwr_regs.server.round import Round
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, ParameterError, plain_numbers
from flwr_regs.wire.arrays import NDArrays, square_sum, statistics
from flwr_regs.wire.config import Spelled


@dataclass(frozen=True)
class CentralDP(Spelled):
    """Central differential privacy for the clients, as the `privacy` of any strategy.

    Parameters
    ----------
    clip_norm : float
        C > 0, the L2 norm that a client's whole update is clipped to, in the units of the parameters.
    noise_multiplier : float
        z ≥ 0: the noise on the mean has the standard deviation ``z C / m``. 0 clips alone and
        protects nobody.
    accountant : PrivacyAccountant, optional
        ``flwr.serverapp.RdpAccountant(PrivacyConfig(...))``, which needs the extra ``privacy``:
        counts the epsilon spent, and stops the training before a round that would pass its
        `max_epsilon`. With ``WITHOUT_REPLACEMENT`` and ``REPLACE_ONE``, the random draw of the cohorts
        counts too; cohorts then come from the operating system's entropy, not from the seed. With
        ``NO_AMPLIFICATION`` and ``ADD_OR_REMOVE_ONE``, others may know the cohorts.

    Raises
    ------
    ValueError
        A number out of range; an accountant of no known kind, without noise, or for Poisson sampling.
    """

    clip_norm: float
    noise_multiplier: float
    accountant: Any = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        POSITIVE.check("CentralDP", "clip_norm", self.clip_norm)
        NOT_NEGATIVE.check("CentralDP", "noise_multiplier", self.noise_multiplier)
        if self.accountant is None:
            return
        if not hasattr(getattr(self.accountant, "config", None), "sampling_method"):
            expected = "an accountant, such as RdpAccountant(PrivacyConfig(...)), or None"
            raise ParameterError("CentralDP", "accountant", expected, self.accountant)
        if self.noise_multiplier == 0:
            raise ValueError("without noise epsilon is infinite: leave out the accountant")
        if self.accountant.config.sampling_method.value == "poisson":
            needs = "the accountant needs SamplingMethod.WITHOUT_REPLACEMENT or NO_AMPLIFICATION"
            raise ValueError(f"Poisson sampling does not describe cohorts of a fixed size: {needs}")

    @property
    def amplified(self) -> bool:
        """Whether the accountant assumes that the cohorts are secret."""
        config = None if self.accountant is None else self.accountant.config
        return config is not None and config.sampling_method.value == "without-replacement"


def private_mean(updates: Updates, dp: CentralDP, cohort_size: int) -> tuple[NDArrays, float]:
    """Return (the noisy mean of the clipped updates, the share of the replies that were clipped).

    Sums in float64, in the order of the replies. Each result has the dtype of its mean. Arrays that are not
    trained do not move.
    """
    base, replies = updates.base, updates.replies
    mean = {n: np.zeros(w.shape) for n, w in base.items()}
    clipped = 0
    for reply in replies.values():
        moves = update_of(reply, base, updates.fixed)
        with np.errstate(over="ignore"):
            norm = math.sqrt(sum(map(square_sum, moves.values())))
        clipped += norm > dp.clip_norm
        if math.isfinite(norm):  # an update that overflows counts as zero
            factor = min(1.0, dp.clip_norm / max(norm, 1e-300))
            for name, move in moves.items():
                mean[name] += factor * move
    noise = np.random.default_rng()  # from the system's entropy
    std = dp.noise_multiplier * dp.clip_norm / cohort_size
    for name in updates.trained:
        mean[name] /= cohort_size
        if std > 0:
            mean[name] += noise.normal(0.0, std, mean[name].shape)
        mean[name] = in_shape(mean[name], base[name])
    return mean, clipped / max(len(replies), 1)


class Budget(Protocol):
    """A privacy budget; the flower folder implements it with Flower's accountants."""

    def check(self, number: int, cohort: int) -> None:
        """Raise if the budget is too small for a round with a cohort of this size."""

    def spend(self, cohort: int) -> tuple[float, float]:
        """Count a round; return (epsilon, delta) spent so far."""

    def snapshot(self) -> dict[str, Any]:
        """Return what was spent, as plain values."""

    def restore(self, spent: Mapping[str, Any]) -> None:
        """Count what was spent before, unless it is counted already."""


class PrivateRounds:
    """The parts of a round that `CentralDP` changes; without one, the plain parts.

    Parameters
    ----------
    dp : CentralDP or None
    seed : int
        The run's seed; cohorts depend on it unless they are secret.
    budget : Budget or None
        For a `dp` with an accountant.
    """

    def __init__(self, dp: CentralDP | None, seed: int, budget: Budget | None) -> None:
        self._dp = dp
        self._budget = budget
        self._population: list[int] = []
        self.ledger: Callable[[Mapping[str, Any]], None] | None = None
        """Gets what was spent, before the noisy mean is used: a crash then forgets no release."""
        # The run's seed would reveal secret cohorts. Each training draws a new one: the accountant assumes
        # independent draws.
        self.cohort_seed = secrets.randbits(128) if dp is not None and dp.amplified else seed

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it.

        The secret seed of the cohorts is not in it: a resumed run may repeat rounds that were released, and
        the accountant assumes that their cohorts were drawn anew.
        """
        spent = None if self._budget is None else self._budget.snapshot()
        return {"population": self._population, "spent": spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; releases that the accountant counted since stay counted."""
        self._population = state["population"]
        if self._budget is not None:
            self._budget.restore(state["spent"])

    def members(self, connected: list[int]) -> list[int]:
        """Return the clients that a cohort is drawn from, given the connected ones.

        An accountant that counts the draw needs a fixed population: a client that leaves after round 1 is
        still drawn, and counts as zero. Raises ValueError if the accountant's population has another size.
        """
        if self._dp is None or self._dp.accountant is None:
            return connected
        if not self._population:
            expected, n = self._dp.accountant.config.population_size, len(connected)
            if n != expected:
                set_to = f"the privacy accountant is set to a population of {expected} clients"
                hint = f"set PrivacyConfig(population_size={n})"
                raise ValueError(f"{set_to}, but {n} are connected: {hint}")
            self._population = connected
        return self._population if self._dp.amplified else connected

    def check_budget(self, this_round: Round) -> None:
        """Raise the accountant's error for a round that it does not allow, before messages are sent."""
        if self._budget is not None:
            self._budget.check(this_round.number, len(this_round.cohort))

    def mean(self, this_round: Round, updates: Updates) -> NDArrays:
        """Return the private mean of updates; note its cost in the round."""
        assert self._dp is not None
        cohort = len(this_round.cohort)
        delta, this_round.events["clipped"] = private_mean(updates, self._dp, cohort)
        if self._budget is not None:
            events = this_round.events
            events["epsilon"], events["delta"] = self._budget.spend(cohort)
            if self.ledger is not None:
                self.ledger(self._budget.snapshot())
        return delta


def refuse_statistics(names: Iterable[str]) -> None:
    """Raise ValueError if a model holds BatchNorm's statistics.

    A central mean would release them without noise; with noise a variance may become negative.
    """
    if refused := statistics(names):
        data = f"BatchNorm's statistics {refused} are clients' data: noise, which they need, spoils them"
        hint = "use GroupNorm, or keep them on the clients with LocalBatchNorm() (FedBN)"
        raise ValueError(f"{data}; {hint}")
