"""Losses on the output z of the last layer: one file a family, `loss_of` to find one."""

from torch_admm.losses.base import AbstractLoss
from torch_admm.losses.cross_entropy import CrossEntropy
from torch_admm.losses.hinge import Hinge, OneVsRestHinge
from torch_admm.losses.logistic import Logistic
from torch_admm.losses.registry import LOSSES, loss_of
from torch_admm.losses.regression import L1, AbstractRegression, Huber, Squared

__all__ = [
    "L1",
    "LOSSES",
    "AbstractLoss",
    "AbstractRegression",
    "CrossEntropy",
    "Hinge",
    "Huber",
    "Logistic",
    "OneVsRestHinge",
    "Squared",
    "loss_of",
]
