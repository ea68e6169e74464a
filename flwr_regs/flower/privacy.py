"""Privacy on the server: `CentralDP` in a strategy's rounds, and Flower's own wrappers around a strategy.

Flower's ``DifferentialPrivacy…`` strategies take another strategy as an argument and tell it nothing. Their
noise has the standard deviation ``z C / num_sampled_clients`` and is added once the inner strategy has made
its step. That is right only where the step is the plain, uniform mean over exactly so many clients; all
else is refused here, by :func:`wrap` or, behind Flower's own constructors, before any client trains.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent, RdpAccountant
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from flwr_regs.chain import Chain
from flwr_regs.server.aggregation import Reply, mean_delta
from flwr_regs.server.privacy import CentralDP, private_mean
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, statistics
from flwr_regs.wire.records import to_record

if TYPE_CHECKING:
    from flwr_regs.flower.strategy import RegStrategy

Mean = Callable[[Mapping[str, Any], Mapping[int, Reply], Mapping[int, float]], dict[str, Any]]
"""A mean of the replies: (model, replies, weights) -> ``Δ`` for every array of the model."""

WRAPPERS = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
Wrapper = TypeVar("Wrapper", bound=Strategy)
WHO = "Flower's privacy wrappers"


def wrap(wrapper: type[Wrapper], strategy: RegStrategy, *args: Any, **kwargs: Any) -> Wrapper:
    """Build one of Flower's four ``DifferentialPrivacy…`` wrappers around a strategy of this package.

    Parameters
    ----------
    wrapper : class
        From ``flwr.serverapp.strategy``. A client-side one needs its mod: ``client_app(..., mods=[...])``.
    strategy : RegStrategy
    *args, **kwargs
        The wrapper's other arguments.

    Raises
    ------
    ValueError
        The pair is not safe; the message says why, and what would be. docs/privacy.md has the table.
    TypeError
        Not one of the four, or not a strategy of this package.
    """
    from flwr_regs.flower.strategy import RegStrategy  # it needs this file

    make: Callable[..., Wrapper] = wrapper
    if not (isinstance(wrapper, type) and issubclass(wrapper, WRAPPERS)):
        names = ", ".join(w.__name__ for w in WRAPPERS)
        raise TypeError(f"wrap takes one of Flower's {names}, not {wrapper!r}")
    if not isinstance(strategy, RegStrategy):
        raise TypeError(f"wrap is for strategies of flwr_regs, not {type(strategy).__name__}")
    if kwargs.get("accountant") is not None:
        raise ValueError(
            "Flower's wrappers count epsilon for Flower's own FedAvg only; give the accountant to "
            "privacy=CentralDP(...) of the strategy, without a wrapper"
        )
    check_wrapped(strategy)
    return make(strategy, *args, **kwargs)


def check_driven(strategy: RegStrategy, who: str = "") -> None:
    """Raise ValueError for what needs the strategy's own start, where something else drives the rounds."""
    who = who or "a wrapper that drives the rounds (Flower's privacy strategies)"
    if any(strategy.term.ternary):
        _refuse(
            "compression needs the strategy's own start: coded updates would be read as dense ones",
            "leave it out, or use privacy=CentralDP(...) on the strategy, which goes with it",
            who,
        )
    if strategy.downlink == "delta":
        _refuse("downlink='delta' needs the strategy's own start", "use downlink='model'", who)
    if strategy.wire_dtype is not None:
        _refuse(
            f"wire_dtype='{strategy.wire_dtype}' needs the strategy's own start: arrays are clipped and "
            "averaged as they travel",
            "leave it out",
            who,
        )
    if strategy.participation.drops:
        _refuse(
            "drop_inactive needs the strategy's own start, and changes the cohorts",
            "leave it out",
            who,
        )


def check_wrapped(strategy: RegStrategy) -> None:
    """Raise ValueError unless a wrapper's clipping and noise cover what `strategy` learns of clients."""
    if strategy.privacy is not None:
        _refuse(
            "the strategy has a privacy= of its own, and noise is needed once", "use one of them"
        )
    _check_uploads(strategy.term, "leave it out")
    check_driven(strategy, WHO)
    if kept := [t.name for t in strategy.term.terms if not t.averages]:
        _refuse(
            f"{kept} move the model by more than the plain mean, from means without noise: the noise is "
            "added after that step, and what the server keeps for the next one is never noised",
            "use privacy=CentralDP(...) on the strategy, which noises the mean itself",
        )
    _check_cohorts(strategy)
    if strategy.participation.incomplete != "average":
        _refuse(
            f"incomplete='{strategy.participation.incomplete}' weighs clients unequally, and their noise "
            "is for equal weights",
            "use incomplete='average'",
        )


