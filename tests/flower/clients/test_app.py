"""A client of a user's own is called as Flower calls it; its reply holds what it returned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.client import Client, NumPyClient

from flwr_regs import InProcessGrid, client_app

MODEL: dict[str, np.ndarray] = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "scalar": np.array(2, np.int64),
    "none": np.zeros((0, 4), np.float32),
    "half": np.array([1, 2], np.float16),
    "flags": np.array([True, False]),
}


class Users(NumPyClient):
    """Returns what the test gives it, or its own arrays changed in place."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def fit(self, parameters: Any, config: Any) -> Any:
        for a in parameters:
            a += a.astype(a.dtype)
        metrics = {"names": config["regs.names"], "raw": b"\0x", "wide": np.float64(2.5)}
        return self.result or (parameters, 3, {"loss": 0.5, "steps": 2, "yes": True, **metrics})

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return self.result or (float(parameters[0].sum()), 4, {"accuracy": 0.25, "who": "me"})


def reply_of(client: Any, kind: str = "train") -> tuple[Message, Message]:
    """Send a client a message; return its reply, and the message."""
    grid = InProcessGrid(client_app(lambda context: client), 1)
    arrays = ArrayRecord({n: Array(a) for n, a in MODEL.items()})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.1, "server-round": 1})})
    sent = grid.create_message(content, kind, next(iter(grid.get_node_ids())), "1")
    return next(iter(grid.send_and_receive([sent]))), sent


WRONG: dict[str, Any] = {
    "a float for n_k": ([np.zeros(2)], 1.0, {}),
    "a nested metric": ([np.zeros(2)] * len(MODEL), 1, {"x": {"y": 1}}),
    "objects": ([np.array([None])] * len(MODEL), 1, {}),
    "too few arrays": ([np.zeros(2)], 1, {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_result_is_an_error(what: str) -> None:
    reply, _ = reply_of(Users(WRONG[what]))
    assert reply.has_error()
    if what == "a float for n_k":
        assert "NumPyClient.fit did not return a tuple" in str(reply.error.reason)


class Own(Users):
    """Says itself how Flower calls it."""

    def to_client(self) -> Client:
        client = super().to_client()
        fit = client.fit
        more = lambda res: replace(res, metrics={**res.metrics, "mine": 1})  # noqa: E731
        client.fit = lambda ins: more(fit(ins))  # type: ignore[method-assign]
        return client


CLIENTS: dict[str, Callable[[], Any]] = {
    "NumPyClient": Users,
    "its Client": lambda: Users().to_client(),
    "one with a to_client of its own": Own,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_any_client_of_flowers_is_called(name: str) -> None:
    """One that writes into its arrays writes into its own; what it returns travels as it is."""
    reply, sent = reply_of(CLIENTS[name]())
    assert reply.content["metrics"]["num-examples"] == 3
    assert ("mine" in reply.content["metrics"]) == (name == "one with a to_client of its own")
    for key, a in MODEL.items():
        np.testing.assert_array_equal(sent.content["arrays"][key].numpy(), a)
        fitted = reply.content["arrays"][key]
        np.testing.assert_array_equal(fitted.numpy(), a + a)
        assert (fitted.dtype, tuple(fitted.shape)) == (str(a.dtype), a.shape)
    told = reply_of(CLIENTS[name](), "evaluate")[0].content
    assert dict(told["metrics"]) == {"num-examples": 4, "loss": 15.0, "accuracy": 0.25}
    assert dict(told["config"]) == {"who": "me"}
