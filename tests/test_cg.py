"""Conjugate gradients: as good as scipy's on plain functions, sound where a function is not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from baselines import CG, ConjugateGradients
from tests.helpers import blobs, net, rng
from torch_admm import fit

F = Callable[[Tensor], Tensor]


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def quadratic(size: int, condition: float) -> F:
    """x'Ax / 2 - sum(x), with the eigenvalues of A spread evenly on a log scale from 1 to `condition`."""
    Q = torch.linalg.qr(torch.randn(size, size, generator=rng(0), dtype=torch.float64)).Q
    A = Q * torch.logspace(0, math.log10(condition), size, dtype=torch.float64) @ Q.T
    return lambda x: x @ A @ x / 2 - x.sum()


def logistic_regression() -> F:
    """Features of very different scales, and labels that overlap."""
    x = torch.randn(200, 10, generator=rng(0), dtype=torch.float64) * torch.logspace(0, 1.5, 10, dtype=torch.float64)
    sign = torch.sign(x.sum(1) + 20 * torch.randn(200, generator=rng(1), dtype=torch.float64))
    return lambda w: nn.functional.softplus(-sign * (x @ w)).mean() + 1e-3 * w @ w


PROBLEMS: dict[str, tuple[F, list[float]]] = {
    "rosenbrock in 2": (rosenbrock, [-1.2, 1.0]),
    "rosenbrock in 10": (rosenbrock, [-1.2, 1.0] * 5),
    "quadratic, condition 1e3": (quadratic(20, 1e3), [0.0] * 20),
    "logistic regression": (logistic_regression(), [0.0] * 10),
}


class Run:
    """A parameter, a closure that counts, and the optimiser of both."""

    def __init__(self, f: F, start: list[float], **settings: Any) -> None:
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.f, self.evaluations = f, 0
        self.optimiser = ConjugateGradients([self.x], **settings)

    def closure(self) -> float:
        self.evaluations += 1
        self.optimiser.zero_grad()
        value = self.f(self.x)
        value.backward()
        return float(value.detach())

    def step(self) -> float:
        return self.optimiser.step(self.closure)

    @property
    def memory(self) -> dict[str, Any]:
        return self.optimiser.state[self.x]  # type: ignore[no-any-return]

    def gradient(self) -> Tensor:
        x = self.x.detach().clone().requires_grad_(True)
        return torch.autograd.grad(self.f(x), x)[0]


