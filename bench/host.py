"""Times the tiled NumPy backend beside the whole matrix on the CPU, with peak memory."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from .run import RESULTS, store

__all__ = ["cpu_name", "run_host"]


def _whole_forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Attention as one writes it in NumPy: (heads, seqlen, head_dim), the matrix in place."""
    scores = np.matmul(q, k.swapaxes(-1, -2))
    scores *= np.float32(q.shape[-1] ** -0.5)
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.matmul(scores, v), scores


def _whole_backward(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, Any, Any]:
    out, p = _whole_forward(q, k, v)
    dv = np.matmul(p.swapaxes(-1, -2), dout)
    ds = np.matmul(dout, v.swapaxes(-1, -2))
    ds -= (dout * out).sum(-1, keepdims=True)
    ds *= p
    ds *= np.float32(q.shape[-1] ** -0.5)
    return np.matmul(ds, k), np.matmul(ds.swapaxes(-1, -2), q), dv


def run_host(output: Path | None = None, seqlen: int = 8192, heads: int = 4) -> None:
    """Time one problem forward, and forward plus backward, and store the rows."""
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal((heads, seqlen, 64)).astype(np.float32) for _ in range(4)]
    now = datetime.datetime.now(datetime.timezone.utc)
    common = {
        "run": now.strftime("%Y%m%d-%H%M%S"),
        "date": now.date().isoformat(),
        "cpu": cpu_name(),
    }
    problem: dict[str, Any] = {"dtype": "float32", "heads": heads, "head_dim": 64, "seqlen": seqlen}
    rows = []
    for impl, passes in _implementations(*tensors).items():
        for op, call in passes.items():
            row: dict[str, Any] = {**common, "impl": impl}
            row |= {"version": f"numpy {np.__version__}", "op": op, **problem}
            row |= {"ms": round(_milliseconds(call), 1)}
            row["peak_mib"] = round(_peak(call) / 2**20, 1)
            rows.append(row)
            print(f"{impl:<14}{op:<22}{row['ms']:>10} ms {row['peak_mib']:>9} MiB", flush=True)
    store(output or RESULTS / "cpu.json", rows)


def _implementations(q: Any, k: Any, v: Any, dout: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    def tiled(algorithm: str) -> dict[str, Callable[[], Any]]:
        options: dict[str, Any] = {"layout": "hsd", "backend": "numpy", "algorithm": algorithm}

        def both() -> Any:
            _, pullback = cuflash.attention_vjp(q, k, v, **options)
            return pullback(dout)

        return {
            "forward": lambda: cuflash.attention(q, k, v, **options),
            "forward and backward": both,
        }

    return {
        "whole matrix": {
            "forward": lambda: _whole_forward(q, k, v)[0],
            "forward and backward": lambda: _whole_backward(q, k, v, dout),
        },
        "cuflash fa1": tiled("fa1"),
        "cuflash fa2": tiled("fa2"),
    }


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration, IndexError):
        name = platform.processor() or platform.machine()
    return name


def _milliseconds(call: Callable[[], Any], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _peak(call: Callable[[], Any]) -> int:
    """Bytes that NumPy held at most beside the inputs."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
