"""What a stack does in fewer calls than client by client: the same numbers, and what it must not change."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.client.measure.fisher_layers import of_layers
from flwr_regs.cohort import data_functions as stack_data
from flwr_regs.cohort.gradients_of_stack import REGISTER, Gradient, _cross_entropy, vmapped
from flwr_regs.cohort.member_view import Products
from flwr_regs.flower.grids.stacked_records import Kept, filled
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.records import to_array
from tests.flower.test_stacked import Stacked, app_of, perceptron, run


@pytest.mark.parametrize("classes", [2, REGISTER - 1, REGISTER, 3 * REGISTER])
def test_the_cross_entropy_of_all_members_is_that_of_each(classes: int) -> None:
    torch.manual_seed(0)
    output = torch.randn(5, 8, classes, requires_grad=True)
    targets = torch.randint(0, classes, (5, 8))
    targets[1, 3] = targets[2, 0] = -100  # ignored
    losses = [
        _cross_entropy(output, targets),
        vmapped(nn.functional.cross_entropy)(output, targets),
    ]
    grads = [torch.autograd.grad(loss.sum(), output)[0] for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 6), (8, 3, 6), (6,)], ids=str)
def test_a_linear_layer_gives_the_same(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(6, 4, bias=bias), torch.randn(shape, requires_grad=True)
    plain, product = layer(x), nn.functional.linear(x, layer.weight)
    with Products():
        found = layer(x)
        torch.testing.assert_close(nn.functional.linear(x, layer.weight), product)
    torch.testing.assert_close(found, plain)
    of = [x, *layer.parameters()]
    mine, others = (torch.autograd.grad(y.square().sum(), of) for y in (found, plain))
    torch.testing.assert_close(mine, others)


def test_fisher_information_finds_the_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []
    of = stack_data.layers_of_stack

    def spy(*given: Any) -> Any:
        layers = of(*given)
        found.append(of_layers(layers))
        return layers

    monkeypatch.setattr(stack_data, "layers_of_stack", spy)
    app = app_of(
        fr.EFLClient, loader=lambda k, shuffle=True: [(torch.ones(4, 6), torch.arange(4) % 3)]
    )
    grid = Stacked(app(), 3)
    fr.EFL(lam=0.1, seed=3, fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(perceptron().state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": 0.1, "local-steps": 1}),
    )
    assert not grid.fallbacks
    assert found == [set(perceptron().state_dict())]


def test_gradients_lie_as_their_parameters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[bool] = []
    of = Gradient.of

    def spy(self: Gradient, part: Any) -> Any:
        grads, *rest = of(self, part)
        laid.extend(
            g.stride() == part.values[n].stride() for n, g in grads.items() if g is not None
        )
        return grads, *rest

    monkeypatch.setattr(Gradient, "of", spy)
    assert not run(app_of(fr.FedAvgClient)).fallbacks
    assert set(laid) == {True}


def kept(k: int, dtype: str = "float32", wide: int = 2, order: Any = "C") -> Kept:
    """Return a client's slot."""
    rng = np.random.default_rng(k)
    arrays = {
        "matrix": np.asarray(rng.standard_normal((3, wide)), dtype, order=order),
        "number": np.asarray(rng.standard_normal(), dtype),
        "empty": np.zeros((0, 3), dtype),
        "_orig_mod.whole": rng.integers(0, 9, (4,)),
    }
    return Kept(filled({n: to_array(a) for n, a in arrays.items()}))


@pytest.mark.parametrize("order", ["C", "F"])
def test_slots_are_decoded_together_as_each_alone(order: str) -> None:
    slots = [kept(k, order=order) for k in range(4)]
    assert len({slot.form for slot in slots}) == 1
    found = Kept.stacked(slots)
    assert found.keys() == dict(slots[0]).keys()
    for key, rows in found.items():
        alone = torch.stack([slot[key] for slot in slots])
        assert rows.dtype == alone.dtype
        assert torch.equal(rows, alone)
        rows.zero_()  # memory of its own
    assert all(Kept(slot.record)["matrix"].any() for slot in slots)


def test_slots_that_differ_have_other_forms() -> None:
    one = kept(0)
    for other in (kept(0, "float64"), kept(0, wide=3), kept(0, order="F")):
        assert other.form != one.form
    for label, value in (
        ("dtype", "float64"),
        ("shape", (2, 3)),
        ("stype", "other"),
        ("data", b""),
    ):
        odd = kept(0)
        setattr(odd.record["matrix"], label, value)
        assert odd.form != one.form
        with pytest.raises(ProtocolError, match="matrix"):
            Kept.stacked([odd, odd])


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_rests_only_for_stacks(on: bool) -> None:
    found: dict[str, set[bool]] = {"made": set(), "alone": set()}

    class Own(fr.FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            found["alone"].add(gc.isenabled())
            return super().fit(parameters, config)

    def client_fn(context: Any) -> Any:
        found["made"].add(gc.isenabled())
        if context.node_config["partition-id"] == 0:
            raise ValueError("broken")
        kind = Own if context.node_config["partition-id"] == 1 else fr.FedAvgClient
        data = [(torch.randn(4, 6), torch.randint(0, 3, (4,)))]
        return kind(perceptron(), data, device="cpu")

    grid = Stacked(fr.client_app(client_fn), 5)
    (gc.enable if on else gc.disable)()
    try:
        fr.FedAvg(seed=1, fraction_evaluate=0.0).start(
            grid,
            fr.float32_arrays(perceptron()),
            2,
            train_config=ConfigRecord({"lr": 0.1, "local-epochs": 1}),
        )
        assert gc.isenabled() == on
    finally:
        gc.enable()
    assert found == {"made": {False}, "alone": {on}}
