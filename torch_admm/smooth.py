"""Smooth activations: h as torch computes it, and its first two derivatives for the table of `tables.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from .activations import activation_of
from .tables import AbstractSmooth

__all__ = ["ELU", "GELU", "SiLU", "Sigmoid", "Softplus", "Tanh"]


@final
@dataclass(frozen=True)
class Sigmoid(AbstractSmooth):
    reach: ClassVar[float] = 36.0

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.sigmoid(z)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        s, q = torch.sigmoid(z), torch.sigmoid(-z)  # q, not 1 - s: no digits lost for large z
        dh = s * q
        return dh, dh * (q - s)


@final
@dataclass(frozen=True)
class Tanh(AbstractSmooth):
    reach: ClassVar[float] = 18.0

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.tanh(z)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        s, q = torch.sigmoid(2 * z), torch.sigmoid(-2 * z)  # tanh(z) = s - q
        dh = 4 * s * q
        return dh, 2 * dh * (q - s)


def _gated(z: Tensor, v: Tensor, dv: Tensor | float, d2v: Tensor | float) -> tuple[Tensor, Tensor]:
    """Derivatives of z sigmoid(v(z))."""
    s, q = torch.sigmoid(v), torch.sigmoid(-v)
    return s + z * s * q * dv, s * q * (2 * dv + z * d2v + z * (q - s) * dv * dv)


@final
@dataclass(frozen=True)
class SiLU(AbstractSmooth):
    reach: ClassVar[float] = 40.0

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return fn.silu(z)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return _gated(z, z, 1.0, 0.0)


_C, _K = 2 * math.sqrt(2 / math.pi), 0.044715


@final
@dataclass(frozen=True)
class GELU(AbstractSmooth):
    approximate: str = "none"
    reach: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise ValueError(f'GELU: approximate must be "none" or "tanh", not {self.approximate!r}')

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return fn.gelu(z, approximate=self.approximate)

    def value(self, z: Tensor) -> Tensor:
        return z * self._gate(z)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.approximate == "tanh":
            zz = z * z
            return _gated(z, _C * z * (1 + _K * zz), _C * (1 + 3 * _K * zz), 6 * _C * _K * z)
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return self._gate(z) + z * density, density * (2 - z * z)

    def _gate(self, z: Tensor) -> Tensor:
        if self.approximate == "tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u)
            return torch.sigmoid(_C * z * (1 + _K * z * z))
        return 0.5 * torch.erfc(-math.sqrt(0.5) * z)


@final
@dataclass(frozen=True)
class ELU(AbstractSmooth):
    alpha: float = 1.0
    top: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"ELU: alpha must be positive and finite, not {self.alpha}")

    @property
    def reach(self) -> float:
        return 36.0 + max(0.0, math.log(self.alpha))

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return fn.elu(z, alpha=self.alpha)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        dh = self.alpha * torch.exp(z)
        return dh, dh


@final
@dataclass(frozen=True)
class Softplus(AbstractSmooth):
    beta: float = 1.0
    threshold: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"Softplus: beta must be positive and finite, not {self.beta}")
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"Softplus: threshold must be finite and not negative, not {self.threshold}")

    @property
    def reach(self) -> float:
        return 36.0 / self.beta

    @property
    def top(self) -> float:
        return self.threshold / self.beta

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return fn.softplus(z, self.beta, self.threshold)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        s, q = torch.sigmoid(self.beta * z), torch.sigmoid(-self.beta * z)
        return s, self.beta * s * q


activation_of.register(nn.Sigmoid, lambda module: Sigmoid())
activation_of.register(nn.Tanh, lambda module: Tanh())
activation_of.register(nn.SiLU, lambda module: SiLU())
activation_of.register(nn.GELU, lambda module: GELU(module.approximate))
activation_of.register(nn.ELU, lambda module: ELU(module.alpha))
activation_of.register(nn.Softplus, lambda module: Softplus(module.beta, module.threshold))
