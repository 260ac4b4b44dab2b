"""Train a small net on scikit-learn's embedded digits with ADMM, L-BFGS and SGD, all from the same start.

    make demo
    python -m examples.digits --sweeps 60 --seed 1

1,797 real 8 x 8 images of digits, a quarter of them held out, a 64-64-10 ReLU net. Needs the extra `sklearn`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import torch_admm
from baselines import LBFGS, SGD

Data = tuple[np.ndarray, np.ndarray]


def digits(seed: int) -> tuple[Data, Data]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    return (images[train], labels[train]), (images[test], labels[test])


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train, test = digits(args.seed)
    methods: dict[str, tuple[torch_admm.AbstractMethod, int]] = {
        "ADMM (anchored)": (torch_admm.AnchoredADMM("cross_entropy"), args.sweeps),
        "ADMM (Algorithm 1)": (torch_admm.BregmanADMM("cross_entropy", gamma=1.0), args.sweeps),
        "L-BFGS": (LBFGS("cross_entropy"), args.sweeps),
        "SGD": (SGD("cross_entropy", lr=0.1), args.sweeps),
    }
    print(f"digits: {len(train[0])} training rows, {len(test[0])} test rows, net 64-64-10\n")
    table = []
    for name, (method, sweeps) in methods.items():
        result = torch_admm.fit(
            network(args.seed),
            train,
            method,
            max_sweeps=sweeps,
            evaluate=test,
            sinks=torch_admm.ProgressBar(f"{name:20s}", always=True),
            seed=args.seed,
        )
        table.append((name, result.best))
    print(f"\n{'method':20s} {'best test accuracy':>18s} {'at sweep':>9s} {'after':>8s}")
    for name, best in table:
        print(f"{name:20s} {best['test_accuracy']:17.1%} {best['sweep']:9.0f} {best['seconds']:7.2f}s")


if __name__ == "__main__":
    main()
