"""rFedAvg's own promises: features, the losses, what is lost between the exchanges, privacy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flwr_regs as fr
from flwr_regs.client.measure.classifier import FeatureTap
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.train.task import Task
from flwr_regs.term import ClientContext
from flwr_regs.testing.problem import app_of, train
from tests.conftest import QUIET, close, make_clients, make_model
from tests.methods.early_stops import Forgetful

CLIENTS = make_clients()


# Features


def test_features_are_what_enters_the_output_layer() -> None:
    model, data = make_model(batch_norm=True), make_clients()[2]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    mean = Measures(model, data, Task(), torch.device("cpu")).mean_features
    got = mean(before)
    want = model[:3].eval()(torch.cat([x for x, _ in data])).mean(0)
    torch.testing.assert_close(got, want)
    shifted = mean({**before, "0.bias": before["0.bias"] + 1})
    assert abs(shifted - got).max() > 1e-2  # at these parameters, not at the model's own
    with FeatureTap(model) as tap:
        pass
    model(data[0][0])
    with pytest.raises(ValueError, match="does not use its output layer"):
        _ = tap.value  # the hook is gone
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_sequences_of_unequal_lengths_have_no_mean_feature() -> None:
    data = [(torch.zeros(2, length, 4), torch.zeros(2)) for length in (3, 5)]
    measures = Measures(nn.Linear(4, 3), data, Task(), torch.device("cpu"))
    with pytest.raises(ValueError, match="have 12 or 20 features, by their batch"):
        measures.mean_features({})


@pytest.mark.parametrize("client", [fr.RFedAvgClient, fr.RFedAvgPlusClient])
def test_a_model_without_a_linear_layer_is_refused_with_a_way_out(client: Any) -> None:
    conv = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"no nn.Linear.*name one with classifier=, of"):
        client(conv, [])
    client(conv, [], classifier="0")
    with pytest.raises(ValueError, match=r"no nn.Linear"):
        fr.RegClient(conv, [], terms=client.terms)


def test_the_losses_are_the_papers() -> None:
    """Gradients alone cannot tell the mean of squared distances from the distance to the mean."""
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    table = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])

    def loss(term: Any, **broadcast: torch.Tensor) -> float:
        ctx = ClientContext({}, 0.1, 1, features=features, client_id=2, broadcast=broadcast)
        return float(term.loss(1.0, {}, ctx))

    # φ̄ = (2, 3): to (0, 0) 13, to (1, 1) 5; its own row is left out
    ids = torch.tensor([0, 1, 2])
    for first, expected in ((0, (13 + 5) / 2), (1, 5.0), (2, 0.0)):
        value = loss(fr.FeatureTable(0.5), ids=ids[first:], table=table[first:])
        assert value == pytest.approx(1 + 0.5 * expected)
    # nobody else is known
    assert loss(fr.FeatureTable(0.5)) == loss(fr.LeaveOneOutMean(0.5)) == 1.0
    value = loss(fr.LeaveOneOutMean(0.5), mean=torch.tensor([0.5, 0.5]))
    assert value == pytest.approx(1 + 0.5 * (1.5**2 + 2.5**2))


# The second exchange


def trained(
    strategy: Any, client: Any = fr.RFedAvgPlusClient, kind: Any = fr.InProcessGrid
) -> tuple[Any, dict[str, np.ndarray]]:
    """The strategy, and the model after three rounds of four clients."""
    return strategy, train(strategy, client, rounds=3, grid=kind(app_of(client, CLIENTS), 4))[-1]


class Amnesiac(Forgetful):
    """Also between the two exchanges."""

    who, before = (1,), None


def test_what_is_lost_between_the_exchanges() -> None:
    """The model is sent again; a client's own δ costs its client the round."""
    _, plain = trained(fr.RFedAvgPlus(lam=0.5, **QUIET))
    strategy, again = trained(fr.RFedAvgPlus(lam=0.5, **QUIET), kind=Amnesiac)
    close(again, plain, 0.0)
    down = strategy.history[-1]["bytes_down"]
    assert down[1] > 1.5 * down[0]
    strategy, _ = trained(fr.RFedAvgPlus(lam=0.5, sum_only=True, **QUIET), kind=Amnesiac)
    assert all("lost its own δ" in e["failures"][1] for e in strategy.history)
    assert all(e["replies"] == [0, 2, 3] for e in strategy.history)


# Privacy


def probe(term: fr.LeaveOneOutMean, times: int = 1) -> np.ndarray:
    feature = torch.full((400,), 0.5, dtype=torch.float64)
    ctx = ClientContext(
        start={}, lr=0.1, num_steps=0, mean_features=lambda p, batches: feature, batch_size=5
    )
    return np.stack([term.probe(ctx)[0]["delta"].numpy() for _ in range(times)])


def test_delta_is_clipped_and_noised_as_in_the_paper() -> None:
    assert np.linalg.norm(probe(fr.LeaveOneOutMean(0.1, clip_norm=2.0))[0]) == pytest.approx(2.0)
    assert np.linalg.norm(probe(fr.LeaveOneOutMean(0.1, clip_norm=50.0))[0]) == pytest.approx(10.0)
    noisy = probe(fr.LeaveOneOutMean(0.1, noise_std=3.0, clip_norm=2.0), times=50)
    clean = probe(fr.LeaveOneOutMean(0.1, clip_norm=2.0))[0]
    assert (noisy - clean).std() == pytest.approx(3.0 * 2.0 / 5, rel=0.05)  # σ C / L
    assert abs((noisy - clean).mean()) < 0.05
