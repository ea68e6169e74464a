"""What a parcel says, and the arrays of many clients in one."""

import numpy as np
import pytest

from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel, Row, Stack


def test_a_client_says_what_its_list_holds_and_nothing_else() -> None:
    for said, expected in (([keys.LOST_MODEL], True), (["x"], False), (keys.LOST_MODEL, False)):
        assert Parcel(config={keys.MEMORY_KEY: said}).says(keys.LOST_MODEL) == expected
    assert not Parcel().says(keys.LOST_MODEL)


@pytest.mark.parametrize(
    "other", [{"w": np.zeros(2)}, {"v": np.zeros(3)}, {"w": np.zeros(3, np.float32)}, {}]
)
def test_a_row_is_usable_if_it_is_like_the_model_and_its_numbers_are_small(
    other: dict[str, np.ndarray],
) -> None:
    expected, row = {"w": np.zeros(3)}, Row(Stack({"w": np.array([[1.0, 2.0, -3.0]])}), 0)
    assert row.is_usable(expected, 100.0)
    assert not row.is_usable(expected, 3.0)
    assert not row.is_usable(other, 100.0)
    for wrong in (np.nan, -np.inf):  # of another client
        stack = Stack({"w": np.array([[1.0, 2.0, 3.0], [1.0, wrong, 0.0]])})
        assert not Row(stack, 0).is_usable(expected, 100.0)
