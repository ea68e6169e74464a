"""Which examples each client has: to train on, held out and to test on, from round to round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from flwr_regs.experiments.data.datasets import Data, load, records, reduced
from flwr_regs.experiments.partition import partitions, shifts
from flwr_regs.experiments.partition.splits import test_split
from flwr_regs.experiments.settings import PERSONAL_SHARE, PROBLEM, Settings

Array = np.ndarray[Any, Any]

USUAL, SEQUENCES = 10_000, 2_000
"""The default of test-examples; of sequences it means fewer, as one takes a hundred images' time."""
DATA_SETTINGS = {*PROBLEM, "seed", "held-out-clients", "held-out-share", "personalise"}
DATA_SETTINGS -= {"test-on-clients"}  # whoever tests, the examples are the same
"""Settings that decide which examples a client has are among these: who shares them shares `ClientData`."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """The examples of each client, as rows of the data set; all draws are from the settings' seed.

    Attributes
    ----------
    settings : Settings
    data : Data
    """

    settings: Settings
    data: Data

    @cached_property
    def every_part(self) -> list[Array]:
        """The examples of each client, then of each client that is held out."""
        data, settings = self.data, self.settings
        clients = settings.num_clients + settings.held_out_clients
        parts = partitions.partition(data.train_y, settings, clients, data.groups, data.coarse)
        return [*map(self._kept, parts)]

    def _shuffled(self, rows: Array) -> Array:
        return np.random.default_rng(self.settings.seed).permutation(rows)

    def _kept(self, rows: Array) -> Array:
        """Return the examples that a client keeps of its own: all, or `examples_per_client` of them."""
        most = self.settings.examples_per_client
        return self._shuffled(rows)[:most] if most else rows

    @cached_property
    def parts(self) -> list[Array]:
        """The examples of each training client; where they change, those of round 1.

        Raises ValueError for a partition that is impossible.
        """
        return self.every_part[: self.settings.num_clients]

    @property
    def hash(self) -> str:
        """The hash of the split: equal ones have the same examples on the same clients."""
        return partitions.partition_hash(self.parts)

    @cached_property
    def label_counts(self) -> Array:
        """How many examples of each class each training client has: (clients, classes), int64."""
        classes, labels = self.data.num_classes, self.data.train_y
        return np.stack([np.bincount(labels[rows], minlength=classes) for rows in self.parts])

    @property
    def by_round(self) -> bool:
        """Whether a client's data changes from round to round."""
        return self.settings.partition in partitions.BY_ROUND

    def rows(self, pid: int, server_round: int) -> Array:
        """Return a client's training examples in a round, those that it holds out among them."""
        settings = self.settings
        if settings.partition != "long-tail-rounds":
            return self.parts[pid]
        drawn = self.data.train_y, pid, server_round, settings.seed
        share, ratio = settings.sample_share, settings.long_tail
        return self._kept(shifts.long_tail(*drawn, share=share, ratio=ratio))

    def split(self, rows: Array) -> tuple[Array, Array]:
        """Return a client's examples as (held out, trained on)."""
        share = PERSONAL_SHARE if self.settings.personalise else self.settings.held_out_share
        if share == 0:
            return rows[:0], rows
        if self.settings.partition == "long-tail-rounds":
            out = shifts.held_out(rows, share, self.settings.seed)
            return rows[out], rows[~out]
        shuffled, count = self._shuffled(rows), int(len(rows) * share)
        return shuffled[:count], shuffled[count:]

    def test_rows(self, pid: int) -> Array:
        """Return the test examples of a client that tests the model."""
        data = self.data
        if self._matched:
            rows = self._matched[pid]
        else:
            rows = np.flatnonzero(np.isin(data.test_y, data.train_y[self.parts[pid]]))
        return self._bounded(rows, (self.settings.seed, pid))

    @cached_property
    def _matched(self) -> list[Array]:
        """The test examples of each client, as its training examples are distributed; [] if by class."""
        data, settings = self.data, self.settings
        train, test, other = data.groups, data.test_groups, "a partition without groups"
        if settings.partition not in partitions.IN_GROUPS or train is None or test is None:
            if settings.test_split == "classes":
                return []
            train, test, other = data.train_y, data.test_y, "test-split=classes"
        return test_split(train, self.parts, test, settings.seed, other)

    def _bounded(self, rows: Array, seed: Any) -> Array:
        """Return `most_tested` of some rows at random, if that is set and they are more."""
        if not 0 < self.most_tested < len(rows):
            return rows
        return np.random.default_rng(seed).permutation(rows)[: self.most_tested]

    @property
    def most_tested(self) -> int:
        """The examples of a test at most; 0: all."""
        most: int = self.settings.test_examples
        sequences = self.data.train_x.ndim == 2 and self.data.train_x.dtype.kind in "iu"
        return SEQUENCES if sequences and most == USUAL else most

    def server_rows(self) -> tuple[bool, Any]:
        """Return (whether they are training examples, the rows that the server tests on).

        Raises ValueError if the share that clients hold out is no example.
        """
        settings = self.settings
        if settings.held_out_clients:
            rows = np.concatenate(self.every_part[settings.num_clients :])
        elif settings.held_out_share:
            rows = np.concatenate([self.split(rows)[0] for rows in self.parts])
            if settings.partition == "long-tail-rounds":  # clients draw the same ones
                rows = np.unique(rows)
            if not len(rows):
                most = f"where no client has more than {max(map(len, self.parts))} examples"
                none = f"held-out-share={settings.held_out_share:g} holds out no example, {most}"
                raise ValueError(f"{none}: use a larger share, or fewer clients")
        elif 0 < self.most_tested < len(self.data.test_y):
            return False, self._bounded(np.arange(len(self.data.test_y)), settings.seed)
        else:
            return False, slice(None)  # no copy
        return True, self._bounded(rows, settings.seed)

    def labels(self, y: Array, server_round: int) -> Array:
        """Return the labels that examples of the classes `y` have in a round."""
        if self.settings.partition != "label-swaps-rounds":
            return y
        drawn = server_round, self.settings.seed, self.settings.swap_probability
        return np.asarray(shifts.swapped(self.data.num_classes, *drawn)[y], y.dtype)

    def step_budget(self, server_round: int, pid: int, planned: int) -> int:
        """Return how many of the planned local steps a client can take in a round.

        The straggler model: a share of the clients is slow. Each slow client has its own speed between
        ``straggler-speed`` and 1, the fraction of its steps that it takes. Any client may drop out of a
        round and take no step. All draws depend on (seed, partition, round) alone.
        """
        settings = self.settings
        # the tag 2 separates these draws from the cohorts', from (seed, round, client)
        client = np.random.default_rng((settings.seed, pid, 0, 2))
        slow = client.random() < settings.straggler_share
        speed = client.uniform(settings.straggler_speed, 1) if slow else 1.0
        luck = np.random.default_rng((settings.seed, pid, server_round, 2)).random()
        return 0 if luck < settings.drop_out else int(planned * speed)


