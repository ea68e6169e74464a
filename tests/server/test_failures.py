"""A reply becomes a value or a named failure; a step over all of them finds the culprits."""

from typing import Any

from flwr_regs.server.failures import culprits


def step_of(bad: Any) -> Any:
    def step(pids: list[int]) -> None:
        if bad(set(pids)):
            raise ValueError("odd")

    return step


def test_culprits() -> None:
    everyone = [0, 1, 2, 3, 4]

    def of(bad: Any) -> set[int]:
        return set(culprits(everyone, step_of(bad), "it fails"))

    def has(*names: int) -> Any:
        return lambda pids: bool(pids & set(names))

    assert of(has()) == set()
    assert of(has(3)) == {3}
    assert of(has(0, 3)) == {0, 3}
    assert of(lambda pids: True) == set()  # not a client's doing
    assert of(lambda pids: 3 in pids and len(pids) > 2) == {3}  # harmless alone
    assert of(lambda pids: len(pids) < 2 or 3 in pids) == {3}  # needs two clients
    assert of(lambda pids: {1, 2} <= pids)  # one of two that do not go together
    assert culprits([0], step_of(lambda pids: True), "it fails") == {}


def test_a_culprit_among_many_is_found_in_few_steps() -> None:
    """It fails only beside others. Looking at each client's absence would look at n² of them."""
    clients, looked_at, odd = list(range(63)), list[int](), 17

    def bad(pids: set[int]) -> bool:
        looked_at.append(len(pids))
        return odd in pids and len(pids) > 1

    found = culprits(clients, step_of(bad), "it fails")
    assert list(found) == [odd]
    assert found[odd].startswith("it fails: ValueError: odd")
    assert sum(looked_at) < 4 * len(clients) * len(clients).bit_length() < len(clients) ** 2
