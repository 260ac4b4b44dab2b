"""Losses on the output z of the last layer: one file a family, `loss_of` to find one."""

from .base import AbstractLoss, Prox
from .cross_entropy import CrossEntropy
from .hinge import Hinge, OneVsRestHinge
from .logistic import Logistic
from .registry import LOSSES, loss_of
from .regression import L1, AbstractRegression, Huber, Squared

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
    "Prox",
    "Squared",
    "loss_of",
]
