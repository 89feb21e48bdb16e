"""What the commands share: their help, where they print, and the codes that they end with."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import rich.console

from .errors import CuflashError

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "MISUSED",
    "UNREAD",
    "Console",
    "add_json",
    "describe",
    "ended",
    "print_json",
]

#: The exit codes beside 0. The last two are those of a shell for a program that SIGINT or SIGPIPE
#: ends.
FAILED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141


class Console(rich.console.Console):
    """The standard output, which tells its caller when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is under way, where rich would end the process."""
        raise


def describe(parser: argparse.ArgumentParser, description: str, *examples: str) -> None:
    """Give a parser a description, and commands that its help shows as they are."""
    width = max(20, shutil.get_terminal_size().columns - 2)
    parser.description = textwrap.fill(description, width)
    parser.epilog = "\n  ".join(("examples:", *examples))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give a parser the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object as JSON that every parser reads: in ASCII, without NaN and infinity."""
    print(json.dumps(value, indent=2, allow_nan=False))


def ended(command: Callable[[], int], name: Callable[[], str]) -> int:
    """Run a command, and say in a line what ends it early.

    Parameters
    ----------
    command
        Returns its exit code.
    name
        What the line begins with.

    Returns
    -------
    int
        The exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold any character
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # it is None where it was closed before the start
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _print_no_more()
        return UNREAD
    except CuflashError as error:
        said = str(error)
        code = MISUSED if isinstance(error, (ValueError, TypeError)) else FAILED
    except (OSError, MemoryError) as error:
        _print_no_more()
        said, code = str(error) or "there is not enough memory", FAILED
    print(f"{name()}: error: {said}", file=sys.stderr)
    return code


def _print_no_more() -> None:
    """Leave what cannot be printed where it is: Python tries once more when it ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
