"""What preparing data costs: HIGGS against `gzip -dc`, and the HOG features of SVHN by one worker against two.

    python -m benchmarks.data_prepare --data-dir data --out benchmarks/results/data_prepare.json
    python -m benchmarks.data_prepare --data-dir data --parts hog

csv: the HIGGS training file, its rows repeated into one larger .csv.gz in a temporary folder, to verified and renamed
HDF5 files, against `gzip -dc FILE > /dev/null`; the two alternate. hog: features of all SVHN images under the data
folder, with the workers up, and the whole of `data prepare svhn`. Medians; a ratio above its target is what is wanted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from torch_admm.data.reader import ahead
from torch_admm.data.sources import AbstractSource, prepare
from torch_admm.data.sources.svhn import BLOCK, SVHN, read, workers
from torch_admm.data.sources.tables import Higgs

CSV_TARGET, HOG_TARGET = 0.5, 1.8


def timed(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def alternating(repeats: int, **tasks: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, after one round that does not count."""
    rounds = [{name: timed(task) for name, task in tasks.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in tasks}


def repeated(source: Path, target: Path, copies: int) -> tuple[int, int]:
    """One gzip member that holds the text of `source` several times; the bytes and lines of that text."""
    text = gzip.decompress(source.read_bytes())
    with gzip.open(target, "wb", compresslevel=6) as file:
        for _ in range(copies):
            file.write(text)
    return copies * len(text), copies * text.count(b"\n")


def made(source: AbstractSource, folder: Path, out: Path) -> None:
    prepare(source, folder, out, force=True, offline=True)


def measure_csv(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    (source,) = (folder / "higgs").glob("HIGGS_train_*.csv.gz")
    big = work / "big.csv.gz"
    text, rows = repeated(source, big, args.copies)
    command = ["gzip", "-dc", str(big)]
    seconds = alternating(
        args.repeats,
        gzip=lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True),
        prepare=lambda: made(Higgs(train=str(big), test_rows=50_000), folder, work),
    )
    return {
        "rows": rows,
        "text_mb": text / 1e6,
        "gz_mb": big.stat().st_size / 1e6,
        "seconds": seconds,
        "ratio": seconds["gzip"] / seconds["prepare"],
        "target": CSV_TARGET,
    }


def measure_hog(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    files = SVHN().files(folder, lambda remote: folder / remote.path)
    crops = np.concatenate([read(path, (0, 2))[0] for path in files])
    blocks = [crops[i : i + BLOCK] for i in range(0, len(crops), BLOCK)]
    with workers(1) as alone, workers(2) as both:
        seconds = alternating(
            args.repeats,
            one=lambda: [alone(block) for block in blocks],
            two=lambda: list(ahead(both, blocks, threads=2, most=4)),
        )
    whole = alternating(
        args.repeats, one=lambda: made(SVHN(workers=1), folder, work), two=lambda: made(SVHN(workers=2), folder, work)
    )
    return {
        "images": len(crops),
        "seconds": seconds,
        "ratio": seconds["one"] / seconds["two"],
        "prepare_seconds": whole,
        "prepare_ratio": whole["one"] / whole["two"],
        "target": HOG_TARGET,
    }


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], dict[str, Any]]] = {"csv": measure_csv, "hog": measure_hog}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--copies", type=int, default=12, help="of the HIGGS training rows in the larger file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON; parts that are not measured now are kept")
    args = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count()}
    for part in args.parts:
        work = Path(tempfile.mkdtemp(prefix="data_prepare"))
        try:
            results[part] = PARTS[part](args.data_dir, work, args)
        finally:
            shutil.rmtree(work)
        print(f"{part}: {json.dumps(results[part], indent=1)}")
    if args.out:
        before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        args.out.write_text(json.dumps({**before, **results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
