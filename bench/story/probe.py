"""Launches jobs under ncu: ``python -m bench.story.probe JOBS.json``.

Only the launches between the profiler's start and stop are counted. A kernel that does nothing
begins every job, so that a reader of the counters can separate the jobs' kernels. Each job prints
one line of JSON: its plan, or why it was not run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..inputs import make_inputs
from .jobs import Job, prepare

__all__ = ["MARK", "main"]

#: The name of the kernel that begins a job.
MARK = "story_mark"


def main(path: str) -> int:
    """Run the jobs of a file."""
    import cupy

    mark = cupy.RawKernel(f'extern "C" __global__ void {MARK}() {{}}', MARK)
    mark((1,), (1,), ())
    for values in json.loads(Path(path).read_text()):
        print(json.dumps(_run(Job.of_json(values), mark, cupy)), flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    return 0


def _run(job: Job, mark: Any, cupy: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"skipped": None}
    call = None
    try:
        call, facts = prepare(job, make_inputs(job.case, cupy))
        said |= facts
    except Exception as error:  # no memory, unsupported, or not compiled
        said["skipped"] = _reason(error)
    cupy.get_default_memory_pool().free_all_blocks()  # ncu saves all allocated memory
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    mark((1,), (1,), ())
    try:
        if call is not None:
            call()
        cupy.cuda.Device().synchronize()
    except Exception as error:  # attention by hand may run out of memory
        said["skipped"] = _reason(error)
    finally:
        cupy.cuda.runtime.profilerStop()
    return said


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
