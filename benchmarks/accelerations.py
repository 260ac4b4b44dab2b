"""What momentum, over-relaxation and Anderson acceleration do for full-batch sweeps: sweeps until a test accuracy.

    python -m benchmarks.accelerations --data-dir .cache/prepared --out benchmarks/results/accelerations.json

Over-relaxation (Eckstein and Bertsekas, 1992) goes alpha times as far as the output step says. Anderson acceleration
(type II) replaces W by the combination of the last iterates whose steps, combined alike, are shortest. It is tried on
AnchoredADMM, with and without momentum. In Algorithm 1 every sweep solves for W anew from a and z, so mixed weights
would be forgotten at once: there over-relaxation only. Sweeps, not seconds; medians over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

import torch_admm
from baselines.problems import Data, load
from benchmarks.kernels import network
from torch_admm.losses import AbstractLoss, loss_of
from torch_admm.method import AbstractMethod

ANCHORED = {"higgs": ([28, 300, 1], 0.69), "svhn": ([648, 100, 50, 1], 0.97)}
BREGMAN = {"higgs": ([28, 300, 1], 0.64), "svhn": ([648, 100, 50, 1], 0.95)}


@final
class OverRelaxed(AbstractLoss):
    """A loss whose proximal step goes alpha times as far."""

    name: ClassVar[str] = "over-relaxed"
    exact: ClassVar[bool] = False
    metric: ClassVar[str] = "accuracy"

    def __init__(self, loss: str, alpha: float) -> None:
        """Wrap a loss of accuracy."""
        self.loss, self.alpha = loss_of(loss), alpha

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z, y)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        return torch.lerp(v, self.loss.prox(v, y, beta), self.alpha)

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        return self.loss.encode(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        return self.loss.predict(z)

    def score(self, z: Tensor, y: Tensor) -> float:
        return self.loss.score(z, y)


@final
class Anderson(AbstractMethod):
    """AnchoredADMM whose weights are mixed after every sweep, from the last `window` sweeps."""

    def __init__(self, inner: torch_admm.AnchoredADMM, window: int) -> None:
        """Wrap a method that does not average."""
        self.inner, self.loss = inner, inner.loss
        self.images: deque[Tensor] = deque(maxlen=window + 1)
        self.moves: deque[Tensor] = deque(maxlen=window + 1)

    def init(self, problem: Any, rows: Any, *, batch_size: int | None, seed: int) -> None:
        self.inner.init(problem, rows, batch_size=batch_size, seed=seed)

    def step(self) -> None:
        before = self._flat()
        self.inner.step()
        after = self._flat()
        self.images.append(after)
        self.moves.append(after - before)
        if len(self.moves) > 1:
            moves, images = torch.stack(tuple(self.moves)), torch.stack(tuple(self.images))
            mix = torch.linalg.lstsq(moves.diff(dim=0).T, moves[-1].unsqueeze(1)).solution
            self._set(after - (images.diff(dim=0).T @ mix).squeeze(1))

    def weights(self) -> dict[int, Tensor]:
        return self.inner.weights()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def _flat(self) -> Tensor:
        return torch.cat([W.flatten() for W in self.inner.W.values()]).double()

    def _set(self, flat: Tensor) -> None:
        for W, part in zip(self.inner.W.values(), flat.split([W.numel() for W in self.inner.W.values()]), strict=True):
            W.copy_(part.view_as(W))


def anchored(alpha: float = 1.0, window: int = 0, **settings: Any) -> AbstractMethod:
    loss = "logistic" if alpha == 1 else OverRelaxed("logistic", alpha)
    method = torch_admm.AnchoredADMM(loss, batch_size="full", **settings)
    return Anderson(method, window) if window else method


def bregman(alpha: float = 1.0) -> AbstractMethod:
    loss = "hinge" if alpha == 1 else OverRelaxed("hinge", alpha)
    return torch_admm.BregmanADMM(loss, gamma=1.0, ridge=0.01)


Make = Callable[[], AbstractMethod]
VARIANTS: dict[str, tuple[dict[str, tuple[list[int], float]], Make]] = {
    "AnchoredADMM, full batch": (ANCHORED, anchored),
    "without averaging": (ANCHORED, lambda: anchored(average=False)),
    "without averaging and momentum": (ANCHORED, lambda: anchored(average=False, momentum=0.0)),
    "the same, Anderson over 3 sweeps": (ANCHORED, lambda: anchored(average=False, momentum=0.0, window=3)),
    "the same, Anderson over 8 sweeps": (ANCHORED, lambda: anchored(average=False, momentum=0.0, window=8)),
    "without averaging, Anderson over 3 sweeps": (ANCHORED, lambda: anchored(average=False, window=3)),
    "over-relaxed by 1.5": (ANCHORED, lambda: anchored(alpha=1.5)),
    "over-relaxed by 1.8": (ANCHORED, lambda: anchored(alpha=1.8)),
    "`BregmanADMM(gamma=1, ridge=0.01)`": (BREGMAN, bregman),
    "Algorithm 1 over-relaxed by 1.5": (BREGMAN, lambda: bregman(1.5)),
    "Algorithm 1 over-relaxed by 1.8": (BREGMAN, lambda: bregman(1.8)),
}


def run(data: Data, widths: list[int], target: float, make: Make, seed: int, sweeps: int) -> float:
    """Sweeps to the target, or infinity."""
    torch.manual_seed(seed)
    stop = torch_admm.Target(target)
    result = torch_admm.fit(
        network(widths), data.train, make(), max_sweeps=sweeps, evaluate=data.test, stop=stop, seed=seed, sinks=()
    )
    last = result.history[-1]
    return last["sweep"] if last["test_accuracy"] >= target else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="of the prepared files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweeps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = {name: load(name, args.data_dir) for name in ANCHORED}
    results: dict[str, dict[str, float | None]] = {}
    for variant, (problems, make) in VARIANTS.items():
        row: dict[str, float | None] = {}
        for name, (widths, target) in problems.items():
            runs = [run(data[name], widths, target, make, seed, args.sweeps) for seed in range(args.seeds)]
            sweeps = statistics.median(runs)
            row[f"{name} {target:.0%}"] = None if math.isinf(sweeps) else sweeps
        results[variant] = row
        print(f"{variant:45} {row}", flush=True)
    if args.out:
        record = {"torch": torch.__version__, "seeds": args.seeds, "sweeps": args.sweeps, "results": results}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