def check_central(strategy: RegStrategy) -> None:
    """Raise ValueError unless clipping and noise cover all that `strategy` learns of its clients."""
    mine = "privacy=CentralDP(...)"
    _check_uploads(strategy.term, "leave it out (an Elastic with lam=0 sends nothing)", mine)
    _check_cohorts(strategy, mine)
    if strategy.participation.incomplete == "scale":
        _refuse(
            "incomplete='scale' weighs clients unequally",
            "use incomplete='average' or 'drop'",
            mine,
        )
    if strategy.participation.drops:
        _refuse(
            "drop_inactive draws the cohorts, and changes their size, by who failed or took no step, "
            "which gets no noise",
            "leave it out",
            mine,
        )


def _check_cohorts(strategy: RegStrategy, who: str = "") -> None:
    if strategy.cohorts == "class-covering":
        _refuse(
            "for class-covering cohorts the clients tell their label counts without noise, and such "
            "cohorts are no uniform sample",
            "use cohorts='uniform'",
            who,
        )
    if strategy.weighting != "uniform":
        _refuse(
            f"weighting='{strategy.weighting}' weighs clients unequally; the noise is for equal weights",
            "use weighting='uniform'",
            who,
        )


def _check_uploads(term: Chain, instead: str, who: str = "") -> None:
    if beside := [t.name for t in term.terms if t.uploads]:
        _refuse(f"the clients of {beside} send more than their update, without noise", instead, who)


def _refuse(why: str, instead: str, who: str = "") -> None:
    raise ValueError(f"{who or WHO}: {why}; {instead}")


def beside(term: Chain) -> dict[str, str]:
    """Return what a round's config says of the terms whose clients send more than a dense update.

    A privacy mod on a client then refuses before the client trains.
    """
    names = [t.name for t in term.terms if t.uploads or t.ternary[0]]
    return {keys.BESIDE_KEY: ", ".join(names)} if names else {}


