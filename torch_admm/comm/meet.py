"""How ranks of one machine find each other, and get hold of each other's memory.

Neither the memory nor the sockets have a name in any file system: a job leaves nothing behind, whichever process is
killed, at any time.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from .group import Group
from .near import MEMORY, Near

__all__ = ["meet"]

NUMBER = struct.Struct("<q")
CREDENTIALS = struct.Struct("3i")  # process, user and group


def meet(comm: Group, seconds: float) -> Near | None:
    """Near, if all ranks are on one machine that can do it; they decide together.

    A rank that does not come within so many seconds is missing: a CommError.
    """
    if len(set(comm.texts(_machine()))) > 1 or not comm.all_true(hasattr(os, "memfd_create")):
        return None
    name = comm.texts(secrets.token_hex(16))[0]
    memory = _memory()
    try:
        with socket.socket(socket.AF_UNIX) as door:
            if not comm.all_true(memory is not None and _opened(door, _address(name, comm.rank))):
                return None
            assert memory is not None
            found = _linked(comm, door, name, memory, seconds)
    except TimeoutError:
        raise comm.explained(f"no answer within {seconds:g} s") from None
    finally:
        if memory is not None:
            os.close(memory)
    return found if comm.all_true(found is not None) else None


def _machine() -> str:
    """Tells one from another that happens to have its name, and what shares a machine but not its network."""
    said = socket.gethostname()
    with suppress(OSError):
        said += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        said += str(Path("/proc/self/ns/net").readlink())
    return said


def _address(name: str, rank: int) -> str:
    """Of Linux' abstract kind, which is no file."""
    return f"\0torch_admm-{name}-{rank}"


def _opened(door: socket.socket, address: str) -> bool:
    try:
        door.bind(address)
        door.listen(socket.SOMAXCONN)
    except OSError:
        return False
    return True


def _memory() -> int | None:
    """Of this rank, for all to read; None where there is none to be had."""
    try:
        memory = os.memfd_create("torch_admm")
    except OSError:
        return None
    os.ftruncate(memory, MEMORY)
    return memory


def _linked(comm: Group, door: socket.socket, name: str, memory: int, seconds: float) -> Near | None:
    """A link with each rank; each way over it goes where the memory of the sender is. All must be there in time."""
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    try:
        memories = {comm.rank: mmap.mmap(memory, MEMORY)}
        for number in range(comm.size - 1):
            left = max(0.001, deadline - time.monotonic())
            link = _dialled(_address(name, number), left) if number < comm.rank else _answered(door, left)
            socket.send_fds(link, [NUMBER.pack(comm.rank)], [memory])
            told, (theirs,), _, _ = socket.recv_fds(link, NUMBER.size, 1)
            (rank,) = NUMBER.unpack(told)
            links[rank], memories[rank] = link, mmap.mmap(theirs, MEMORY)
            os.close(theirs)
            link.setblocking(False)
    except (OSError, ValueError) as error:
        for link in links.values():
            link.close()
        if isinstance(error, TimeoutError):
            raise
        return None
    return Near(comm.rank, dict(sorted(links.items())), [memories[rank] for rank in range(comm.size)], seconds)


def _dialled(address: str, seconds: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(seconds)
    link.connect(address)
    return _known(link)


def _answered(door: socket.socket, seconds: float) -> socket.socket:
    door.settimeout(seconds)
    link, _ = door.accept()
    link.settimeout(seconds)
    return _known(link)


def _known(link: socket.socket) -> socket.socket:
    """Nobody else's process gets to see this memory: an address of this kind has no permissions."""
    _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.geteuid():
        link.close()
        raise PermissionError(f"a process of user {user} has come to a meeting of user {os.geteuid()}")
    return link
