"""A line search for the strong Wolfe conditions: find a bracket, then zoom in by cubic interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, final

from torch import Tensor

__all__ = ["Point", "StrongWolfe", "cubic_minimum"]

GROWTH = 10.0  # a step that is still going down grows by this factor at most
MARGIN = 0.1  # a trial keeps this share of the bracket away from its ends
SHRINK = 2 / 3  # a trial that leaves more of the bracket than this is followed by a bisection


class Point(NamedTuple):
    """What is known at one step along the direction: value, slope along it, and the whole gradient."""

    step: float
    value: float
    slope: float
    gradient: Tensor


@final
class StrongWolfe:
    """Looks along one direction for a step t with, in terms of phi(t) and phi'(t) and where it goes down at 0,

    phi(t) <= phi(0) + c1 t phi'(0)   and   |phi'(t)| <= c2 |phi'(0)|.
    """

    def __init__(
        self, at: Callable[[float], Point], start: Point, *, c1: float, c2: float, max_evals: int, precision: float
    ) -> None:
        """`at` evaluates a step, `start` is step 0; differences below `precision` of a value are rounding."""
        self.at, self.start, self.c1, self.c2 = at, start, c1, c2
        self.left, self.precision = max_evals, precision

    def search(self, step: float) -> Point:
        """The first point found that meets both conditions, tried from `step` on.

        Where there is none (a kink, the limit of precision), the lowest that met the first condition: `start` at worst.
        """
        low, high = self._bracket(step)
        return low if high is None else self._zoom(low, high)

    def _bracket(self, step: float) -> tuple[Point, Point | None]:
        """The lower and the other end of an interval that has a point as wanted; or that point, and None."""
        last = self.start
        while self.left:
            point = self._evaluate(step)
            if self._is_wanted(point, last):
                return point, None
            if not self._lowers(point) or point.value >= last.value:
                return last, point
            if point.slope >= 0:
                return point, last
            last, step = point, self._further(last, point)
        return last, None

    def _zoom(self, low: Point, high: Point) -> Point:
        """`low` stays the lowest point that meets the first condition, and goes down towards `high`."""
        width = math.inf
        while self.left and abs(high.step - low.step) * abs(low.slope) > self._noise(low):
            last_width, width = width, abs(high.step - low.step)
            point = self._evaluate(_between(low, high, bisect=width > SHRINK * last_width))
            if self._is_wanted(point, low):
                return point
            if not self._lowers(point) or point.value >= low.value:
                high = point
            else:
                if point.slope * (high.step - low.step) >= 0:
                    high = low
                low = point
        return low

    def _evaluate(self, step: float) -> Point:
        self.left -= 1
        return self.at(step)

    def _lowers(self, point: Point) -> bool:
        """The first condition; a point that is not finite never meets it."""
        bound = self.start.value + self.c1 * point.step * self.start.slope
        return math.isfinite(point.value) and math.isfinite(point.slope) and point.value <= bound

    def _is_wanted(self, point: Point, low: Point) -> bool:
        """Both conditions; and no higher than `low`, but for rounding: close to a minimum values no longer differ."""
        flat = abs(point.slope) <= self.c2 * abs(self.start.slope)
        return flat and self._lowers(point) and point.value <= low.value + self._noise(low)

    def _noise(self, low: Point) -> float:
        return self.precision * max(abs(self.start.value), abs(low.value))

    @staticmethod
    def _further(last: Point, point: Point) -> float:
        """Where the cubic has its minimum ahead of `point`; where it has none there, as far as is allowed."""
        step, nearest, furthest = cubic_minimum(last, point), (1 + MARGIN) * point.step, GROWTH * point.step
        return min(max(step, nearest), furthest) if step > point.step else furthest


def _between(low: Point, high: Point, *, bisect: bool) -> float:
    left, right = sorted((low.step, high.step))
    margin, step = MARGIN * (right - left), cubic_minimum(low, high)
    if bisect or math.isnan(step):
        return (left + right) / 2
    return min(max(step, left + margin), right - margin)


def cubic_minimum(a: Point, b: Point) -> float:
    """Where the cubic with the values and slopes of `a` and `b` has its local minimum; NaN if it has none."""
    width = b.step - a.step
    if not width or not all(map(math.isfinite, (a.value, a.slope, b.value, b.slope))):
        return math.nan
    mean = a.slope + b.slope - 3 * (b.value - a.value) / width
    root = mean * mean - a.slope * b.slope
    root = math.copysign(math.sqrt(root), width) if root >= 0 else math.nan
    below = b.slope - a.slope + 2 * root
    return b.step - width * (b.slope + root - mean) / below if below else math.nan
