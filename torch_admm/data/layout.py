"""The file format: what an HDF5 file of rows holds, and where.

    /x          (rows, features) float32 or float16, chunked by rows, fletcher32
    /y          (rows,) class numbers (unsigned, as small as will do) or float32, chunked alike, fletcher32
    /checksums  (chunks, 2) uint32, the CRC-32 of each chunk of x and y as stored, without its fletcher32
    attributes  HEADER below, and `digest`: SHA-256 of them and of the checksums

Any HDF5 program reads it. Here HDF5 finds the chunks and nothing more: their bytes are read by the operating system,
outside HDF5's global lock, and checked by CRC-32, which is several times as fast as fletcher32. HDF5 guards its own
structures by checksums only in the newer file versions, hence LIBRARY; digest and CRC-32 guard everything else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .pieces import Column, gather
from .reader import Pool

__all__ = ["FORMAT", "LIBRARY", "VERSION", "Description", "Layout", "describe", "digest", "layout_of"]

FORMAT, VERSION = "torch_admm rows", 1
LIBRARY = ("v110", "v110")  # the oldest file versions in which all structures carry checksums
HEADER = (
    *("format", "version", "source", "rows", "features", "chunk_rows", "dtype", "target_dtype"),
    *("classes", "counts", "attributes"),  # as JSON
    *("mean", "scale"),
)
FLETCHER_BYTES = 4  # appended to each chunk by HDF5

Array = npt.NDArray[Any]
Plain = str | int | float


@final
@dataclass(frozen=True, eq=False)
class Description:
    """What the file says about its rows; `scale` is the standard deviation, or 1 where a feature never changes."""

    path: Path
    rows: int
    features: int
    classes: tuple[str, ...] | None
    counts: tuple[int, ...] | None
    dtype: str
    source: str
    mean: Array
    scale: Array
    attributes: Mapping[str, Plain]


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """All that is needed to read rows without HDF5. It holds no open file, so it goes to other processes."""

    description: Description
    chunk_rows: int
    x: Column
    y: Column

    @property
    def chunks(self) -> int:
        return len(self.x.offsets)

    def room(self, chunks: int, pool: Pool | None = None) -> tuple[Array, Array]:
        """Memory for the x and y of so many chunks, padding included."""
        empty = np.empty if pool is None else pool.empty
        x, y = (empty((chunks * self.chunk_rows, *c.width), c.dtype) for c in (self.x, self.y))
        return x, y

    def read(self, descriptor: int, chunks: Sequence[int], x: Array, y: Array) -> None:
        """Whole chunks, one after the other, into `room` for them; checked."""
        try:
            gather(descriptor, [*self.x.pieces(chunks, x), *self.y.pieces(chunks, y)])
        except EOFError:
            size = os.fstat(descriptor).st_size
            cut = [c for c in chunks if any(part.end(c) > size for part in (self.x, self.y))]
            raise self._damaged([*cut, *chunks][0], f"the file ends after {size} bytes") from None
        if self.x.damaged(chunks, x) or self.y.damaged(chunks, y):
            where = [(c, slice(i * self.chunk_rows, (i + 1) * self.chunk_rows)) for i, c in enumerate(chunks)]
            bad = [c for c, rows in where if self.x.damaged([c], x[rows]) or self.y.damaged([c], y[rows])]
            raise self._damaged(bad[0], "their checksum does not match")

    def _damaged(self, chunk: int, reason: str) -> DataError:
        first = int(chunk) * self.chunk_rows
        last = min(first + self.chunk_rows, self.description.rows) - 1
        return DataError(f"{self.description.path}: rows {first} to {last} are damaged: {reason}")


def describe(path: str | os.PathLike[str]) -> Description:
    """The header of a file, with all of its structure checked; rows are checked when they are read."""
    return layout_of(path).description


def layout_of(path: str | os.PathLike[str]) -> Layout:
    """Open, check and close; a DataError names the file and what is wrong with it."""
    h5py = require_h5py()
    path = Path(path)
    with path.open("rb"):  # the usual OSError if it is not there, or not ours to read
        pass
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _layout(file, path)
    except DataError:
        raise
    except Exception as error:  # h5py has no base class: damage surfaces as OSError, KeyError, RuntimeError and others
        raise DataError(f"{path}: not a whole HDF5 file: {str(error) or type(error).__name__}") from error


def _layout(file: Any, path: Path) -> Layout:
    if "format" not in file.attrs or _plain(file.attrs["format"]) != FORMAT:
        raise DataError(f"{path}: HDF5, but not rows of torch_admm; torch_admm.data.hdf5.Writer makes such files")
    version = _plain(file.attrs["version"])
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format; this torch_admm reads version {VERSION}")
    header = {name: _plain(file.attrs[name]) for name in HEADER}
    checksums = _own(file, "checksums", path)[...]
    if _plain(file.attrs["digest"]) != digest(header, checksums):
        raise DataError(f"{path}: the header is damaged: its digest does not match")
    chunk_rows, rows, features = header["chunk_rows"], header["rows"], header["features"]
    columns = (
        _column(file, path, "x", header["dtype"], rows, (features,), chunk_rows, checksums[:, 0]),
        _column(file, path, "y", header["target_dtype"], rows, (), chunk_rows, checksums[:, 1]),
    )
    return Layout(_description(path, header), chunk_rows, *columns)


def _description(path: Path, header: Mapping[str, Any]) -> Description:
    classes, counts = json.loads(header["classes"]), json.loads(header["counts"])
    return Description(
        path=path,
        rows=header["rows"],
        features=header["features"],
        classes=None if classes is None else tuple(classes),
        counts=None if counts is None else tuple(counts),
        dtype=header["dtype"],
        source=header["source"],
        mean=np.array(header["mean"]),
        scale=np.array(header["scale"]),
        attributes=json.loads(header["attributes"]),
    )


def _column(
    file: Any, path: Path, name: str, dtype: str, rows: int, width: tuple[int, ...], chunk_rows: int, checksums: Array
) -> Column:
    stored = _own(file, name, path)
    kind = np.dtype(dtype).newbyteorder("<")
    if (stored.shape, stored.chunks, stored.dtype) != ((rows, *width), (chunk_rows, *width), kind):
        raise DataError(f"{path}: {name} is not laid out as the header says")
    size = chunk_rows * int(np.prod(width, dtype=np.int64)) * kind.itemsize + FLETCHER_BYTES
    offsets = np.full(-(-rows // chunk_rows), -1, np.int64)

    def note(chunk: Any) -> None:
        if chunk.filter_mask or chunk.size != size:
            raise DataError(f"{path}: chunk {chunk.chunk_offset} of {name} is {chunk.size} bytes, {size} are expected")
        offsets[chunk.chunk_offset[0] // chunk_rows] = chunk.byte_offset

    stored.id.chunk_iter(note)
    if (offsets < 0).any() or len(checksums) != len(offsets):
        raise DataError(f"{path}: {name} lacks chunks")
    return Column(name, kind, width, chunk_rows, offsets.tolist(), checksums.tolist())


def _own(file: Any, name: str, path: Path) -> Any:
    """A data set of this very file: a link might lead anywhere."""
    h5py = require_h5py()
    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
        raise DataError(f"{path}: there is no data set {name}")
    return file[name]


def digest(header: Mapping[str, Any], checksums: Array) -> str:
    """SHA-256 of the header and of the checksums of all rows, so of the whole content."""
    text = json.dumps({name: header[name] for name in HEADER}, sort_keys=True)
    return hashlib.sha256(text.encode() + checksums.astype("<u4").tobytes()).hexdigest()


def _plain(value: Any) -> Any:
    """An attribute as the Python object that was stored."""
    if isinstance(value, bytes):
        return value.decode()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def require_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError('HDF5 files need h5py: pip install "torch-admm[data]"') from error
    return h5py
