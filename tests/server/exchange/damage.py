"""Real replies, recorded once, then damaged: what a client can send that no client should.

A `Recording` runs a method's real clients and keeps their replies as bytes; of one client, the server gets
only errors. A `Playback` serves these replies again, with that client's damaged. Where the damaged reply is
refused, the run must equal the recorded one to the bit.
"""

import io
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Error, Message, RecordDict
from torch import nn

import flwr_regs as fr
from flwr_regs.testing.problem import app_of
from tests.conftest import Tampered, composed, make_clients, make_model, norm_model, start, still

BAD = 3
"""The partition whose replies are damaged; its node is 1000 + 3."""
LOST = "the recorded client is out of order"
How = Callable[[str, int, RecordDict], RecordDict | str | None]
"""(kind of message, round, a reply's content) -> the damaged content, an error's text, or None."""


class Recording(Tampered):
    """Runs real clients and keeps their replies; the server gets errors from the bad one."""

    def __init__(self, app: Any, n: int) -> None:
        super().__init__(app, n, self._keep)
        self.kept: dict[tuple[int, str, int], RecordDict | str] = {}
        self._seen: Counter[tuple[int, str]] = Counter()

    def _keep(self, kind: str, pid: int, message: Message, reply: Message) -> Message | str:
        node, error = 1000 + pid, reply.has_error()
        kept = str(reply.error.reason) if error else reply.content
        self.kept[node, kind, self._seen[node, kind]] = kept
        self._seen[node, kind] += 1
        asked = kind.startswith("query.flwr_regs") and kind != "query.flwr_regs_probe"
        return LOST if pid == BAD and not asked | error else reply


class Playback(fr.InProcessGrid):
    """Serves recorded replies; those of the bad client are damaged by `how`."""

    def __init__(self, kept: Mapping[tuple[int, str, int], RecordDict | str], how: How) -> None:
        super().__init__(lambda message, context: message, 4)  # type: ignore[arg-type]
        self._kept, self._how = kept, how
        self._seen: Counter[tuple[int, str]] = Counter()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for m in messages:
            node, kind = m.metadata.dst_node_id, m.metadata.message_type
            number = self._seen[node, kind]
            self._seen[node, kind] += 1
            m.metadata.__dict__["_message_id"] = i = f"{node}.{kind}.{number}"
            ids.append(i)
            last = max((n for a, b, n in self._kept if (a, b) == (node, kind)), default=-1)
            found: Any = self._kept[node, kind, min(number, last)] if last >= 0 else LOST
            if isinstance(found, RecordDict):
                found = RecordDict({name: r.copy() for name, r in found.items()})
                config = found.config_records.get("config", {})
                if "regs.start" in config:  # of the recorded training
                    config["regs.start"] = m.content["config"]["regs.start"]
            if node == 1000 + BAD and isinstance(found, RecordDict):
                found = self._how(kind, number + 1, found)
            if isinstance(found, RecordDict):
                self._replies[i] = Message(found, reply_to=m)
            elif found is not None:
                self._replies[i] = Message(Error(2, found), reply_to=m)
        return ids


# Methods


@dataclass(frozen=True)
class Case:
    """A method whose messages are damaged."""

    strategy: Callable[..., Any]
    client: Callable[..., Any]
    model: Callable[[], nn.Module] = make_model
    settings: Mapping[str, Any] | None = None

    def start(self, grid: fr.InProcessGrid, rounds: int = 2) -> Any:
        """Train on a grid; return the strategy."""
        strategy = self.strategy(seed=3)
        strategy.wait_timeout = 0.0
        start(strategy, grid, rounds, self.model, {"lr": 0.1, "local-steps": 2})
        return strategy

    def app(self) -> Any:
        """Return the real clients' app."""
        dtype = next(self.model().parameters()).dtype
        data = make_clients(4, dtype)
        return app_of(self.client, data, self.model, **(self.settings or {}))


