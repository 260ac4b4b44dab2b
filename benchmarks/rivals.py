"""Gradient methods as bare torch loops, as lean as a hand-written script, and the settings they are tuned over.

Neither the loop nor the losses of torch_admm are used. A rival is a function of a model, a task, a seed and settings
that gives back `step`: one training step with all it takes, fetching the batch too. SGD and Adam are torch's fused
ones. L-BFGS and CG evaluate in chunks of the size that is fastest on the machine, and look up what they have evaluated.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from baselines.cg import ConjugateGradients

__all__ = ["CRITERIA", "GRIDS", "RIVALS", "Settings", "Step", "Task", "batches", "fastest_chunk", "start"]

Step = Callable[[], None]
Settings = dict[str, Any]

CHUNKS = (1024, 2048, 4096, 8192, 16384)
LONGEST_MEMORY = 0.99  # what the average of the weights keeps of itself at most


@dataclass(frozen=True)
class Task:
    """Training rows, and the loss of outputs and labels: `criterion(z, y, reduction=...)`."""

    x: Tensor
    y: Tensor
    criterion: Callable[..., Tensor]
    chunk: int


def batches(x: Tensor, y: Tensor, size: int | None, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows for ever, or shuffled batches epoch after epoch; the odd rows at an epoch's end are left out."""
    generator = torch.Generator().manual_seed(seed)
    while size is None or size >= len(x):
        yield x, y
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(size)[: len(x) // size]:
            yield x.index_select(0, rows), y.index_select(0, rows)


def start(rival: str, model: nn.Module, task: Task, seed: int, settings: Settings) -> tuple[Step, nn.Module]:
    """One training step, and the model to evaluate: the one trained, or its average over steps."""
    settings = dict(settings)
    average = settings.pop("average")
    step = RIVALS[rival](model, task, seed, **settings)
    return averaged(step, model) if average else (step, model)


def averaged(step: Step, model: nn.Module) -> tuple[Step, nn.Module]:
    """Exponential average, with a short memory while the weights still move far."""
    mean = copy.deepcopy(model).requires_grad_(False)
    means, weights = ([p.detach() for p in m.parameters()] for m in (mean, model))
    number = count(1)

    def both() -> None:
        step()
        k = next(number)
        torch._foreach_lerp_(means, weights, 1 - min(LONGEST_MEMORY, (1 + k) / (10 + k)))

    return both, mean


def sgd(model: nn.Module, task: Task, seed: int, *, lr: float, momentum: float, batch: int) -> Step:
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, fused=True)
    return stochastic(model, task, seed, optimiser, batch)


def adam(model: nn.Module, task: Task, seed: int, *, lr: float, batch: int, beta2: float = 0.999) -> Step:
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, beta2), fused=True)
    return stochastic(model, task, seed, optimiser, batch)


def stochastic(model: nn.Module, task: Task, seed: int, optimiser: torch.optim.Optimizer, batch: int) -> Step:
    fetch = batches(task.x, task.y, batch, seed)

    def step() -> None:
        x, y = next(fetch)
        optimiser.zero_grad(set_to_none=True)
        task.criterion(model(x), y).backward()
        optimiser.step()

    return step


def lbfgs(
    model: nn.Module, task: Task, seed: int, *, history: int, lr: float, batch: int | None, hold: int = 1
) -> Step:
    """`lr` is where the line search starts; torch takes its evaluations from max_eval, whose default leaves none."""
    optimiser = torch.optim.LBFGS(
        model.parameters(), lr=lr, max_iter=1, max_eval=26, history_size=history, line_search_fn="strong_wolfe"
    )
    return searching(model, task, seed, optimiser, batch, hold)


def cg(model: nn.Module, task: Task, seed: int, *, evals: int, batch: int | None, hold: int = 1) -> Step:
    optimiser = ConjugateGradients(model.parameters(), max_iter=1, max_evals=evals, tolerance_grad=0.0)
    return searching(model, task, seed, optimiser, batch, hold)


