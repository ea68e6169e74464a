"""The laws of a federated method, in the order in which they are checked."""

from __future__ import annotations

from flwr_regs.testing import client_rounds as rounds
from flwr_regs.testing import whole_runs as runs
from flwr_regs.testing.law import Law

EPOCHS, STEPS = {"local-epochs": 2}, {"local-steps": 7}
LAWS = {
    law.name: law
    for law in (
        Law("neutral", "neutral hyper-parameters give FedAvg", runs.neutral),
        Law(
            "moves",
            "other hyper-parameters move the weights, in both directions",
            runs.moves,
        ),
        Law(
            "oracle",
            "a whole run equals the oracle",
            runs.oracle,
            {
                "num-examples, epochs": {"weighting": "num-examples", "length": EPOCHS},
                "uniform, steps": {"weighting": "uniform", "length": STEPS},
                "some clients": {"length": EPOCHS, "share": 0.6},
            },
        ),
        Law(
            "pure",
            "hooks are pure: they change no argument, return no view, and remember nothing",
            rounds.pure,
        ),
        Law(
            "runners",
            "every runner gives the same: the plain loop and a user's own loop as the NumPyClient",
            rounds.runners,
            {"plain loop": {"loop": "plain"}, "own loop": {"loop": "own"}},
        ),
        Law(
            "stacked",
            "a cohort stacked under torch.func.vmap equals the loop",
            rounds.stacked,
            {"alone": {"remembering": False}, "with client state": {"remembering": True}},
        ),
        Law(
            "state",
            "messages and client state survive Flower's serialisation to the bit",
            runs.state,
        ),
        Law(
            "repeated",
            "a round that the server repeats is trained to the same bits",
            runs.repeated,
        ),
        Law("downlinks", "both downlinks train to the same model", runs.downlinks),
        Law(
            "unused",
            "a reply that is not used leaves no trace",
            rounds.unused,
            {"model": {"what": "model"}, "slots": {"what": "slots"}},
        ),
        Law(
            "order",
            "neither the order of the replies nor which client is which matters",
            runs.order,
            {"replies": {"what": "replies"}, "clients": {"what": "clients"}},
        ),
        Law(
            "identity",
            "chaining a term that does nothing changes no bit",
            runs.identity,
            {"first": {"first": True}, "last": {"first": False}},
        ),
        Law("fixed-point", "two quadratic clients settle where the theory says", runs.fixed_point),
        Law(
            "incomplete",
            "an incomplete client counts what was done, not what was planned",
            rounds.incomplete,
            {"what it sends": {"where": "client"}, "what is seen": {"where": "server"}},
        ),
        Law(
            "slices",
            "`correct` of an elementwise term may be evaluated on slices",
            rounds.slices,
        ),
    )
}
