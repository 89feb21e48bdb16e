"""Planted bugs in FlashAttention-2's backward pass where dQ is summed in one order."""

from __future__ import annotations

from .bug import ORDER, POISON, Bug, row

_BACKWARD = "cuda_src/fa2/backward.cu"
_STEPS = "cuda_src/fa2/backward_steps.cuh"
_TRANSPOSED = "cuda_src/fa2/backward_transposed.cuh"
_STATISTICS = "cuda_src/steps/statistics.cu"
_ORDERED = row("fa2-sm_90-float16-d64-dv64-causal-planned-ordered")
_FILLED_ORDERED = row("fa2-sm_90-float16-d64-dv64-causal-filled-ordered")

BUGS = (
    Bug(
        "turns are not reset",
        _STATISTICS,
        "int i = threadIdx.x; i < Config::turns;",
        "int i = threadIdx.x + 1; i < Config::turns;",
        POISON,
        _ORDERED,
    ),
    Bug(
        "turns are not waited for",
        _STEPS,
        "await_turn(c, step);\n",
        "\n",
        ORDER,
        _ORDERED,
    ),
    Bug(
        "under a causal mask the first kv tile has the first turn",
        _STEPS,
        "kv_range<Config>(c.seq, step.q_tile).end - 1 - tile : tile",
        "tile : tile",
        ORDER,
        _ORDERED,
    ),
    Bug(
        "a turn is passed before dQ is added",
        _STEPS,
        "await_turn(c, step);\n",
        "await_turn(c, step);\n  if constexpr (Config::ordered) {\n"
        "    open.open(turn_of(c, step));\n    open.pass();\n  }\n",
        ORDER,
        _ORDERED,
    ),
    Bug(
        "the last turn of a block is not passed",
        _BACKWARD,
        "gradient_step(c, step, steps.count - 1, dead, dk, dv, open);\n  open.pass();",
        "gradient_step(c, step, steps.count - 1, dead, dk, dv, open);",
        ORDER,
        _ORDERED,
    ),
    Bug(
        "scores as keys x queries: the last turn is not passed",
        _TRANSPOSED,
        "accumulate_q(c, before, steps.count - 1, dead_before, open);\n  open.pass();",
        "accumulate_q(c, before, steps.count - 1, dead_before, open);",
        ORDER,
        _FILLED_ORDERED,
    ),
)
