"""The disk under HDF5."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, final

__all__ = ["Disk"]


@final
class Disk(io.RawIOBase):
    """A file for h5py to write to, which never fails while HDF5 looks.

    HDF5 does not survive a full disk: it loses the error, cannot close the file and crashes when the process ends. So
    the first error is kept here, later writes do nothing, and `check` raises it once HDF5 is out of the way.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        """`path` is what `check` calls the file."""
        super().__init__()
        self.descriptor, self.path, self.position = descriptor, path, 0
        self.error: OSError | None = None

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            number = self.error.errno or 0
            raise OSError(number, f"could not be written: {os.strerror(number)}", str(self.path)) from self.error

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.error is None:
            try:
                done += os.pwrite(self.descriptor, view[done:], self.position + done)
            except OSError as error:
                self.error = error
        self.position += len(view)
        return len(view)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = os.pread(self.descriptor, len(view), self.position)
        view[: len(data)] = data
        view[len(data) :] = bytes(len(view) - len(data))  # what a failed write would have put there: nobody will see it
        self.position += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: os.fstat(self.descriptor).st_size}
        self.position = start[whence] + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def truncate(self, size: int | None = None, /) -> int:
        size = self.position if size is None else size
        try:
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            self.error = self.error or error
        return size

    def sync(self) -> None:
        """Down to the device."""
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            self.error = self.error or error
        self.check()
