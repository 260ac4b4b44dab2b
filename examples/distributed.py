"""One model, trained by several processes together; the same script for all ways to start them.

    python -m examples.distributed                                                  # one process
    torchrun --standalone --nproc-per-node 2 -m examples.distributed                # one machine
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 -m examples.distributed
    mpirun -n 2 python -m examples.distributed                                      # Open MPI or MPICH, talking by gloo
    mpirun -n 2 python -m examples.distributed --backend mpi                        # by MPI itself (mpi4py)
    srun python -m examples.distributed                                             # see examples/slurm.sbatch

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m examples.distributed --checkpoint runs/distributed

With a folder for checkpoints a run that is killed goes on from the last one, on any number of processes; started again
by torchrun or by hand. With --deterministic it also ends in the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_admm import AnchoredADMM, comm, fit


def circles(rows: int) -> tuple[Tensor, Tensor]:
    """Made alike on every rank: all are given all rows, and each works on its part."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    return x, (x.square().sum(1) > 7.3).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=list(comm.BACKENDS), default="auto")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()

    x, y = circles(20_000)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    with comm.start(args.backend) as ranks:
        result = fit(
            model,
            (x[:16_000], y[:16_000]),
            AnchoredADMM("logistic"),
            max_sweeps=5,
            evaluate=(x[16_000:], y[16_000:]),
            checkpoint=args.checkpoint,
            resume="auto" if args.checkpoint else False,
            deterministic=args.deterministic,
        )
        if ranks.rank == 0:
            right, seconds = result.best["test_accuracy"], result.best["seconds"]
            print(f"{ranks.size} rank(s): {right:.4f} of the test rows right after {seconds:.2f} s")


if __name__ == "__main__":
    main()
