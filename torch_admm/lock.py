"""A folder that only one run at a time writes to."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import final

from .errors import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "Lock"]

LOCK = "in-use"
UNLOCKABLE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EROFS, errno.EACCES}


@final
class Lock:
    """A folder kept for one run: by a file that the system unlocks when the process ends, whatever ends it.

    Some file systems know no locks: there, nothing is kept out.
    """

    def __init__(self, folder: Path) -> None:
        """A CheckpointError if another run has it."""
        self.path, self.descriptor = folder / LOCK, -1
        try:
            while fcntl is not None and not self._taken():
                pass
        except OSError as error:
            self._close()
            if error.errno not in UNLOCKABLE:
                raise
        _HELD.add(self)

    def release(self) -> None:
        """Remove the file first: who has opened it before sees that it is gone, and makes another."""
        if self.descriptor >= 0:
            with suppress(OSError):
                self.path.unlink()
            self._close()

    def _taken(self) -> bool:
        """False if whoever had it removed the file meanwhile."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self.descriptor, 1000).decode(errors="replace")
            self._close()
            said = f"{self.path.parent} is in use by another run"
            raise CheckpointError(f"{said} ({holder})" if holder else said) from None
        if not self._is_there():
            self._close()
            return False
        with suppress(OSError):  # on a full disk, nobody learns who it is
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return True

    def _is_there(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        return False

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a process forked off, such as one that loads data: it would hold them after its parent was killed."""
    for lock in _HELD:
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
