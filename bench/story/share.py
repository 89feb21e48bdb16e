"""The share of the peak that each kernel reaches, and how busy it keeps each unit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..cases import Case
from ..inputs import Inputs
from ..sources import digest_now
from ..timing import Timer, turns
from .counters import Kernel, NoCountersError
from .jobs import Job
from .jobs import prepare as prepare_job
from .speed import DTYPE, GENERATIONS

__all__ = ["METRICS", "UNITS", "jobs_of", "measure"]

SEQLEN = 4096
ROUNDS = 9

#: The units, and the counters for each; the first counter that the device has is used.
UNITS = {
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "exponentials": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",),
    "fma": (
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed",
    ),
    "alu": (
        "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed",),
    "shared": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",),
    "l2": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    "dram": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
}
TIME = "gpu__time_duration.sum"
METRICS = (*(name for names in UNITS.values() for name in names), TIME)


def jobs_of(num_sms: int) -> list[Job]:
    """A job for each generation, width and pass; the problem is large enough to fill the device."""
    jobs = []
    for op in ("forward", "backward"):
        for dim in (64, 128):
            heads = 2 * num_sms * 64 // dim
            for name in GENERATIONS:
                case = Case(op, DTYPE, 1, heads, heads, dim, dim, SEQLEN, SEQLEN, False, name)
                jobs.append(Job(case))
    return jobs


def measure(
    gpu: Any,
    make: Callable[[Case], Inputs],
    clock: Timer,
    read: Callable[[Sequence[Job], Sequence[str]], Any],
    prepare: Callable[[Job, Inputs], Any] = prepare_job,
) -> Iterator[dict[str, Any]]:
    """A row for the rate of the matrix units, then one for each kernel.

    Parameters
    ----------
    gpu
        A :class:`bench.story.device.Gpu`.
    make
        Makes the arrays of a case.
    clock
        Returns the milliseconds of a call.
    read
        Runs jobs under the counters: :func:`bench.story.counters.read`.
    prepare
        Makes the call of a job.
    """
    product = {"part": "share", "op": "product", "sources": None, "dtype": DTYPE}
    yield {**product, **gpu.matrix_rate()}
    jobs = jobs_of(gpu.num_sms)
    rows = []
    for first in range(0, len(jobs), len(GENERATIONS)):
        rows += _timed(jobs[first : first + len(GENERATIONS)], make, clock, prepare)
    try:
        found = read(jobs, METRICS)
    except NoCountersError as error:
        found = [({"skipped": str(error)}, []) for _ in jobs]
    for row, (said, kernels) in zip(rows, found, strict=True):
        reason = said.get("skipped") or (None if kernels else "no kernel was counted")
        yield {**row, "no_counters": reason, **(busy(kernels) if reason is None else {})}


def _timed(
    jobs: Sequence[Job],
    make: Callable[[Case], Inputs],
    clock: Timer,
    prepare: Callable[[Job, Inputs], Any],
) -> list[dict[str, Any]]:
    """Rows of the generations of one problem, which take turns."""
    inputs = make(jobs[0].case)
    prepared = {job.case.algorithm: prepare(job, inputs) for job in jobs}
    times = turns({name: call for name, (call, _) in prepared.items()}, ROUNDS, clock=clock)
    rows = []
    for job in jobs:
        case, milliseconds = job.case, statistics.median(times[job.case.algorithm])
        row: dict[str, Any] = {"part": "share", "label": f"cuflash {case.algorithm}", "op": case.op}
        row |= {"sources": digest_now(case.algorithm, case.op)}
        row |= {"dtype": case.dtype, "heads": case.heads_q, "head_dim": case.head_dim}
        row |= {"seqlen": case.seqlen_q, **prepared[case.algorithm][1]}
        row |= {"ms": round(milliseconds, 5), "tflops": round(case.flops / milliseconds / 1e9, 1)}
        rows.append(row)
    return rows


def busy(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Percent of every unit's peak over the kernels of a pass, weighted by time."""
    times = [kernel.values.get(TIME, 0.0) for kernel in kernels]
    whole = sum(times)
    found: dict[str, Any] = {}
    if not whole:
        return found
    for unit, names in UNITS.items():
        shares = [
            next((kernel.values[name] for name in names if name in kernel.values), None)
            for kernel in kernels
        ]
        known = None not in shares
        sums = sum((share or 0.0) * time for share, time in zip(shares, times, strict=True))
        found[unit] = round(sums / whole, 2) if known else None
    return found
