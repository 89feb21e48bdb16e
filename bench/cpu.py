"""Times the tiled NumPy backend on this CPU, alone and while other processes keep all cores busy.

The library, whole NumPy matrices, PyTorch and JAX take turns, in another order each round, so that
all of them run under the same conditions.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .cpu_cases import CASES, CpuCase, implementations
from .host import host_columns
from .run import RESULTS, store
from .timing import median_ratio

__all__ = ["CONDITIONS", "loaded", "rows_of", "run_cpu", "time_turns"]

CONDITIONS = ("alone", "loaded")
#: Time limit of a case's rounds in seconds, and the fewest and most rounds.
LONGEST, FEWEST, MOST = 12.0, 5, 41

_BURN = """
import numpy
a = numpy.ones((600, 600), numpy.float32)
while True:
    a @ a
"""

Call = Callable[[], Any]


@contextlib.contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Keep this many cores busy: each of as many other processes computes matrix products."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _BURN]
    burning = [subprocess.Popen(command, env=environment) for _ in range(processes)]
    try:
        time.sleep(1.0 if burning else 0.0)
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def cores_used() -> tuple[float, float, float] | None:
    """Seconds of the clock, CPU seconds of all processes and of this process; None if unknown."""
    try:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, softirq = numbers[:7]
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return time.perf_counter(), busy, own.user + own.system


def used_by_others(
    start: tuple[float, float, float] | None, end: tuple[float, float, float] | None
) -> float | None:
    """Cores that other processes used between two readings; 0 means that this process was alone."""
    if start is None or end is None:
        return None
    clock, busy, own = (after - before for after, before in zip(end, start, strict=True))
    return round(max(0.0, (busy - own) / clock), 2)


def time_turns(
    calls: Mapping[str, Call], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds of every call, round by round, in shuffled order."""
    names, order = list(calls), random.Random(0)
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in names}
    start = clock()
    for done in range(MOST):
        if done >= FEWEST and (clock() - start) * (done + 1) / done > LONGEST:
            break
        order.shuffle(names)
        for name in names:
            before = clock()
            calls[name]()
            times[name].append(1e3 * (clock() - before))
    return times


def rows_of(
    case: CpuCase, condition: str, versions: Mapping[str, str], timed: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """A row for each implementation, with the ratio of its time to ours."""
    rows = []
    for name, times in timed.items():
        ours = "cuflash jit" if name == "jax.nn jit" and "cuflash jit" in timed else "cuflash"
        ratio, low, _ = median_ratio(timed[ours], times)
        median = statistics.median(times)
        rows.append(
            {
                "impl": name,
                "version": versions[name],
                **case.columns,
                "condition": condition,
                "rounds": len(times),
                "ms": round(median, 4),
                "spread": round((max(times) - min(times)) / median, 4),
                "ratio": round(ratio, 4),
                "ratio_low": round(low, 4),
            }
        )
    return rows


def run_cpu(
    names: str, conditions: str = ",".join(CONDITIONS), output: Path | None = None
) -> list[dict[str, Any]]:
    """Time the named cases under the named conditions, print a line each and store the rows."""
    cases = [case for name in _known(names, tuple(CASES), "--cases") for case in CASES[name]]
    asked = _known(conditions, CONDITIONS, "--conditions")
    now = datetime.datetime.now(datetime.timezone.utc)
    common = {"run": now.strftime("%Y%m%d-%H%M%S"), "date": now.date().isoformat()}
    common |= host_columns()
    rows: list[dict[str, Any]] = []
    try:
        for case in cases:
            found = implementations(case)
            calls = {name: call for name, (_, call) in found.items()}
            versions = {name: version for name, (version, _) in found.items()}
            peaks = {name: _peak(calls[name]) for name in ("cuflash", "whole matrix")}
            for condition in asked:
                with loaded((os.cpu_count() or 1) if condition == "loaded" else 0):
                    start = cores_used()
                    timed = time_turns(calls)
                    others = used_by_others(start, cores_used())
                for row in rows_of(case, condition, versions, timed):
                    row["peak_mib"] = peaks.get(row["impl"])
                    row["others"] = others
                    rows.append({**common, **row})
                    print(_line(case, row), flush=True)
    finally:  # keeps what was measured before an error
        if rows:
            store(output or RESULTS / "cpu.json", rows)
    return rows


def _known(names: str, there_are: tuple[str, ...], option: str) -> list[str]:
    wanted = names.split(",")
    for name in wanted:
        if name not in there_are:
            raise SystemExit(f"{option}: no {name!r}; there are {', '.join(there_are)}")
    return wanted


def _line(case: CpuCase, row: Mapping[str, Any]) -> str:
    heads = f"{case.heads_q}/{case.heads_kv}"
    mask = "causal" if case.causal else "full"
    return (
        f"{case.dtype:<9}{heads:<6}{case.seqlen_q:>5} x {case.seqlen_kv:<5}{mask:<7}{case.op:<21}"
        f"{row['condition']:<7}{row['impl']:<13}{row['ms']:>10.2f} ms  ours is {row['ratio']:.2f} "
        f"times as fast (at least {row['ratio_low']:.2f})"
    )


def _peak(call: Call) -> float:
    """The most MiB that a call allocated at once."""
    tracemalloc.start()
    try:
        call()
        return round(tracemalloc.get_traced_memory()[1] / 2**20, 1)
    finally:
        tracemalloc.stop()
