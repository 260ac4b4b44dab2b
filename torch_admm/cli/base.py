"""Commands by name, the parser made of them, and what becomes of errors.

@command("data", "show", help="what is in a file", arguments=add_arguments)
def show(args: argparse.Namespace) -> int: ...
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..comm import rank_in
from ..errors import CommError, told

__all__ = ["BAD_INPUT", "BROKEN", "COMMANDS", "INTERRUPTED", "Command", "command", "main", "parser", "path"]

BROKEN, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; argparse ends with 2, too
HEARD = 0.5  # seconds: launchers end all ranks with the first that goes, so that should be the one that speaks

Run = Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """What a command does, and the options it takes."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Run


COMMANDS: dict[tuple[str, ...], Command] = {}


def command(*words: str, help: str, arguments: Callable[[argparse.ArgumentParser], None]) -> Callable[[Run], Run]:
    """Function decorator: make a command known by its words."""

    def known(run: Run) -> Run:
        COMMANDS[words] = Command(help, arguments, run)
        return run

    return known


def path(text: str) -> Path:
    """An option's. Nothing at all would be the current folder, where a variable of the shell is not set, say."""
    if not text:
        raise argparse.ArgumentTypeError("a path is expected, but nothing is there")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Bad input is one sentence on stderr, never a traceback."""
    try:
        args = parser().parse_args(argv)
        run: Run = args.run
        return run(args)
    except KeyboardInterrupt:
        _tell("interrupted", rank_in() == 0)
        return INTERRUPTED
    except CommError as error:
        _tell(error, error.speaks)
        return BAD_INPUT
    except (ValueError, OSError, ImportError) as error:
        _tell(told(error), rank_in() == 0)
        _let_speak()
        return BAD_INPUT


def _let_speak() -> None:
    if rank_in() > 0:
        time.sleep(HEARD)


def _tell(what: object, speaks: bool) -> None:
    if speaks:
        print(f"torch-admm: {what}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    root = Parser(prog="torch-admm", description="Train PyTorch networks without gradients.")
    groups: dict[tuple[str, ...], Any] = {(): root.add_subparsers(metavar="COMMAND", required=True)}
    for words, (text, arguments, run) in COMMANDS.items():
        for depth in range(1, len(words)):
            if words[:depth] not in groups:
                inside = ", ".join(other[depth] for other in COMMANDS if other[:depth] == words[:depth])
                group = groups[words[: depth - 1]].add_parser(words[depth - 1], help=inside, description=inside)
                groups[words[:depth]] = group.add_subparsers(metavar="COMMAND", required=True)
        leaf = groups[words[:-1]].add_parser(words[-1], help=text, description=text)
        leaf.set_defaults(run=run)
        arguments(leaf)
    return root


class Parser(argparse.ArgumentParser):
    """An option given twice is an error, not a silent change of mind; no option by half its name."""

    def __init__(self, **kwargs: Any) -> None:
        """As argparse's."""
        super().__init__(**kwargs, allow_abbrev=False)
        self.register("action", None, Once)

    def error(self, message: str) -> NoReturn:
        """As argparse's, on one rank."""
        if rank_in() > 0:
            _let_speak()
            sys.exit(BAD_INPUT)
        super().error(message)


class Once(argparse.Action):
    """Stores the value, the first time."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seen: set[str] = namespace.__dict__.setdefault("_seen", set())
        if self.option_strings and self.dest in seen:
            parser.error(f"{option} is given twice")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)