def scipys(f: F, start: list[float]) -> Any:
    def value_and_gradient(at: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(at, requires_grad=True)
        value = f(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()

    return scipy.optimize.minimize(value_and_gradient, np.array(start), jac=True, method="CG")


@pytest.mark.parametrize("name", PROBLEMS)
def test_same_minimum_as_scipy(name: str) -> None:
    f, start = PROBLEMS[name]
    run, reference = Run(f, start, max_iter=2000, tolerance_grad=1e-5), scipys(f, start)
    assert run.step() == pytest.approx(float(f(torch.tensor(start, dtype=torch.float64))), rel=1e-14)
    assert reference.success
    assert run.gradient().abs().max() <= 1e-5
    assert float(f(run.x.detach())) == pytest.approx(reference.fun, abs=1e-5)
    np.testing.assert_allclose(run.x.detach().numpy(), reference.x, atol=1e-4)  # both end at a gradient of 1e-5
    assert run.evaluations <= 2 * reference.nfev


def test_an_iteration_a_step_is_the_same_as_many() -> None:
    many, single = Run(rosenbrock, [-1.2, 1.0], max_iter=10), Run(rosenbrock, [-1.2, 1.0], max_iter=1)
    many.step()
    for _ in range(10):
        single.step()
    assert torch.equal(many.x, single.x)
    assert single.evaluations == many.evaluations + 9  # each step looks where it is first


def test_directions_are_those_of_polak_and_ribiere() -> None:
    run = Run(*PROBLEMS["rosenbrock in 10"], max_iter=1)
    directions, gradients, points = [], [], [run.x.detach().clone()]
    for _ in range(30):
        gradients.append(run.gradient())
        run.step()
        directions.append(run.memory["direction"])
        points.append(run.x.detach().clone())
        if run.memory["count"] == 1:
            expected = -gradients[-1]
        else:
            g, old = gradients[-1], gradients[-2]
            expected = -g + max(0.0, float(g @ (g - old) / (old @ old))) * directions[-2]
        torch.testing.assert_close(directions[-1], expected)
        torch.testing.assert_close(points[-1], points[-2] + run.memory["length"] * directions[-1])


def test_restarts_after_as_many_iterations_as_parameters() -> None:
    run = Run(*PROBLEMS["quadratic, condition 1e3"], max_iter=1)
    counts = []
    for _ in range(60):
        run.step()
        counts.append(run.memory["count"])
    assert max(counts) <= 20
    assert counts.count(1) >= 3


class Planted(NamedTuple):
    """A gradient to meet, what is remembered, and the slope of the direction if that is not steepest descent."""

    gradient: list[float]
    last: list[float]
    direction: list[float]
    iterations: int
    slope: float | None


DIRECTIONS = {
    "conjugate": Planted([1.0, 0.0], [0.0, 1.0], [0.0, -1.0], 1, -1.0),
    "never longer than the parameters": Planted([1.0, 0.0], [0.0, 1.0], [0.0, -1.0], 2, None),
    "gradients alike": Planted([1.0, 0.1], [1.2, 0.0], [-1.0, 0.0], 1, None),
    "opposite gradients": Planted([1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], 1, None),
    "not downwards": Planted([1.0, 0.0], [0.0, 1.0], [2.0, -1.0], 1, None),
    "beyond the largest number": Planted([1.0, 0.0], [0.0, 1.0], [-math.inf, 0.0], 1, None),
    "hardly downwards": Planted([1.0, 0.0], [0.0, 1.0], [0.995, -1.0], 1, None),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_restarts_where_a_direction_is_no_good(name: str) -> None:
    case = DIRECTIONS[name]
    run = Run(rosenbrock, [0.0, 0.0])
    g, last, d = (torch.tensor(v, dtype=torch.float64) for v in case[:3])
    run.memory.update(gradient=last, direction=d, count=case.iterations)
    direction, slope, count = run.optimiser._direction(g)
    assert slope == pytest.approx(float(g @ direction))
    assert count == (1 if case.slope is None else case.iterations + 1)
    if case.slope is None:
        assert torch.equal(direction, -g)
    else:
        assert slope == pytest.approx(case.slope)
        assert not torch.equal(direction, -g)


def test_a_factor_on_the_function_changes_little() -> None:
    """First and later guesses of the step follow the scale of function and slope."""
    counts = []
    for factor in (1e-6, 1.0, 1e6):
        run = Run(lambda x, c=factor: c * rosenbrock(x), [-1.2, 1.0], max_iter=500, tolerance_grad=1e-5 * factor)  # type: ignore[misc]
        run.step()
        assert run.gradient().abs().max() <= 1e-5 * factor
        counts.append(run.evaluations)
    assert max(counts) <= 1.1 * min(counts)


def test_guesses_of_the_step() -> None:
    run = Run(rosenbrock, [0.0, 0.0])
    assert run.optimiser._guess(-4.0) == 0.5  # a gradient of length 2, a step of length 1
    run.memory.update(length=2.0, slope=-3.0)
    assert run.optimiser._guess(-6.0) == 1.0  # as much descent, to first order, as last time


def test_at_the_minimum_nothing_moves() -> None:
    run = Run(rosenbrock, [1.0, 1.0])
    assert run.step() == 0.0
    assert run.evaluations == 1
    assert run.x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("start", [3.0, 0.1, 1e-3, 1e3])
def test_steps_back_from_where_the_function_ends(start: float) -> None:
    run = Run(lambda x: (x - x.log()).sum(), [start], max_iter=100)
    run.step()
    assert run.x.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("gradient", [math.nan, math.inf, -2.0])
def test_a_gradient_that_is_wrong_leaves_the_parameters_alone(gradient: float) -> None:
    """Not a number, or pointing the wrong way: nothing goes down, in one direction or in any number of steps."""
    x = nn.Parameter(torch.tensor([1.0]))
    optimiser = ConjugateGradients([x])

    def closure() -> float:
        x.grad = gradient * x.detach()
        return float(x.detach().square().sum())

    for _ in range(3):
        assert optimiser.step(closure) == 1.0
    assert x.item() == 1.0


def test_vanishing_gradients_end_the_run() -> None:
    x = nn.Parameter(torch.tensor([1e-25]))
    optimiser = ConjugateGradients([x], tolerance_grad=0.0)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = x.square().sum() + 1
        value.backward()
        return value

    assert optimiser.step(closure) == 1.0  # type: ignore[arg-type]


def test_parameters_without_gradient_stay() -> None:
    used, unused = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2, 3))
    optimiser = ConjugateGradients([unused, used])

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = used.square().sum()
        value.backward()
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    assert used.abs().max() < 1e-6
    assert torch.equal(unused, torch.ones(2, 3))


def test_a_copy_of_the_optimiser_goes_on_the_same() -> None:
    run = Run(rosenbrock, [-1.2, 1.0], max_iter=3)
    run.step()
    twin = copy.deepcopy(run)
    run.step()
    twin.step()
    assert torch.equal(run.x, twin.x)
    assert run.x is not twin.x


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Run(rosenbrock, [0.0], max_iter=0), r"max_iter is 0; a whole number of at least 1"),
    (lambda: Run(rosenbrock, [0.0], max_evals=2.5), r"max_evals is 2\.5; a whole number of at least 1"),
    (lambda: Run(rosenbrock, [0.0], tolerance_grad=-1), r"tolerance_grad is -1; a finite number of at least 0"),
    (lambda: ConjugateGradients([{"params": [nn.Parameter(torch.ones(1))]} for _ in "ab"]), r"params has 2 groups"),
    (lambda: CG("hinge", max_evals=0), r"max_evals is 0; a whole number of at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), SETTINGS)
def test_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# As a method of fit


def test_through_fit_it_reaches_scipys_minimum() -> None:
    x, y = blobs(80, 3, dtype=torch.float64)
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    result = fit(model, (x, y), CG("logistic"), max_sweeps=30, sinks=(), monitor="loss")
    sign = 2.0 * y - 1

    def f(w: Tensor) -> Tensor:
        return nn.functional.softplus(-sign * (x @ w[:3] + w[3])).mean()

    reference = scipys(f, [0.0] * 4)
    assert result.best["loss"] == pytest.approx(reference.fun, abs=1e-8)
    weights = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    np.testing.assert_allclose(weights.numpy(), reference.x, atol=1e-4)


@pytest.mark.parametrize("loss", ["cross_entropy", "one_vs_rest_hinge"])
def test_the_loss_of_a_net_never_rises(loss: str) -> None:
    result = fit(net(4, 8, 3), blobs(100, 4, 3), CG(loss), max_sweeps=40, sinks=())
    losses = [row["loss"] for row in result.history]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(losses))
    assert losses[-1] < 0.6 * losses[0]


def test_chunks_add_up_to_all_rows() -> None:
    x, y = blobs(100, 4, 3, dtype=torch.float64)
    models = [net(4, 8, 3, act=nn.Tanh, dtype=torch.float64) for _ in range(2)]
    for model, rows in zip(models, (16_384, 17), strict=True):
        fit(model, (x, y), CG("cross_entropy", chunk_rows=rows), max_sweeps=5, sinks=(), restore_best=False)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
