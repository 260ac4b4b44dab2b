"""What several processes say to each other; the only place that names torch.distributed.

    with comm.start():           # torchrun, mpirun and srun are recognised; alone it is the trivial case
        fit(model, data)

Every rank calls `fit` with the same model and the same data; each works on its own part of the rows, and only small
sums cross.
"""

from .base import AbstractComm, Solo
from .group import Group
from .launch import Launch, launched, rank_in
from .pending import Pending
from .standing import AbstractStanding
from .start import BACKENDS, current, start
from .tree import Growing, Order

__all__ = [
    "BACKENDS",
    "AbstractComm",
    "AbstractStanding",
    "Group",
    "Growing",
    "Launch",
    "Order",
    "Pending",
    "Solo",
    "current",
    "launched",
    "rank_in",
    "start",
]
