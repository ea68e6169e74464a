"""A user's files that a test has loaded are gone after it, as in a new process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _forget_users_files() -> Iterator[None]:
    before, path = {*sys.modules}, [*sys.path]
    yield
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(tempfile.gettempdir()):
            del sys.modules[name]
    sys.path[:] = path