class Privacy:
    """What a strategy does in its rounds for its clients' privacy.

    Parameters
    ----------
    strategy : RegStrategy
    dp : CentralDP or None

    Raises
    ------
    ValueError
        The strategy does something that clipping and noise do not cover.
    """

    def __init__(self, strategy: RegStrategy, dp: CentralDP | None) -> None:
        if dp is not None:
            check_central(strategy)
        self._strategy = strategy
        self._dp = dp
        self._wrapper: Any = None
        self._ahead: RdpAccountant | None = None  # the accountant, one round ahead
        self._population: list[int] = []
        self.cohort_seed = strategy.seed

    def begin(self, model: NDArrays) -> None:
        """Find out whether a wrapper of Flower's drives the strategy; refuse what is not safe.

        `model` is what the clients share of the initial arrays.
        """
        self._population = []
        self._ahead = None  # another strategy may have spent of the same budget since
        if self._dp is not None and self._dp.amplified:
            # Who knows the seed knows the cohorts, and then their being drawn hides nobody. Each training
            # draws anew: the accountant counts on independent draws.
            self.cohort_seed = secrets.randbits(128)
        self._wrapper = _calling_wrapper(self._strategy)
        if self._wrapper is not None:
            check_wrapped(self._strategy)
            if hasattr(self._wrapper, "current_arrays"):
                self._wrapper.current_arrays = to_record(model)  # clips against what is shared
        if self._wrapper is not None or self._dp is not None:
            refuse_statistics(model)

    def members(self, here: list[int]) -> list[int]:
        """Return the clients that a cohort is drawn from, given those that are there.

        An accountant that counts the draw needs one population: a client that has left since round 1 is
        still drawn, and counts as zero.
        """
        if self._dp is None or self._dp.accountant is None:
            return here
        if not self._population:
            expected = self._dp.accountant.config.population_size
            if len(here) != expected:
                raise ValueError(
                    f"the privacy accountant was told of a population of {expected} clients, but "
                    f"{len(here)} are there: set PrivacyConfig(population_size={len(here)})"
                )
            self._population = here
        return self._population if self._dp.amplified else here

    def before(self, server_round: int, cohort: list[int]) -> None:
        """Refuse a round that must not be trained, before its clients hear of it.

        Raises
        ------
        PrivacyBudgetExhausted
            The round would pass the accountant's `max_epsilon`.
        ValueError
            A wrapper's noise is for a cohort of another size.
        """
        if self._wrapper is not None and self._wrapper.num_sampled_clients != len(cohort):
            raise ValueError(
                f"{type(self._wrapper).__name__} has noise for num_sampled_clients="
                f"{self._wrapper.num_sampled_clients}, but the cohort of round {server_round} has "
                f"{len(cohort)} clients: the two must agree (see fraction_train, min_train_nodes)"
            )
        if self._dp is None or self._dp.accountant is None:
            return
        accountant = self._dp.accountant
        limit = accountant.config.max_epsilon
        if limit is None:
            return
        event = self._event(len(cohort))
        if not isinstance(accountant, RdpAccountant):
            over = accountant.would_exceed(event)
        else:  # its own would_exceed counts all rounds anew each time, half a second each
            done = accountant.num_releases
            if self._ahead is None or self._ahead.num_releases not in (done, done + 1):
                state: Any = accountant.state_dict()
                self._ahead = RdpAccountant(accountant.config, tuple(state["orders"]))
                self._ahead.load_state_dict(state)
            if self._ahead.num_releases == done:
                self._ahead.compose(event)
            over = self._ahead.get_epsilon(accountant.config.target_delta) > limit
        if over:
            spent = accountant.get_privacy_spent()
            raise PrivacyBudgetExhausted(
                f"round {server_round} would pass max_epsilon={limit:g}: {spent.num_releases} rounds have "
                f"spent epsilon={spent.epsilon:.4g} at delta={spent.delta:g}; `strategy.arrays` is the "
                "model after the last of them"
            )

    def wrong(
        self,
        replies: Mapping[int, Reply],
        model: NDArrays,
        buffers: Iterable[str],
        config: Mapping[str, Any],
    ) -> dict[int, str]:
        """Return the reasons against replies that clipping and noise would not cover, by client.

        `buffers` are the arrays that are not trained, `config` is the round's.
        """
        found: dict[int, str] = {}
        if self._dp is None and self._wrapper is None:
            return found
        norm = None if self._wrapper is None else config.get("clipping_norm")
        for pid, reply in replies.items():
            changed = [
                n for n in buffers if n in reply.arrays and np.any(reply.arrays[n] != model[n])
            ]
            if sent := sorted(name for name, arrays in reply.uploads.items() if arrays):
                found[pid] = f"it sends uploads of {sent} beside its update, which get no noise"
            elif reply.tied and self._wrapper is not None:
                found[pid] = (
                    f"its model ties the weights {sorted(reply.tied)}, which {WHO} would noise anew under "
                    "each name; use privacy=CentralDP(...) on the strategy"
                )
            elif changed and self._dp is not None:
                found[pid] = f"it changed {changed}, which are not trained and would get no noise"
            elif norm is not None and not _is_clipped(reply, model, float(norm)):
                found[pid] = (
                    f"its update is larger than clipping_norm={norm:g}: build its app with "
                    "client_app(client_fn, mods=[fixedclipping_mod]), or adaptiveclipping_mod"
                )
        return found

    def needed(self, min_replies: int, cohort: int) -> int:
        """Return the replies without which no mean may be released: a wrapper's noise is for all."""
        return min_replies if self._wrapper is None else max(min_replies, cohort)

    def mean(self, buffers: Iterable[str], cohort: int, entry: dict[str, Any]) -> Mean:
        """Return the round's mean of the replies; a private one notes in `entry` what it cost."""
        if self._dp is None:
            return mean_delta
        dp, fixed = self._dp, set(buffers)

        def noisy(base: Any, replies: Any, weights: Any) -> dict[str, Any]:
            trained = [n for n in base if n not in fixed]
            delta, entry["clipped"] = private_mean(base, replies, trained, dp, cohort)
            if dp.accountant is not None:
                dp.accountant.compose(self._event(cohort))
                spent = dp.accountant.get_privacy_spent()
                entry.update(epsilon=spent.epsilon, delta=spent.delta)
            return delta

        return noisy

    def _event(self, cohort: int) -> GaussianPrivacyEvent:
        assert self._dp is not None
        assert self._dp.accountant is not None
        population = self._dp.accountant.config.population_size
        return GaussianPrivacyEvent(
            self._dp.accounted_multiplier, min(cohort, population), population
        )


def refuse_statistics(names: Iterable[str]) -> None:
    """Raise ValueError if a model holds BatchNorm's statistics, which noise must not touch.

    A central mean would release them without noise, a wrapper or mod would noise them, and a variance
    may then be negative.
    """
    if found := statistics(names):
        raise ValueError(
            f"BatchNorm's statistics {found} are data of the clients that neither go without noise nor "
            "bear it: use GroupNorm, or keep them on the clients with LocalBatchNorm() (FedBN)"
        )


def _is_clipped(reply: Reply, model: NDArrays, norm: float) -> bool:
    """Whether an update is as short as it should be, up to the rounding of ``w + Δ`` in its dtype."""
    update = size = 0.0
    for n, v in reply.arrays.items():
        if v.dtype.kind == "f":
            w = model[n].astype(np.float64)
            update += float(np.sum((v - w) ** 2))
            size += float(np.sum(w**2)) * float(np.finfo(v.dtype).eps) ** 2
    return bool(np.sqrt(update) <= norm * 1.001 + np.sqrt(size))


def _calling_wrapper(strategy: RegStrategy) -> Any:
    """Return the wrapper of Flower's that is calling `strategy`, or None.

    It hands nothing of itself on, so it is looked for among the callers.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        caller = frame.f_locals.get("self")
        if isinstance(caller, WRAPPERS) and caller.strategy is strategy:
            return caller
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
