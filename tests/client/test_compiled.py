"""Compiled models: names, hooks, and which steps run compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining, local_round
from flwr_regs.client.measure.classifier import FeatureTap
from flwr_regs.client.measure.fisher import fisher_diagonal
from flwr_regs.client.train.task import Task
from flwr_regs.methods.client_loss.rfedavg import LeaveOneOutMean
from flwr_regs.testing.problem import app_of
from flwr_regs.wire.records import parcel_of
from tests.conftest import close, make_clients, make_model, start

Build = Callable[[], nn.Module]


def counting() -> tuple[Build, list[int]]:
    """Return a compiled model's constructor, and a list that grows when compiled code runs."""
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    def build() -> nn.Module:
        torch.compiler.reset()
        return torch.compile(make_model(), backend=backend)  # type: ignore[return-value]

    return build, calls


def train(server: Build, client: Build) -> dict[str, Any]:
    strategy = fr.FedFOR(alpha=0.1)
    seen: list[list[str]] = []
    grid = fr.InProcessGrid(app_of(fr.FedFORClient, make_clients(), client), 4)
    told = {"evaluate_fn": lambda number, arrays: seen.append(list(arrays))}
    result = start(strategy, grid, model=server, **told)
    assert seen == [list(make_model().state_dict())] * 3
    return {n: a.numpy() for n, a in result.arrays.items()}


def test_compiled_and_plain_clients_and_servers_go_together() -> None:
    compiled, calls = counting()
    want = train(make_model, make_model)
    for server, client in ((compiled, make_model), (make_model, compiled), (compiled, compiled)):
        close(train(server, client), want, 0.0)
    assert len(calls) >= 2 * 2 * 14  # every local step of both trainings with compiled clients


def test_what_a_compiled_model_gives_has_plain_order_and_names() -> None:
    compiled, _ = counting()
    model, data = compiled(), make_clients()[0]
    want = [v.shape for v in make_model().state_dict().values()]
    assert [v.shape for v in fr.FedAvgClient(model, data).get_parameters({})] == want
    state = local_round(model, chain([]), data, lr=0.1, epochs=1, device="cpu").state
    reply = parcel_of(RecordDict({"arrays": ArrayRecord(model.state_dict())})).records["arrays"]
    found = fisher_diagonal(model, data, Task(), "cpu")
    for arrays in (state, found, fr.float32_arrays(model), reply):
        assert list(arrays) == list(make_model().state_dict())


def test_a_loop_of_ones_own_with_features_needs_the_model_itself() -> None:
    compiled, _ = counting()
    model, data = compiled(), make_clients()[0]
    term = chain([LeaveOneOutMean(0.1)])
    training = LocalTraining(model, term, data, lr=0.1, epochs=1, device="cpu")
    x, y = data[0]
    output = model(x)
    with pytest.raises(ValueError, match=r"reads features.*without torch\.compile"):
        training.loss(nn.functional.cross_entropy(output, y), x, y, output)


def test_a_tap_sees_through_modules_that_are_compiled_in_place() -> None:
    torch.compiler.reset()
    model, x = make_model(), make_clients()[0][0][0]
    model.compile(backend="eager")
    model[2].compile(backend="eager")
    impls = [m._compiled_call_impl for m in model.modules()]
    model(x)
    for _ in range(2):
        with FeatureTap(model) as tap:
            model(x)
            assert torch.equal(tap.value, model[:2](x))
    assert [m._compiled_call_impl for m in model.modules()] == impls
    assert impls[0] is not None
