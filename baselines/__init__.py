"""Gradient-based rivals as methods of `torch_admm.fit`: the only place where autograd trains anything."""

from .gradient import LBFGS, SGD

__all__ = ["LBFGS", "SGD"]
