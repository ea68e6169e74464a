"""One round's messages to its cohort: the training itself, a probe before it, and models sent ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_regs.chain import Chain
from flwr_regs.server.downlink import Downlink
from flwr_regs.server.population import Population
from flwr_regs.server.replies import receive_uploads, sort_replies, told
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.records import content_bytes, to_record


def client_seed(seed: int, server_round: int, pid: int) -> int:
    """Return the seed of one client in one round, from (seed, round, partition id) alone."""
    return int(np.random.SeedSequence((seed, server_round, pid)).generate_state(1)[0])


class Exchange:
    """What a round sends, to whom, and how many bytes that is.

    Parameters
    ----------
    server_round, seed : int
    settings : mapping
        The round's config, the same for every client.
    downlink : Downlink
    population : Population
    held : dict
        Partition id -> round whose model that client last kept; kept up to date here.
    used : mapping or None
        Partition id -> round whose reply of that client was last averaged; None if clients need not know.
    entry : dict
        The round's history entry: the bytes and the failures of a probe are noted in it.
    """

    def __init__(
        self,
        server_round: int,
        seed: int,
        settings: Mapping[str, Any],
        downlink: Downlink,
        population: Population,
        held: dict[int, int],
        used: Mapping[int, int] | None,
        entry: dict[str, Any],
    ) -> None:
        self._round = server_round
        self._seed = seed
        self._settings = settings
        self._downlink = downlink
        self._population = population
        self._held = held
        self._used = used
        self._entry = entry
        self._answers: dict[int, Slot] = {}
        self._ahead_of: dict[int, int] = {}

    def train(self, clients: Iterable[int], lost: bool = False) -> list[Message]:
        """Return the train messages; `lost` clients get everything, whatever they had."""
        messages = []
        bytes_down = self._entry.setdefault("bytes_down", {})
        for pid in clients:
            content = self._content(pid, None if lost else self._held.get(pid))
            sent_before = bytes_down.get(pid, self._entry.get("bytes_probe_down", {}).get(pid, 0))
            bytes_down[pid] = sent_before + content_bytes(content)
            messages.append(Message(content, self._population.node_id(pid), "train"))
        return messages

    def probe(self, cohort: list[int], term: Chain, grid: Grid, timeout: float) -> list[int]:
        """Hold the round's first exchange, ``w_t`` down and the terms' probes up; return who answered.

        A client that does not answer is left out of the round and named among its failures.
        """
        uploads: dict[int, Slot] = {}
        failures = self._entry["failures"]
        down: dict[int, int] = dict.fromkeys(cohort, 0)
        up: dict[int, int] = {}
        asked = {pid: self._content(pid, self._held.get(pid), probe=True) for pid in cohort}
        for last in (
            False,
            True,
        ):  # a client that has lost its model is asked once more, with the model
            messages = [
                Message(content, self._population.node_id(pid), keys.PROBE)
                for pid, content in asked.items()
            ]
            replies = grid.send_and_receive(messages, timeout=timeout)
            answered, failed = sort_replies(replies, self._population.nodes(asked))
            failures |= failed
            for pid, content in asked.items():
                down[pid] += content_bytes(content)
            lost = [pid for pid, reply in answered.items() if says(reply, keys.OUT_OF_SYNC_KEY)]
            if last:
                failures |= dict.fromkeys(lost, "it says that it lacks the model it was just sent")
            for pid in sorted(set(answered) - set(lost)):
                try:
                    content = answered[pid].content
                    found = receive_uploads(f"the probe of client {pid}", content)
                    term.check(found, {}, probing=True)
                    uploads[pid] = found
                    up[pid] = content_bytes(content)
                except ValueError as error:
                    failures[pid] = str(error)
            if not lost:
                break
            asked = {pid: self._content(pid, None, probe=True) for pid in lost}
        if failures:
            log(WARNING, "\t> in the first exchange: %s", told(failures))
        self._answers = term.answer({pid: uploads[pid] for pid in sorted(uploads)})
        self._held |= dict.fromkeys(uploads, self._round)
        self._entry |= {"bytes_probe_down": down, "bytes_probe_up": up}
        return sorted(uploads)

    def ahead(self, clients: Iterable[int], model: ArrayRecord) -> list[Message]:
        """Return ``w_t`` for clients of the next cohort who do not get it in this round anyway."""
        config = {k: self._settings[k] for k in (keys.METHOD_KEY, keys.START_KEY, keys.ROUND_KEY)}
        bytes_ahead = self._entry.setdefault("bytes_ahead", {})
        messages = []
        for pid in clients:
            content = RecordDict({keys.ARRAYS: model, keys.CONFIG: ConfigRecord(config)})
            node = self._population.node_id(pid)
            self._ahead_of[node] = pid
            bytes_ahead[pid] = content_bytes(content)
            messages.append(Message(content, node, keys.PREFETCH))
        return messages

    def got_ahead(self, replies: Iterable[Message]) -> None:
        """Note who now keeps the model that was sent ahead."""
        for ack in replies:
            if ack.metadata.message_type == keys.PREFETCH and not ack.has_error():
                self._held[self._ahead_of[ack.metadata.src_node_id]] = self._round

    def _content(self, pid: int, held_round: int | None, probe: bool = False) -> RecordDict:
        records, scalars = self._downlink.content(held_round, probe)
        for name, slot in self._answers.get(pid, {}).items():
            if slot:
                records = {**records, f"{name}.broadcast": to_record(slot)}
        own: dict[str, Any] = {
            keys.SEED_KEY: client_seed(self._seed, self._round, pid),
            keys.CLIENT_KEY: pid,
        }
        if self._used is not None:
            own[keys.USED_KEY] = self._used.get(pid, 0)
        if probe:
            own |= {keys.PROBE_KEY: True, keys.KEEP_KEY: True}
        config = ConfigRecord({**self._settings, **scalars, **own})
        return RecordDict({**records, keys.CONFIG: config})


def says(message: Message, key: str) -> bool:
    """Return whether a client's answer says, by `key`, that it has lost what it should hold."""
    config = message.content.config_records.get(keys.CONFIG)
    return config is not None and bool(config.get(key, False))