def searching(model: nn.Module, task: Task, seed: int, optimiser: Any, batch: int | None, hold: int) -> Step:
    """One iteration with its line search; a batch serves `hold` iterations.

    An iteration begins with an evaluation where the last one ended: that is looked up, as long as the batch lasts.
    """
    fetch, number = batches(task.x, task.y, batch, seed), count()
    parameters, x, y = list(model.parameters()), task.x, task.y
    seen: deque[tuple[Tensor, float, list[Tensor | None]]] = deque(maxlen=4)

    def closure() -> float:
        at = parameters_to_vector(parameters).detach()
        found = next((point for point in reversed(seen) if torch.equal(point[0], at)), None)
        if found is None:
            value = gradient(model, x, y, task.criterion, task.chunk)
            found = at, value, [p.grad for p in parameters]
            seen.append(found)
        for p, grad in zip(parameters, found[2], strict=True):
            p.grad = grad
        return found[1]

    def step() -> None:
        nonlocal x, y
        if batch is not None and next(number) % hold == 0:
            x, y = next(fetch)
            seen.clear()
        optimiser.step(closure)

    return step


def gradient(model: nn.Module, x: Tensor, y: Tensor, criterion: Callable[..., Tensor], chunk: int) -> float:
    """The mean loss; its gradient is left in the parameters."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for part, labels in zip(x.split(chunk), y.split(chunk), strict=True):
        loss = criterion(model(part), labels, reduction="sum") / len(x)
        loss.backward()
        total += loss.detach()
    return float(total)


def fastest_chunk(model: nn.Module, task: Task, repeats: int = 3) -> int:
    times = dict.fromkeys(CHUNKS, float("inf"))
    for _ in range(repeats):
        for chunk in CHUNKS:
            begin = perf_counter()
            gradient(model, task.x, task.y, task.criterion, chunk)
            times[chunk] = min(times[chunk], perf_counter() - begin)
    return min(times, key=lambda chunk: times[chunk])


def logistic(z: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return functional.binary_cross_entropy_with_logits(z.squeeze(1), y, reduction=reduction)


def grid(**choices: list[Any]) -> list[Settings]:
    """All combinations, each with and without averaging."""
    names = [*choices, "average"]
    return [dict(zip(names, values, strict=True)) for values in product(*choices.values(), [False, True])]


CRITERIA: dict[str, Callable[..., Tensor]] = {"logistic": logistic, "cross_entropy": functional.cross_entropy}
RIVALS: dict[str, Callable[..., Step]] = {"sgd": sgd, "adam": adam, "lbfgs": lbfgs, "cg": cg}

# By what a problem leaves open: "any" batch size, mini-batches of 4,096 only (all rows are allowed), "all" rows only.
GRIDS: dict[str, dict[str, list[Settings]]] = {
    "any": {
        "sgd": [
            *grid(lr=[0.03], momentum=[0.9], batch=[32, 128]),
            *grid(lr=[0.1, 0.3, 1.0], momentum=[0.5, 0.9], batch=[32, 128, 512, 2048]),
            *grid(lr=[3.0, 6.0], momentum=[0.5], batch=[512, 1024, 2048]),
        ],
        "adam": grid(lr=[1e-3, 3e-3, 1e-2, 2e-2, 4e-2], batch=[64, 256, 1024, 4096]),
        "lbfgs": [
            *grid(history=[10, 50], lr=[0.5, 1.0], batch=[None]),
            *grid(history=[10, 50], lr=[1.0], batch=[1024, 2048, 8192], hold=[5, 20]),
        ],
        "cg": [*grid(evals=[4, 10, 25], batch=[None]), *grid(evals=[4, 10], batch=[1024, 4096], hold=[1, 5, 20])],
    },
    "4096": {
        "sgd": grid(lr=[0.1, 0.3, 1.0, 2.0], momentum=[0.8, 0.9, 0.95], batch=[4096]),
        "adam": grid(lr=[1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 4e-2], beta2=[0.99, 0.999], batch=[4096]),
        "lbfgs": [
            *grid(history=[10, 50], lr=[0.5, 1.0], batch=[None]),
            *grid(history=[10, 50], lr=[0.5, 1.0], batch=[4096], hold=[3, 10]),
        ],
        "cg": [*grid(evals=[4, 10, 25], batch=[None]), *grid(evals=[4, 10, 25], batch=[4096], hold=[1, 3, 10])],
    },
    "all": {"lbfgs": grid(history=[5, 10, 20, 50, 100], lr=[0.5, 1.0], batch=[None])},
}
