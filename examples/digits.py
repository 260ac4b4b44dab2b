"""All methods on scikit-learn's embedded digits, from the same start, with a table and a report.

    make demo
    python -m examples.digits --seeds 1 2 3 --seconds 2 --out runs/demo

1,797 real 8 x 8 images of digits, a quarter of them held out, a 64-64-10 ReLU net. `anchored` is AnchoredADMM at its
defaults, `bregman` the paper's Algorithm 1; they and the gradient methods run one after another, each in a process of
its own. It is `python -m baselines.compare --problem digits` with little time for each. Needs the extra `compare`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from baselines import compare, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(problems.task("digits").methods))
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--seconds", default="0.7", help="of training for every method and seed")
    parser.add_argument("--threads", default="1", help="more do not pay on a net this small")
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo", help="made anew every time")
    args = parser.parse_args(argv)

    shutil.rmtree(args.out, ignore_errors=True)  # a demonstration that finds everything done already shows nothing
    data = problems.load("digits", None)
    print(
        f"digits: {len(data.train[0])} training rows, {len(data.test[0])} test rows, net {problems.task('digits').net}"
    )
    print(f"{len(args.methods)} methods, {len(args.seeds)} seeds, {args.seconds} s of training each\n", flush=True)
    options = {"--methods": args.methods, "--seeds": args.seeds}
    lists = [text for name, values in options.items() for text in (name, *values)]
    rest = ["--seconds", args.seconds, "--threads", args.threads, "--out", str(args.out)]
    return compare.main(["--problem", "digits", *lists, *rest])


if __name__ == "__main__":
    sys.exit(main())
