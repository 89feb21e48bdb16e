"""Times the first call of a process, with no kernel compiled and with all kernels on disk.

Each call is made by a new process, after its CUDA context exists. The processes keep compiled
kernels in temporary folders.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import Case
from .host import cpu_name
from .run import common_columns, results_file, store

__all__ = ["CASES", "first_call", "run_cold"]

#: Both passes of two generations at the most common widths.
CASES = tuple(
    Case(op, "float16", 1, 4, 4, dim, dim, 1024, 1024, True, algorithm)
    for algorithm in ("fa3", "fa2")
    for op in ("forward", "backward")
    for dim in (64, 128)
)
TIMES = 3

_CHILD = """
import json, sys, time
import cupy
import cuflash
from bench.cases import Case
from bench.inputs import make_inputs
case = Case(**json.loads(sys.argv[1]))
x = make_inputs(case, cupy)
lse = cupy.zeros((case.batch, case.heads_q, case.seqlen_q), cupy.float32)
cupy.cuda.Device().synchronize()
options = {"causal": case.causal, "algorithm": case.algorithm}
start = time.perf_counter()
if case.op == "forward":
    cuflash.attention(x.q, x.k, x.v, **options)
else:
    cuflash.attention_backward(x.dout, x.q, x.k, x.v, x.dout, lse, **options)
cupy.cuda.Device().synchronize()
print(1e3 * (time.perf_counter() - start))
"""
_FIELDS = (
    *("op", "dtype", "batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    *("seqlen_q", "seqlen_kv", "causal", "algorithm"),
)


def first_call(case: Case, cache: Path) -> float:
    """Milliseconds of the first call of a new process that keeps kernels in ``cache``."""
    given = json.dumps({name: getattr(case, name) for name in _FIELDS})
    command = [sys.executable, "-c", _CHILD, given]
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def run_cold(
    output: Path | None = None, first: Callable[[Case, Path], float] = first_call
) -> list[dict[str, Any]]:
    """Time first calls with an empty and with a filled cache, print and store the rows."""
    from cuflash.cuda.available import require_device

    require_device()
    common = {**common_columns(), "cpu": cpu_name(), "python": platform.python_version()}
    rows = []
    for case in CASES:
        compiled, loaded = [], []
        for _ in range(TIMES):
            with tempfile.TemporaryDirectory() as folder:
                compiled.append(first(case, Path(folder)))
                loaded.append(first(case, Path(folder)))
        row = {**common, **{name: getattr(case, name) for name in _FIELDS}}
        row["compiled_ms"] = round(statistics.median(compiled), 1)
        row["loaded_ms"] = round(statistics.median(loaded), 1)
        print(
            f"{case!s:<52} compiled {row['compiled_ms']:>8} ms, from disk {row['loaded_ms']:>6} ms",
            flush=True,
        )
        rows.append(row)
    store(output or results_file(common["gpu"], "-cold"), rows)
    return rows
