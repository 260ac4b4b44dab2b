"""What AnchoredADMM keeps from step to step, as plain tensors and numbers: given, checked and taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import state as states
from .guard import Guard
from .scaling import Scaling

if TYPE_CHECKING:
    from .anchored import AnchoredADMM

__all__ = ["check", "load", "of"]

COUNTERS = ("steps", "epoch", "shorter", "rollbacks")
MOMENTS = ("inputs", "residuals")

State = dict[str, Any]


def of(method: AnchoredADMM) -> State:
    """Copies."""
    return {
        **states.copies(_parts(method)),
        **method.damping.state_dict(),
        "scaling": None if method.scaling is None else method.scaling.state_dict(),
        **{name: getattr(owner, name) for owner, names in _counters(method) for name in names},
    }


def check(method: AnchoredADMM, state: State) -> None:
    """Could `load` take it up? Nothing changes."""
    states.check(state, _parts(method), (*MOMENTS, "scaling", *COUNTERS, *Guard.counters), "AnchoredADMM")
    for name in MOMENTS:
        states.check_part(state[name], {}, name)
    method.damping.check(state)
    for moment in (state[side][l] for side in MOMENTS for l in method.W):
        states.check_number(moment, "refreshes", 0)
    if state["scaling"] is not None:
        like = method.W[1].new_empty(method.problem.inputs)
        states.check_part(state["scaling"], {"shift": like, "scale": like}, "scaling")
    for owner, names in _counters(method):
        for name in names:
            states.check_number(state, name, getattr(owner, name))


def load(method: AnchoredADMM, state: State) -> None:
    check(method, state)
    states.copy_back(_parts(method), state)
    method.damping.load_state_dict(state)
    kept = state["scaling"]
    if kept is not None:
        kept = Scaling(*(kept[k].to(method.W[1], copy=True) for k in ("shift", "scale")))
    method.scaling = kept
    for owner, names in _counters(method):
        for name in names:
            setattr(owner, name, state[name])


def _counters(method: AnchoredADMM) -> list[tuple[Any, tuple[str, ...]]]:
    return [(method, COUNTERS), (method.guard, Guard.counters)]


def _parts(method: AnchoredADMM) -> states.Parts:
    mine = {"W": method.W, "V": method.V, "mean": method.mean, "norm": method.motion.first, "K": method.walk.K}
    return {**mine, **method.guard.parts}
