"""Each test reads its own files: nothing that was loaded before stays."""

from collections.abc import Iterator

import pytest

from flwr_regs.experiments.data import datasets as data


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    data.load.cache_clear()
    yield
    data.load.cache_clear()
