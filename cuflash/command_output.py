"""Help, output and exit codes, shared by the commands."""

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

#: The exit codes other than 0. The last two are those that a shell reports for a program that
#: SIGINT or SIGPIPE ends.
FAILED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141


class Console(rich.console.Console):
    """The standard output; it raises an error when its reader is gone."""

    def on_broken_pipe(self) -> None:
        """Raise the current error; rich would end the process."""
        raise


def describe(parser: argparse.ArgumentParser, description: str, *examples: str) -> None:
    """Give a parser a description, and example commands that its help shows verbatim."""
    width = max(20, shutil.get_terminal_size().columns - 2)
    parser.description = textwrap.fill(description, width)
    parser.epilog = "\n  ".join(("examples:", *examples))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give a parser the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object as JSON that every parser reads: ASCII, without NaN and infinity."""
    print(json.dumps(value, indent=2, allow_nan=False))


def ended(command: Callable[[], int], name: Callable[[], str]) -> int:
    """Run a command, and report in one line an error that ends it.

    Parameters
    ----------
    command
        The command; it returns its exit code.
    name
        The beginning of the line.

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
            if sys.stdout is not None:  # it is None if it was closed before the start
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
    """Discard output that cannot be printed; otherwise Python tries again when it exits."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
