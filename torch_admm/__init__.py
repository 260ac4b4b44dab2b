"""Train PyTorch networks without gradients: ADMM / Bregman iteration with closed-form steps."""

from . import comm, smooth  # noqa: F401 (smooth registers its activations)
from .activations import AbstractActivation, activation_of
from .anchored import AnchoredADMM
from .bound import BoundADMM
from .bregman import BregmanADMM
from .errors import CheckpointError, CommError, ConversionError, DataError, RankError
from .fit import Result, fit
from .losses import AbstractLoss, loss_of
from .maps import AbstractLinearMap, map_of
from .method import AbstractMethod
from .problem import Layer, Problem, from_module, to_module
from .record import AbstractSink, JSONLines, ProgressBar, TensorBoard
from .stop import AbstractStop, Outcome, Patience, Target, TimeBudget, Tolerance

__version__ = "0.1.0"

__all__ = [
    "AbstractActivation",
    "AbstractLinearMap",
    "AbstractLoss",
    "AbstractMethod",
    "AbstractSink",
    "AbstractStop",
    "AnchoredADMM",
    "BoundADMM",
    "BregmanADMM",
    "CheckpointError",
    "CommError",
    "ConversionError",
    "DataError",
    "JSONLines",
    "Layer",
    "Outcome",
    "Patience",
    "Problem",
    "ProgressBar",
    "RankError",
    "Result",
    "Target",
    "TensorBoard",
    "TimeBudget",
    "Tolerance",
    "activation_of",
    "comm",
    "fit",
    "from_module",
    "loss_of",
    "map_of",
    "to_module",
]
