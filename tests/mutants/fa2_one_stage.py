"""Planted bugs in FlashAttention-2's backward pass: one stage of Q and dO, and float64."""

from __future__ import annotations

from .bug import Bug, backward, row

_BACKWARD = "cuda_src/fa2/backward.cu"
_EXPONENTIAL = "cuda_src/tile/exponential.cuh"
_FP64 = "cuda_src/tile/product_fp64.cuh"
_SUM = "cuda_src/tile/gradient_accumulator.cuh"
_DOUBLE = "float64-d64-dv64"
_ONE_STAGE = row("fa2-sm_90-float64-d64-dv64-causal-filled")
_DEAD = row(
    "fa2-sm_90-float64-d64-dv64-causal-filled",
    "test_dead_rows.py::test_dead_rows_beside_rows_that_see_nan",
)
_FULL = row("fa2-sm_90-float64-d64-dv64-full")
_CAUSAL = backward("cuda-fa2", "causal", _DOUBLE)

BUGS = (
    Bug(
        "one stage: dO of the next step comes while dV reads this one's",
        _BACKWARD,
        "  __syncthreads();\n  loads.load_dout(c);",
        "  loads.load_dout(c);",
        _CAUSAL,
        _ONE_STAGE,
    ),
    Bug(
        "one stage: Q of the next step comes while dK reads this one's",
        _BACKWARD,
        "  __syncthreads();\n  loads.load_q(c);",
        "  loads.load_q(c);",
        _CAUSAL,
        _ONE_STAGE,
    ),
    Bug(
        "one stage: numbers of the next rows come before dQ has asked which of these are dead",
        _BACKWARD,
        "  if (!dead) loads.load_numbers(c);\n  accumulate_q(c, step, i, dead, open);",
        "  loads.load_numbers(c);\n  commit_copies<Config::workspace_copies>();\n"
        "  wait_copies<Config::workspace_copies, 0>();\n"
        "  __syncthreads();\n  accumulate_q(c, step, i, dead, open);",
        "tests/property/test_dead_rows.py::"
        "test_dead_rows_beside_rows_that_see_nan[cuda-fa2-float64]",
        _DEAD,
    ),
    Bug(
        "the numbers of a fragment of float64 lie together where they are added alone",
        _SUM,
        "ptx::reduce_add(to + i * kElementStride<Config>, x[i]);",
        "ptx::reduce_add(to + i, x[i]);",
        _CAUSAL,
        _FULL,
    ),
    Bug(
        "the right operand's numbers of a step are those of the other step",
        _FP64,
        "address(operand, chunks[k / 8 % 2][i], row, far)",
        "address(operand, chunks[k / 8 % 2 ^ (depth_along_row<Operand> ? 0 : 1)][i], row, far)",
        _CAUSAL,
        _FULL,
    ),
    Bug(
        "exponentials far from zero are computed as those near to it",
        _EXPONENTIAL,
        "if (farthest < kNearZero) {",
        "if (farthest <= 0xffffffffu) {",
        _CAUSAL,
        row("fa2-sm_90-float64-d96-dv128-causal"),
    ),
)
