"""What preparing and reading data costs, against what the system's own tools take.

    python -m benchmarks.data --data-dir data --out benchmarks/results/data.json
    python -m benchmarks.data --data-dir data --parts hog

csv: the HIGGS training file, its rows repeated into one larger .csv.gz, to verified and renamed HDF5 files, against
`gzip -dc FILE > /dev/null`. hog: features of all SVHN images under the data folder by two workers against one, with the
workers up, and the whole of `data prepare svhn`. stream: 10,500,000 x 28 synthetic rows in an HDF5 file, in chunks and
in shuffled batches, to a consumer that does nothing, against `cat FILE > /dev/null`, the file being warm. memory: the
peak of processes that read or prepare rows, few and many, beyond what they have before.

The two sides alternate; medians. A ratio above its target is what is wanted. Files go to a temporary folder, 1.3 GB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

import torch_admm
from torch_admm.data import AbstractRows, rows_of
from torch_admm.data.reader import ahead
from torch_admm.data.sources import AbstractSource, prepare
from torch_admm.data.sources.svhn import BLOCK, SVHN, read, workers
from torch_admm.data.sources.synthetic import Synthetic
from torch_admm.data.sources.tables import Higgs

TARGETS = {"csv": 0.5, "hog": 1.8, "stream": 0.7}
CHUNK, BATCH = 4096, 512
FEW = 1_000_000  # rows whose peak memory is held against that of all


def timed(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def alternating(repeats: int, **tasks: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, after one round that does not count."""
    rounds = [{name: timed(task) for name, task in tasks.items()} for _ in range(repeats + 1)]
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in tasks}


def discarded(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], stdout=subprocess.DEVNULL, check=True)


# --- preparing


def repeated(folder: Path, target: Path, copies: int) -> tuple[int, int]:
    """One gzip member that holds the text of the HIGGS rows several times; the bytes and lines of that text."""
    (source,) = (folder / "higgs").glob("HIGGS_train_*.csv.gz")
    text = gzip.decompress(source.read_bytes())
    with gzip.open(target, "wb", compresslevel=6) as file:
        for _ in range(copies):
            file.write(text)
    return copies * len(text), copies * text.count(b"\n")


def made(source: AbstractSource, folder: Path, out: Path) -> None:
    prepare(source, folder, out, force=True, offline=True)


def measure_csv(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    big = work / "big.csv.gz"
    text, rows = repeated(folder, big, args.copies)
    seconds = alternating(
        args.repeats,
        gzip=lambda: discarded("gzip", "-dc", big),
        prepare=lambda: made(Higgs(train=str(big), test_rows=5000), folder, work),
    )
    ratio = seconds["gzip"] / seconds["prepare"]
    return {"rows": rows, "text_mb": text / 1e6, "gz_mb": big.stat().st_size / 1e6, "seconds": seconds, "ratio": ratio}


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
    }


# --- reading


def opened(path: Path) -> AbstractRows:
    return rows_of(path, torch_admm.from_module(nn.Linear(28, 1), "logistic"))


def in_chunks(rows: AbstractRows) -> None:
    for _ in rows.chunks(CHUNK):
        pass


def in_batches(rows: AbstractRows) -> None:
    for _ in rows.batches(BATCH, 0, 0):
        pass


def written(folder: Path, rows: int) -> Path:
    return prepare(Synthetic(rows=rows, test_rows=1), folder, name=str(rows)).parts.train


def measure_stream(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    file = written(work, args.rows)
    rows = opened(file)
    seconds = alternating(
        args.repeats,
        cat=lambda: discarded("cat", file),
        chunks=lambda: in_chunks(rows),
        batches=lambda: in_batches(rows),
    )
    return {
        "rows": rows.count,
        "file_mb": file.stat().st_size / 1e6,
        "seconds": seconds,
        "ratio": seconds["cat"] / seconds["chunks"],
        "batches_ratio": seconds["cat"] / seconds["batches"],
    }


# --- memory


def peak() -> int:
    """Of this process so far, in MiB; its own even where it was started by a larger one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


READERS: dict[str, Callable[[AbstractRows], None]] = {"chunks": in_chunks, "batches": in_batches}


def child(task: str, file: Path) -> None:
    """Idle and peak memory of one task, as JSON."""
    few = file.parent / f"few_{task}"
    if task == "prepare":  # once on a few rows, so that all code and its buffers are there
        made(Higgs(train=str(file.parent / "few.csv.gz"), test_rows=5000), file.parent, few)
        idle = peak()
        made(Higgs(train=str(file), test_rows=5000), file.parent, few)
    else:
        rows = opened(file)
        idle = peak()
        READERS[task](rows)
    print(json.dumps({"idle_mib": idle, "peak_mib": peak()}))


def measure_memory(folder: Path, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    repeated(folder, work / "few.csv.gz", 1)
    _, many = repeated(folder, work / "many.csv.gz", args.copies)
    results: dict[str, Any] = {}
    for rows in (min(FEW, args.rows), args.rows):
        file = written(work, rows)
        for task in READERS:
            results[f"{task}, {rows:,} rows"] = asked(task, file)
    results[f"prepare, {many:,} rows"] = asked("prepare", work / "many.csv.gz")
    return results


def asked(task: str, file: Path) -> Any:
    words = [sys.executable, "-m", "benchmarks.data", "--child", task, str(file)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], dict[str, Any]]] = {
    "csv": measure_csv,
    "hog": measure_hog,
    "stream": measure_stream,
    "memory": measure_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--copies", type=int, default=12, help="of the HIGGS training rows in the larger file")
    parser.add_argument("--rows", type=int, default=10_500_000, help="of the file that is streamed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON; parts that are not measured now are kept")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], Path(args.child[1]))
    if args.data_dir is None:
        parser.error("--data-dir is needed: the folder with higgs and svhn")
    results: dict[str, Any] = {"cores": os.cpu_count()}
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="data") as work:
            results[part] = PARTS[part](args.data_dir, Path(work), args)
        if part in TARGETS:
            results[part]["target"] = TARGETS[part]
        print(f"{part}: {json.dumps(results[part], indent=1)}", flush=True)
    if args.out:
        before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        args.out.write_text(json.dumps({**before, **results}, indent=2) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
