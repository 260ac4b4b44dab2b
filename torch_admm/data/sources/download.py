"""Raw files: those that are there, and downloads that can be resumed and are checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ...errors import DataError
from .base import Remote, needs

__all__ = ["obtain"]

BLOCK = 1 << 16  # what a broken connection loses at most
SECONDS = 30  # without a byte before a connection counts as dead


def obtain(remote: Remote, *, folder: Path, offline: bool = False) -> Path:
    """The file under `folder`, downloaded if it is missing; a download gets its name when its sha256 is right."""
    path = folder / remote.path
    if path.exists():
        return path
    advice = f"get {remote.url} and put it there, or name another folder by --data-dir"
    if offline:
        raise DataError(f"{path} does not exist; {advice}")
    pooch = needs("pooch")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(remote.url, f"sha256:{remote.sha256}", path.name, path.parent, downloader=resume)
    except (OSError, ValueError) as error:  # no network, no such page, a full disk; another sha256
        raise DataError(f"{path} does not exist and could not be downloaded ({_short(error)}); {advice}") from None
    return path


def resume(url: str, output: str, pooch: Any) -> None:
    """A downloader for pooch that goes on where an earlier one was cut off."""
    requests = needs("requests")
    partial = Path(output).with_name(url.rsplit("/", 1)[1] + ".partial")  # pooch's own name is another one every time
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, stream=True, timeout=SECONDS) as answer:
        if answer.status_code != 416:  # 416: there is nothing after what we have
            answer.raise_for_status()
            _append(answer, partial, have if answer.status_code == 206 else 0)
    os.replace(partial, output)


def _append(answer: Any, path: Path, have: int) -> None:
    left = answer.headers.get("Content-Length")
    total = have + int(left) if left else None
    with (
        path.open("r+b" if have else "wb") as file,
        tqdm(total=total, initial=have, desc=path.stem, unit="B", unit_scale=True, disable=None) as bar,
    ):
        file.seek(have)
        for block in answer.iter_content(BLOCK):
            file.write(block)
            bar.update(len(block))
        if total is not None and file.tell() != total:
            raise OSError(f"the connection broke after {file.tell():,} of {total:,} bytes; run again to go on")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
