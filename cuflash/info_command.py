"""``python -m cuflash info``: its output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from .command_output import Console, add_json, describe, print_json
from .cuda.kernel_cache import binaries, kernel_cache_folder
from .cuda.source import find_sources
from .errors import CuflashError
from .info import Info, info
from .planning.device import HostLimits

__all__ = ["add_info"]


def add_info(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the command, and the command."""
    parser.set_defaults(run=_run)
    describe(
        parser,
        "Show what a bug report needs: versions, devices, the kernel cache and the environment, "
        "and what a call on CUDA would miss.",
        "%(prog)s",
        "%(prog)s --json",
    )
    add_json(parser)


def _run(given: argparse.Namespace) -> int:
    found = info()
    if given.json:
        print_json(_report(found))
        return 0
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for section in found.sections:
        for name, value in section.items():
            table.add_row(name, Text(value))
        table.add_section()
    Console().print(table)
    return 0


def _report(found: Info) -> dict[str, Any]:
    """The report in the types of JSON; an unknown value is null, with its error beside it."""
    usable = found.cuda == "usable"
    folder = kernel_cache_folder()
    return {
        "versions": dict(found.versions),
        "cuda": {"usable": usable, "error": None if usable else found.cuda},
        "devices": [
            {"architecture": device.architecture, **asdict(device)} for device in found.devices
        ],
        "cpu_cache": _asked("bytes_per_core", lambda: HostLimits.query().cache),
        "cuda_sources": _asked("folder", lambda: str(find_sources())),
        "kernel_cache": {
            "folder": str(folder),
            **_asked("binaries", lambda: len(binaries(folder)) if folder.is_dir() else 0),
        },
        "environment": dict(found.environment),
    }


def _asked(name: str, ask: Callable[[], int | str]) -> dict[str, int | str | None]:
    try:
        return {name: ask(), "error": None}
    except (CuflashError, OSError) as error:
        return {name: None, "error": str(error)}
