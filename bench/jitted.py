"""Programs of ``jax.jit`` with our attention, beside the same programs with others' attention.

A program is timed as its user sees it: many runs are queued, and the time until all are done is
divided by their number. For a short program that is the host's time to queue it, for a long program
the device's time to run it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from .cases import Case
from .flash3 import FUNCTIONS as WITH_FLASH3
from .flash3 import OURS, PEER, Function, to_cupy
from .inputs import make_inputs
from .jit import Pass, time_passes
from .run import common_columns, results_file, store
from .timing import median_ratio
from .verify import Truth

__all__ = ["CALLBACK", "CUDNN", "PROGRAMS", "TRIVIAL", "XLA", "Program", "measure", "run_jitted"]

CALLBACK, CUDNN, XLA, TRIVIAL = "callback", "cudnn", "xla", "x + 1"

#: Seconds of the runs that are queued between two waits, and the most and the fewest of these runs.
_QUEUED, _MOST, _FEWEST = 0.03, 300, 4


@dataclass(frozen=True)
class Program:
    """Calls in sequence, each with the output of the one before as q, or their gradients."""

    case: Case
    calls: int = 1


def _programs() -> tuple[Program, ...]:
    """Both passes of tiny problems, which show the cost of a call, small ones and large ones."""
    tiny = (1, 4, 4, 64, 64, 64, 64, False)
    others = (
        (1, 8, 8, 64, 64, 256, 256, True),
        (32, 12, 12, 64, 64, 512, 512, False),
        (8, 16, 16, 64, 64, 2048, 2048, True),
        (2, 16, 16, 128, 128, 8192, 8192, True),
        (2, 16, 16, 128, 128, 8192, 8192, False),
        (4, 32, 8, 128, 128, 4096, 4096, True),
        (1, 8, 8, 256, 256, 16384, 16384, True),
    )
    every = [
        Program(Case(op, "bfloat16", *shape, "auto"))
        for shape in (tiny, *others)
        for op in ("forward", "backward")
    ]
    return every[0], Program(every[0].case, 4), *every[1:]


PROGRAMS = _programs()


def run_jitted(output: Path | None = None) -> list[dict[str, Any]]:
    """Time all programs on the GPU, print a line for each row and store the rows."""
    from cuflash.cuda.available import require_device

    require_device()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import cupy
    import jax

    common = {**common_columns(), "version": f"jax {jax.__version__}"}
    rows: list[dict[str, Any]] = []
    try:
        for program in PROGRAMS:
            inputs = make_inputs(program.case, cupy)
            truth = Truth(program.case, inputs)
            arrays = [jax.dlpack.from_dlpack(a) for a in inputs.matrices(program.case)]
            made = measure(program, arrays, lambda found, t=truth: _check(t, found), _say)
            rows += [{**common, **row} for row in made]
            del inputs, arrays, truth
            cupy.get_default_memory_pool().free_all_blocks()
    finally:  # keeps what was measured before an error
        if rows:
            store(output or results_file(common["gpu"], "-jitted"), rows)
    return rows


def measure(
    program: Program,
    arrays: list[Any],
    check: Callable[[list[Any]], float],
    say: Callable[[str], None],
    functions: Mapping[str, Callable[[Case], Function]] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a program, ours first; prints a line for a peer that cannot do it.

    Parameters
    ----------
    arrays
        q, k, v and dout.
    check
        Takes the results of one call, and returns their error as :meth:`Truth.worst_ratio` does.
    """
    passes, worst = {}, {}
    for name, make in (functions or FUNCTIONS).items():
        try:
            passes[name], worst[name] = _made(program, name, make, arrays, check)
        except Exception as error:
            passes.pop(name, None)
            if name == OURS:
                raise
            say(f"left out: {name}, {program}: {type(error).__name__}: {str(error)[:160]}")
    times = time_passes(passes, _wait, count=_count(passes[OURS]))
    rows = [_row(program, name, times, worst[name]) for name in passes]
    for row in rows:
        say(_line(program, row))
    return rows


