"""Gradient-based rivals as methods of `torch_admm.fit`: the only place where autograd trains anything."""

from .adam import Adam
from .cg import CG, ConjugateGradients
from .lbfgs import LBFGS
from .sgd import SGD

__all__ = ["CG", "LBFGS", "SGD", "Adam", "ConjugateGradients"]
