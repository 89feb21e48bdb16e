"""Holds timed outputs against float64 on the device, by the row-wise rule of the tests."""

from __future__ import annotations

import math
from typing import Any

from .cases import Case
from .peers import Inputs

__all__ = ["worst_ratio"]

#: Largest relative error of one rounding to the storage type.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
#: Below this magnitude a rounding errs by the unit of this. float16 has it where a test can see it.
SMALLEST = {"float16": 2.0**-14}


def worst_ratio(case: Case, inputs: Inputs, result: Any) -> float:
    """Most of ``|x - r| / (u (|r| + E))`` over the rows of the first and the last head.

    E is what the roundings that really happen (of P, of dS and of the output)
    amount to; a correct kernel stays below 1 forward, 2 backward.
    """
    import cupy

    worst = 0.0
    for batch, head in ((0, 0), (case.batch - 1, case.heads_q - 1)):
        arrays = [
            getattr(inputs, name)[batch, :, head].astype(cupy.float64)
            for name in ("q", "k", "v", "dout")
        ]
        truths = _truth(case, *arrays)
        got = (result,) if case.op == "forward" else result
        for x, (truth, model) in zip(got, truths[case.op], strict=True):
            row = x[batch, :, head].astype(cupy.float64)
            error = cupy.linalg.norm(row - truth, axis=-1)
            size = cupy.maximum(abs(truth), SMALLEST.get(case.dtype, 0.0))
            allowed = UNIT[case.dtype] * (cupy.linalg.norm(size, axis=-1) + model)
            ratio = error / cupy.maximum(allowed, 1e-300)
            worst = max(worst, float(cupy.where(error == 0, 0, ratio).max()))
            if bool(cupy.isnan(row).any()):
                return math.inf
    return worst


def _truth(case: Case, q: Any, k: Any, v: Any, dout: Any) -> dict[str, list[tuple[Any, Any]]]:
    import cupy

    scale = case.head_dim**-0.5
    scores = q @ k.T * scale
    if case.causal:
        rows, columns = cupy.arange(len(q))[:, None], cupy.arange(len(k))[None]
        scores = cupy.where(columns <= rows + len(k) - len(q), scores, -cupy.inf)
    p = cupy.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    square = p * p  # masked weights stay 0
    seen, smallest = p > 0, SMALLEST.get(case.dtype, 0.0)
    forward = [(out, cupy.sqrt(square @ (v * v).sum(-1)))]
    if case.op == "forward":
        return {"forward": forward}
    ds = p * (dout @ v.T - (dout * out).sum(-1, keepdims=True))
    ds_square = cupy.where(seen, cupy.maximum(abs(ds), smallest), 0) ** 2
    # Of the output inside delta: its own rounding, and that of the weights it was summed with.
    rounding = ((dout * out) ** 2).sum(-1) + (square * (dout @ v.T) ** 2).sum(-1)
    error_q = ds_square @ (k * k).sum(-1) + rounding * ((p @ k) ** 2).sum(-1)
    error_k = (ds_square + square * rounding[:, None]).T @ (q * q).sum(-1)
    return {
        "backward": [
            (ds @ k * scale, scale * cupy.sqrt(error_q)),
            (ds.T @ q * scale, scale * cupy.sqrt(error_k)),
            (p.T @ dout, cupy.sqrt(square.T @ (dout * dout).sum(-1))),
        ]
    }
