"""Today's messages are the golden ones. For a change that is meant: ``python -m tests.golden``."""

import pytest

from tests.golden.messages import differences, stored
from tests.golden.scenarios import SCENARIOS, messages


@pytest.mark.parametrize("name", SCENARIOS)
def test_messages_are_as_they_were(name: str) -> None:
    assert list(differences(messages(name), stored()[name], name)) == []