def client_data_of(settings: Any) -> ClientData:
    """Return the clients' data of :class:`Settings`, made once for all runs that share it.

    Raises as :func:`data_of` does.
    """
    shared = Settings.of({name: settings.config[name] for name in DATA_SETTINGS})
    return _client_data(shared, data_of(settings))


_client_data = lru_cache(maxsize=8)(ClientData)


def data_of(settings: Any) -> Data:
    """Return the data set of :class:`Settings`, or what `examples`, `num-classes` and `synthetic` leave.

    Raises ImportError, OSError or ValueError as :func:`flwr_regs.experiments.data.datasets.load` does.
    """
    source = settings.dataset, settings.data_dir, settings.code_dir
    data = (records if settings.synthetic else load)(*source)
    kept = settings.examples, settings.num_classes
    return _reduced(data, *kept) if any(kept) else data


_reduced = lru_cache(maxsize=2)(reduced)


def left(settings: Any, clients: ClientData) -> str:
    """Say what the clients, and the server's test, have of the data set; "" if that is all of it.

    And that `examples` asks for more than there is.
    """
    data, whole = clients.data, data_of(replace(settings, examples=0, num_classes=0))
    rows = np.arange(len(data.train_y))
    if settings.partition != "long-tail-rounds":  # where clients draw from all
        rows = np.unique(np.concatenate(clients.every_part))
    counts = [(len(rows), len(whole.train_y), "training examples")]
    if data.groups is not None and whole.groups is not None:
        kept, every = np.unique(data.groups[rows]), np.unique(whole.groups)
        counts.append((len(kept), len(every), "groups"))
    whole_test = False, slice(None)
    of_training, tested = whole_test if settings.test_on_clients else clients.server_rows()
    if not of_training:
        counts.append((len(data.test_y[tested]), len(whole.test_y), "test examples"))
    parts = [f"{kept:,} of {total:,} {what}" for kept, total, what in counts if kept < total]
    if settings.examples > len(data.train_y):
        there = f"all {len(data.train_y):,} examples to train on"
        parts.insert(0, f"{there} (examples={settings.examples} asks for more)")
    return ", ".join(parts)
