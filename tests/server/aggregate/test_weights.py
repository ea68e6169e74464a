"""The weights of replies: what a weigher sees."""

from typing import Any

from flwr_regs.server.aggregate.weights import restricted
from flwr_regs.term import ServerContext


def test_a_part_of_a_round_has_the_weights_and_replies_of_its_clients_alone() -> None:
    replies: Any = dict.fromkeys(range(3))
    part = restricted(
        ServerContext(1, 0.1, weights={0: 0.2, 1: 0.3, 2: 0.5}, replies=replies), [0, 1]
    )
    assert part.weights == {0: 0.4, 1: 0.6}
    assert part.replies.keys() == {0, 1}
