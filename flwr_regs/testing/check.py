"""`check_method`: every law for a method, as scikit-learn's ``check_estimator`` does for an estimator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flwr_regs.chain import chain
from flwr_regs.flower.client import RegClient, client_class
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.term import Term
from flwr_regs.testing import laws
from flwr_regs.testing.method import Exempt, Law, Method, Oracle

LOG = logging.getLogger("flwr")
LAWS = {law.name: law for law in vars(laws).values() if isinstance(law, Law)}
"""In the order in which they are checked."""


class Report(dict[str, str]):
    """Law to result: ``"passed"``, or the reason why it was skipped or does not hold."""

    def __str__(self) -> str:
        """Return a line for each law."""
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {outcome}" for name, outcome in self.items())


def check_method(
    strategy: Callable[..., RegStrategy] | RegStrategy,
    client: Callable[..., Any] | None = None,
    terms: Term | Sequence[Term] | None = None,
    oracle: Oracle | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    neutral: Mapping[str, Any] | RegStrategy | None = None,
    neutral_is_exact: bool = False,
    oracle_settings: Mapping[str, Any] | None = None,
    tolerance: float = 1e-10,
    fixed_point: Callable[..., float] | None = None,
    settling: Mapping[str, Any] | None = None,
    exempt: Mapping[str, str | Exempt] | None = None,
) -> Report:
    """Check the laws of a federated method; raise LawBroken at the first that is broken.

    The laws run on a small perceptron and unequal clients (:mod:`flwr_regs.testing.problem`), on the CPU,
    in some seconds; the log names each as it begins.

    Parameters
    ----------
    strategy : RegStrategy, or callable that returns one
        A strategy class, or any callable that takes `settings` and a strategy's own settings (seed,
        weighting, fraction_train, …) by name. An instance is rebuilt with other settings.
    client : callable, optional
        A named client's class, or ``client(model, train_data, eval_data, **settings)``. RegClient itself,
        or None: of `MyMethod` the class `MyMethodClient` in its module, else a RegClient with the terms'
        classes.
    terms : Term or sequence of Term
        The terms that the strategy must run with `settings`; None: those that it runs.
    oracle : callable, optional
        The method once more, in plain numpy and float64::

            oracle(weights, clients, rounds, lr, *, epochs, local_steps, weighting, cohorts, gradient,
                   **oracle_settings) -> [the global model after each round]

        ``weights`` are the start model, arrays by name. ``clients`` has for each client its list of batches
        (x, y): (batch, 4) floats and (batch,) labels of three classes. ``lr(t)`` is the learning rate of
        round t, from 1. A client takes ``local_steps`` steps, or if that is None ``epochs`` passes over its
        batches in their order. ``weighting`` is "num-examples" or "uniform". ``cohorts[t - 1]`` are the
        clients of round t, ascending; None means all. ``gradient(weights, x, y)`` is the gradient of the
        mean cross-entropy, and ``gradient(weights, x, y, loss_fn)`` of a loss of the outputs, in torch.
        Arguments after ``lr`` are passed by name, those that the oracle takes. None: no comparison with an
        oracle.
    settings : mapping, optional
        Hyper-parameters of the strategy with which it differs from FedAvg.
    neutral : mapping or RegStrategy, optional
        Hyper-parameters, in place of `settings`, with which it is FedAvg.
    neutral_is_exact : bool
        Whether the neutral method is FedAvg to the bit.
    oracle_settings : mapping, optional
        The oracle's further arguments.
    tolerance : float
        The largest difference from the oracle.
    fixed_point : callable, optional
        ``fixed_point(curvatures, centres, weights, lr, steps) -> v``: where two clients with losses
        ``a/2 (v − c)²`` settle, such as :func:`flwr_regs.testing.problem.settled`; `settling` are further
        settings with which they do in 120 rounds.
    exempt : mapping, optional
        Law, or ``"law/variant"``, to a sentence that says why it does not hold, or to :class:`Exempt`.
        The law must then really be broken.

    Returns
    -------
    Report
        Law to what came of it; prints as a table.

    Raises
    ------
    LawBroken
        An AssertionError: the law, what was expected, what was found, and where.
    ValueError
        `terms` are not those of the strategy; an exemption from an unknown law, or without a reason.
    """
    reasons = (exempt or {}).items()
    given = {law: why if isinstance(why, Exempt) else Exempt(why) for law, why in reasons}
    known = {f"{law.name}/{variant}" for law in LAWS.values() for variant in law.variants}
    if unknown := sorted(given.keys() - LAWS.keys() - known):
        raise ValueError(f"exempt from {unknown}, but the laws are {sorted(LAWS)}")
    terms = [terms] if isinstance(terms, Term) else terms
    if isinstance(terms, type):
        raise TypeError(f"terms are instances, such as {terms.__name__}(...), not the class")
    if isinstance(strategy, Term) or not (isinstance(strategy, RegStrategy) or callable(strategy)):
        must = "the strategy must be a RegStrategy, or a callable that returns one"
        raise TypeError(f"{must}, not {strategy!r}; for a term: RegStrategy([term])")
    if isinstance(strategy, RegStrategy) and (settings or isinstance(neutral, Mapping)):
        remedy = "give `settings` and `neutral` with a class or callable, or a neutral instance"
        raise TypeError(f"a strategy's instance has its settings: {remedy}")
    built = strategy if isinstance(strategy, RegStrategy) else strategy(**settings or {})
    runs = built.term.terms
    terms = runs if terms is None else chain(terms).terms
    client = client_class(built) if client in (None, RegClient) else client
    method = Method(
        strategy,
        client,
        terms,
        oracle,
        settings=settings or {},
        neutral=neutral,
        neutral_is_exact=neutral_is_exact,
        oracle_settings=oracle_settings or {},
        tolerance=tolerance,
        fixed_point=fixed_point,
        settling=settling or {},
        exempt=given,
    )
    if runs != terms:
        raise ValueError(f"the strategy runs {runs}, not terms={terms}")
    report = Report()
    for number, law in enumerate(LAWS.values(), start=1):
        LOG.info("law %d of %d: %s", number, len(LAWS), law.name)
        with _quiet():
            outcomes = {v: law.judge(method, v) for v in law.variants}
        if len(set(outcomes.values())) == 1:
            report[law.name] = outcomes.popitem()[1]
        else:
            report |= {f"{law.name}/{v}": outcome for v, outcome in outcomes.items()}
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the runs' own log lines back, and the small model on one thread: more would only wait."""
    level, threads = LOG.level, torch.get_num_threads()
    LOG.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        LOG.setLevel(level)
        torch.set_num_threads(threads)
