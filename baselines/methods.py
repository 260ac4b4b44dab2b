"""The methods of the comparison by name, each with its settings and the space they are searched in."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM

from .adam import Adam
from .cg import CG
from .lbfgs import LBFGS
from .sgd import SGD

__all__ = [
    "AVERAGE",
    "METHODS",
    "AbstractSpace",
    "Choice",
    "Entry",
    "Log",
    "Settings",
    "build",
    "entry",
    "known_methods",
]

Settings = dict[str, Any]

AVERAGE = "+average"  # after a method's name: averaged weights


class AbstractSpace(abc.ABC):
    """The values that one setting may take in a search."""

    values: tuple[Any, ...]  # of a grid

    @abc.abstractmethod
    def distribution(self) -> Any:
        """For Optuna."""


@final
@dataclass(frozen=True)
class Choice(AbstractSpace):
    """One of these."""

    values: tuple[Any, ...]

    def distribution(self) -> Any:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)


@final
@dataclass(frozen=True)
class Log(AbstractSpace):
    """Any number between the least and the greatest of `values`, on a logarithmic scale; a grid takes `values`."""

    values: tuple[float, ...]

    def distribution(self) -> Any:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(min(self.values), max(self.values), log=True)


@final
@dataclass(frozen=True)
class Entry:
    """How a method is made, `make(loss, **settings)`, and tuned; `fixed` settings belong to the name."""

    make: Callable[..., AbstractMethod]
    space: Mapping[str, AbstractSpace] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)  # in place of the problem's
    gradient: bool = True  # one of those that ADMM is compared with
    starts: tuple[Settings, ...] = ()  # settings that served well on other data: a search begins with them

    @property
    def known(self) -> list[str]:
        """The settings that may be given, all keyword-only."""
        parameters = inspect.signature(self.make).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in self.fixed]


def adam(
    loss: Any,
    *,
    lr: float = 1e-3,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    batch_size: int = 128,
    average: bool = False,
) -> AbstractMethod:
    """Adam with its second beta as a setting of its own."""
    betas = (0.9, beta2)
    return Adam(loss, lr=lr, betas=betas, weight_decay=weight_decay, batch_size=batch_size, average=average)


def adamw(
    loss: Any,
    *,
    lr: float = 1e-3,
    beta2: float = 0.999,
    weight_decay: float = 0.01,
    batch_size: int = 128,
    average: bool = False,
) -> AbstractMethod:
    """AdamW, with torch's own default of the decay."""
    options = {"weight_decay": weight_decay, "batch_size": batch_size, "average": average}
    return Adam(loss, lr=lr, betas=(0.9, beta2), decoupled=True, **options)  # type: ignore[arg-type]


def sgd(
    loss: Any,
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    batch_size: int = 128,
    average: bool = False,
) -> AbstractMethod:
    """SGD, where Nesterov's momentum may be asked for with any momentum, none included."""
    options = {"weight_decay": weight_decay, "batch_size": batch_size, "average": average}
    return SGD(loss, lr=lr, momentum=momentum, nesterov=nesterov and momentum != 0, **options)  # type: ignore[arg-type]


