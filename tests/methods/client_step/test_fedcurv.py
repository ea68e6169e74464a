"""FedCurv beyond the laws: rounded sums, and where the server lacks the model for v̂_k = u_k ⊙ v_k."""

from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Message

import flwr_regs as fr
from flwr_regs.term import ClientContext, Term
from flwr_regs.testing.problem import app_of, train
from tests.conftest import Tampered, make_clients, make_model


def test_rounding_makes_no_curvature_negative() -> None:
    """A large implicit step would else divide by zero."""
    u = torch.tensor([1.0])
    broadcast = {"U.w": u * (1 - 1e-6), "V.w": u, "used": torch.tensor(True)}
    client = {"U.w": u, "V.w": u}
    ctx = ClientContext({"w": u}, 0.1, 1, broadcast=broadcast, client=client)
    assert fr.Curvature(1.0).sums("w", ctx)[0] == 0.0


def sent(terms: list[Term], **settings: Any) -> set[str]:
    """The kinds of arrays that a client uploads, the last of three rounds."""
    kinds = set[str]()

    def note(kind: str, pid: int, message: Message, reply: Message) -> Message:
        uploads = [u for key, u in reply.content.array_records.items() if key != "arrays"]
        if kind == "train" and message.content["config"]["server-round"] == 3:
            kinds.update(key.split(".")[0] for upload in uploads for key in upload)
        return reply

    strategy = fr.RegStrategy(terms, seed=5, fraction_evaluate=0.0, **settings)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    model = partial(make_model, torch.float32)
    grid = Tampered(app_of(client, make_clients(2, torch.float32), model), 2, note)
    train(strategy, client, rounds=3, grid=grid, model=model)
    assert [e["replies"] for e in strategy.history] == [[0, 1]] * 3
    return kinds


@pytest.mark.parametrize(
    ("term", "known", "unknown"),
    [
        (fr.Curvature(0.4), {"U"}, {"U", "V"}),
        (fr.Elastic(0.4), {"U"}, {"U", "V"}),
        (fr.ControlVariates(), set(), {"0", "2"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_the_server_can_compute_travels_only_where_it_lacks_the_model(
    term: Term, known: set[str], unknown: set[str]
) -> None:
    """Fisher information times the model, and SCAFFOLD's change of c_k, which follows from the update."""
    assert sent([term]) == known
    assert sent([term, fr.SparseTernary(None, 0.5)]) == known
    assert sent([term, fr.SparseTernary(0.5)]) == unknown
    assert sent([term], wire_dtype="bfloat16") == unknown
    if isinstance(term, fr.ControlVariates):
        assert sent([fr.ControlVariates(1)]) == unknown
        assert sent([fr.ControlVariates(state="server")]) == known
    else:
        assert sent([fr.EmbeddedMomentum(0.5, 0.5), term]) == known
