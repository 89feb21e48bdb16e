"""FlashAttention-3's own kernels beside ours, both under ``jax.jit``: only JAX can call them.

They come with the package ``dew_flash_attn``. A backward pass is the pullback of
``jax.vjp``, compiled separately. Usually many passes are queued and timed together.
Where a pass is so short that the host may not keep up with the device, the kernel
times of JAX's profiler count instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .cases import Case, select
from .inputs import Inputs, make_inputs
from .jit import Pass, time_passes
from .kernel_times import kernel_times
from .lengths import lengths_of, offsets_of
from .run import common_columns, results_file, store
from .sources import digest_now
from .timing import median_ratio
from .verify import Truth

__all__ = [
    "FUNCTIONS",
    "HIDDEN",
    "OURS",
    "PEER",
    "Function",
    "compiled_pass",
    "measure",
    "run_flash3",
    "timed",
    "to_cupy",
]

OURS, PEER = "cuflash", "flash-attn-3"
#: If a pass takes at least this many milliseconds, the host keeps up with the device.
HIDDEN = 0.2

#: A function of q, k, v and, in cases with sinks, of the sinks; it returns the output.
Function = Callable[..., Any]


def run_flash3(names: str, output: Path | None = None) -> list[dict[str, Any]]:
    """Time the sets of cases on the GPU, print a line for each row and store the rows."""
    from cuflash.cuda.available import require_device

    cases = select(names)
    known = {"window", "softcap", "sinks", "packed_lengths"}
    if not all(known.issuperset(case.features) for case in cases):
        raise SystemExit("--cases: FlashAttention-3 has no slopes, no bias and no boolean mask")
    require_device()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import cupy
    import jax

    common = {**common_columns(), "jax": jax.__version__}
    rows: list[dict[str, Any]] = []
    try:
        for case in cases:
            inputs = make_inputs(case, cupy)
            for row in measure(case, inputs, jax.dlpack.from_dlpack, to_cupy, _say):
                rows.append({**common, **row})
                _say(_line(case, row))
            del inputs
            cupy.get_default_memory_pool().free_all_blocks()
    finally:  # keeps what was measured before an error
        if rows:
            store(output or results_file(common["gpu"], "-flash3"), rows)
    for line in summary(rows):
        _say(line)
    return rows


def measure(
    case: Case,
    inputs: Inputs,
    to_jax: Callable[[Any], Any],
    from_jax: Callable[[Any], Any],
    say: Callable[[str], None],
    functions: Mapping[str, Callable[[Case], Function]] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a case, ours first; prints a line if the peer cannot do it."""
    import jax

    *given, dout = inputs.matrices(case)
    if not case.lengths:  # offsets have no gradient: the functions make them
        given += inputs.features(case).values()
    arrays, dout = [to_jax(array) for array in given], to_jax(dout)
    truth, passes, worst = Truth(case, inputs), {}, {}
    for name, make in (functions or FUNCTIONS).items():
        try:
            one = compiled_pass(case, make(case), arrays, dout)
            found = jax.tree.leaves(jax.block_until_ready(one()))
        except Exception as error:
            if name == OURS:
                raise
            say(f"left out: {name}, {case}: {type(error).__name__}: {str(error)[:160]}")
            continue
        worst[name] = truth.worst_ratio([from_jax(array) for array in found])
        if not worst[name] <= truth.limit:
            raise RuntimeError(
                f"{name}, {case}: wrong by {worst[name]:.3g} times what rounding explains"
            )
        passes[name] = one
    how, times = timed(passes, say)
    return [_row(case, name, how, times, worst[name]) for name in passes]


def compiled_pass(case: Case, function: Function, arrays: list[Any], dout: Any) -> Pass:
    """The forward pass under ``jax.jit``, or the pullback of the arrays, compiled separately."""
    import jax

    if case.op == "forward":
        forward = jax.jit(function)
        return lambda: forward(*arrays)
    _, pullback = jax.vjp(function, *arrays)
    # The residuals of the forward pass are arguments of this function.
    backward = jax.jit(lambda pull, cotangent: pull(cotangent))
    return lambda: backward(pullback, dout)


def timed(
    passes: Mapping[str, Pass],
    say: Callable[[str], None],
    of_passes: Callable[..., dict[str, list[float]]] = time_passes,
    of_kernels: Callable[..., dict[str, list[float]]] = kernel_times,
) -> tuple[str, dict[str, list[float]]]:
    """The method of timing, and the milliseconds of each pass in every round."""
    import jax

    times = of_passes(passes, jax.block_until_ready)
    if min(map(statistics.median, times.values())) >= HIDDEN:
        return "passes", times
    try:
        return "kernels", of_kernels(passes, jax.block_until_ready)
    except Exception as error:  # the profiler may fail in any way
        say(f"no kernel times, {type(error).__name__}: {error}")
        return "passes", times


