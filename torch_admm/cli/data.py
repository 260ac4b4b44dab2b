"""`data prepare`, `data list`, `data show`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..data.hdf5 import Description, describe
from ..data.sources import SOURCES, AbstractSource, prepare, prepared
from ..errors import DataError
from .base import command, path


def prepare_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(metavar="NAME", required=True)
    for name, source in SOURCES.items():
        leaf = sources.add_parser(name, help=source.summary, description=source.summary)
        leaf.set_defaults(source=source)
        leaf.add_argument("--data-dir", type=path, required=True, help="where raw files are, and downloads go")
        leaf.add_argument("--out", type=path, help="where NAME/train.h5 and NAME/test.h5 go (default: --data-dir)")
        leaf.add_argument("--as", dest="folder_name", metavar="NAME", help=f"another name than {name} under --out")
        leaf.add_argument("--storage", choices=["float32", "float16"], default="float32", help="of the features")
        leaf.add_argument("--force", action="store_true", help="replace what was prepared otherwise")
        leaf.add_argument("--offline", action="store_true", help="never download")
        for field in dataclasses.fields(source):  # type: ignore[arg-type]
            flag = f"--{field.name.replace('_', '-')}"
            leaf.add_argument(flag, default=field.default, help=field.metadata["help"], **field.metadata["how"])


@command("data", "prepare", help="make train.h5 and test.h5 of a source", arguments=prepare_arguments)
def run_prepare(args: argparse.Namespace) -> int:
    fields = [f.name for f in dataclasses.fields(args.source)]
    values = {name: getattr(args, name) for name in fields}
    source: AbstractSource = args.source(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    result = prepare(
        source,
        args.data_dir,
        args.out,
        name=_folder(args.folder_name),
        dtype=args.storage,
        force=args.force,
        offline=args.offline,
    )
    state = "written" if result.written else "there already, from the same files and options; nothing to do"
    print(f"{result.parts.train} and {result.parts.test.name}: {state}")
    print(f"{_shape(result.train)}, {result.test.rows:,} test rows")
    return 0


def _folder(name: str | None) -> str | None:
    if name is not None and (name in ("", ".", "..") or Path(name).name != name):
        raise DataError(f"--as is {name!r}; the name of a folder is expected, without a path")
    return name


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=path, help="tell what is prepared there")


@command("data", "list", help="the sources, and what is prepared", arguments=list_arguments)
def run_list(args: argparse.Namespace) -> int:
    for name, source in SOURCES.items():
        print(f"{name:14} {source.summary}")
    if args.data_dir is not None:
        found = sorted(path.parent.name for path in args.data_dir.glob("*/train.h5"))
        print(f"\nprepared under {args.data_dir}: {', '.join(found) or 'nothing'}")
        for name in found:
            print(f"{name:14} {_state(name, args.data_dir)}")
    return 0


def _state(name: str, folder: Path) -> str:
    try:
        train, test = (describe(path) for path in prepared(name, folder))
    except (DataError, OSError) as error:
        return str(error)
    return f"{_shape(train)}, {test.rows:,} test rows"


def show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path, metavar="FILE")


@command("data", "show", help="what is in a prepared file", arguments=show_arguments)
def run_show(args: argparse.Namespace) -> int:
    found = describe(args.file)
    facts: dict[str, Any] = {"rows": f"{found.rows:,}", "features": found.features, "storage": found.dtype}
    facts["target"] = (
        "a number" if found.classes is None else f"{len(found.classes)} classes: {', '.join(found.classes)}"
    )
    facts["source"] = found.source
    facts["means"] = f"{found.mean.min():.4g} to {found.mean.max():.4g}"
    facts["scales"] = f"{found.scale.min():.4g} to {found.scale.max():.4g}"
    for key, value in {**facts, **found.attributes}.items():
        print(f"{key:10} {value}")
    return 0


def _shape(found: Description) -> str:
    target = "a number to predict" if found.classes is None else f"{len(found.classes)} classes"
    return f"{found.rows:,} rows of {found.features} features, {target}"
