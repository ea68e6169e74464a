"""The clients' evaluation of the global model: who is asked, and what becomes of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log

from flwr_regs.server.cohorts import uniform_cohort
from flwr_regs.server.outbox import client_seed
from flwr_regs.server.population import Population
from flwr_regs.server.replies import receive_metrics, sort_replies, told, with_common_metrics
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.records import content_bytes

Aggregate = Callable[[list[RecordDict], str], MetricRecord]


class NobodyEvaluated(RuntimeError):
    """No client could evaluate, and none ever could: a mistake rather than bad luck."""


class Evaluation:
    """One training's evaluations on clients.

    Parameters
    ----------
    population : Population
    seed : int
    settings : mapping
        What every client is told beside the evaluate config.
    """

    def __init__(self, population: Population, seed: int, settings: Mapping[str, Any]) -> None:
        self._population = population
        self._seed = seed
        self._settings = settings
        self._worked = False

    def messages(
        self, server_round: int, size: int, arrays: ArrayRecord, config: Mapping[str, Any]
    ) -> list[Message]:
        """Return the messages to `size` of the clients that are there."""
        members = self._population.here
        self._asked = uniform_cohort(members, (self._seed, server_round, 1), size)
        messages = []
        self._bytes = {}
        for pid in self._asked:
            own = {
                keys.ROUND_KEY: server_round,
                keys.SEED_KEY: client_seed(self._seed, server_round, pid),
            }
            content = RecordDict(
                {
                    keys.ARRAYS: arrays,
                    keys.CONFIG: ConfigRecord({**config, **self._settings, **own}),
                }
            )
            self._bytes[pid] = content_bytes(content)
            messages.append(Message(content, self._population.node_id(pid), "evaluate"))
        self._clock = time.monotonic()
        return messages

    def result(
        self,
        replies: Iterable[Message],
        entry: dict[str, Any],
        aggregate: Aggregate,
        weighted_by_key: str,
    ) -> MetricRecord | None:
        """Average the clients' metrics and note each client's own in the history's `entry`.

        Returns None if nobody could evaluate this time; raises NobodyEvaluated if nobody ever could.
        """
        answered, failures = sort_replies(replies, self._population.nodes(self._asked))
        per_client: dict[int, dict[str, Any]] = {}
        for pid in sorted(answered):
            try:
                metrics, _ = receive_metrics(pid, answered[pid].content, weighted_by_key)
                per_client[pid] = dict(metrics)
            except ProtocolError as error:
                failures[pid] = str(error)
        if failures:
            log(WARNING, "\t> evaluation: %s", told(failures))
        entry["seconds"]["evaluate"] = time.monotonic() - self._clock
        entry["evaluate"] = {
            "bytes_down": self._bytes,
            "failures": failures,
            "clients": per_client,
        }
        if not per_client:
            if self._worked:
                return None
            raise NobodyEvaluated(
                f"no client of {len(self._asked)} could evaluate; {told(failures)}"
            )
        self._worked = True
        return aggregate(
            with_common_metrics(MetricRecord(m) for m in per_client.values()), weighted_by_key
        )
