"""A privacy budget, counted by one of Flower's accountants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr_regs.flower.compat import PrivacyBudgetExhausted, privacy_accounting
from flwr_regs.server.privacy import CentralDP


class AccountedBudget:
    """The budget of a `CentralDP` with an accountant; ImportError if this Flower has none."""

    def __init__(self, dp: CentralDP) -> None:
        self._flower = privacy_accounting()
        self._dp = dp
        self._accountant: Any = dp.accountant
        self._ahead: Any = None  # a copy, one round ahead

    def check(self, number: int, cohort: int) -> None:
        """Raise PrivacyBudgetExhausted if a round would pass the accountant's `max_epsilon`."""
        accountant, limit = self._accountant, self._accountant.config.max_epsilon
        if limit is None:
            return
        event = self._event(cohort)
        if not isinstance(accountant, self._flower.RdpAccountant):
            over = accountant.would_exceed(event)
        else:  # RdpAccountant.would_exceed recounts all rounds: half a second a call
            done = accountant.num_releases
            if self._ahead is None or self._ahead.num_releases not in (done, done + 1):
                state: Any = accountant.state_dict()
                self._ahead = self._flower.RdpAccountant(accountant.config, tuple(state["orders"]))
                self._ahead.load_state_dict(state)
            if self._ahead.num_releases == done:
                self._ahead.compose(event)
            over = self._ahead.get_epsilon(accountant.config.target_delta) > limit
        if over:
            spent = accountant.get_privacy_spent()
            raise PrivacyBudgetExhausted(
                f"round {number} would pass max_epsilon={limit:g}: {spent.num_releases} rounds have "
                f"spent epsilon={spent.epsilon:.4g} at delta={spent.delta:g}; `strategy.arrays` is the "
                "model after the last of them"
            )

    def spend(self, cohort: int) -> tuple[float, float]:
        """Count a round; return (epsilon, delta) spent so far."""
        self._accountant.compose(self._event(cohort))
        spent = self._accountant.get_privacy_spent()
        return spent.epsilon, spent.delta

    def snapshot(self) -> dict[str, Any]:
        """Return the accountant's own record of all releases."""
        return dict(self._accountant.state_dict())

    def restore(self, spent: Mapping[str, Any]) -> None:
        """Count the releases of an earlier record, unless the accountant has counted them already.

        Raises ValueError if it has counted others, or is set otherwise.
        """
        counted, then = self.snapshot()["compositions"], spent["compositions"]
        if counted[: len(then)] == then:  # the same accountant, which lived on
            return
        if then[: len(counted)] != counted:
            others = f"{len(counted)} releases that are not the checkpoint's {len(then)}"
            raise ValueError(f"the privacy accountant has counted {others}: pass a new accountant")
        self._accountant.load_state_dict(dict(spent))

    def _event(self, cohort: int) -> Any:
        config = self._accountant.config
        # the noise's standard deviation over the sensitivity
        multiplier = self._dp.noise_multiplier
        multiplier /= 2 if config.neighboring_relation.value == "replace-one" else 1
        population = config.population_size
        return self._flower.GaussianPrivacyEvent(multiplier, min(cohort, population), population)
