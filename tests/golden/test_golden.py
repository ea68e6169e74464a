"""Today's messages are the golden ones. For a change that is meant: ``python -m tests.golden``."""

from typing import Any

import pytest

from flwr_regs.wire import keys
from tests.golden.messages import differences, stored
from tests.golden.scenarios import SCENARIOS, messages


@pytest.mark.parametrize("name", SCENARIOS)
def test_messages_are_as_they_were(name: str) -> None:
    assert list(differences(messages(name), stored()[name], name)) == []


def keys_of(nest: Any) -> set[str]:
    if isinstance(nest, dict):
        return set(nest) | {key for value in nest.values() for key in keys_of(value)}
    return {key for value in nest for key in keys_of(value)} if isinstance(nest, list) else set()


def test_the_protocols_keys_and_messages_occur() -> None:
    golden = [*stored().values()]
    found = keys_of(golden) | {m["type"] for run in golden for m in run}
    contents = [m.get("content", {}) for run in golden for m in run]
    configs = [c["config"]["ConfigRecord"] for c in contents if "config" in c]
    found |= {word for config in configs for word in config.get(keys.MEMORY_KEY, [])}
    named = {v for k, v in vars(keys).items() if k.isupper() and isinstance(v, str)}
    on_the_node = {keys.FLOWER_KEY, keys.NAMES_KEY, keys.STEP, keys.MODEL, keys.MEMORY}
    accidents = {keys.NOT_SAVED, keys.LOST_PRIVATE, keys.LOSS_ROSE}
    assert named - found == on_the_node | accidents
