"""Finished trials, one JSON object a line, that survive a run killed at any moment."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, final

__all__ = ["Journal", "Record", "plain", "read"]

Record = dict[str, Any]


@final
class Journal:
    """Appends to a file of records, alone; what a killed run left half written is cut off first."""

    def __init__(self, path: Path) -> None:
        """`records` has what the file had already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        try:
            _lock(self._file, path)
            self._file.seek(0)
            lines = _whole_lines(self._file.read(), path)
            self.records: list[Record] = [record for record, _ in lines]
            self._file.truncate(lines[-1][1] if lines else 0)
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> Record:
        """Write at once; non-finite numbers become null, and the record comes back as a reader would see it."""
        kept: Record = plain(record)
        self._file.write((json.dumps({**kept, "crc": _crc(kept)}) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(kept)
        return kept

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def read(path: Path) -> list[Record]:
    """All whole records, without changing the file."""
    return [record for record, _ in _whole_lines(path.read_bytes(), path)]


def plain(value: Any) -> Any:
    """As JSON has it: no tuples, no keys but strings, no infinities."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(raw: bytes, path: Path) -> list[tuple[Record, int]]:
    """Records with the place where each ends. Only the last line may be torn: it is what was being written."""
    found: list[tuple[Record, int]] = []
    for number, (line, end) in enumerate(_lines(raw), start=1):
        record = _checked(line)
        if record is not None:
            found.append((record, end))
        elif end < len(raw):
            raise ValueError(f"{path}, line {number} is damaged; remove that line to run its trial again")
    return found


def _lines(raw: bytes) -> Iterator[tuple[bytes, int]]:
    end = 0
    for line in raw.splitlines(keepends=True):
        end += len(line)
        yield line, end


def _checked(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and record.pop("crc", None) == _crc(record)
    return record if whole else None


def _crc(record: Record) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, allow_nan=False).encode()):08x}"


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows, where two runs into one folder are the user's own affair
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path} is in use by another run; wait for it, or choose another folder") from None
