"""AnchoredADMM at its defaults on data that its constants were not chosen on, against Adam at three rates.

    python -m benchmarks.other_data --out benchmarks/results/other_data.json

Nine data sets of scikit-learn, embedded or made: 2 to 3,000 features, 133 to 15,000 training rows, raw units from 1e-6
to 1e6, two to ten classes or a number to predict; five nets each, 10 to 1,000 units wide, one to six hidden layers. The
score is the best test accuracy (or R squared) of any epoch, the same number of epochs for all; Adam's is that of the
best of its rates, with weight averaging, on inputs standardised for it. A difference counts where it is larger than one
standard error of the score on the test rows. A quarter of the rows is held out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

import torch_admm
from baselines.adam import Adam
from torch_admm.method import AbstractMethod

HIDDEN: tuple[tuple[int, ...], ...] = ((10,), (100,), (1000,), (64, 64, 64), (32,) * 6)
RATES = (1e-3, 3e-3, 1e-2)
EPOCHS = 15
Pair = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """A data set; `outputs` 0 stands for a number to predict."""

    name: str
    train: Pair
    test: Pair
    outputs: int

    @property
    def loss(self) -> str:
        return {0: "squared", 1: "logistic"}.get(self.outputs, "cross_entropy")

    @property
    def score(self) -> str:
        return "test_accuracy" if self.outputs else "test_r2"


def case(name: str, data: Any, outputs: int) -> Case:
    x, y = data
    features = torch.as_tensor(np.asarray(x, np.float32))
    target = torch.as_tensor(y).long() if outputs else torch.as_tensor((y - y.mean()) / y.std()).float().unsqueeze(1)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    parts = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    train, test = ((features[part], target[part]) for part in parts)
    return Case(name, train, test, outputs)


def cases() -> Iterator[Case]:
    yield case("digits", datasets.load_digits(return_X_y=True), 10)
    yield case("breast cancer", datasets.load_breast_cancer(return_X_y=True), 1)
    yield case("wine", datasets.load_wine(return_X_y=True), 3)
    yield case("diabetes", datasets.load_diabetes(return_X_y=True), 0)
    yield case("friedman", datasets.make_friedman1(3000, 10, noise=1.0, random_state=0), 0)
    yield case("moons", datasets.make_moons(2000, noise=0.25, random_state=0), 1)
    options: dict[str, Any] = {"random_state": 0}
    five = datasets.make_classification(
        5000, 50, n_informative=12, n_classes=5, n_clusters_per_class=3, class_sep=1.0, **options
    )
    yield case("five classes", five, 5)
    yield case("3,000 features", datasets.make_classification(600, 3000, n_informative=20, **options), 1)
    x, y = datasets.make_classification(20_000, 20, n_informative=10, n_clusters_per_class=8, random_state=1)
    yield case("units 1e-6 to 1e6", (x * np.logspace(-6, 6, 20), y), 1)


def network(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def score(data: Case, hidden: tuple[int, ...], method: AbstractMethod) -> float:
    model = network((data.train[0].shape[1], *hidden, max(1, data.outputs)))
    result = torch_admm.fit(model, data.train, method, max_sweeps=EPOCHS, evaluate=data.test, sinks=())
    return result.best[data.score]


def standardised(data: Case) -> Case:
    mean, scale = data.train[0].mean(0), data.train[0].std(0).clamp_min(1e-12)
    train, test = (((x - mean) / scale, y) for x, y in (data.train, data.test))
    return data._replace(train=train, test=test)


def standard_error(data: Case, ours: float, other: float) -> float:
    """Of an accuracy; for R squared as if it were one, which is about as much."""
    middle = min(0.99, max(0.01, (ours + other) / 2))
    return float((middle * (1 - middle) / len(data.test[0])) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: list[dict[str, Any]] = []
    for data in cases():
        for hidden in HIDDEN:
            ours = score(data, hidden, torch_admm.AnchoredADMM(data.loss))
            adam = (Adam(data.loss, lr=rate, batch_size=64, average=True) for rate in RATES)
            best, rate = max((score(standardised(data), hidden, method), method.lr) for method in adam)
            row = {"data": data.name, "hidden": hidden, "ours": ours, "adam": best, "rate": rate}
            results.append(row | {"error": standard_error(data, ours, best)})
            print(
                f"{data.name:18} {'-'.join(map(str, hidden)):18} ours {ours:.4f}  Adam {best:.4f} at {rate:g}",
                flush=True,
            )
    better = sum(r["ours"] > r["adam"] + r["error"] for r in results)
    worse = sum(r["ours"] < r["adam"] - r["error"] for r in results)
    print(f"better {better}, about equal {len(results) - better - worse}, worse {worse}")
    if args.out:
        record = {"torch": torch.__version__, "epochs": EPOCHS, "rates": RATES, "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
