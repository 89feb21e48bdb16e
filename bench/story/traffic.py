"""The IO theorem: bytes of device memory from the hardware counters, beside the counts.

Everything here runs one forward pass without a mask. FlashAttention-1 streams Q and O of every head
once per K/V block. With one head for each multiprocessor, hundreds of megabytes are streamed
between two uses of a byte, more than L2 can keep. The squares of standard attention have half a
gigabyte each. FlashAttention-2 and 3 get many heads: at the end L2 still holds some output that is
not yet written to device memory, and with many heads this is a small share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..cases import Case
from ..sources import digest_now
from .counters import Kernel, NoCountersError
from .counts import of_row
from .jobs import Job
from .speed import DTYPE, STANDARD

__all__ = ["METRICS", "batches", "measure", "row_of"]

SEQLEN, LONGER = 16384, 32768
#: Heads of standard attention, each with a square of half a gigabyte.
HEADS_BY_HAND = 4
#: Rows of a query block, which do not change FlashAttention-1's bytes, and of key blocks, which do.
BLOCK_Q, BLOCKS_KV = 64, (16, 32, 64, 128, 256)
#: Bytes of shared memory that the plan may use.
BUDGETS = tuple(kib << 10 for kib in (24, 32, 48, 64, 96, 128, 227))

METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_sector_hit_rate.pct",
    "gpu__time_duration.sum",
)
SECTOR = 32  # bytes


def _case(algorithm: str, heads: int, dim: int = 64, seqlen: int = SEQLEN) -> Case:
    return Case("forward", DTYPE, 1, heads, heads, dim, dim, seqlen, seqlen, False, algorithm)


def batches(num_sms: int) -> list[list[Job]]:
    """The counted jobs; each batch has its own process, so that a failure affects no other."""
    fa1, wide = _case("fa1", num_sms), _case("fa1", num_sms, 128)
    by_block = [Job(replace(fa1, blocks=(BLOCK_Q, keys))) for keys in BLOCKS_KV]
    by_budget = [Job(fa1, budget=budget) for budget in BUDGETS]
    others = [
        Job(replace(wide, blocks=(BLOCK_Q, 64))),
        Job(wide),
        Job(replace(_case("fa1", num_sms, seqlen=LONGER), blocks=(BLOCK_Q, BLOCKS_KV[-1]))),
        *(Job(_case(name, 4 * num_sms, dim)) for name in ("fa2", "fa3") for dim in (64, 128)),
        *(Job(_case("fa1", HEADS_BY_HAND, dim), by_hand=True) for dim in (64, 128)),
    ]
    return [others, by_block, by_budget]


def measure(
    num_sms: int,
    read: Callable[[Sequence[Job], Sequence[str]], Any],
    say: Callable[[str], None],
) -> Iterator[list[dict[str, Any]]]:
    """Rows of every process that ran the jobs.

    Parameters
    ----------
    num_sms
        Multiprocessors of the device.
    read
        Runs jobs under the counters: :func:`bench.story.counters.read`.
    say
        Is called with every row.
    """
    for jobs in batches(num_sms):
        try:
            found = read(jobs, METRICS)
        except NoCountersError as error:
            found = [({"skipped": str(error)}, []) for _ in jobs]
        rows = [
            row_of(job, said, kernels) for job, (said, kernels) in zip(jobs, found, strict=True)
        ]
        for row in rows:
            say(_line(row))
        yield rows


def row_of(job: Job, said: dict[str, Any], kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The bytes of one job from the hardware counters, for all heads."""
    case = job.case
    row: dict[str, Any] = {
        "part": "io",
        "label": STANDARD if job.by_hand else f"cuflash {case.algorithm}",
        "sources": None if job.by_hand else digest_now(case.algorithm, case.op),
        "dtype": case.dtype,
        "heads": case.heads_q,
        "head_dim": case.head_dim,
        "seqlen": case.seqlen_q,
        "blocks": said.get("blocks"),
        "budget": job.budget,
        "shared_bytes": said.get("shared_bytes"),
        "kernels": len(kernels),
        "skipped": said.get("skipped") or (None if kernels else "no kernel was counted"),
    }
    if row["skipped"] is None:
        row |= _measured(kernels)
        if row["dram_read"] is None or row["dram_write"] is None:
            row["skipped"] = "the device has no counters of device memory's bytes"
    return row


def _measured(kernels: Sequence[Kernel]) -> dict[str, Any]:
    def total(*names: str) -> float | None:
        """The sum over all kernels of the first counter that there is; None without one."""
        for name in names:
            found = [kernel.values[name] for kernel in kernels if name in kernel.values]
            if found:
                return sum(found)
        return None

    def bytes_of(*names: str) -> int | None:
        sectors = total(*names)
        return None if sectors is None else round(SECTOR * sectors)

    read, write = total("dram__bytes_read.sum"), total("dram__bytes_write.sum")
    times = [kernel.values.get("gpu__time_duration.sum", 0.0) for kernel in kernels]
    hits = [kernel.values.get("lts__t_sector_hit_rate.pct", 0.0) for kernel in kernels]
    weights = times if any(times) else [1.0] * len(kernels)
    hit = sum(h * w for h, w in zip(hits, weights, strict=True)) / sum(weights)
    return {
        "dram_read": None if read is None else round(read),
        "dram_write": None if write is None else round(write),
        "l2_read": bytes_of("lts__t_sectors_srcunit_tex_op_read.sum"),
        "l2_write": bytes_of("lts__t_sectors_srcunit_tex_op_write.sum"),
        "l2_hit_percent": round(hit, 2),
        "ms": round(sum(times), 4),
    }


def _line(row: dict[str, Any]) -> str:
    tile = "x".join(map(str, row["blocks"] or [])) or "whole"
    where = f"{row['label']} {row['head_dim']} {row['heads']}x{row['seqlen']} {tile}"
    if row["skipped"]:
        return f"{where}: skipped: {row['skipped']}"
    row = {**row, **of_row(row)}
    parts = [
        f"{way} {(row[f'dram_{way}'] or 0) / 1e9:.2f} GB of {row[f'count_{way}'] / 1e9:.2f} counted"
        for way in ("read", "write")
    ]
    return f"{where}: {', '.join(parts)}, {row['ms']:.1f} ms"
