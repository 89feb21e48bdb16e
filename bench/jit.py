"""The time of gradients under ``jax.jit`` beside the plain calls, on the same arrays.

XLA has its own stream, on which our events cannot be recorded. Therefore many passes are queued,
and the time until all are done is divided by their number. The passes are so long that the host
stays far ahead of the device.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .cases import Case
from .inputs import make_inputs
from .run import common_columns, results_file, store
from .timing import median_ratio

__all__ = ["IMPLEMENTATIONS", "run_jit", "time_passes"]

#: Forward and backward passes take some milliseconds.
CASES = tuple(
    Case("backward", "bfloat16", 2, 16, 16, 128, 128, 8192, 8192, causal, "auto")
    for causal in (False, True)
)
PASSES = 12
ROUNDS = 9
IMPLEMENTATIONS = ("cuflash", "jax.jit(jax.grad)")

#: A function that queues one pass; its return value keeps the results alive.
Pass = Callable[[], Any]


def run_jit(output: Path | None = None) -> list[dict[str, Any]]:
    """Time plain calls and ``jax.jit`` on the GPU, print a line for each case, store the rows."""
    from cuflash.cuda.available import require_device

    require_device()
    import cupy
    import jax

    common = {**common_columns(), "version": f"jax {jax.__version__}"}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        passes = {
            name: make(case)
            for name, make in zip(IMPLEMENTATIONS, (plain_pass, jitted_pass), strict=True)
        }
        timed = time_passes(passes, lambda _: cupy.cuda.runtime.deviceSynchronize())
        rows += [{**common, **row} for row in rows_of(case, timed)]
        print(f"{case!s:<52} jit {rows[-1]['ratio']:.3f} of the plain calls' speed", flush=True)
    store(output or results_file(common["gpu"], "-jit"), rows)
    return rows


def plain_pass(case: Case) -> Pass:
    """The library's own calls on CuPy's arrays."""
    import cupy

    import cuflash

    x = make_inputs(case, cupy)

    def both() -> Any:
        out, lse = cuflash.attention(x.q, x.k, x.v, causal=case.causal, return_lse=True)
        return cuflash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, causal=case.causal)

    return both


def jitted_pass(case: Case) -> Pass:
    """JAX's gradients of ``sum(out * dout)``, which are the same, compiled as one program."""
    import cupy
    import jax

    from cuflash.jax import attention

    x = make_inputs(case, cupy)
    q, k, v, dout = (jax.dlpack.from_dlpack(a) for a in (x.q, x.k, x.v, x.dout))

    def product(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return (attention(q, k, v, is_causal=case.causal, q_offset=None) * dout).sum()

    gradients = jax.jit(jax.grad(product, argnums=(0, 1, 2)))
    return lambda: gradients(q, k, v, dout)


def time_passes(
    passes: Mapping[str, Pass],
    wait: Callable[[Any], Any],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    count: int = PASSES,
) -> dict[str, list[float]]:
    """Milliseconds of every pass in each round; the passes take turns.

    Parameters
    ----------
    passes
        The passes, in another order each round.
    wait
        Takes the return value of the last pass, and returns when the device has nothing left to do.
    count
        Passes that are queued before a wait.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    names, order = list(passes), random.Random(0)
    for each in passes.values():  # compiles
        wait(each())
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            start = clock()
            last = [passes[name]() for _ in range(count)][-1]
            wait(last)
            times[name].append(1e3 * (clock() - start) / count)
    return times


def rows_of(
    case: Case, timed: Mapping[str, list[float]], yardstick: str = IMPLEMENTATIONS[0]
) -> list[dict[str, Any]]:
    """A row for each implementation, with its speed relative to that of ``yardstick``."""
    plain = timed[yardstick]
    rows = []
    for name, times in timed.items():
        ratio, low, _ = median_ratio(times, plain)
        median = statistics.median(times)
        rows.append(
            {
                "impl": name,
                "op": "forward and backward",
                **{n: getattr(case, n) for n in ("dtype", "batch", "heads_q", "head_dim")},
                **{n: getattr(case, n) for n in ("seqlen_q", "causal")},
                "ms": round(median, 4),
                "spread": round((max(times) - min(times)) / median, 4),
                "ratio": round(ratio, 4),
                "ratio_low": round(low, 4),
            }
        )
    return rows
