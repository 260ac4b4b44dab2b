"""From a name, a torch criterion or a loss to the loss: `loss_of`, open to names and types of one's own.

    LOSSES["mine"] = MyLoss                                         by name: anything that returns a loss
    loss_of.register(MyCriterion, lambda criterion: MyLoss(...))    by type

The split objective always sums over rows and outputs, so a criterion's `reduction="mean"` and `"sum"` mean
the same here, class weights included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import nn

from ..errors import ConversionError
from .base import AbstractLoss
from .cross_entropy import CrossEntropy
from .hinge import Hinge, OneVsRestHinge
from .logistic import Logistic
from .regression import L1, Huber, Squared

__all__ = ["LOSSES", "loss_of"]

BUILT_IN: tuple[type[AbstractLoss], ...] = (Hinge, OneVsRestHinge, Squared, L1, Huber, Logistic, CrossEntropy)
LOSSES: dict[str, Callable[[], AbstractLoss]] = {loss.name: loss for loss in BUILT_IN}


def _known() -> str:
    return ", ".join(map(repr, sorted(LOSSES)))


@functools.singledispatch
def loss_of(spec: object) -> AbstractLoss:
    """The loss meant by a name, a torch criterion or a loss; ConversionError if there is none."""
    _refuse(spec, f"pass one of {_known()}, an AbstractLoss, or a torch criterion with one of these meanings")


def _refuse(spec: object, advice: str) -> NoReturn:
    kind = type(spec).__name__
    raise ConversionError(
        f"{kind} cannot be the loss: the argmin of loss(z, y) + beta ||z - v||^2 is not known; {advice}. "
        f"For an AbstractLoss of your own: torch_admm.loss_of.register({kind}, lambda criterion: MyLoss(...))"
    )


@loss_of.register
def _(spec: AbstractLoss) -> AbstractLoss:
    return spec


@loss_of.register
def _(spec: str) -> AbstractLoss:
    if spec not in LOSSES:
        raise ConversionError(
            f"unknown loss {spec!r}; known: {_known()}. "
            f"For one of your own: torch_admm.losses.LOSSES[{spec!r}] = MyLoss"
        )
    return LOSSES[spec]()


# --- torch criteria: honour every option they carry, or refuse it by name

Criterion = TypeVar("Criterion", bound=nn.Module)


def _criterion(kind: type[Criterion]) -> Callable[[Callable[[Criterion], AbstractLoss]], object]:
    """Register a conversion of `kind` that first makes sure that the criterion computes what `kind` does."""

    def register(convert: Callable[[Criterion], AbstractLoss]) -> object:
        def checked(spec: Criterion) -> AbstractLoss:
            if type(spec).forward is not kind.forward:
                _refuse(spec, f"it overrides the forward of {kind.__name__}, so its values are not known")
            if spec.reduction not in ("mean", "sum"):
                _refuse_option(spec, "reduction", "the sum over rows is minimised; use 'mean' or 'sum'")
            try:
                return convert(spec)
            except ConversionError:
                raise
            except ValueError as error:
                raise ConversionError(f"{type(spec).__name__}: {error}") from error

        return loss_of.register(kind, checked)

    return register


def _refuse_option(spec: nn.Module, option: str, why: str) -> NoReturn:
    value = getattr(spec, option)
    raise ConversionError(f"{type(spec).__name__}({option}={value!r}) cannot be the loss: {why}")


@_criterion(nn.MSELoss)
def _(spec: nn.MSELoss) -> AbstractLoss:
    return Squared()


@_criterion(nn.L1Loss)
def _(spec: nn.L1Loss) -> AbstractLoss:
    return L1()


@_criterion(nn.HuberLoss)
def _(spec: nn.HuberLoss) -> AbstractLoss:
    return Huber(spec.delta)


@_criterion(nn.BCEWithLogitsLoss)
def _(spec: nn.BCEWithLogitsLoss) -> AbstractLoss:
    if spec.weight is not None:
        _refuse_option(spec, "weight", "it is tied to one batch; use pos_weight, or repeat rows")
    return Logistic(spec.pos_weight)


@_criterion(nn.CrossEntropyLoss)
def _(spec: nn.CrossEntropyLoss) -> AbstractLoss:
    if spec.ignore_index != -100:
        _refuse_option(spec, "ignore_index", "every row is fitted; drop those rows from the data")
    return CrossEntropy(spec.label_smoothing, spec.weight)


# --- criteria with a near relative that works
ADVICE: dict[type[nn.Module], str] = {
    nn.BCELoss: "drop the Sigmoid at the end of the model and use nn.BCEWithLogitsLoss",
    nn.NLLLoss: "drop the LogSoftmax at the end of the model and use nn.CrossEntropyLoss",
    nn.SmoothL1Loss: "use nn.HuberLoss, which is beta times it for delta = beta",
    nn.MultiLabelSoftMarginLoss: "use nn.BCEWithLogitsLoss, whose mean over outputs it is",
    nn.SoftMarginLoss: "map the labels -1 and +1 to 0 and 1 and use nn.BCEWithLogitsLoss",
    nn.HingeEmbeddingLoss: "for a binary hinge use the loss 'hinge'",
    nn.MultiMarginLoss: "use the loss 'one_vs_rest_hinge' or nn.CrossEntropyLoss",
}


def _advised(advice: str) -> Callable[[Any], AbstractLoss]:
    return lambda spec: _refuse(spec, advice)


for _kind, _advice in ADVICE.items():
    loss_of.register(_kind, _advised(_advice))