def _made(
    program: Program,
    name: str,
    make: Callable[[Case], Function],
    arrays: list[Any],
    check: Callable[[list[Any]], float],
) -> tuple[Pass, float | None]:
    """A compiled program, and the error of one call of it."""
    import jax

    native = "0" if name == CALLBACK else "1"
    with mock.patch.dict(os.environ, CUFLASH_JAX_NATIVE=native):  # read while JAX lowers
        one = compiled_program(program, make(program.case), arrays)
        found = jax.tree.leaves(jax.block_until_ready(one()))
    if program.calls > 1 or name == TRIVIAL:
        return one, None
    error = check(found)
    return one, round(error, 4)


def compiled_program(program: Program, function: Function, arrays: list[Any]) -> Pass:
    """The calls under ``jax.jit``, or the gradients of ``sum(out * dout)``."""
    import jax

    *given, dout = arrays

    def forward(q: Any, k: Any, v: Any) -> Any:
        for _ in range(program.calls):
            q = function(q, k, v)
        return q

    def product(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return (forward(q, k, v) * dout).sum()

    if program.case.op == "forward":
        whole = jax.jit(forward)
        return lambda: whole(*given)
    gradients = jax.jit(jax.grad(product, argnums=(0, 1, 2)))
    return lambda: gradients(*given, dout)


def _check(truth: Truth, found: list[Any]) -> float:
    worst = truth.worst_ratio([to_cupy(array) for array in found])
    if not worst <= truth.limit:
        raise RuntimeError(f"wrong by {worst:.3g} times what rounding explains")
    return worst


def _wait(last: Any) -> None:
    import jax

    jax.block_until_ready(last)


def _count(each: Pass, clock: Callable[[], float] = time.perf_counter) -> int:
    """The number of runs that are queued between two waits."""
    start = clock()
    for _ in range(_FEWEST):
        last = each()
    _wait(last)
    once = max((clock() - start) / _FEWEST, 1e-9)
    return min(max(int(_QUEUED / once), _FEWEST), _MOST)


def _row(
    program: Program, name: str, times: Mapping[str, list[float]], worst: float | None
) -> dict[str, Any]:
    """A row of an implementation; ``ratio`` is our speed relative to its speed."""
    case, median = program.case, statistics.median(times[name])
    ratio, low, _ = median_ratio(times[OURS], times[name])
    return {
        "impl": name,
        "calls": program.calls,
        **{n: getattr(case, n) for n in ("op", "dtype", "batch", "heads_q", "heads_kv")},
        **{n: getattr(case, n) for n in ("head_dim", "seqlen_q", "seqlen_kv", "causal")},
        "us": round(1e3 * median, 2),
        "spread": round((max(times[name]) - min(times[name])) / median, 4),
        "ratio": round(ratio, 4),
        "ratio_low": round(low, 4),
        "worst_ratio": worst,
    }


def _of_jax(implementation: str) -> Callable[[Case], Function]:
    def make(case: Case) -> Function:
        import jax

        attention, options = jax.nn.dot_product_attention, {"implementation": implementation}
        return lambda q, k, v: attention(q, k, v, is_causal=case.causal, **options)

    return make


#: Ours by the native handler and by a Python callback; JAX's two; FlashAttention-3; no attention.
FUNCTIONS: Mapping[str, Callable[[Case], Function]] = {
    OURS: WITH_FLASH3[OURS],
    CALLBACK: WITH_FLASH3[OURS],
    CUDNN: _of_jax("cudnn"),
    XLA: _of_jax("xla"),
    PEER: WITH_FLASH3[PEER],
    TRIVIAL: lambda case: lambda q, k, v: q + 1,
}


def _line(program: Program, row: Mapping[str, Any]) -> str:
    return (
        f"{program.case!s:<56} {program.calls} calls  {row['impl']:<13} {row['us']:>9.1f} us  "
        f"{row['ratio']:.3f} (at least {row['ratio_low']:.3f})"
    )


def _say(line: str) -> None:
    print(line, flush=True)
