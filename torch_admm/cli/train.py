"""`train`: from prepared rows to a saved model."""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import nn

from ..anchored import AnchoredADMM
from ..arguments import multiple, positive, positive_int
from ..bregman import BregmanADMM
from ..comm import BACKENDS, AbstractComm, rank_in, start
from ..data.hdf5 import Description, describe
from ..data.shards import SHARDS
from ..data.sources import prepared
from ..errors import DataError
from ..fit import Result, fit
from ..losses import loss_of
from ..method import AbstractMethod
from ..record import AbstractSink, JSONLines, ProgressBar, Row
from ..stop import AbstractStop, Outcome, Target, TimeBudget
from .base import BROKEN, INTERRUPTED, command, path

METHODS: dict[str, Callable[..., AbstractMethod]] = {"anchored": AnchoredADMM, "bregman": BregmanADMM}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "hardsigmoid": nn.Hardsigmoid,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}
RESUME: dict[str, bool | Literal["auto"]] = {"never": False, "always": True, "auto": "auto"}
LOG = ("--log", "--history")  # torchrun takes the first for one of its own, unless -- comes before the program
EXITS = {Outcome.INTERRUPTED: INTERRUPTED, Outcome.NON_FINITE: BROKEN}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", required=True, metavar="FILE_OR_NAME", help="an .h5 file, or what was prepared under --data-dir")
    add("--data-dir", type=path, default=Path("."), help="where prepared data are (default: here)")
    add("--test", type=path, metavar="FILE", help="held-out rows (default: test.h5 of the name)")
    add("--net", default="300", help="hidden widths, 300 or 100,50, or all widths, 28-300-1 (default: 300)")
    add("--activation", choices=ACTIVATIONS, default="relu", help="between the layers (default: relu)")
    add("--method", choices=METHODS, default="anchored", help="bregman is the paper's Algorithm 1 (default: anchored)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method, such as gamma=1.0")
    add("--loss", default="auto", help="by name; auto: squared, logistic or cross_entropy, by the labels")
    add("--epochs", type=int, default=10, help="at most so many sweeps over all rows (default: 10)")
    add("--seconds", type=float, help="stop after so many seconds of training")
    add("--target", type=float, help="stop at this accuracy")
    add("--batch-size", type=int, help="rows a mini-batch (default: the method's choice)")
    add("--threads", type=int, help="of torch (default: its own choice; ranks of one machine share the cores)")
    add("--seed", type=int, default=0, help="of first weights and mini-batches (default: 0)")
    add("--device", default="cpu", help="by torch's name for it (default: cpu)")
    add("--save", type=path, metavar="MODEL.pt", help="the weights; MODEL.json beside it describes the net")
    add(*LOG, type=path, metavar="RUN.jsonl", dest="log", help="every recorded row, as JSON lines")
    add("--checkpoint", type=path, metavar="DIR", help="folder for the state of the run, to go on from")
    add("--checkpoint-every", type=int, default=1, metavar="N", help="sweeps between two checkpoints (default: 1)")
    add("--keep", type=int, default=2, metavar="N", help="how many checkpoints stay (default: 2)")
    add("--resume", choices=RESUME, default="never", help="go on from the newest checkpoint; auto: if there is any")
    add("--deterministic", action="store_true", help="the same bits on any number of ranks; slower")
    shards = f"parts of the rows, a multiple of {SHARDS}: up to so many ranks get the same bits (default: {SHARDS})"
    add("--shards", type=int, default=SHARDS, metavar="N", help=shards)
    add(
        "--backend",
        choices=list(BACKENDS),
        default="auto",
        help="how ranks communicate (default: nccl on GPUs, else gloo)",
    )
    waits = "how long to wait for a rank that does not answer (default: 5)"
    add("--timeout", type=float, default=5.0, metavar="MINUTES", help=waits)


class Files(NamedTuple):
    train: Path
    test: Path | None


