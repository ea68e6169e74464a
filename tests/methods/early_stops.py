"""A run in which some clients stop early and one forgets, beside its oracle's."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict

from flwr_regs import InProcessGrid, RegStrategy
from flwr_regs.testing import Method, problem
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients

SHORT = [{}, {1: 2, 3: 1}, {0: 3, 1: 0}, {2: 4, 4: 1}]
"""Round -> client -> steps that it has time for; 0: it is inactive."""
ROUNDS, FORGETS = range(1, 7), 4


class Forgetful(InProcessGrid):
    """Some clients lose their state before a round's first messages, or (None) before all messages."""

    who: tuple[int, ...] = (2,)
    before: int | None = FORGETS
    forgot = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        config = messages[0].content.config_records.get(keys.CONFIG, {})
        training = messages[0].metadata.message_type in ("train", keys.PROBE)
        now = training and config.get(keys.ROUND_KEY) == self.before and not self.forgot
        if now or self.before is None:
            for pid in self.who:
                self._contexts[1000 + pid].state = RecordDict()
            self.forgot = True
        return super().push_messages(messages)


def equals_the_oracle(
    case: Method, how: str, loses: bool = True, **recorded: Any
) -> tuple[RegStrategy, Any]:
    """Run 3 of 5 clients a round; return the strategy, and its models, which are the oracle's.

    Who stops early is used as the method has it, or (`how`) dropped. `loses`: what client 2 forgets counts.
    What is `recorded` are lists that the oracle fills.
    """
    options = {"incomplete": how, "downlink": "delta"} if how == "drop" else {}
    some: dict[str, Any] = {"fraction_train": 0.6, "min_train_nodes": 1, "max_scale": 99.0}
    strategy = case.build(seed=8, **some, **options)
    data, client = make_clients(5), budgeted(case.client, SHORT)
    grid = Forgetful(problem.app_of(client, data), 5)
    models = problem.train(strategy, client, rounds=len(ROUNDS), grid=grid)
    history = strategy.history
    assert case.oracle is not None
    plan = problem.start_weights(), problem.to_numpy(data), len(ROUNDS), lambda t: 0.2, 2
    expected = case.oracle(
        *plan,
        weighting=strategy.weighting,
        cohorts=[e["cohort"] for e in history],
        steps_done=[SHORT[(t - 1) % 4] for t in ROUNDS],
        unused=[set(e["cohort"]) - set(e["replies"]) for e in history],
        lost=[{2} if loses and t == FORGETS else set[int]() for t in ROUNDS],
        **case.oracle_settings,
        **recorded,
    )
    for ours, theirs in zip(models, expected, strict=True):
        close(ours, theirs, 1e-10)
    return strategy, expected
