"""A user's files that a test has loaded are gone after it, as in a new process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _forget_users_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before, path = {*sys.modules}, [*sys.path]
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
    sys.path[:] = path