@final
@dataclass(frozen=True)
class Net:
    """What is needed to build the model again."""

    widths: tuple[int, ...]
    activation: str

    def build(self) -> nn.Sequential:
        parts: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            parts += [ACTIVATIONS[self.activation]()] if i else []
            parts.append(nn.Linear(inputs, outputs))
        return nn.Sequential(*parts)

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.widths))} {self.activation}"


@command("train", help="train a network on prepared rows, on one rank or many", arguments=arguments)
def run(args: argparse.Namespace) -> int:
    threads = None if args.threads is None else positive_int("--threads", args.threads)
    minutes = positive("--timeout", args.timeout)
    with _warnings_in_a_line(), start(args.backend, timeout_minutes=minutes, threads=threads) as ranks:
        return train(args, ranks)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """As errors are: where in the source they come from says nothing to people at a terminal."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if rank_in() == 0:
            print(f"torch-admm: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def train(args: argparse.Namespace, ranks: AbstractComm) -> int:
    with ranks.together():
        files = files_of(args)
        about = describe(files.train)
        if about.rows < ranks.size:
            said = f"fewer than the {ranks.size} ranks; start at most {about.rows}"
            raise DataError(f"{files.train} has {about.rows} rows, {said}")
        net = Net(widths_of(args.net, about), args.activation)
        method = method_of(args, about)
        writable(args)
        torch.manual_seed(args.seed)
        model = net.build().to(device_of(args.device))
    if ranks.rank == 0:
        where = f" on {ranks.size} ranks" if ranks.size > 1 else ""
        print(f"{files.train}: {about.rows:,} rows; net {net}; {type(method).__name__}, {method.loss.name} loss{where}")
    result = fit(
        model,
        files.train,
        method,
        max_sweeps=positive_int("--epochs", args.epochs),
        batch_size=args.batch_size,
        evaluate=files.test,
        stop=stops(args),
        sinks=sinks(args),
        seed=args.seed,
        checkpoint=args.checkpoint,
        checkpoint_every=positive_int("--checkpoint-every", args.checkpoint_every),
        keep=positive_int("--keep", args.keep),
        resume=RESUME[args.resume],
        deterministic=args.deterministic,
        shards=multiple("--shards", args.shards, SHARDS),
    )
    with ranks.together():
        if ranks.rank == 0:
            try:
                saved = "" if args.save is None else save(args, net, about, result)
            finally:
                print(table(result))
            print(saved, end="")
    return EXITS.get(result.outcome, 0)


def files_of(args: argparse.Namespace) -> Files:
    if Path(args.data).suffix in (".h5", ".hdf5"):
        return Files(Path(args.data), args.test)
    train, test = prepared(args.data, args.data_dir)
    return Files(train, args.test or test)


def outputs_of(about: Description) -> int:
    return 1 if about.classes is None or len(about.classes) == 2 else len(about.classes)


def widths_of(text: str, about: Description) -> tuple[int, ...]:
    """All widths where they are joined by dashes; else the hidden ones."""
    inputs, outputs = about.features, outputs_of(about)
    try:
        given = tuple(int(width) for width in text.replace(",", "-").split("-"))
    except ValueError:
        given = ()
    if not given or min(given) < 1 or ("," in text and "-" in text):
        raise DataError(f"--net is {text!r}; hidden widths such as 300 or 100,50, or all, {inputs}-300-{outputs}")
    if "-" not in text:
        return (inputs, *given, outputs)
    if given[0] != inputs or given[-1] != outputs:
        raise DataError(f"--net is {text}, but the data have {inputs} features and need {outputs} outputs")
    return given


def method_of(args: argparse.Namespace, about: Description) -> AbstractMethod:
    fitting = "squared" if about.classes is None else "logistic" if outputs_of(about) == 1 else "cross_entropy"
    make = METHODS[args.method]
    known = [name for name in inspect.signature(make).parameters if name != "loss"]
    settings = dict(_setting(text) for text in args.set)
    if unknown := settings.keys() - known:
        raise DataError(f"--set has {', '.join(sorted(unknown))}; {args.method} knows {', '.join(known)}")
    return make(loss_of(fitting if args.loss == "auto" else args.loss), **settings)


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise DataError(f"--set has {text!r}; NAME=VALUE is expected")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a word: multiplier=consistent


def stops(args: argparse.Namespace) -> list[AbstractStop]:
    rules: list[AbstractStop] = [] if args.seconds is None else [TimeBudget(args.seconds)]
    return rules if args.target is None else [*rules, Target(args.target)]


def sinks(args: argparse.Namespace) -> list[AbstractSink]:
    return [ProgressBar()] if args.log is None else [ProgressBar(), JSONLines(args.log)]


def device_of(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DataError(f"--device is {name!r}, which is not here: {str(error).splitlines()[0]}") from None


def table(result: Result) -> str:
    """How it ended, then the best row and the last one, which may be of runs on other numbers of ranks."""
    best, last = result.best, result.history[-1]
    keys = [key for key in {**best, **last} if not key.startswith(("residual", "rollbacks"))]
    lines = [f"{result.message}; the model is that of sweep {best['sweep']:.0f}", "", _cells("", keys)]
    return "\n".join([*lines, *(_cells(name, _figures(row, keys)) for name, row in (("best", best), ("last", last)))])


def _figures(row: Row, keys: list[str]) -> list[str]:
    whole = ("sweep", "bytes_sent")
    return ["-" if key not in row else f"{row[key]:.0f}" if key in whole else f"{row[key]:.4f}" for key in keys]


def _cells(name: str, cells: list[str]) -> str:
    return f"{name:6}" + "".join(f"{cell:>16}" for cell in cells)


def writable(args: argparse.Namespace) -> None:
    """Better said before an hour of training than after, and by all ranks alike."""
    log = " or ".join(LOG)
    for option, file in (("--save", args.save), (log, args.log)):
        if file is not None and not file.parent.is_dir():
            raise DataError(f"{option} is {file}, but there is no folder {file.parent}")
        if file is not None and file.is_dir():
            raise DataError(f"{option} is {file}, which is a folder")
    if args.save is not None and args.save.suffix == ".json":
        raise DataError(f"--save is {args.save}; the weights need another suffix, for the JSON file stands beside them")
    if args.save is not None and args.log in (args.save, args.save.with_suffix(".json")):
        raise DataError(f"{log} is {args.log}, which --save would write over; give it another name")


def save(args: argparse.Namespace, net: Net, about: Description, result: Result) -> str:
    """Plain tensors, loadable with weights_only=True, and what they mean: both whole, or neither."""
    weights = {name: value.detach().cpu() for name, value in result.model.state_dict().items()}
    facts = {
        "widths": net.widths,
        "activation": net.activation,
        "classes": about.classes,
        "data": {"source": about.source, "rows": about.rows, "features": about.features},
        "method": args.method,
        "loss": result.method.loss.name,
        "outcome": result.message,
        "best": result.best,
    }
    raw = io.BytesIO()
    torch.save(weights, raw)  # not into the file: of a disk that is full, torch says where in its source it noticed
    paths = args.save, args.save.with_suffix(".json")
    try:
        _write_both(dict(zip(paths, (raw.getvalue(), json.dumps(facts, indent=2).encode() + b"\n"), strict=True)))
    except OSError as error:
        raise DataError(f"--save is {args.save}, which cannot be written: {error.strerror or error}") from None
    return f"\nsaved {paths[0]} and {paths[1].name}\n"


def _write_both(contents: dict[Path, bytes]) -> None:
    asides = {path: path.with_name(path.name + ".part") for path in contents}
    try:
        for path, raw in contents.items():
            with asides[path].open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        for path, aside in asides.items():
            os.replace(aside, path)
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
