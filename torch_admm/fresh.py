"""Does a network have the weights that torch drew for it?"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .problem import Problem, Weights

__all__ = ["is_fresh"]

FEWEST = 100  # weights that can tell
SPREAD = 0.9  # standard deviation of 3 u^2 for u uniform in [-1, 1], whose mean is one
TOLERANCE = 5.0  # standard deviations


def is_fresh(problem: Problem, W: Weights) -> bool:
    """Are all weights and biases such as `nn.Linear` draws them, uniform in [-1, 1] / sqrt(inputs)?

    Training, however short, takes some of those next to the bounds beyond, or makes all of them smaller.
    """
    if problem.size < FEWEST:
        return False
    far = [_surprise(W[l], layer.map.inputs) for l, layer in problem.layers.items()]
    return bool((torch.stack(far) <= 1).all())


def _surprise(W: Tensor, inputs: int) -> Tensor:
    """Above one if W goes beyond the bounds, or if its mean square says that it was not drawn so."""
    low, high = W.aminmax()
    reach = torch.maximum(high, -low) * math.sqrt(inputs) - 1e-6
    excess = vector_norm(W).square() * (3 * inputs / W.numel()) - 1
    return torch.maximum(reach, excess.abs() * (math.sqrt(W.numel()) / (TOLERANCE * SPREAD)))