CASES: dict[str, Case] = {
    "FedFOR": Case(partial(fr.FedFOR, alpha=0.5), fr.FedFORClient),
    "FedADC-delta": Case(partial(fr.FedADC, downlink="delta"), fr.FedADCClient),
    "EFL-coded-sums": Case(partial(fr.EFL, 0.1, sums_bits=16, sums_density=0.5), fr.EFLClient),
    "RFedAvgPlus": Case(partial(fr.RFedAvgPlus, lam=0.1), fr.RFedAvgPlusClient),
    "FedAdam-buffers": Case(fr.FedAdam, fr.FedAdamClient, norm_model),
    "bfloat16": Case(
        partial(fr.FedFOR, alpha=0.5, wire_dtype="bfloat16"),
        fr.FedFORClient,
        partial(make_model, torch.float32),
    ),
    "frozen": Case(fr.FedAvg, fr.FedAvgClient, lambda: still(make_model(), "0")),
    "private": Case(
        partial(fr.FedAvg, privacy=fr.CentralDP(1.0, 0.1), weighting="uniform"),
        fr.FedAvgClient,
    ),
    "FedFOR+FedBN+ternary": Case(
        partial(fr.RegStrategy, [fr.FirstOrder(0.5), fr.LocalBatchNorm(), fr.SparseTernary(0.3)]),
        composed(fr.FirstOrder, fr.LocalBatchNorm, fr.SparseTernary),
        norm_model,
    ),
    "class-covering": Case(
        partial(fr.FedAvg, cohorts="class-covering"),
        fr.FedAvgClient,
        settings={"share_label_counts": True},
    ),
    "FedDyn": Case(partial(fr.FedDyn, 0.1), fr.FedDynClient),
    "FedNova": Case(fr.FedNova, fr.FedNovaClient),
    "Mime": Case(partial(fr.Mime, 0.5), fr.MimeClient),
    "QFedAvg": Case(partial(fr.QFedAvg, 0.5), fr.QFedAvgClient),
}

# Bytes


def npy(array: Any) -> bytes:
    """Return the bytes of a ``.npy``."""
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def headed(text: str, body: bytes = b"") -> bytes:
    """Return a ``.npy`` with a header of one's own."""
    head = text.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def shaped(shape: str, body: bytes = b"") -> bytes:
    """Return a ``.npy`` that claims a shape."""
    return headed(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n", body)


def bomb() -> bytes:
    """Return a zip file of a megabyte of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros(2**17)))
    return file.getvalue()


class Evil:
    """An object whose unpickling would raise."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


NOT_ARRAYS: dict[str, bytes] = {
    "zip": bomb(),
    "pickle": pickle.dumps(Evil()),
    "objects": npy(np.array([Evil()], dtype=object)),
    "nothing": b"",
    "terabyte": shaped("(137438953472,)"),
    "overflow": shaped("(4294967296, 4294967296, 4294967296, 16)"),
    "wrapped": shaped("(9223372036854775807, 2)", body=b"\0" * 16),
    "nothing-by-much": shaped("(0, 9223372036854775807, 9223372036854775807)"),
    "negative": shaped("(-1,)", body=b"\0" * 8),
    "many-dimensions": shaped("(" + "1, " * 40 + ")", body=b"\0" * 8),
    "nested": shaped("(" * 300 + "3" + ",)" * 300),
    "code": shaped("__import__('os').getpid()"),
    "trailing": npy(np.zeros(3)) + b"\0",
    "truncated": npy(np.zeros(3))[:-1],
    "big-endian": npy(np.zeros(3, ">f8")),
    "complex": npy(np.zeros(3, complex)),
    "record": npy(np.zeros(2, [("a", "<f8")])),
    "long-double": npy(np.zeros(2, np.longdouble)),
    "long-header": headed(" " * 60_000),
    "header-beyond": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
}
"""What a strict reader refuses, by name."""

DEEP = "[" * 100_000 + "]" * 100_000
ANSI = "\x1b[31m\x1b[2J\x07\r\nrun failed\u202e\u200b\x00"
LONG = "A" * 1_000_000
BEYOND = [float("nan"), float("inf"), -1e300, 3e38, 1e16, 10**18, -1, 0, 2**62, 0.5]
VALUES: list[Any] = [
    *BEYOND,
    True,
    "",
    ANSI,
    LONG,
    DEEP,
    '{"0.weight": "2.weight"}',
    "[1, 2]",
    "NaN",
    b"",
    b"\xff" * 9,
    b"STC\x01" + b"\xff" * 60,
    [1, 2],
    [float("nan")] * 3,
    [b"", b"\xff"],
]
"""Values for a config's entry; numbers and lists of numbers go for metrics too."""


def arrays_like(value: np.ndarray) -> list[Array]:
    """Return arrays that could stand in place of one that is expected."""
    wide = value.astype(np.float64)
    made = [
        *(wide * factor for factor in (-1.0, 1e6, 1e16, 1e300, np.nan, np.inf)),
        wide.astype(np.float32),
        np.zeros_like(value),
        value.reshape(-1),
        value[..., None],
        np.asfortranarray(value),
        np.zeros(0),
        np.zeros((7, 0)),
        value.astype(np.int64, casting="unsafe"),
        np.full(value.shape, np.iinfo(np.int64).min),
        np.full(value.shape, 2**64 - 1, np.uint64),
        np.ones(value.shape, bool),
        np.full(value.shape, 65535, np.uint16),
        np.full(value.shape, 1e15, value.dtype) if value.dtype.kind == "f" else value,
    ]
    return [Array(np.asarray(a)) for a in made]
