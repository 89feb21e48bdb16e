"""``python -m bench story``: measures the parts and stores their rows, part by part."""

from __future__ import annotations

import datetime
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..inputs import make_inputs
from ..peers import importable, select_peers
from ..run import RESULTS, store
from . import counters, memory, share, speed, traffic
from .device import Gpu, datasheet, peak_memory
from .jobs import Job, compile_all

__all__ = ["PARTS", "jobs_of", "run", "select_parts"]

Batches = Iterator[list[dict[str, Any]]]
#: The best peers in the stored tables.
BEST_PEERS = "cudnn,fa4"


def _say(line: str) -> None:
    print(line, flush=True)


def _make(case: Any) -> Any:
    import cupy

    _free()
    return make_inputs(case, cupy)


def _free() -> None:
    """Return the memory in the pools of CuPy and PyTorch, so that either can use it."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _speed(gpu: Gpu, peers: str) -> Batches:
    found = importable(select_peers(peers), _say)
    for panel in speed.panels():
        yield list(speed.measure_panel(panel, found, gpu, _make, _say, gpu.clock))


def _memory(gpu: Gpu, peers: str) -> Batches:
    rows = list(memory.measure(_make, peak_memory, gpu.free_bytes))
    for row in rows:
        value = row["skipped"] or f"{row['extra_bytes'] / 2**20:.1f} MiB"
        _say(f"{row['label']} {row['pass']} {row['seqlen']}: {value}")
    yield rows


def _io(gpu: Gpu, peers: str) -> Batches:
    _free()  # the counted processes need the memory
    return traffic.measure(gpu.num_sms, counters.read, _say)


def _share(gpu: Gpu, peers: str) -> Batches:
    def read(jobs: Any, metrics: Any) -> Any:
        _free()
        return counters.read(jobs, metrics)

    rows = list(share.measure(gpu, _make, gpu.clock, read))
    for row in rows:
        said = {name: row[name] for name in share.UNITS if row.get(name) is not None}
        _say(
            f"{row['label']} {row['op']} {row.get('head_dim', '')}: {row['tflops']} TFLOP/s {said}"
        )
    yield rows


PARTS: dict[str, Callable[[Gpu, str], Batches]] = {
    "memory": _memory,
    "share": _share,
    "io": _io,
    "speed": _speed,
}


def select_parts(names: str) -> list[str]:
    """The parts in a comma-separated list."""
    unknown = [name for name in names.split(",") if name not in PARTS]
    if unknown:
        raise SystemExit(f"--parts: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names.split(",")


def jobs_of(parts: list[str], num_sms: int) -> list[Job]:
    """All calls of ours in these parts, as jobs whose kernels can be compiled first."""
    from dataclasses import replace

    cases = []
    if "speed" in parts:
        cases += [case for panel in speed.panels() for case in speed.cases(panel)]
    if "memory" in parts:
        cases += [replace(one, op=op) for one in memory.cases() for op in ("forward", "backward")]
    jobs = [Job(replace(case, algorithm=name)) for case in cases for name in speed.GENERATIONS]
    jobs += share.jobs_of(num_sms) if "share" in parts else []
    jobs += [job for batch in traffic.batches(num_sms) for job in batch] if "io" in parts else []
    return jobs


def run(parts: str, output: Path | None = None, peers: str | None = None) -> Path:
    """Measure the parts in order and append their rows as they come; return the file."""
    from cuflash.cuda.available import require_device

    selected = select_parts(parts)
    require_device()
    gpu = Gpu()
    now = datetime.datetime.now(datetime.timezone.utc)
    common = {"run": now.strftime("%Y%m%d-%H%M%S"), "date": now.date().isoformat()}
    common |= {"gpu": gpu.name}
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower())
    path = output or RESULTS / f"{name}-story.json"
    fixed = {"num_sms": gpu.num_sms, "datasheet_tflops": datasheet(gpu.name)}
    compile_all(jobs_of(selected, gpu.num_sms), _say)
    for part in selected:
        start = time.perf_counter()
        for rows in PARTS[part](gpu, BEST_PEERS if peers is None else peers):
            store(path, [{**common, **(fixed if part == "share" else {}), **row} for row in rows])
        _say(f"-- {part}: {time.perf_counter() - start:.0f} s")
    return path
