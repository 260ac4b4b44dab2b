"""The line search of conjugate gradients by itself: the strong Wolfe conditions, and sound where a line is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from baselines.line_search import Point, StrongWolfe, cubic_minimum

Line = Callable[[float], tuple[float, float]]  # value and slope

LINES: dict[str, Line] = {
    "parabola": lambda t: ((t - 1) ** 2, 2 * (t - 1)),
    "far minimum": lambda t: ((t / 1e4 - 1) ** 2, 2e-4 * (t / 1e4 - 1)),
    "flat valley": lambda t: (-t / (t * t + 2), (t * t - 2) / (t * t + 2) ** 2),  # Moré and Thuente's first
    "steep end": lambda t: ((t + 0.004) ** 5 - 2 * (t + 0.004) ** 4, 5 * (t + 0.004) ** 4 - 8 * (t + 0.004) ** 3),
    "waves": lambda t: (0.1 * math.sin(9 * t) - t + t * t / 8, 0.9 * math.cos(9 * t) - 1 + t / 4),
    "wall": lambda t: (-t - math.log(1 - t) / 9, -1 + 1 / (9 - 9 * t)) if t < 1 else (math.inf, math.nan),
    "no slope beyond": lambda t: ((t - 1) ** 2, 2 * (t - 1)) if t < 2 else (-9.0, math.nan),
    "bottomless beyond": lambda t: ((t - 1) ** 2, 2 * (t - 1)) if t < 2 else (-math.inf, -1.0),
}


def search_along(line: Line, step: float, max_evals: int = 30, c2: float = 0.1) -> tuple[Point, Point, int]:
    seen: list[float] = []

    def at(t: float) -> Point:
        seen.append(t)
        return Point(t, *line(t), torch.empty(0))

    start = Point(0.0, *line(0.0), torch.empty(0))
    found = StrongWolfe(at, start, c1=1e-4, c2=c2, max_evals=max_evals, precision=2**-52).search(step)
    return start, found, len(seen)


@pytest.mark.parametrize("step", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("name", LINES)
def test_strong_wolfe_conditions_hold(name: str, step: float) -> None:
    start, found, evaluations = search_along(LINES[name], step)
    assert found.step > 0
    assert found.value <= start.value + 1e-4 * found.step * start.slope
    assert abs(found.slope) <= 0.1 * abs(start.slope)
    assert (found.value, found.slope) == LINES[name](found.step)
    assert evaluations <= 20


def test_a_good_guess_is_taken_at_once() -> None:
    _, found, evaluations = search_along(LINES["parabola"], 1.05)
    assert (found.step, evaluations) == (1.05, 1)


def test_a_parabola_takes_one_interpolation() -> None:
    _, found, evaluations = search_along(LINES["parabola"], 1.7)
    assert found.step == pytest.approx(1.0)
    assert evaluations == 2


def test_interpolations_that_creep_give_way_to_bisection() -> None:
    """Steep on the right, hardly sloping on the left: cubics alone take 11 evaluations."""

    def lopsided(t: float) -> tuple[float, float]:
        root = math.hypot(t - 1, 0.01)
        return root + 0.98 * (t - 1), (t - 1) / root + 0.98

    _, found, evaluations = search_along(lopsided, 1.3)
    assert abs(found.slope) <= 0.1 * abs(lopsided(0.0)[1])
    assert evaluations <= 8


def test_at_a_kink_the_lowest_point_is_kept() -> None:
    """The slope of |t - 1| is never small: the search ends by its budget, close to the kink."""
    _, found, evaluations = search_along(lambda t: (abs(t - 1), math.copysign(1, t - 1)), 3.0)
    assert found.value < 1e-3
    assert evaluations == 30


def test_nowhere_lower_is_the_start() -> None:
    start, found, _ = search_along(lambda t: (t, -1.0), 1.0)
    assert found == start


def test_without_end_the_last_point_is_kept() -> None:
    _, found, evaluations = search_along(lambda t: (-t, -1.0), 1.0, max_evals=5)
    assert (found.step, evaluations) == (1e4, 5)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (1.0, 0.0), (-2.0, 3.0), (5.0, 6.0)])
@pytest.mark.parametrize("bend", [1.0, -0.02, 0.0])
def test_cubic_minimum_of_a_cubic(bend: float, ends: tuple[float, float]) -> None:
    """bend (t - 2)^3 + (t - 2)^2 has its local minimum at 2."""

    def at(t: float) -> Point:
        s = t - 2
        return Point(t, bend * s**3 + s**2, 3 * bend * s**2 + 2 * s, torch.empty(0))

    assert cubic_minimum(at(ends[0]), at(ends[1])) == pytest.approx(2.0)


@pytest.mark.parametrize("value", [(1.0, 1.0), (math.nan, 0.0), (math.inf, 0.0), (2.0, 4.0)])
def test_no_cubic_minimum(value: tuple[float, float]) -> None:
    """A straight line, values that are none, and a cubic that only rises."""
    assert math.isnan(cubic_minimum(Point(0.0, 0.0, 1.0, torch.empty(0)), Point(1.0, *value, torch.empty(0))))
