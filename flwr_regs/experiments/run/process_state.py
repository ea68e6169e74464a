"""What a training changes in its process, and puts back: torch's threads, and the log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@contextmanager
def threads(number: int) -> Iterator[int]:
    """Let torch use so many threads; yield how many it used before.

    One is the rule: small models train faster so, and any number of workers gives equal bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


class _Collector(logging.Handler):
    """Keeps warnings, each once; the server's list of failed clients is in the history."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("\t>") and len(self.said) < 5:
            self.said[text] = None


@contextmanager
def quiet() -> Iterator[Collection[str]]:
    """Keep the log from the screen; return its warnings, which the table repeats."""
    log, collector = logging.getLogger("flwr"), _Collector()
    before, log.handlers = log.handlers, [collector]
    try:
        with warnings.catch_warnings():
            # torch.func asks users to file an issue with torch, for each layer that it does not stack
            warnings.filterwarnings("ignore", "There is a performance drop because")
            yield collector.said
    finally:
        log.handlers = before


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Train a moment: what torch loads at its first step must not count as the first method's time."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.Flatten(), torch.nn.Linear(1, 2))
    loss = torch.nn.functional.cross_entropy(model(torch.zeros(2, 1, 3, 3)), torch.tensor([0, 1]))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), 0.1).step()
