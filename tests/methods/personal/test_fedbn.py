"""FedBN and private entries: what stays, what never travels, and which entries they are."""

from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import nn

import flwr_regs as fr
from flwr_regs.testing.problem import app_of, make_clients, make_model, train
from tests.conftest import QUIET, Tampered, close, norm_model, plain_fedavg, remembered

BN = {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
DATA = [[(x[:2], y[:2]), *more] for (x, y), *more in make_clients(3)]  # unequal batches


@pytest.mark.parametrize("one_model", [False, True])
def test_fedbn_equals_the_plain_loops_and_batch_norm_never_travels(one_model: bool) -> None:
    """Clients evaluate with their own, too; also those that share a model, as at module level."""
    names, model = set[str](), norm_model()
    app = app_of(fr.FedBNClient, DATA, (lambda: model) if one_model else norm_model)

    def note(kind: str, pid: int, message: Message, reply: Message) -> Message:
        names.update(*message.content.array_records.values(), *reply.content.array_records.values())
        return reply

    grid, strategy = Tampered(app, 3, note), fr.FedBN(seed=1)
    models = train(strategy, fr.FedBNClient, rounds=3, model=norm_model, grid=grid)
    shared, local = plain_fedavg(norm_model, DATA, 3, 0.2, own=BN)  # Alg. 1
    close(models[-1], shared, 1e-12)
    assert names == set(shared)  # in train and evaluate messages and replies alike
    for pid, model in enumerate(local):
        own = {k: v for k, v in model.state_dict().items() if k in BN}
        close(remembered(grid, pid)["regs"], own, 1e-12)
        model.load_state_dict(shared, strict=False)
        model.eval()
        with torch.no_grad():
            x, y = (torch.cat(parts) for parts in zip(*DATA[pid], strict=True))
            loss = nn.functional.cross_entropy(model(x), y).item()
        told = strategy.history[-1]["evaluate"]["clients"][pid]["loss"]
        assert told == pytest.approx(loss, abs=1e-12)
    assert (local[0][1].weight - local[1][1].weight).abs().max() > 1e-3  # type: ignore[index]


@pytest.mark.parametrize(
    ("strategy", "client", "match"),
    [
        (fr.FedBN(), fr.FedBNClient, "has no BatchNorm layer"),
        (fr.FedPer("head.*"), fr.FedPerClient, r"'head.\*' matches none of the model's arrays"),
        (fr.FedPer("*"), fr.FedPerClient, "share nothing of initial_arrays"),
        (fr.FedBABU(layer="*"), fr.FedBABUClient, "train none of initial_arrays"),
    ],
)
def test_nothing_to_keep_or_to_share_is_refused(strategy: Any, client: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        train(strategy, client)


def test_which_entries_are_private() -> None:
    kept = fr.Private("0.*, 3.bias").private(["0.weight", "3.bias", "3.weight"])
    assert kept == {"0.weight", "3.bias"}
    own = {"block.bn.weight", "block.bn.running_mean", "running_mean"}
    assert fr.LocalBatchNorm().private([*own, "conv.weight", "block.bn2.weight"]) == own


def test_a_client_that_fails_leaves_nothing_to_others_in_a_shared_model() -> None:
    clients = make_clients(3)
    clients[0][-1][1][0] = 99  # no class
    ends = [
        train(fr.FedPer("2.*", **QUIET), fr.FedPerClient, rounds=1, grid=grid)[-1]
        for grid in (
            fr.InProcessGrid(fr.Clients(make_model(), clients)),
            fr.InProcessGrid(app_of(fr.FedPerClient, clients, make_model), 3),
        )
    ]
    close(*ends, 0.0)


def test_private_entries_that_the_user_loads_into_a_shared_model_stay() -> None:
    """Each client begins with a head of its own, from a file of the user."""
    heads = {
        pid: {n: v * (pid + 2) for n, v in make_model()[2].state_dict().items()} for pid in (0, 1)
    }
    shared = make_model()

    def models(one: nn.Sequential | None) -> list[Any]:
        def made(context: Any) -> fr.FedPerClient:
            pid = context.node_config["partition-id"]
            model = one or make_model()
            if not context.state:
                model[2].load_state_dict(heads[pid])
            return fr.FedPerClient(model, DATA[pid])

        grid = fr.InProcessGrid(fr.client_app(made), 2)
        return train(fr.FedPer("2.*", **QUIET), fr.FedPerClient, grid=grid)

    close(models(shared)[-1], models(None)[-1], 0.0)
