"""``python -m bench run | host | report``."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time cases on the GPU and store the rows")
    run.add_argument("--cases", default="fa1", help="sets of cases, comma-separated")
    run.add_argument("--protocol", default="rested,turns", help="rested, turns or both")
    run.add_argument("--output", type=Path, help="results file; by default by the GPU's name")
    host = commands.add_parser("host", help="time the tiled NumPy backend on this CPU")
    host.add_argument("--output", type=Path)
    report = commands.add_parser("report", help="check the README against the results")
    report.add_argument("--write", action="store_true", help="bring the README up to date")
    arguments = parser.parse_args()
    if arguments.command == "run":
        from .run import run as run_cases

        run_cases(arguments.cases, arguments.protocol, arguments.output)
    elif arguments.command == "host":
        from .host import run_host

        run_host(arguments.output)
    else:
        return _report(arguments.write)
    return 0


def _report(write: bool) -> int:
    from . import report

    if write:
        report.write()
    stale = report.check(report.README.read_text())
    for line in report.outdated():
        print(line)
    for name in stale:
        print(f"README: the block {name!r} differs from the results")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
