"""Downloads: resumed where they were cut off, checked before they get their name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from torch_admm.data.sources.base import Remote
from torch_admm.data.sources.download import obtain
from torch_admm.errors import DataError


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


CONTENT = bytes(range(256)) * 5000


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT from the byte that is asked for; the first answer breaks off half way."""

    asked: ClassVar[list[str | None]] = []
    ranges = True

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Range"))
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if self.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        broken = self.path == "/broken" and len(self.asked) == 1
        self.wfile.write(CONTENT[start : start + len(CONTENT) // 2] if broken else CONTENT[start:])

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "asked", [])
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def remote(url: str, sha256: str | None = None) -> Remote:
    return Remote("raw/file.bin", url, sha256 or hashlib.sha256(CONTENT).hexdigest())


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_was_cut_off(
    tmp_path: Path, server: str, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "ranges", ranges)
    get = partial(obtain, remote(f"{server}/broken"), folder=tmp_path)
    with pytest.raises(
        DataError, match=r"file.bin does not exist and could not be downloaded \(.*\); get http\S+/broken"
    ):
        get()
    assert files_in(tmp_path) == ["broken.partial"]
    half = (tmp_path / "raw/broken.partial").stat().st_size
    assert half > len(CONTENT) // 4
    assert get().read_bytes() == CONTENT
    assert Handler.asked == [None, f"bytes={half}-"]
    assert files_in(tmp_path) == ["file.bin"]
    get()
    assert len(Handler.asked) == 2


def test_a_partial_file_that_is_whole_already(tmp_path: Path, server: str) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/whole.partial").write_bytes(CONTENT)
    assert obtain(remote(f"{server}/whole"), folder=tmp_path).read_bytes() == CONTENT


def test_a_download_with_another_sum_is_not_kept(tmp_path: Path, server: str) -> None:
    with pytest.raises(DataError, match=r"could not be downloaded \(ValueError: SHA256 hash of downloaded file"):
        obtain(remote(f"{server}/good", "0" * 64), folder=tmp_path)
    assert files_in(tmp_path) == []


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"could not be downloaded \(ConnectionError: .*get http://127.0.0.1:9/x and put"
    ):
        obtain(remote("http://127.0.0.1:9/x"), folder=tmp_path)
