"""Clients in plain numpy behind the server's network: no Flower, no torch."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np

from flwr_regs.server.exchange.network import Course, Network, Replies, Request
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.parcel import Parcel, Record

T = TypeVar("T")
ECHOED = (keys.METHOD_KEY, keys.START_KEY, keys.ROUND_KEY)
"""The entries of a message that its reply repeats."""
Client = Callable[[int, Request, Parcel], Parcel | str | None]


def run(course: Course[T], network: Network) -> T:
    """Run a course to its end on a network."""
    requests = next(course)
    try:
        course.send([network.ask(r) for r in requests])
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a course pauses once")


class NumpyNetwork:
    """Serves partitions 0 … n − 1 at nodes 100 … 100 + n − 1, each by `client`.

    A client returns its reply, a text for an error, or None for silence. `here` are the nodes that are
    connected, `asked` is every (kind, partition id) in order.
    """

    def __init__(self, n: int, client: Client) -> None:
        self.here = set(range(100, 100 + n))
        self.size = n
        self.asked: list[tuple[str, int]] = []
        self._client = client

    def nodes(self) -> Collection[int]:
        return list(self.here)

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        came: dict[int, Parcel] = {}
        failures: dict[int, str] = {}
        silent = []
        for pid, parcel in request.parcels.items():
            self.asked.append((request.kind, pid))
            reply = self._client(request.nodes[pid] - 100, request, parcel)
            if isinstance(reply, Parcel):
                came[pid] = reply
            else:
                failures[pid] = reply or "no reply in time"
                silent += [pid] * (reply is None)
        return Replies(came, failures, silent)


def quadratic(curvature: Any, centre: Any) -> Client:
    """Clients of ``f_k(v) = a_k/2 ‖v − c_k‖²`` with ``k + 1`` examples."""

    def client(k: int, request: Request, parcel: Parcel) -> Parcel:
        if request.kind == keys.IDENTIFY:
            return Parcel(config={"partition-id": k, "num-partitions": len(curvature)})
        v: NDArrays = {n: np.array(a) for n, a in parcel.records[keys.ARRAYS].items()}
        config = parcel.config
        if request.kind == "evaluate":
            loss = sum(float(((a - centre[k]) ** 2).sum()) for a in v.values())
            return Parcel(metrics={"num-examples": k + 1, "loss": loss})
        for _ in range(config["local-steps"]):
            for name in v:
                v[name] = v[name] - config["lr"] * curvature[k] * (v[name] - centre[k])
        steps = {"local-steps": config["local-steps"], "planned-steps": config["local-steps"]}
        steps["examples-processed"] = k - 1
        return Parcel(
            {keys.ARRAYS: Record(v)},
            {key: config[key] for key in ECHOED} | {keys.NOT_TRAINED_KEY: []},
            {"num-examples": k + 1, **steps},
        )

    return client
