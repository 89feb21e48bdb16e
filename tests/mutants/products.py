"""Planted bugs in the products of float32 and float64 on the tensor cores."""

from __future__ import annotations

from .bug import Bug, backward, dead_keys, forward, row

_TF32 = "cuda_src/tile/product_tf32.cuh"
_FP64 = "cuda_src/tile/product_fp64.cuh"
_FLOAT32 = row("fa2-sm_90-float32-d64-dv64-full")
_FLOAT64 = row("fa2-sm_90-float64-d64-dv64-full")
_SINGLE = "float32-d64-dv64"
_DOUBLE = "float64-d64-dv64"

BUGS = (
    Bug(
        "one of the small tf32 products is left out",
        _TF32,
        "ptx::mma_m16n8k8(sums.small.value[m][n], left[s][m].high, b.low);",
        "",
        forward("cuda-fa2", "full", _SINGLE),
        _FLOAT32,
    ),
    Bug(
        "the left operand is not split",
        _TF32,
        "split(to, x);",
        "for (int i = 0; i < 4; ++i) to.high[i] = x[i], to.low[i] = 0;",
        forward("cuda-fa2", "full", _SINGLE),
        _FLOAT32,
    ),
    Bug(
        "small tf32 products count where the large are not finite",
        _TF32,
        "if (fabsf(total) < infinity<float>()) total += x;",
        "total += x;",
        dead_keys("cuda-fa2", "float32"),
        row(
            "fa2-sm_90-float32-d64-dv64-full",
            "test_products.py::test_infinities_and_nan_come_through",
        ),
    ),
    Bug(
        "large tf32 sums are added once too often",
        _TF32,
        "for (int k0 = 0; k0 < depth; k0 += part) {\n        sums.large.fill(0.0f);",
        "sums.large.fill(0.0f);\n      for (int k0 = 0; k0 < depth; k0 += part) {",
        forward("cuda-fa2", "full", "float32-d128-dv128"),
        row("fa2-sm_80-float32-d96-dv128-causal"),
    ),
    Bug(
        "the weights' pairs of depth change places",
        _FP64,
        "left[s][m].rows[group][0] = weights.value[m][k / 8 + s][group][0];\n"
        "          left[s][m].rows[group][1] =",
        "left[s][m].rows[group][1] = weights.value[m][k / 8 + s][group][0];\n"
        "          left[s][m].rows[group][0] =",
        forward("cuda-fa2", "full", _DOUBLE),
        _FLOAT64,
    ),
    Bug(
        "chunks of float64 are spread for the left operand alone",
        _FP64,
        "const auto right = fragments_of<spread>(b, lane);",
        "const auto right = fragments_of<false>(b, lane);",
        backward("cuda-fa2", "full", _DOUBLE),
        _FLOAT64,
    ),
)
