"""Losses from names and torch criteria, targets in, predictions out, and what is refused with which words."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import rng
from torch_admm.errors import ConversionError
from torch_admm.losses import (
    L1,
    LOSSES,
    AbstractLoss,
    AbstractRegression,
    CrossEntropy,
    Hinge,
    Huber,
    Logistic,
    OneVsRestHinge,
    Squared,
    loss_of,
)

DTYPES = [torch.float32, torch.float64]

VECTOR, TABLE = (20,), (20, 5)
CRITERIA: list[tuple[type[nn.Module], dict[str, Any], AbstractLoss, str]] = [
    (nn.MSELoss, {}, Squared(), "real"),
    (nn.L1Loss, {}, L1(), "real"),
    (nn.HuberLoss, {"delta": 0.5}, Huber(0.5), "real"),
    (nn.BCEWithLogitsLoss, {}, Logistic(), "share"),
    (nn.BCEWithLogitsLoss, {"pos_weight": torch.tensor([2.5])}, Logistic(2.5), "share"),
    (nn.BCEWithLogitsLoss, {"pos_weight": torch.arange(5.0)}, Logistic([0, 1, 2, 3, 4]), "share"),
    (nn.CrossEntropyLoss, {}, CrossEntropy(), "label"),
    (nn.CrossEntropyLoss, {"label_smoothing": 0.25}, CrossEntropy(0.25), "label"),
    (nn.CrossEntropyLoss, {"weight": torch.arange(5.0)}, CrossEntropy(weight=[0, 1, 2, 3, 4]), "label"),
    (
        nn.CrossEntropyLoss,
        {"weight": torch.arange(5.0), "label_smoothing": 0.5},
        CrossEntropy(0.5, torch.arange(5)),
        "label",
    ),
    (
        nn.CrossEntropyLoss,
        {"weight": torch.arange(5.0), "label_smoothing": 0.5},
        CrossEntropy(0.5, torch.arange(5)),
        "share",
    ),
]
TARGETS = {
    "real": torch.randn(TABLE, generator=rng(2), dtype=torch.float64),
    "share": torch.rand(TABLE, generator=rng(2), dtype=torch.float64),
    "label": torch.randint(5, VECTOR, generator=rng(2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "options", "expected", "target"), CRITERIA)
def test_criteria_convert_and_agree(
    kind: type[nn.Module], options: dict[str, Any], expected: AbstractLoss, target: str, dtype: torch.dtype
) -> None:
    loss = loss_of(kind(**options))
    assert loss == expected == loss_of(kind(**options, reduction="sum"))
    z = 3 * torch.randn(TABLE, generator=rng(3), dtype=dtype)
    y = TARGETS[target] if target == "label" else TARGETS[target].to(dtype)
    options = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in options.items()}
    rows = kind(**options, reduction="none")(z, y)
    torch.testing.assert_close(loss(z, loss.encode(y, 5, z)), rows if rows.ndim == 1 else rows.sum(1))


class Shifted(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target + 1)


class Renamed(nn.MSELoss):
    pass


def test_names_losses_and_untouched_subclasses_convert() -> None:
    assert sorted(LOSSES) == [
        "cross_entropy", "hinge", "huber", "l1", "logistic", "one_vs_rest_hinge", "squared"
    ]  # fmt: skip
    for name in LOSSES:
        loss = loss_of(name)
        assert loss.name == name
        assert loss_of(loss) is loss
    assert loss_of(Renamed()) == Squared()


Z = torch.zeros(3, 1)
KNOWN = "'cross_entropy', 'hinge', 'huber', 'l1', 'logistic', 'one_vs_rest_hinge', 'squared'"


def encoding(loss: AbstractLoss, y: list[Any] | Tensor, outputs: int) -> Callable[[], object]:
    return lambda: loss.encode(torch.as_tensor(y), outputs, Z)


def converting(spec: object) -> Callable[[], object]:
    return lambda: loss_of(spec)


ENCODE_ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        encoding(Hinge(), [[0, 1], [1, 0]], 2),
        r"'hinge' takes one output but the net has 2: .*'one_vs_rest_hinge'",
    ),
    (encoding(Hinge(), [[0, 1], [1, 0]], 1), r"y has shape \(2, 2\), expected \(rows,\) or \(rows, 1\)"),
    (encoding(Hinge(), [0, 1, 2], 1), r"y\[2\] is 2: expected labels 0 and 1"),
    (encoding(Hinge(), [[0.0], [0.5]], 1), r"y\[1, 0\] is 0.5: expected labels 0 and 1"),
    (encoding(Hinge(), [-1, 1, 1], 1), r"y holds labels -1 and \+1: map them to 0 and 1"),
    (encoding(Hinge(), [0.0, math.nan], 1), r"y\[1\] is nan: targets must be finite"),
    (encoding(Hinge(), [1j, 0j], 1), r"y has dtype torch.complex64, expected real targets"),
    (
        encoding(OneVsRestHinge(), [0, 1], 1),
        r"one output: use the loss 'hinge' or 'logistic', or give the net",
    ),
    (encoding(OneVsRestHinge(), [0, 3], 3), r"y\[1\] is 3: expected class labels 0..2"),
    (encoding(OneVsRestHinge(), [0, 1, -1], 3), r"y\[2\] is -1: expected class labels 0..2"),
    (encoding(OneVsRestHinge(), [0.0, 1.0], 3), r"y has dtype torch.float32, expected integer class labels"),
    (encoding(OneVsRestHinge(), [True, False], 2), r"y has dtype torch.bool, expected integer class labels"),
    (encoding(OneVsRestHinge(), [[0], [1]], 2), r"y has shape \(2, 1\), expected \(rows,\) for class labels"),
    (encoding(OneVsRestHinge(), [1j], 2), r"y has dtype torch.complex64, expected real targets"),
    (encoding(Squared(), [1.0, 2.0], 2), r"y has shape \(2,\), expected \(rows, 2\) for 2 outputs"),
    (encoding(Squared(), torch.zeros(()), 1), r"y has shape \(\), expected \(rows,\)"),
    (encoding(L1(), [[1.0, -math.inf]], 2), r"y\[0, 1\] is -inf: targets must be finite"),
    (
        encoding(Huber(), torch.tensor([1e300], dtype=torch.float64), 1),
        r"y\[0\] is 1e\+300: .*finite in torch.float32",
    ),
    (encoding(Logistic(), [0.0, 1.5], 1), r"y\[1\] is 1.5: expected labels or probabilities between 0 and 1"),
    (encoding(Logistic(), [-1, 1], 1), r"y\[0\] is -1: .*map labels -1 and \+1 to 0 and 1"),
    (encoding(Logistic([1.0, 2.0]), [0, 1], 1), r"pos_weight has 2 entries but the net has 1 outputs"),
    (encoding(CrossEntropy(), [0, 1], 1), r"one output: use the loss 'hinge' or 'logistic', or give the net"),
    (encoding(CrossEntropy(), [[0.5, 0.5]], 1), r"one output: use the loss 'hinge' or 'logistic'"),
    (encoding(CrossEntropy(), [0, 5], 5), r"y\[1\] is 5: expected class labels 0..4"),
    (encoding(CrossEntropy(), [0.0, 1.0], 5), r"y has dtype torch.float32, expected integer class labels"),
    (encoding(CrossEntropy(), [[0, 1]], 2), r"y has shape \(1, 2\), expected \(rows,\) for class labels"),
    (encoding(CrossEntropy(), [[0.2, 0.8]], 3), r"y has shape \(1, 2\), expected \(rows, 3\)"),
    (encoding(CrossEntropy(), [[0.2, 1.8]], 2), r"y\[0, 1\] is 1.79.*between 0 and 1"),
    (encoding(CrossEntropy(), [[0.2, math.nan]], 2), r"y\[0, 1\] is nan: targets must be finite"),
    (encoding(CrossEntropy(weight=[1, 2]), [0, 1], 3), r"weight has 2 entries but the net has 3 outputs"),
    (lambda: Huber(0.0), r"delta is 0.0, expected a finite number > 0"),
    (lambda: CrossEntropy(1.5), r"label_smoothing is 1.5, expected a number between 0 and 1"),
    (lambda: CrossEntropy(weight=[1, -1]), r"weight is \(1.0, -1.0\), expected finite numbers >= 0"),
    (lambda: Logistic(math.nan), r"pos_weight is \(nan,\), expected finite numbers >= 0"),
    (lambda: Logistic(torch.ones(2, 3)), r"pos_weight has shape \(2, 3\), expected one number per output"),
]
CONVERSION_ERRORS: list[tuple[Callable[[], object], str]] = [
    (converting("hing"), rf"unknown loss 'hing'; known: {KNOWN}\. .*LOSSES\['hing'\] = MyLoss"),
    (converting(3), rf"int cannot be the loss: .*one of {KNOWN}.*loss_of.register\(int,"),
    (converting(nn.KLDivLoss()), r"KLDivLoss cannot be the loss: .*loss_of.register\(KLDivLoss,"),
    (converting(nn.BCELoss()), r"BCELoss cannot be .*drop the Sigmoid .*BCEWithLogits.*register\(BCELoss,"),
    (converting(nn.NLLLoss()), r"NLLLoss cannot be .*drop the LogSoftmax .*CrossEntropyLoss"),
    (converting(nn.SmoothL1Loss()), r"SmoothL1Loss cannot be .*use nn.HuberLoss"),
    (converting(nn.MultiLabelSoftMarginLoss()), r"MultiLabelSoftMarginLoss .*use nn.BCEWithLogitsLoss"),
    (converting(nn.SoftMarginLoss()), r"SoftMarginLoss cannot be .*map the labels -1 and \+1 to 0 and 1"),
    (converting(nn.HingeEmbeddingLoss()), r"HingeEmbeddingLoss cannot be .*use the loss 'hinge'"),
    (converting(nn.MultiMarginLoss()), r"MultiMarginLoss cannot be .*'one_vs_rest_hinge'"),
    (converting(Shifted()), r"Shifted cannot be .*overrides the forward of MSELoss.*register\(Shifted,"),
    (converting(nn.MSELoss(reduction="none")), r"MSELoss\(reduction='none'\) cannot be .*'mean' or 'sum'"),
    (
        converting(nn.BCEWithLogitsLoss(torch.ones(3))),
        r"BCEWithLogitsLoss\(weight=tensor\(\[1., 1., 1.\]\)\) cannot be .*use pos_weight",
    ),
    (converting(nn.CrossEntropyLoss(ignore_index=2)), r"CrossEntropyLoss\(ignore_index=2\) .*drop those"),
    (converting(nn.CrossEntropyLoss(-torch.ones(1))), r"CrossEntropyLoss: weight is \(-1.0,\), expected"),
    (converting(nn.HuberLoss(delta=-1.0)), r"HuberLoss: delta is -1.0, expected a finite number > 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ENCODE_ERRORS, ids=[m for _, m in ENCODE_ERRORS])
def test_targets_and_settings_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), CONVERSION_ERRORS, ids=[m for _, m in CONVERSION_ERRORS])
def test_specs_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        call()


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "expected"),
    [
        (Hinge(), torch.tensor([True, False]), 1, torch.tensor([[1.0], [0.0]])),
        (Hinge(), torch.tensor([1.0, 0.0], dtype=torch.float64), 1, torch.tensor([[1.0], [0.0]])),
        (Hinge(), torch.tensor([[1], [1]], dtype=torch.uint8), 1, torch.tensor([[1.0], [1.0]])),
        (OneVsRestHinge(), torch.tensor([2, 0], dtype=torch.uint8), 3, torch.tensor([2, 0])),
        (CrossEntropy(), torch.tensor([2, 0], dtype=torch.int32), 3, torch.tensor([2, 0])),
        (CrossEntropy(), torch.tensor([[0.5, 0.5]], dtype=torch.float64), 2, torch.tensor([[0.5, 0.5]])),
        (Squared(), torch.tensor([2, 0]), 1, torch.tensor([[2.0], [0.0]])),
        (Logistic(), torch.tensor([[True, False]]), 2, torch.tensor([[1.0, 0.0]])),
        (Logistic(), torch.tensor([0.25]), 1, torch.tensor([[0.25]])),
        (Hinge(), torch.tensor([]), 1, torch.zeros(0, 1)),
    ],
)
def test_encode(loss: AbstractLoss, y: Tensor, outputs: int, expected: Tensor) -> None:
    torch.testing.assert_close(loss.encode(y, outputs, Z), expected, rtol=0, atol=0)  # checks the dtype too


@pytest.mark.parametrize(
    ("loss", "z", "y", "predicted", "score"),
    [
        (Hinge(), [[0.4], [0.6], [2.0]], [0, 1, 0], [0, 1, 1], 2 / 3),
        (OneVsRestHinge(), [[1.0, 0.0], [2.0, 3.0]], [0, 0], [0, 1], 0.5),
        (Logistic(), [[-0.1], [0.1]], [0, 1], [0, 1], 1.0),
        (Logistic(), [[-1.0, 1.0]], [[0.2, 0.3]], [[0, 1]], 0.5),
        (Logistic(), [[-1.0, -1.0]], [[0.5, 0.5]], [[0, 0]], 1.0),
        (CrossEntropy(), [[1.0, 0.0], [2.0, 3.0]], [0, 0], [0, 1], 0.5),
        (CrossEntropy(), [[1.0, 0.0], [2.0, 3.0]], [[0.9, 0.1], [0.4, 0.6]], [0, 1], 1.0),
        (Squared(), [[1.0], [2.0], [4.0]], [1.0, 2.0, 3.0], [[1.0], [2.0], [4.0]], 0.5),
        (L1(), [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 7.0]], 1.0),
        (Huber(), [[1.0, 7.0], [3.0, 8.0]], [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 8.0]], 0.5),
    ],
)
def test_predict_and_score(loss: AbstractLoss, z: list[Any], y: list[Any], predicted: Any, score: float) -> None:
    outputs = torch.tensor(z)
    assert loss.predict(outputs).tolist() == predicted
    measured = loss.score(outputs, loss.encode(torch.tensor(y), outputs.shape[1], outputs))
    assert type(measured) is float
    assert measured == pytest.approx(score)


def test_score_of_no_rows_is_nan() -> None:
    assert math.isnan(Hinge().score(torch.zeros(0, 1), torch.zeros(0, 1)))


@final
@dataclass(frozen=True)
class Doubled(AbstractRegression):
    """2 (z - y)^2."""

    name: ClassVar[str] = "doubled"
    exact: ClassVar[bool] = True

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * ((z - y) ** 2).sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        return (2 * y + beta * v) / (2 + beta)


class DoubledCriterion(nn.Module):
    """No relative of torch's criteria."""


@pytest.fixture
def forget() -> Iterator[None]:
    """Take DoubledCriterion and Shifted out of the registry again, for which functools has no call."""
    yield
    (registry,) = gc.get_referents(loss_of.registry)
    for kind in (DoubledCriterion, Shifted):
        registry.pop(kind, None)
    loss_of._clear_cache()


@pytest.mark.usefixtures("forget")
def test_own_losses_register_by_type_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of.register(DoubledCriterion, lambda criterion: Doubled())
    loss_of.register(Shifted, lambda criterion: Doubled())  # more specific than the built-in for MSELoss
    monkeypatch.setitem(LOSSES, "doubled", Doubled)
    assert loss_of(DoubledCriterion()) == loss_of(Shifted()) == loss_of("doubled") == Doubled()
    with pytest.raises(ConversionError, match="'cross_entropy', 'doubled', 'hinge'"):
        loss_of("tripled")


def test_own_losses_are_forgotten() -> None:
    for spec in (DoubledCriterion(), Shifted(), "doubled"):
        with pytest.raises(ConversionError):
            loss_of(spec)
