"""Ranks that go missing: who they are and why, as far as can be found out, and how a job ends all the same."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple

from ..errors import CommError

__all__ = [
    "GRACE",
    "HEARD",
    "POLL",
    "Process",
    "ended",
    "here",
    "leave",
    "line",
    "lost",
    "named",
    "noticing_stops",
    "stay",
]

GRACE = 0.6  # seconds in which the ranks that are left say so, after one was found missing
POLL = 0.02
HEARD = 0.2  # seconds: launchers end all ranks with the first that goes, so that should be the one that speaks
WOKEN = 5.0  # seconds after it was let go on, in which a rank leaves it to those who did that to say why
_stuck: list[Thread] = []  # with a store that does not answer
_went_on: deque[float] = deque(maxlen=1)  # when this process did so, after it was stopped
ABORT = b"cmd=abort exitcode=2\n"  # in the words of PMI, by which MPICH's mpirun talks with its processes


class Process(NamedTuple):
    """The process of a rank, told from any other that may get its number later."""

    machine: str  # as it was started, and as far as numbers of processes go
    number: int
    began: str


def here() -> Process:
    """The one that asks."""
    machine = "".join(_read(place) for place in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"))
    return Process(machine, os.getpid(), _state(os.getpid())[1])


def lost(store: Any, rank: int, size: int, reason: str, processes: Sequence[Process] = ()) -> CommError:
    """Who is missing, and why, as far as can be found out."""
    if store is None:
        return CommError(f"communication between ranks failed: {reason}")
    told, missing = _roll_call(store, rank, size)
    speaks = rank == min(set(range(size)) - set(missing), default=0) and not _was_stopped()
    _wake([processes[other] for other in missing if processes])
    for other, text in told.items():
        if text:
            return ended(f"rank {other} stopped: {text}", speaks=speaks, job=False)
    if not missing:
        return ended(f"communication between ranks failed: {reason}", speaks=speaks, job=False)
    what = "is missing (it ended or is stuck)" if len(missing) == 1 else "are missing (they ended or are stuck)"
    return ended(f"{named(missing)} {what}; rank {rank} reports: {reason}", speaks=speaks)


@contextmanager
def noticing_stops() -> Iterator[None]:
    """Note when this process goes on after it was stopped, unless somebody else has a use for that signal."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGCONT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGCONT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, signal.SIG_DFL)


def _note(number: int, frame: Any) -> None:
    _went_on.append(time.monotonic())


def _was_stopped() -> bool:
    return bool(_went_on) and time.monotonic() - _went_on[-1] < WOKEN


def ended(said: str, *, speaks: bool, pause: float = HEARD, job: bool = True) -> CommError:
    """What this rank raises. The one that speaks goes first, and ends the `job` if somebody will not do so himself."""
    if not speaks:
        time.sleep(pause)
    elif job:
        _end_job()
    return CommError(said, speaks=speaks)


def named(ranks: Sequence[int]) -> str:
    """In words: rank 3; ranks 1, 2 and 5."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def leave(store: Any, rank: int, why: str) -> None:
    """Tell the others why this rank is going; without a store, or if it is gone or stuck, they will find out."""
    if store is not None:
        _within_grace(_tell, store, rank, why)


def stay(store: Any, rank: int, size: int) -> None:
    """The store goes with the rank that keeps it: let the others read there why, those who notice soon."""
    _within_grace(_ask, store, rank, size, {})


def line(error: BaseException) -> str:
    """The first line of what torch says, without the place in its source."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", first)


def _tell(store: Any, rank: int, why: str) -> None:
    with suppress(RuntimeError):
        store.set(f"left/{rank}", why)


def _roll_call(store: Any, rank: int, size: int) -> tuple[dict[int, str], list[int]]:
    """What each rank said when it left, and the ranks that said nothing."""
    told: dict[int, str] = {}
    _within_grace(_ask, store, rank, size, told)
    if rank not in told:  # no answer from the store, which lives in rank 0
        return {}, [0]
    return dict(told), sorted(set(range(size)) - told.keys())


def _ask(store: Any, rank: int, size: int, told: dict[int, str]) -> None:
    deadline = time.monotonic() + GRACE
    with suppress(RuntimeError):
        if not store.check([f"left/{rank}"]):
            store.set(f"left/{rank}", "")
        while len(told) < size and time.monotonic() < deadline:
            for other in set(range(size)) - told.keys():
                if store.check([f"left/{other}"]):
                    told[other] = store.get(f"left/{other}").decode()
            time.sleep(POLL)


def _within_grace(call: Callable[..., None], *arguments: Any) -> None:
    """A store that is gone or stuck would keep this rank, too."""
    thread = Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(GRACE + 10 * POLL)
    if thread.is_alive():
        _stuck.append(thread)


def _wake(processes: Sequence[Process]) -> None:
    """A process that is stopped does not end when its launcher asks it to. One that goes on finds the others gone."""
    machine = here().machine
    stopped = [p for p in processes if p.machine == machine and _state(p.number) == ("T", p.began)]
    for process in stopped:
        with suppress(OSError):
            os.kill(process.number, signal.SIGCONT)
    for thread in _stuck if stopped else ():  # a store that answers again while Python ends would abort the process
        thread.join(HEARD)


def _end_job() -> None:
    """MPICH's mpirun waits for all processes, unless they have made use of MPI: tell it, last of all, not to."""
    mpi = sys.modules.get("mpi4py.MPI")
    if "PMI_FD" in os.environ and not (mpi is not None and mpi.Is_initialized()):
        atexit.register(_abort)


def _abort() -> None:
    time.sleep(HEARD)  # it may drop what it has not passed on by then
    with suppress(OSError, ValueError):
        os.write(int(os.environ["PMI_FD"]), ABORT)


def _state(number: int) -> tuple[str, str]:
    """Of a process: is it running (R), asleep (S), stopped (T) ..., and when it began; nothing where nobody can say."""
    fields = _read(f"/proc/{number}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _read(place: str) -> str:
    path = Path(place)
    with suppress(OSError):
        return str(path.readlink()) if path.is_symlink() else path.read_text(encoding="utf-8", errors="replace")
    return ""
