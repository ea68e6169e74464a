"""A client's round from its message: what a message must not hold."""

import pytest

from flwr_regs.chain import chain
from flwr_regs.client.member import model_of
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.parcel import Parcel
from tests.conftest import make_model


def test_coded_steps_without_a_code_are_refused() -> None:
    message = Parcel({keys.ARRAYS: {}}, {keys.STEPS_KEY: [b"code"]})
    with pytest.raises(ProtocolError, match="sends coded steps, but this method has no code for"):
        model_of(message, make_model(), chain([]))
