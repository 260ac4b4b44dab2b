"""MPI through mpi4py, as a backend of torch.distributed, for builds of torch that have no MPI of their own."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Work

from .launch import Launch

__all__ = ["check", "finish", "init", "ready"]

NAME = "mpi4py"
BY_MPI = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # of a process that MPI knows
_went_well = False  # so far: MPI is taken down with the process only if all ranks are there to do it

SPIN, NAP = 0.002, 0.0002  # seconds: first asked again at once, then after naps, which leave the core to others


def check(launch: Launch | None) -> None:
    """An ImportError unless there is an MPI, torch's own or mpi4py's; a ValueError if it cannot know these ranks."""
    if not dist.is_mpi_available():
        require()
    if launch is not None and launch.size > 1 and not any(name in os.environ for name in BY_MPI):
        raise ValueError(f"MPI sees 1 of the {launch.size} ranks that {launch.by} started: start them with mpirun")


def ready() -> Any:
    """mpi4py's MPI, initialised: that waits for all ranks, and for ever."""
    MPI = require()
    if not MPI.Is_initialized():
        MPI.Init_thread()
        atexit.register(_take_down)
    return MPI


def require() -> Any:
    """mpi4py's MPI, with an MPI library behind it."""
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # wheels of mpi4py serve both, and would take an MPICH that lies nearer
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # not before all ranks are known to be there
        mpi4py.rc.finalize = False  # at the end of a run that failed it would wait for ranks that never come
    except ImportError as error:
        raise ImportError('backend "mpi" needs mpi4py and an MPI library: pip install "torch-admm[mpi]"') from error
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(f'backend "mpi" found mpi4py, but no MPI library: {str(error).splitlines()[0]}') from error
    return MPI


def init(size: int, by: str, patience: timedelta) -> None:
    """Make the default group of so many ranks, started by so-and-so, of torch's own MPI if it has one."""
    global _went_well  # noqa: PLW0603
    _went_well = False
    if dist.is_mpi_available():
        dist.init_process_group("mpi")
        return
    world = ready().COMM_WORLD
    if world.Get_size() != size:
        why = "mpirun and mpi4py are of different MPI libraries"
        raise ValueError(f"MPI sees {world.Get_size()} of the {size} ranks that {by} started: {why}")
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    dist.init_process_group(
        NAME, store=HashStore(), rank=world.Get_rank(), world_size=world.Get_size(), timeout=patience
    )


def finish() -> None:
    """The end of a run that went well: all ranks get here. MPI, if it is in use, stays: others may use it."""
    global _went_well  # noqa: PLW0603
    _went_well = True


def _take_down() -> None:
    MPI = require()
    if _went_well and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return _Ranks(rank, size, timeout)


@final
class _Ranks(dist.ProcessGroup):
    """The collectives that `Group` uses, and those of DistributedDataParallel."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.MPI, self.seconds = require(), timeout.total_seconds()
        self.world = self.MPI.COMM_WORLD
        ops = dist.ReduceOp
        self.operations = [(ops.SUM, self.MPI.SUM), (ops.MAX, self.MPI.MAX), (ops.MIN, self.MPI.MIN)]

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        (values,) = tensors
        wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        operation = next(theirs for ours, theirs in self.operations if wanted == ours)  # not the other way round
        return self._work(self.world.Iallreduce(self.MPI.IN_PLACE, values.numpy(), op=operation))

    def allgather(self, output: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        (values,), (rooms,) = tensors, output
        came = values.new_empty(len(rooms), *values.shape)

        def deal() -> None:
            for room, theirs in zip(rooms, came.unbind(), strict=True):
                room.copy_(theirs)

        return self._work(self.world.Iallgather(values.numpy(), came.numpy()), deal)

    def alltoall_base(
        self, output: Tensor, values: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> Any:
        assert not output_sizes, "all ranks get as much"
        assert not sizes, "all ranks get as much"
        return self._work(self.world.Ialltoall(values.numpy(), output.numpy()))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        return self._work(self.world.Ibcast(tensors[0].numpy(), opts.rootRank))

    def barrier(self, opts: Any = None) -> Any:
        return self._work(self.world.Ibarrier())

    def _work(self, request: Any, then: Callable[[], None] = lambda: None) -> Any:
        return _Work(request, then, self.seconds)


@final
class _Work(Work):
    """A request under way. MPI would wait for a lost rank for ever; this does not."""

    def __init__(self, request: Any, then: Callable[[], None], seconds: float) -> None:
        super().__init__()
        self.request, self.then, self.seconds = request, then, seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        began = time.monotonic()
        while not self.request.Test():
            waited = time.monotonic() - began
            if waited > self.seconds:
                raise RuntimeError(f"no answer within {self.seconds:g} s")
            if waited > SPIN:
                time.sleep(NAP)
        self.then()
        return True

    def is_completed(self) -> bool:
        return bool(self.request.Test())
