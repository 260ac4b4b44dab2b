"""From an nn.Sequential to the split problem and back.

This is the only code, besides the registries `activation_of`, `map_of` and `loss_of`, that knows torch.nn classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .activations import AbstractActivation, Piece, PiecewiseLinear, activation_of
from .errors import ConversionError
from .losses import AbstractLoss, loss_of
from .maps import AbstractLinearMap, map_of

__all__ = ["Layer", "Problem", "Weights", "from_module", "to_module"]

Weights = dict[int, Tensor]  # [W_l, b_l], keyed 1..L

IDENTITY = PiecewiseLinear([Piece(1.0, 0.0)])
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Layer:
    """m = W a + b, then h(z); the last layer has no h."""

    map: AbstractLinearMap
    h: AbstractActivation


@dataclass(frozen=True)
class Problem:
    """A model split into layers 1..L, and the loss on its output. The model itself is the one to be trained."""

    model: nn.Module
    layers: dict[int, Layer]
    loss: AbstractLoss
    flatten: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def L(self) -> int:
        return len(self.layers)

    @property
    def inputs(self) -> int:
        return self.layers[1].map.inputs

    @property
    def outputs(self) -> int:
        return self.layers[self.L].map.outputs

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(p.numel() for p in self.model.parameters())

    def read(self) -> Weights:
        """A copy of the model's weights."""
        return {l: layer.map.read() for l, layer in self.layers.items()}

    def write(self, W: Weights) -> None:
        """Write weights into the model, in place."""
        for l, layer in self.layers.items():
            layer.map.write(W[l])

    def forward(self, W: Weights, x: Tensor) -> Tensor:
        """The network's output z_L under the weights W."""
        for l, layer in self.layers.items():
            x = layer.map.forward(W[l], x)
            if l < self.L:
                x = layer.h(x)
        return x


def from_module(model: nn.Module, loss: Any) -> Problem:
    """Split `model` into closed-form sub-problems with `loss` (a name, a torch criterion or an AbstractLoss) on top.

    Takes nn.Linear, or nn.Sequential (nested as you like) of nn.Linear and entrywise activations, with nn.Flatten in
    front and nn.Identity or nn.Dropout(p=0) anywhere. Anything else raises a ConversionError that says what to do.
    Nothing in the model changes; all of its weights are trained, whatever their `requires_grad`.
    """
    criterion = loss_of(loss)
    leaves = [(where, part) for where, part in _leaves(model) if not _is_transparent(part)]
    flatten = bool(leaves) and _is_flatten(leaves[0][1])
    layers = _split(leaves[flatten:])
    if not layers:
        raise ConversionError(f"{_name(model)} has no linear layer to train; add an nn.Linear")
    dtype, device = _one_kind_of_weights(model)
    return Problem(model, dict(enumerate(layers, start=1)), criterion, flatten, dtype, device)


def to_module(problem: Problem, W: Weights) -> nn.Module:
    """The user's own model with the weights W in it."""
    problem.write(W)
    return problem.model


def _leaves(module: nn.Module, where: str = "") -> Iterator[tuple[str, nn.Module]]:
    _refuse_strange(where or "top", module)
    if type(module).forward is not nn.Sequential.forward:
        yield where or "top", module
        return
    for name, child in module._modules.items():  # named_children would drop a repeated module
        assert child is not None
        yield from _leaves(child, f"{where}.{name}" if where else name)


def _split(leaves: list[tuple[str, nn.Module]]) -> list[Layer]:
    layers: list[Layer] = []
    pending: tuple[str, nn.Module, AbstractActivation] | None = None  # an activation waiting for its next map
    for where, part in leaves:
        if (linear := _look_up(map_of, where, part)) is not None:
            if layers:
                h = pending[2] if pending else IDENTITY
                layers[-1] = Layer(layers[-1].map, h)
                _check_widths(where, part, layers[-1].map, linear)
            layers.append(Layer(linear, IDENTITY))
            pending = None
        elif (activation := _look_up(activation_of, where, part)) is not None:
            if not layers:
                _refuse(where, part, "no linear layer comes before it", "apply it to the data instead")
            if pending:
                _refuse(where, part, f"it follows another activation ({pending[0]})", "put an nn.Linear between them")
            pending = where, part, activation
        else:
            _refuse(where, part, *reason_of(part))
    if pending:
        why = "the output of the network has no activation in the split problem: the loss acts on the last linear layer"
        _refuse(pending[0], pending[1], why, "drop it (for class probabilities, apply it after training)")
    _refuse_shared(leaves)
    return layers


def _look_up(registry: Any, where: str, part: nn.Module) -> Any:
    """What the registry makes of `part`; a subclass with a forward of its own is another function altogether."""
    found = next(c for c in type(part).__mro__ if c in registry.registry or c is nn.Module)
    if found is not nn.Module and type(part).forward is not found.forward:  # type: ignore[attr-defined]
        _refuse(where, part, f"it overrides the forward of {found.__name__}", REGISTER)
    try:
        return registry(part)
    except ValueError as error:
        raise ConversionError(f"{_name(part)} at position {where} cannot be split: {error}") from None


