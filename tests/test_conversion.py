"""From nn.Sequential to a Problem and back, and what is refused with which words."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import torch_admm
from tests.helpers import blobs, net
from torch_admm import AbstractActivation, ConversionError, activation_of, fit, from_module, map_of, to_module
from torch_admm.activations import PiecewiseLinear
from torch_admm.activations import leaky_relu as leaky
from torch_admm.maps import Dense

ACTIVATIONS: list[nn.Module] = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.2), nn.ReLU6(), nn.Hardtanh(-2, 0.5), nn.Hardsigmoid(),
    nn.Threshold(0.1, 0.1), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ELU(0.7),
    nn.Softplus(2.0),
]  # fmt: skip


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_problem_computes_what_the_model_does(act: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 3))
    problem = from_module(model, "squared")
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(problem.forward(problem.read(), x), model(x))


class Branded(nn.Sequential):
    """A subclass that changes nothing."""


@pytest.mark.parametrize(
    ("model", "depth"),
    [
        (nn.Linear(4, 2), 1),
        (nn.Sequential(nn.Linear(4, 2)), 1),
        (
            nn.Sequential(
                nn.Flatten(),
                nn.Linear(4, 3),
                nn.Identity(),
                nn.ReLU(),
                nn.Dropout(0.0),
                nn.AlphaDropout(0.0),
                nn.Linear(3, 2),
            ),
            2,
        ),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Sequential(nn.Sequential(nn.Linear(3, 2)))), 2),
        (nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)), 3),
        (nn.Sequential(OrderedDict(first=nn.Linear(4, 3), act=nn.ELU(), last=nn.Linear(3, 2))), 2),
        (Branded(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 2),
    ],
)
def test_accepted_shapes(model: nn.Module, depth: int) -> None:
    problem = from_module(model, "squared")
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    assert (problem.L, problem.inputs, problem.outputs) == (depth, 4, 2)
    torch.testing.assert_close(problem.forward(problem.read(), x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_users_model_is_what_gets_trained(dtype: torch.dtype) -> None:
    model = net(4, 6, 1, dtype=dtype)
    model[0].weight.requires_grad_(False)
    before = {k: (id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad) for k, p in model.named_parameters()}
    old = [p.clone() for p in model.parameters()]
    result = fit(model, blobs(dtype=dtype), max_sweeps=3, sinks=(), restore_best=False)
    after = {k: (id(p), p.data_ptr(), p.dtype, p.device, p.requires_grad) for k, p in model.named_parameters()}
    assert result.model is model
    assert after == before
    assert all(not torch.equal(o, p) for o, p in zip(old, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_there_and_back() -> None:
    model = net(4, 6, 2)
    problem = from_module(model, "squared")
    W = {l: 2 * w for l, w in problem.read().items()}
    assert to_module(problem, W) is model
    torch.testing.assert_close(problem.read(), W)


def test_images_through_a_leading_flatten() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))
    x = torch.randn(400, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    data = x, x[:, 0, 0, 0] > 0
    result = fit(model, data, torch_admm.BregmanADMM(gamma=1.0), max_sweeps=20, evaluate=data, sinks=())
    assert result.best["test_accuracy"] > 0.9
    assert model(x).shape == (400, 1)


class Custom(nn.Module):
    """A module with parts and a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Scaled(nn.Linear):
    """A linear layer that is not one any more."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def sequence(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), *parts, nn.Linear(3, 1))


def tied() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(4, 3), shared, nn.ReLU(), shared, nn.Linear(3, 1))


def hooked() -> nn.Sequential:
    model = sequence(nn.ReLU())
    model[1].register_forward_hook(lambda module, x, y: y + 1)
    return model


def patched() -> nn.Sequential:
    model = sequence(nn.ReLU())
    model[1].forward = torch.tanh
    return model


def frozen() -> nn.Sequential:
    with torch.inference_mode():
        return sequence(nn.ReLU())


def mixed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1, dtype=torch.float64))


REFUSED: list[tuple[Any, str]] = [
    (sequence(nn.Softmax(1)), r"nn\.Softmax at position 1 .* couples the entries of a row; .*loss='cross_entropy'"),
    (sequence(nn.LogSoftmax(1)), r"nn\.LogSoftmax at position 1 cannot be split"),
    (sequence(nn.Dropout(0.5)), r"nn\.Dropout at position 1 .* p=0\.5 makes the layer random.*; set p=0 or remove it"),
    (sequence(nn.BatchNorm1d(3)), r"nn\.BatchNorm1d at position 1 .* normalisation .*standardise the inputs"),
    (sequence(nn.LayerNorm(3)), r"nn\.LayerNorm at position 1 .* normalisation"),
    (sequence(nn.Conv1d(1, 1, 1)), r"nn\.Conv1d at position 1 .* only dense .*map_of\.register\(YourClass"),
    (sequence(nn.PReLU()), r"nn\.PReLU at position 1 .* learned or random.*nn\.LeakyReLU"),
    (sequence(nn.Hardswish()), r"nn\.Hardswish at position 1 .* no linear map or .*activation_of\.register\(YourClass"),
    (sequence(nn.Threshold(0.1, 20.0)), r"nn\.Threshold at position 1 .* jumps at 0\.1 from 20 to 0\.1"),
    (sequence(nn.ELU(-1.0)), r"nn\.ELU at position 1 cannot be split: ELU: alpha must be positive and finite, not -1"),
    (sequence(nn.Flatten()), r"nn\.Flatten at position 1 .* only a leading nn\.Flatten\(\).*; put it first"),
    (sequence(nn.ReLU(), nn.ReLU()), r"nn\.ReLU at position 2 .* follows another activation \(1\); put an nn\.Linear"),
    (sequence(nn.Sequential(nn.ReLU(), Custom())), r"Custom at position 1\.1 .* own forward .*nn\.Sequential"),
    (sequence(nn.Linear(5, 3)), r"nn\.Linear at position 1 .* takes 5 inputs, but the layer before gives 3; make"),
    (sequence(Scaled(3, 3)), r"Scaled at position 1 .* overrides the forward of Linear; register your own class"),
    (sequence(nn.LazyLinear(3)), r"nn\.LazyLinear at position 1 .* no weights yet; run the model once"),
    (sequence(parametrizations.weight_norm(nn.Linear(3, 3))), r"ParametrizedLinear at position 1 .* parametrized"),
    (hooked(), r"nn\.ReLU at position 1 .* forward hooks.*; remove the hooks"),
    (patched(), r"nn\.ReLU at position 1 .* forward was replaced on the object"),
    (frozen(), r"nn\.Linear at position 0 .* inference tensors, which cannot be written"),
    (tied(), r"nn\.Linear at position 3 .* shares weights with position 1; give each layer its own"),
    (mixed(), r"mixes weights of torch\.float32 on cpu, torch\.float64 on cpu; bring them to one"),
    (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), r"nn\.Sigmoid at position 1 .* output .* no activation.*; drop it"),
    (nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), r"nn\.ReLU at position 0 .* no linear layer comes before it; apply it"),
    (nn.Sequential(), r"nn\.Sequential has no linear layer to train; add an nn\.Linear"),
    (nn.ModuleList([nn.Linear(4, 3)]), r"nn\.ModuleList at position top .* without an order of calls; use nn\.Seq"),
    (Custom(), r"Custom at position top .* cannot be read off; write the model as nn\.Sequential"),
    (nn.Linear(4, 3).half(), r"nn\.Linear has torch\.float16 weights; .* float32 or float64"),
    (nn.Linear(4, 3, device="meta"), r"nn\.Linear is on the meta device and has no values"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[m[:28] for _, m in REFUSED])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        from_module(model, "squared")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_is_refused() -> None:
    with pytest.raises(ConversionError, match="forward hooks"):
        from_module(sequence(weight_norm(nn.Linear(3, 3))), "squared")


class Abs(nn.Module):
    """A user's own activation module."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Doubled(nn.Module):
    """A user's own linear module: an nn.Linear inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.fixture
def registered() -> Iterator[None]:
    """Register without touching the package; forget afterwards, so that other tests see the package as it is."""
    activation_of.register(Abs, lambda module: leaky(-1.0))
    map_of.register(Doubled, lambda module: Dense(module.inner))
    yield
    activation_of.register(Abs, lambda module: None)
    map_of.register(Doubled, lambda module: None)


@pytest.mark.usefixtures("registered")
def test_a_users_own_activation_and_map() -> None:
    model = nn.Sequential(Doubled(), Abs(), nn.Linear(6, 1))
    x, y = blobs(200, 4)
    problem = from_module(model, "hinge")
    assert isinstance(problem.layers[1].h, PiecewiseLinear)
    torch.testing.assert_close(problem.forward(problem.read(), x), model(x))
    result = fit(model, (x, y), torch_admm.BregmanADMM("hinge", gamma=1.0), max_sweeps=20, sinks=())
    assert result.best["train_accuracy"] > 0.6


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_read_row_by_row(bias: bool) -> None:
    """However the module has them: what crosses to other ranks lies in one piece."""
    model = net(4, 3, 1, bias=bias)
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(first.weight.detach().T.contiguous().T)
    W = from_module(model, "squared").read()[1]
    assert W.is_contiguous()
    assert torch.equal(W[:, :4], first.weight)
    W.zero_()
    assert first.weight.any()


def test_unregistered_again() -> None:
    with pytest.raises(ConversionError, match="Abs at position 1"):
        from_module(sequence(Abs()), "squared")


def test_activations_are_abstract_or_final() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AbstractActivation()  # type: ignore[abstract]