def table(names: str, *rows: tuple[Any, ...]) -> tuple[Settings, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


ADAM_SPACE: dict[str, AbstractSpace] = {
    "lr": Log((5e-4, 1e-3, 3e-3, 1e-2, 2e-2, 4e-2)),
    "beta2": Choice((0.99, 0.999)),
    "batch_size": Choice((64, 128, 256, 512, 1024, 4096)),
}
ADAM_STARTS = table(
    "lr beta2 batch_size",
    *((1e-3, 0.999, 64), (5e-3, 0.999, 256), (0.01, 0.99, 1024), (0.02, 0.99, 4096), (0.02, 0.999, 1024)),
    (0.04, 0.999, 1024),
)
SEARCHING_SPACE: dict[str, AbstractSpace] = {
    "max_evals": Choice((4, 10, 25)),
    "batch_size": Choice((None, 1024, 2048, 4096, 8192)),
    "hold": Choice((1, 3, 5, 10, 20)),
    "chunk_rows": Choice((1024, 4096, 16384)),
}
ANCHORED_SPACE: dict[str, AbstractSpace] = {
    "eta": Log((0.02, 0.04, 0.06, 0.1, 0.15)),
    "half_life": Log((50.0, 150.0, 500.0)),
    "momentum": Choice((0.5, 0.7, 0.8, 0.9)),
    "rho": Log((0.5, 2.0, 8.0)),
    "batch_size": Choice((128, 256, 512, 1024, 4096)),
}

METHODS: dict[str, Entry] = {
    "anchored": Entry(AnchoredADMM, gradient=False),  # nothing to search: this is the one that runs at its defaults
    "anchored-tuned": Entry(AnchoredADMM, ANCHORED_SPACE, gradient=False),
    "bregman": Entry(
        BregmanADMM,
        {
            "gamma": Log((0.3, 1.0, 3.0, 10.0)),
            "ridge": Choice((None, 1e-3, 1e-2, 1e-1)),
            "warm_start": Choice((3, 10, 30)),
            "multiplier": Choice(("paper", "consistent", "none")),
        },
        losses={"logistic": "hinge"},  # the paper's
        gradient=False,
    ),
    "sgd": Entry(
        sgd,
        {
            "lr": Log((0.03, 0.1, 0.3, 1.0, 3.0, 6.0)),
            "momentum": Choice((0.0, 0.5, 0.8, 0.9, 0.95)),
            "nesterov": Choice((False, True)),
            "batch_size": Choice((32, 64, 128, 256, 512, 1024, 2048)),
        },
        starts=table(
            "lr momentum nesterov batch_size",
            *((0.1, 0.9, False, 128), (0.2, 0.9, True, 256), (0.3, 0.95, True, 512), (1.0, 0.5, False, 512)),
            *((1.0, 0.9, False, 2048), (3.0, 0.5, False, 1024)),
        ),
    ),
    "adam": Entry(adam, ADAM_SPACE, starts=ADAM_STARTS),
    "adamw": Entry(adamw, {**ADAM_SPACE, "weight_decay": Log((1e-3, 1e-2, 1e-1))}),
    "lbfgs": Entry(
        LBFGS,
        {"history_size": Choice((5, 10, 20, 50, 100)), "lr": Log((0.3, 0.5, 1.0)), **SEARCHING_SPACE},
        starts=table(
            "history_size lr max_evals batch_size hold chunk_rows",
            *((50, 1.0, 25, 2048, 5, 4096), (50, 1.0, 25, 8192, 10, 4096), (20, 1.0, 25, None, 1, 4096)),
            *((10, 0.5, 10, 1024, 5, 1024), (100, 1.0, 10, None, 1, 4096)),
        ),
    ),
    "cg": Entry(
        CG,
        {"c2": Log((0.03, 0.1, 0.3)), **SEARCHING_SPACE},
        starts=table(
            "c2 max_evals batch_size hold chunk_rows",
            *((0.1, 4, 1024, 5, 4096), (0.1, 10, 4096, 20, 4096), (0.1, 25, None, 1, 4096), (0.3, 4, 4096, 10, 4096)),
            (0.3, 10, None, 1, 4096),
        ),
    ),
}


def known_methods() -> list[str]:
    """All names: those of METHODS, and with averaged weights where that is a switch."""
    return [*METHODS, *(f"{name}{AVERAGE}" for name, e in METHODS.items() if _averages(e))]


def entry(name: str) -> Entry:
    """The method of this name."""
    if name not in known_methods():
        raise ValueError(f"method is {name!r}; one of {', '.join(known_methods())} is expected")
    found = METHODS[name.removesuffix(AVERAGE)]
    if not name.endswith(AVERAGE):
        return found
    return replace(found, fixed={**found.fixed, "average": True})


def build(name: str, loss: str, settings: Mapping[str, Any]) -> AbstractMethod:
    """A fresh method for a problem with this loss."""
    found = entry(name)
    unknown = [key for key in settings if key not in found.known]
    if unknown:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; its settings are {', '.join(found.known)}")
    try:
        return found.make(found.losses.get(loss, loss), **settings, **found.fixed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _averages(e: Entry) -> bool:
    """Off unless asked for: AnchoredADMM averages anyway."""
    average = inspect.signature(e.make).parameters.get("average")
    return average is not None and average.default is False
