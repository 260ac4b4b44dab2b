"""Trials for TensorBoard: curves, and settings with results under HPARAMS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .journal import Record

__all__ = ["write"]


def write(records: Sequence[Record], folder: Path) -> None:
    """One run a trial, under METHOD/seed-N; made anew from the records each time."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError('TensorBoard needs the extra: pip install "torch-admm[compare]"') from error
    for record in records:
        ranks = "" if record["ranks"] == 1 else f"-ranks-{record['ranks']}"
        run = folder / f"{record['method'].replace('+', '-')}{ranks}" / f"seed-{record['seed']}"
        for old in run.glob("events.out.tfevents.*"):
            old.unlink()
        writer: Any = SummaryWriter(str(run))
        try:
            _write(writer, record)
        finally:
            writer.close()


def _write(writer: Any, record: Record) -> None:
    for step, (seconds, epochs, accuracy, loss) in enumerate(record["curve"]):
        for name, value in (("test/accuracy", accuracy), ("train/loss", loss), ("train/epochs", epochs)):
            if value is not None:
                writer.add_scalar(name, value, step, walltime=seconds)
    settings = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in record["settings"].items()}
    about = {"method": record["method"], "seed": record["seed"], "threads": record["threads"]}
    results = {f"seconds_to/{target}": point[0] for target, point in record["reached"].items() if point}
    if record["best_accuracy"] is not None:
        results["best_accuracy"] = record["best_accuracy"]
    writer.add_hparams({**about, **settings, "outcome": record["outcome"]}, results, run_name=".")
