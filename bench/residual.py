"""The accuracy and the cost of a float32 residual.

Two things are measured. One is the error of dq against float64 if the keys have a
component in common, for this library with and without the float32 residual, for
PyTorch and for JAX. The other is the time of a forward and a backward pass with and
without the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .cases import Case
from .inputs import make_inputs
from .jit import rows_of, time_passes
from .run import common_columns, results_file, store

__all__ = ["ERRORS", "TIMES", "errors", "run_residual"]

#: The two kinds of rows.
ERRORS, TIMES = "error of dq", "time"
#: (batch, seqlen, heads, head_dim) of the arrays for errors.
SHAPE = (2, 512, 4, 64)
#: How many times every key but the first contains the common vector, whose elements are standard
#: normal. The first key lacks it because the NumPy backend, which computes the truth, would
#: subtract a vector that all keys have.
SHIFTS = (0, 1, 4, 16, 64)
RESIDUALS: Mapping[str, str | None] = {"cuflash": None, "cuflash, float32 residual": "float32"}
CASES = tuple(
    Case("backward", "bfloat16", 2, 16, 16, d, d, seqlen, seqlen, True, "auto")
    for d in (64, 128)
    for seqlen in (2048, 8192)
)

#: A function of q, k, v and dout that returns dq, all NumPy arrays.
Gradient = Callable[[Any, Any, Any, Any], Any]


def run_residual(output: Path | None = None) -> list[dict[str, Any]]:
    """Measure on the GPU, print a line for each row and store the rows."""
    from cuflash.cuda.available import require_device

    require_device()
    common = common_columns()
    rows = [{**common, **row} for row in [*errors(_gradients()), *_times()]]
    for row in rows:
        found = f"{row['error']:.1e}" if row["what"] == ERRORS else f"{row['ms']:.3f} ms"
        where = row.get("shift", f"{row.get('head_dim')} x {row.get('seqlen_q')}")
        print(f"{row['what']:<12}{row['impl']:<28}{where!s:<14}{found}", flush=True)
    store(output or results_file(common["gpu"], "-residual"), rows)
    return rows


def errors(gradients: Mapping[str, Gradient], dtype: str = "bfloat16") -> list[dict[str, Any]]:
    """The relative error of dq, in the norm, of every implementation and shift."""
    import cuflash

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rows = []
    for shift in SHIFTS:
        rng = np.random.default_rng(0)
        q, k, v, dout = (rng.standard_normal(SHAPE) for _ in range(4))
        k[:, 1:] += shift * rng.standard_normal(SHAPE[-1])
        x = [a.astype(kind) for a in (q, k, v, dout)]
        wide = [a.astype(np.float64) for a in x]
        truth = cuflash.attention_vjp(*wide[:3], backend="numpy")[1](wide[3])[0]
        for impl, gradient in gradients.items():
            difference = gradient(*x).astype(np.float64) - truth
            found = float(np.linalg.norm(difference) / np.linalg.norm(truth))
            row = {"what": ERRORS, "impl": impl, "dtype": dtype, "shift": shift}
            rows.append({**row, "shape": list(SHAPE), "error": found})
    return rows


def _gradients() -> dict[str, Gradient]:
    import jax
    import torch

    found = {name: _ours(residual) for name, residual in RESIDUALS.items()}
    return {
        **found,
        f"torch {torch.__version__}": _torch,
        f"jax.nn, JAX {jax.__version__}": _jax,
    }


def _ours(residual: str | None) -> Gradient:
    import cupy

    import cuflash

    def gradient(q: Any, k: Any, v: Any, dout: Any) -> Any:
        x = [cupy.asarray(a) for a in (q, k, v, dout)]
        _, pullback = cuflash.attention_vjp(*x[:3], residual_dtype=residual)
        return pullback(x[3])[0].get()

    return gradient


def _torch(q: Any, k: Any, v: Any, dout: Any) -> Any:
    """PyTorch's attention by FlashAttention-2, which takes (batch, heads, seqlen, head_dim)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def tensor(array: Any) -> Any:
        wide = torch.tensor(np.asarray(array, np.float32), device="cuda")
        return wide.to(torch.bfloat16).transpose(1, 2)

    x = [tensor(a).requires_grad_() for a in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*x)
    out.backward(tensor(dout))
    return x[0].grad.transpose(1, 2).float().cpu().numpy()


def _jax(q: Any, k: Any, v: Any, dout: Any) -> Any:
    import jax

    arrays = [jax.numpy.asarray(a) for a in (q, k, v, dout)]
    _, pullback = jax.vjp(jax.nn.dot_product_attention, *arrays[:3])
    return np.asarray(pullback(arrays[3])[0])


def _times() -> list[dict[str, Any]]:
    import cupy

    rows = []
    for case in CASES:
        x = make_inputs(case, cupy)
        passes = {name: _both(case, x, residual) for name, residual in RESIDUALS.items()}
        timed = time_passes(passes, lambda _: cupy.cuda.runtime.deviceSynchronize())
        rows += [{"what": TIMES, **row} for row in rows_of(case, timed, "cuflash")]
    return rows


def _both(case: Case, x: Any, residual: str | None) -> Callable[[], Any]:
    import cuflash

    def call() -> Any:
        options = {"causal": case.causal, "residual_dtype": residual}
        return cuflash.attention_vjp(x.q, x.k, x.v, **options)[1](x.dout)

    return call
