"""What a search tries next: all combinations of a grid, or what Optuna suggests."""

from __future__ import annotations

import abc
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, final

from .journal import Record
from .methods import AbstractSpace, Choice, Settings
from .ranking import score

__all__ = ["SAMPLERS", "AbstractSampler", "Grid", "Tpe"]


class AbstractSampler(abc.ABC):
    """Says what to try next, and hears how it went."""

    @abc.abstractmethod
    def ask(self) -> Settings | None:
        """The next settings; None when there are no more."""

    @abc.abstractmethod
    def tell(self, settings: Settings, record: Record) -> None:
        """A trial has ended, now or in an earlier run."""


@final
class Grid(AbstractSampler):
    """All combinations, in an order drawn by the seed; those tried before are left out."""

    def __init__(self, space: Mapping[str, AbstractSpace], seed: int) -> None:
        """An empty space has one combination: none."""
        combinations = itertools.product(*(part.values for part in space.values()))
        self.left = [dict(zip(space, values, strict=True)) for values in combinations]
        random.Random(seed).shuffle(self.left)

    def ask(self) -> Settings | None:
        return self.left.pop() if self.left else None

    def tell(self, settings: Settings, record: Record) -> None:
        self.left = [other for other in self.left if other != settings]


@final
class Tpe(AbstractSampler):
    """Optuna's tree-structured Parzen estimator; the study lives in memory and is told what the journal has."""

    def __init__(self, space: Mapping[str, AbstractSpace], seed: int) -> None:
        """The seed draws the first settings."""
        try:
            import optuna
        except ImportError as error:
            raise ImportError('the sampler tpe needs Optuna: pip install "torch-admm[compare]"') from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
        self.study: Any = optuna.create_study(sampler=sampler)
        self.space = {name: part.distribution() for name, part in space.items()}
        self.running: dict[str, Any] = {}

    def ask(self) -> Settings | None:
        """Trials that still run count as bad ones, so that two at a time do not try the same."""
        trial = self.study.ask(self.space)
        self.running[json.dumps(trial.params, sort_keys=True)] = trial
        return dict(trial.params)

    def tell(self, settings: Settings, record: Record) -> None:
        import optuna

        running = self.running.pop(json.dumps(settings, sort_keys=True), None)
        if running is not None:
            self.study.tell(running, _cost(record))
        elif self._fits(settings):
            self.study.add_trial(optuna.create_trial(params=settings, distributions=self.space, value=_cost(record)))

    def _fits(self, settings: Settings) -> bool:
        """A grid's settings serve too, unless the space has changed since."""
        return settings.keys() == self.space.keys() and all(
            d._contains(d.to_internal_repr(settings[name])) for name, d in self.space.items()
        )


def _cost(record: Record) -> float:
    """One number for Optuna, ordered as `score`: those that never got there come last, by what was missing."""
    seconds, missing = score(record)
    return math.log(seconds) if math.isfinite(seconds) else 10.0 + 10.0 * min(missing, 1.0)


def _tpe_or_grid(space: Mapping[str, AbstractSpace], seed: int) -> AbstractSampler:
    """Where there are choices only, and so no scale to learn anything from, a grid never tries the same twice."""
    kind: type[Grid] | type[Tpe] = Grid if all(isinstance(part, Choice) for part in space.values()) else Tpe
    return kind(space, seed)


Sampler = Callable[[Mapping[str, AbstractSpace], int], AbstractSampler]
SAMPLERS: dict[str, Sampler] = {"tpe": _tpe_or_grid, "grid": Grid}
