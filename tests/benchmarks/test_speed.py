"""The measurements of speed: each runs, and its sides do the same job."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flwr_regs as fr
from benchmarks.speed import __main__ as command
from benchmarks.speed import jobs, report

IN_PROCESS = [name for name in command.PARTS if name not in ("ray", "gpu")]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_PROCESS, marks=pytest.mark.full, id="in-process"),
        pytest.param(["ray"], marks=pytest.mark.flower, id="ray"),
    ],
)
def test_every_part_measures_quickly(names: list[str], tmp_path: Path) -> None:
    """Its rows hold figures that are finite, or say why there are none."""
    out = tmp_path / "speed.json"
    assert command.main(["measure", *names, "--quick", "--json", str(out)]) == 0
    parts: dict[str, Any] = json.loads(out.read_text())
    assert set(parts) >= set(names)
    assert report.tables(parts).keys() >= parts.keys()
    for part in parts.values():
        assert part["rows"]
        assert "NaN" not in json.dumps(part)
        assert all(row.get("seconds", {"median": 1})["median"] > 0 for row in part["rows"])


def test_all_sides_of_a_client_take_the_same_steps() -> None:
    """One epoch over one batch a client, where all orders are one: the same model from all of them."""
    grid = fr.InProcessGrid(jobs.app("FedAvg", steps=1), 3)
    start = jobs.small()
    strategy = fr.FedAvg(seed=1, fraction_evaluate=0.0)
    jobs.rounds(strategy, grid, start, 1, jobs.train_config(1))
    mean = {n: torch.zeros_like(p) for n, p in start.named_parameters()}
    for pid in range(3):
        model = jobs.copied(start)
        x, y = jobs.loader(pid, 1).dataset.tensors  # type: ignore[attr-defined]
        jobs.bare_steps(model, [(x, y)])
        loss = torch.nn.functional.cross_entropy(
            torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y
        )
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for (n, p), g in zip(model.named_parameters(), grads, strict=True):
            mean[n] += (p - jobs.LR * g).detach() / 3
    for n, a in strategy.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(a, mean[n])
