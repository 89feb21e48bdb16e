"""Hardware counters of jobs, read by Nsight Compute (``ncu``) in a separate process."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from .jobs import Job
from .probe import MARK

__all__ = ["Kernel", "NoCountersError", "available", "counters_of", "parse", "read", "split"]

#: Seconds after which a process is ended, with all jobs that it runs.
PATIENCE = 240
#: Places of ncu besides the PATH.
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
#: Factors to milliseconds and to bytes.
_UNITS = {
    "nsecond": 1e-6,
    "ns": 1e-6,
    "usecond": 1e-3,
    "us": 1e-3,
    "second": 1e3,
    "s": 1e3,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "Tbyte": 1e12,
}
_REFUSED = (
    ("ERR_NVGPUCTRPERM", "the driver lets this user read no hardware counters (ERR_NVGPUCTRPERM)"),
    ("LibraryNotLoaded", "ncu could not start its profiler (LibraryNotLoaded)"),
)


class NoCountersError(Exception):
    """The hardware counters cannot be read here; the message says why."""


@dataclass(frozen=True)
class Kernel:
    """One launch: its name, and its counters; times in milliseconds, sizes in bytes."""

    name: str
    values: dict[str, float]


def ncu() -> str:
    """The path of the command.

    Raises
    ------
    NoCountersError
        If it is not installed.
    """
    found = [shutil.which("ncu"), *(path for place in _PLACES for path in sorted(glob(place)))]
    for command in found:
        if command:
            return command
    raise NoCountersError("ncu (Nsight Compute) is not installed")


def available(metrics: Sequence[str], listed: str) -> list[str]:
    """The metrics whose base name is in the output of ``ncu --query-metrics``.

    All of them if it printed none.
    """
    names = set(re.findall(r"^(\w+__\w+)", listed, re.MULTILINE))
    return [metric for metric in metrics if not names or metric.split(".")[0] in names]


def parse(text: str) -> list[Kernel]:
    """The launches in the output of ``ncu --csv --page raw``; other lines are skipped."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        return []
    header, units, *rows = csv.reader(lines)
    if units[0]:  # ncu printed no line of units
        rows, units = [units, *rows], [""] * len(header)
    place = header.index("Kernel Name")
    return [Kernel(row[place], _values(header, units, row)) for row in rows]


def _values(header: list[str], units: list[str], row: list[str]) -> dict[str, float]:
    values = {}
    for name, unit, text in zip(header, units, row, strict=False):
        if "__" in name:
            try:
                values[name] = float(text.replace(",", "")) * _UNITS.get(unit, 1.0)
            except ValueError:  # "n/a"
                continue
    return values


def split(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of every job."""
    jobs: list[list[Kernel]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            jobs.append([])
        elif jobs:
            jobs[-1].append(kernel)
    return jobs


def read(jobs: Sequence[Job], metrics: Sequence[str]) -> list[tuple[dict[str, Any], list[Kernel]]]:
    """Run jobs under ncu; return the probe's output and the kernels of each job.

    Raises
    ------
    NoCountersError
        If there is no ncu, if the driver refuses the counters, or if ncu fails.
    """
    command = ncu()
    listed = _run([command, "--query-metrics"], 60).stdout
    wanted = available(metrics, listed)
    with tempfile.TemporaryDirectory() as folder:
        asked, log = Path(folder) / "jobs.json", Path(folder) / "ncu.csv"
        asked.write_text(json.dumps([job.as_json() for job in jobs]))
        options = ["--target-processes", "all", "--profile-from-start", "off"]
        options += ["--clock-control", "none", "--csv"]
        options += ["--page", "raw", "--print-units", "base", "--log-file", str(log)]
        options += ["--metrics", ",".join(wanted)]
        probe = [sys.executable, "-m", "bench.story.probe", str(asked)]
        done = _run([command, *options, *probe], PATIENCE)
        text = log.read_text() if log.exists() else ""
    return counters_of(jobs, done, text)


def counters_of(
    jobs: Sequence[Job], done: subprocess.CompletedProcess[str], text: str
) -> list[tuple[dict[str, Any], list[Kernel]]]:
    """The output and the counters of a finished process; jobs that did not run have no kernels."""
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kernels = split(parse(text))
    if not kernels:
        raise NoCountersError(_why(done, text))
    missing = {"skipped": _why(done, text)}
    found = []
    for place in range(len(jobs)):
        whole = place < min(len(said), len(kernels))
        found.append((said[place], kernels[place]) if whole else (missing, []))
    return found


def _why(done: subprocess.CompletedProcess[str], text: str) -> str:
    everything = "\n".join((text, done.stdout, done.stderr))
    for sign, reason in _REFUSED:
        if sign in everything:
            return reason
    errors = [line for line in everything.splitlines() if "==ERROR==" in line]
    if errors:
        return f"ncu: {errors[-1].split('==ERROR==')[-1].strip()[:160]}"
    last = done.stderr.strip().splitlines()[-1:] or ["it counted no kernel"]
    return f"ncu ended with {done.returncode}: {last[0][:160]}"


def _run(command: list[str], patience: float) -> subprocess.CompletedProcess[str]:
    """The result of a process; one that takes too long is ended, and its output so far is kept."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=patience
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        return subprocess.CompletedProcess(command, -1, text, f"given up after {patience:.0f} s")
    except OSError as error:
        raise NoCountersError(f"ncu could not be started: {error}") from error
