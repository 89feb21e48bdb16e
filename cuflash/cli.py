"""The command line: ``python -m cuflash info | explain | compile | demo``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from . import __version__
from .command_output import MISUSED, describe, ended
from .compile_command import add_compile
from .demo import PRESETS, Options, plans, run
from .demo.options import DTYPES as DEMO_DTYPES
from .explain_command import add_explain, add_selection
from .info_command import add_info

__all__ = ["main"]

_DESCRIPTION = "Exact attention for CuPy, NumPy and JAX: what runs here, and a demo."
#: The environment in which NumPy runs the demo fast on a CPU; it is read when a process starts. The
#: demo's products are too short for threads: as soon as another program needs a core, threads wait
#: for each other many times longer than they compute. And glibc would return memory to the system
#: at every step.
_THREADS = "OPENBLAS_NUM_THREADS"
_QUICK = {
    _THREADS: "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default the arguments of the process.

    Returns
    -------
    int
        The exit code: 0 on success; 1 if something fails, or the demo's evidence falls short; 2 if
        the request is impossible; 130 if interrupted; 141 if the reader of the output is gone.

    Raises
    ------
    SystemExit
        From argparse, with code 2 for wrong arguments and 0 for ``--help``
        and ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    given = argparse.Namespace(arguments=arguments, command=None)
    return ended(lambda: _run(given), lambda: " ".join(filter(None, ("cuflash", given.command))))


def _run(given: argparse.Namespace) -> int:
    parser = _parser()
    if not given.arguments:
        parser.print_help(sys.stderr)
        parser.exit(MISUSED)
    parser.parse_args(given.arguments, given)
    command: Callable[[argparse.Namespace], int] = given.run
    return command(given)


def _parser() -> argparse.ArgumentParser:
    program = "cuflash" if Path(sys.argv[0]).stem == "cuflash" else "python -m cuflash"
    parser = argparse.ArgumentParser(prog=program)
    describe(parser, _DESCRIPTION, f"{program} info", f"{program} explain --causal")
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_info(commands.add_parser("info", help="versions, devices, kernel cache and environment"))
    add_explain(commands.add_parser("explain", help="what a call would run, and why"))
    add_compile(commands.add_parser("compile", help="fill the kernel cache before the first calls"))
    _add_demo(commands.add_parser("demo", help="train a transformer on the text of Python's help"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_demo)
    describe(
        parser,
        "Train a transformer of bytes on the text of Python's help, with attention and its "
        "gradients by cuflash. The exit code is 1 if it does not beat models without attention.",
        "%(prog)s",
        "%(prog)s --size gpu --generate",
    )
    told = "the defaults of the other options"
    parser.add_argument("--size", choices=PRESETS, default="small", help=told)
    for name in ("steps", "batch", "seqlen", "layers", "heads", "head-dim", "seed", "compared"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=DEMO_DTYPES, help="of q, k and v")
    told = "also write text, with a cache and without; default 200 bytes"
    parser.add_argument("--generate", type=int, nargs="?", const=200, metavar="BYTES", help=told)
    add_selection(parser, None)


def _demo(given: argparse.Namespace) -> int:
    chosen = {
        field.name: getattr(given, field.name)
        for field in fields(Options)
        if getattr(given, field.name, None) is not None
    }
    options = replace(PRESETS[given.size], **chosen)
    if _THREADS not in os.environ and plans(options)["forward"].backend == "numpy":
        command = [sys.executable, "-m", __package__, *given.arguments]
        code = subprocess.run(command, env={**os.environ, **_QUICK}, check=False).returncode
        return code if code >= 0 else 128 - code  # a shell's code for a signal
    return 0 if run(options) else 1
