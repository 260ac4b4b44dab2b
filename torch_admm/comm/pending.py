"""What is on its way from other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

__all__ = ["Pending"]

Result = TypeVar("Result")


@final
class Pending(Generic[Result]):
    """A result that is on its way; local work can go on meanwhile."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        """`finish` waits for it."""
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None

    def wait(self) -> Result:
        """The result, the same on all ranks; asking twice is fine."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None
        return self._result
