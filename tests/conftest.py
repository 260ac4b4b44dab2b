"""Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.files import threads


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Threads that read rows in the background are gone when a test ends."""
    yield
    assert threads() == []
