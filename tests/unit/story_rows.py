"""Made-up rows of the story; its measuring code makes some, with fake counters and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bench.story import share, speed, traffic
from bench.story.counters import Kernel
from bench.story.counts import of_row
from bench.story.jobs import Job, facts_of, plan_of

from ..architectures import LIMITS

__all__ = ["H200", "RUN", "fake_read", "io_rows", "memory_rows", "share_rows", "speed_rows"]

H200 = replace(LIMITS["90"], name="NVIDIA H200")
RUN = {"run": "20300101-000000", "date": "2030-01-01", "gpu": "NVIDIA H200"}


def fake_read(jobs: Sequence[Job], metrics: Sequence[str]) -> list[Any]:
    """Reads each job as one kernel whose byte counters equal the counts of its loops."""
    found = []
    for job in jobs:
        facts = {} if job.by_hand else facts_of(plan_of(job, H200))
        values = dict.fromkeys(metrics, 50.0)
        if "dram__bytes_read.sum" in metrics:
            counts = of_row(traffic.row_of(job, facts, []))
            values["dram__bytes_read.sum"] = counts["count_read"]
            values["dram__bytes_write.sum"] = counts["count_write"]
        found.append(({"skipped": None, **facts}, [Kernel("main", values)]))
    return found


def speed_rows() -> Iterator[dict[str, Any]]:
    """Rows of every panel: standard attention at 10 TFLOP/s, generations at 100, 200 and 300."""
    rates = {speed.STANDARD: 10.0, "torch cudnn": 330.0}
    rates |= {f"cuflash {name}": 100.0 * (n + 1) for n, name in enumerate(speed.GENERATIONS)}
    for panel in speed.panels():
        for case in speed.cases(panel):
            for label, rate in rates.items():
                yield {**_speed_row(case, label), "tflops": rate, "ms": case.flops / rate / 1e9}
            full = speed.filled(case, 132)
            if full:
                yield {**_speed_row(full, "cuflash fa1"), "setting": "filled", "tflops": 150.0}


def _speed_row(case: Any, label: str) -> dict[str, Any]:
    of = {"part": "speed", "label": label, "version": "1", "setting": "papers", "op": case.op}
    of |= {"sources": "0" * 16 if label.startswith("cuflash") else None, "dtype": case.dtype}
    of |= {"heads": case.batch * case.heads_q, "head_dim": case.head_dim}
    of |= {"seqlen": case.seqlen_q, "causal": case.causal, "skipped": None, "ms": 1.0}
    return {**RUN, **of, "tflops": 1.0, "rounds": 7, "worst_ratio": 0.5}


def memory_rows() -> Iterator[dict[str, Any]]:
    """Rows of memory: standard attention needs a square of scores, others 100 bytes a row."""
    for seqlen in (1024, 2048, 4096):
        for label in (speed.STANDARD, *(f"cuflash {name}" for name in speed.GENERATIONS)):
            for times, done in enumerate(("forward", "forward and backward"), 1):
                square = label == speed.STANDARD
                extra = times * 4 * seqlen * (2 * seqlen if square else 100)
                if label == "cuflash fa3" and done == "forward":
                    extra = 0
                row = {"part": "memory", "label": label, "pass": done, "dtype": "float16"}
                row |= {"heads": 4, "head_dim": 64, "seqlen": seqlen, "skipped": None}
                row |= {"sources": None if square else "0" * 16}
                yield {**RUN, **row, "extra_bytes": extra}


def io_rows() -> Iterator[dict[str, Any]]:
    """The rows that are stored if the hardware counts the same bytes as the loops."""
    for rows in traffic.measure(132, fake_read, lambda line: None):
        yield from ({**RUN, **row} for row in rows)


def share_rows() -> Iterator[dict[str, Any]]:
    """Rows of calls that each take a millisecond and keep every unit half busy."""
    gpu = SimpleNamespace(
        num_sms=132, matrix_rate=lambda: {"label": "cuBLAS", "ms": 1.0, "tflops": 700.0}
    )

    def make(case: Any) -> Any:
        return None

    def prepare(job: Job, inputs: Any) -> Any:
        return lambda: None, facts_of(plan_of(job, H200))

    for row in share.measure(gpu, make, lambda name, call: 1.0, fake_read, prepare):
        yield {**RUN, "num_sms": 132, "datasheet_tflops": 989.4, **row}
