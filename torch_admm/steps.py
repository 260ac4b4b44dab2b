"""The five argmins of one sweep, as pure functions of rows.

The split problem (eq. "split" of Taylor et al. with the multiplier of eq. "bregman"), over all rows:

    min  loss(z_L, y) + <lam, z_L> + sum_l beta_l ||z_l - m_l||^2 + sum_{l<L} gamma_l ||a_l - h_l(z_l)||^2
    with m_l = W_l a_{l-1} + b_l and a_0 = the data

Two conventions hold in the whole package and are declared here only: penalties carry no 1/2, and rows are samples (the
paper's matrices transposed).

| paper | here |
| --- | --- |
| l = 1..L | keys 1..L of every container |
| W_l | `W[l]`, shape (outputs, inputs + 1): the bias b_l is its last column |
| a_l, z_l | `a[l]`, `z[l]`, shape (rows, outputs of layer l); a_0 is the data |
| W_l a_{l-1} | `m`, with the bias |
| h_l | `h`, an activation |
| lambda | `lam`, shape of z_L |
| beta_l, gamma_l | `beta[l]`, `gamma[l]` |
| a_{l-1}^+ | `Gram` ... `Factor.solve` |
"""

from __future__ import annotations

from torch import Tensor

from .activations import AbstractActivation, Pull
from .gram import Factor
from .losses import AbstractLoss
from .maps import InputSolve

__all__ = ["activation_step", "hidden_residual", "hidden_step", "multiplier_step", "output_step", "weight_step"]


def weight_step(gram: Factor, R: Tensor, like: Tensor) -> Tensor:
    """argmin_W  ||z_l - W [a_{l-1}, 1]||^2  from the factored G = sum [a, 1]'[a, 1] and R = sum z'[a, 1]."""
    return gram.solve(R).to(like.dtype)


def activation_step(solve: InputSolve, z_next: Tensor, h_z: Tensor) -> Tensor:
    """argmin_a  beta_{l+1} ||z_{l+1} - W_{l+1} a - b_{l+1}||^2 + gamma_l ||a - h_l(z_l)||^2; h_z is used up."""
    return solve(h_z, z_next)


def hidden_step(
    h: AbstractActivation, a: Tensor, m: Tensor, beta: float, gamma: float, out: Tensor | None = None
) -> Tensor:
    """argmin_z  gamma_l ||a_l - h_l(z)||^2 + beta_l ||z - m_l||^2."""
    return h.minimise(a, m, beta, gamma, out)


def hidden_residual(
    h: AbstractActivation, pull: Pull, m: Tensor, h_m: Tensor, beta: float, gamma: float, room: Tensor
) -> Tensor:
    """argmin_z { gamma_l ||h_l(m_l) + d_l - h_l(z)||^2 + beta_l ||z - m_l||^2 } - m_l; m and room are used up."""
    return h.residual(pull, m, h_m, beta, gamma, room)


def output_step(loss: AbstractLoss, m: Tensor, y: Tensor, lam: Tensor, beta: float) -> Tensor:
    """argmin_z  loss(z, y) + <lam, z> + beta_L ||z - m_L||^2, the multiplier folded into the centre."""
    return loss.prox(m - lam / (2 * beta), y, beta)


def multiplier_step(lam: Tensor, z: Tensor, m: Tensor, beta: float, dual_step: float) -> Tensor:
    """lam + dual_step 2 beta_L (z_L - m_L).

    With dual_step = 1 the new lam is minus a subgradient of the loss at z_L (the Bregman update). The paper prints
    beta_L (z_L - m_L), that is dual_step = 1/2 under its own convention of penalties without 1/2.
    """
    return lam + (dual_step * 2 * beta) * (z - m)
