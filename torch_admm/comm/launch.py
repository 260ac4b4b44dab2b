"""How this process was started: by torchrun, by mpirun of Open MPI or MPICH, by srun, or by itself."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

__all__ = ["LAUNCHERS", "Launch", "launched", "rank_in"]

MEET = "set MASTER_ADDR to the host name of rank 0's machine"
PORTS = range(20_000, 30_000)  # for launchers that give none: below those that systems hand out by themselves
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

Environment = Mapping[str, str]


@final
@dataclass(frozen=True)
class Launch:
    """One process among those started with it, and where they meet."""

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    job: str  # tells one job from another
    waits: bool = False  # is there a store at that address already, kept by the launcher?

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size

    @property
    def elsewhere(self) -> bool:
        """Is this the first rank of a machine that may not be that of rank 0?"""
        return not self.one_machine and self.rank > 0 and (self.local_rank == 0 or self.local_size == 1)

    @property
    def serves(self) -> bool:
        """Does this rank keep the store?"""
        return self.rank == 0 and not self.waits


def launched(env: Environment = os.environ) -> Launch | None:
    """What the environment says; None for a process by itself."""
    found = _read(env)
    if found is not None:
        _check(found)
    return found


def rank_in(env: Environment = os.environ) -> int:
    """The rank of this process, even where the rest of the environment makes no sense; 0 by itself."""
    try:
        found = _read(env)
    except ValueError:
        said = next((env[name] for name in RANKS if name in env), "0")
        return int(said) if said.isdecimal() else 0
    if found is None or 0 < found.size <= found.rank:  # of the latter nobody else knows
        return 0
    return found.rank


def _read(env: Environment) -> Launch | None:
    return next((found for read in LAUNCHERS.values() if (found := read(env)) is not None), None)


def _check(found: Launch) -> None:
    by, rank, size = found.by, found.rank, found.size
    if size < 1:
        raise ValueError(f"{by} says that there are {size} ranks; at least 1 is expected")
    if not 0 <= rank < size:
        raise ValueError(f"{by} says rank {rank} of {size}; a rank from 0 to {size - 1} is expected")


def _torchrun(env: Environment) -> Launch | None:
    given = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    if not given:
        return None
    if len(given) == 1:
        other = "WORLD_SIZE" if given[0] == "RANK" else "RANK"
        raise ValueError(f"{given[0]} is set in the environment, but {other} is not; set both, or none to train alone")
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    return Launch(
        "torchrun",
        rank,
        size,
        _number(env, "LOCAL_RANK", rank),
        _number(env, "LOCAL_WORLD_SIZE", 1),
        env.get("MASTER_ADDR", "127.0.0.1"),
        _port(env, "torchrun"),
        env.get("TORCHELASTIC_RUN_ID", ""),
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _open_mpi(env: Environment) -> Launch | None:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return _counted("Open MPI", env, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), job)


def _mpich(env: Environment) -> Launch | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if names[-1] not in env and "SLURM_STEP_NUM_TASKS" in env:  # srun --mpi=pmi2 speaks of ranks in the same words
        return None
    several = names[0] in env and names[-1] in env and _number(env, names[-1]) < _number(env, names[1], 1)
    if several and "MASTER_PORT" not in env:
        raise ValueError(f"MPICH started ranks on several machines; {MEET}, and MASTER_PORT to a port free there")
    job = "" if several else str(os.getppid())  # MPICH gives no name that all machines know; the port tells jobs apart
    return _counted("MPICH", env, "{}", names, job)


def _slurm(env: Environment) -> Launch | None:
    if "SLURM_STEP_NUM_TASKS" not in env:  # a batch script by itself is not a step
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    return Launch(
        "Slurm",
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID", 0),
        int(tasks.group()) if tasks else size,
        address,
        _port(env, job),
        job,
    )


LAUNCHERS: dict[str, Callable[[Environment], Launch | None]] = {
    "torchrun": _torchrun,  # first: it may itself have been started by one of the others
    "Open MPI": _open_mpi,
    "MPICH": _mpich,
    "Slurm": _slurm,
}


def _counted(by: str, env: Environment, pattern: str, names: tuple[str, str, str, str], job: str) -> Launch | None:
    keys = [pattern.format(name) for name in names]
    if keys[0] not in env or keys[1] not in env:
        return None
    rank, size = _number(env, keys[0]), _number(env, keys[1])
    local_rank, local_size = _number(env, keys[2], rank), _number(env, keys[3], size)
    address = env.get("MASTER_ADDR")
    if address is None and local_size < size:
        raise ValueError(f"{by} started ranks on several machines; {MEET}")
    return Launch(by, rank, size, local_rank, local_size, address or "127.0.0.1", _port(env, job), job)


def _port(env: Environment, job: str) -> int:
    """As given, or one that only this job is likely to take."""
    port = _number(env, "MASTER_PORT", PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT is {port} in the environment; a port from 1 to 65535 is expected")
    return port


def _first_host(nodes: str) -> str:
    """Of node[03-07,11],other it is node03."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return nodes if found is None else found.group(1) + (found.group(2) or "")


def _number(env: Environment, name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set in the environment; a whole number is expected")
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r} in the environment; a whole number is expected")
    return int(text)