REGISTER = (
    "register your own class: torch_admm.activation_of.register(YourClass, lambda module: YourActivation()) for an "
    "entrywise function, torch_admm.map_of.register(YourClass, YourMap) for a linear map"
)


@singledispatch
def reason_of(part: nn.Module) -> tuple[str, str]:
    """Why a module cannot be split, and what to do instead."""
    if any(part.children()):
        return "what its own forward does cannot be read off", "write the model as nn.Sequential"
    return "no linear map or entrywise activation is registered for its class", REGISTER


@reason_of.register
def _(part: nn.Flatten) -> tuple[str, str]:
    return "only a leading nn.Flatten() with start_dim=1 and end_dim=-1 keeps rows as samples", "put it first"


@reason_of.register(nn.modules.dropout._DropoutNd)
def _(part: nn.modules.dropout._DropoutNd) -> tuple[str, str]:
    return (
        f"dropout with p={part.p:g} makes the layer random, so it has no exact minimiser",
        "set p=0 or remove it",
    )


@reason_of.register(nn.Softmax)
@reason_of.register(nn.LogSoftmax)
def _(part: nn.Module) -> tuple[str, str]:
    return "it couples the entries of a row", "drop it and use loss='cross_entropy', which takes the logits"


@reason_of.register(nn.PReLU)
@reason_of.register(nn.RReLU)
def _(part: nn.Module) -> tuple[str, str]:
    return "its slope is learned or random, not fixed", "use nn.LeakyReLU with a fixed slope"


@reason_of.register(nn.modules.batchnorm._NormBase)
@reason_of.register(nn.LayerNorm)
@reason_of.register(nn.GroupNorm)
def _(part: nn.Module) -> tuple[str, str]:
    return (
        "a normalisation couples entries, so the step has no closed form",
        "remove it and standardise the inputs",
    )


@reason_of.register(nn.modules.conv._ConvNd)
@reason_of.register(nn.RNNBase)
def _(part: nn.Module) -> tuple[str, str]:
    return "only dense linear maps are built in", REGISTER


@reason_of.register(nn.ModuleList)
@reason_of.register(nn.ModuleDict)
def _(part: nn.Module) -> tuple[str, str]:
    return "a container without an order of calls", "use nn.Sequential"


def _is_transparent(part: nn.Module) -> bool:
    return type(part) is nn.Identity or (isinstance(part, DROPOUTS) and type(part) in DROPOUTS and part.p == 0)


def _is_flatten(part: nn.Module) -> bool:
    return type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)


def _check_widths(where: str, part: nn.Module, before: AbstractLinearMap, after: AbstractLinearMap) -> None:
    if before.outputs != after.inputs:
        why = f"it takes {after.inputs} inputs, but the layer before gives {before.outputs}"
        _refuse(where, part, why, "make the two widths equal")


def _refuse_strange(where: str, part: nn.Module) -> None:
    if any(nn.parameter.is_lazy(p) for p in part._parameters.values() if p is not None):
        _refuse(where, part, "it has no weights yet", "run the model once on a batch to create them")
    if any(p.is_inference() for p in part._parameters.values() if p is not None):
        _refuse(where, part, "its weights are inference tensors, which cannot be written", "build it outside that mode")
    if "forward" in vars(part):
        _refuse(where, part, "its forward was replaced on the object", "make it a class of its own and register that")
    if parametrize.is_parametrized(part):
        _refuse(
            where,
            part,
            "its weights are parametrized",
            "torch.nn.utils.parametrize.remove_parametrizations first",
        )
    if part._forward_pre_hooks or part._forward_hooks:
        why = "it has forward hooks, which may change what it computes (weight_norm and spectral_norm use them)"
        _refuse(where, part, why, "remove the hooks before training")


def _refuse_shared(leaves: list[tuple[str, nn.Module]]) -> None:
    seen: dict[int, str] = {}
    for where, part in leaves:
        for parameter in part.parameters():
            if id(parameter) in seen:
                why = f"it shares weights with position {seen[id(parameter)]}"
                _refuse(where, part, why, "give each layer its own weights")
            seen[id(parameter)] = where


def _one_kind_of_weights(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConversionError(f"{_name(model)} mixes weights of {listed}; bring them to one dtype and device")
    dtype, device = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        raise ConversionError(f"{_name(model)} has {dtype} weights; the steps need float32 or float64: model.float()")
    if device.type == "meta":
        raise ConversionError(f"{_name(model)} is on the meta device and has no values; model.to_empty(device='cpu')")
    return dtype, device


def _refuse(where: str, part: nn.Module, why: str, remedy: str) -> NoReturn:
    raise ConversionError(f"{_name(part)} at position {where} cannot be split: {why}; {remedy}")


def _name(part: nn.Module) -> str:
    kind = type(part)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__name__