def _row(
    case: Case, name: str, how: str, times: Mapping[str, list[float]], worst: float
) -> dict[str, Any]:
    others = [other for other in times if other != name]
    median = statistics.median(times[name])
    ratio = low = None
    if others:
        ratio, low, _ = (round(x, 4) for x in median_ratio(times[name], times[others[0]]))
    return {
        "sources": digest_now(case.algorithm, case.op, case.features) if name == OURS else None,
        "impl": name,
        "version": _VERSIONS[name](),
        **{n: getattr(case, n) for n in ("op", "dtype", "batch", "heads_q", "heads_kv")},
        **{n: getattr(case, n) for n in ("head_dim", "head_dim_v", "seqlen_q", "seqlen_kv")},
        "causal": case.causal,
        "options": case.options if name == OURS else case.peer_options,
        "how": how,
        "ms": round(median, 5),
        "spread": round((max(times[name]) - min(times[name])) / median, 4),
        "tflops": round(case.flops / median / 1e9, 2),
        "ratio": ratio,
        "ratio_low": low,
        "worst_ratio": round(worst, 4),
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each pass: the geometric mean and the worst of our ratios."""
    lines = []
    for op in ("forward", "backward"):
        ratios = [r["ratio"] for r in rows if r["impl"] == OURS and r["op"] == op and r["ratio"]]
        if ratios:
            lines.append(
                f"{op}: {geometric_mean(ratios):.3f} times {PEER} (geometric mean of "
                f"{len(ratios)}), worst {min(ratios):.3f}"
            )
    return lines


def _ours(case: Case) -> Function:
    from cuflash.jax import attention

    options: dict[str, Any] = {"is_causal": case.causal, "algorithm": case.algorithm}
    if case.window_size is not None:  # None becomes the length: negative sides are bounds in JAX
        sides = (case.seqlen_kv if side is None else side for side in case.window_size)
        options["local_window_size"] = tuple(sides)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.lengths is not None:
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), _offsets(case.lengths))

    def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        return attention(q, k, v, **options, **dict(zip(("sinks",), sinks, strict=False)))

    return function


def _offsets(kind: str) -> Any:
    return importlib.import_module("jax.numpy").asarray(offsets_of(kind))


def _flash3(case: Case) -> Function:
    if case.lengths is not None:
        packed = importlib.import_module("dew_flash_attn").flash_mha_varlen
        offsets, longest = _offsets(case.lengths), max(lengths_of(case.lengths))
        return lambda q, k, v: packed(q, k, v, offsets, longest, is_causal=case.causal)
    flash_mha = importlib.import_module("dew_flash_attn").flash_mha
    if case.softcap is not None:
        raise ValueError("takes no softcap")
    sides = tuple(-1 if side is None else side for side in case.window_size or (None, None))

    def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        more = dict(zip(("sinks",), sinks, strict=False))
        return flash_mha(q, k, v, is_causal=case.causal, window_size=sides, **more)

    return function


FUNCTIONS: Mapping[str, Callable[[Case], Function]] = {OURS: _ours, PEER: _flash3}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # unpacked by hand
        return "unknown"


def _our_version() -> str:
    import cuflash

    return cuflash.__version__


_VERSIONS: Mapping[str, Callable[[], str]] = {
    OURS: _our_version,
    PEER: lambda: f"dew-flash-attn {_version_of('dew-flash-attn-cu13')}",
}


def to_cupy(array: Any) -> Any:
    """A CuPy array on the memory of a JAX array; bfloat16 goes through 16-bit integers."""
    import cupy
    import jax

    if array.dtype.name != "bfloat16":
        return cupy.from_dlpack(array)
    bits = jax.lax.bitcast_convert_type(array, "uint16")
    return cupy.from_dlpack(jax.block_until_ready(bits)).view(array.dtype)


def _line(case: Case, row: Mapping[str, Any]) -> str:
    ratio = f"  {row['ratio']:.3f} (at least {row['ratio_low']:.3f})" if row["ratio"] else ""
    return (
        f"{case!s:<56} {row['how']:<7} {row['impl']:<13} {row['ms']:>8.4f} ms "
        f"{row['tflops']:>6.1f} TFLOP/s  error {row['worst_ratio']:.2f}{ratio}"
    )


def _say(line: str) -> None:
    print(line, flush=True)
