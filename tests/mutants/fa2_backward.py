"""Planted bugs in FlashAttention-2's backward pass: all of its kernels."""

from __future__ import annotations

from .bug import (
    FULL_DEVICE,
    FULL_DEVICE_DEAD,
    Bug,
    backward,
    checks,
    dead_keys,
    dead_queries,
    dead_rows,
    row,
)

_BACKWARD = "cuda_src/fa2/backward.cu"
_STEPS = "cuda_src/fa2/backward_steps.cuh"
_TYPES = "cuda_src/fa2/backward_types.cuh"
_LOADS = "cuda_src/fa2/backward_loads.cuh"
_TRANSPOSED = "cuda_src/fa2/backward_transposed.cuh"
_STATISTICS = "cuda_src/steps/statistics.cu"
_SUM = "cuda_src/tile/gradient_accumulator.cuh"
_FULL = row("fa2-sm_90-bfloat16-d64-dv64-full")
_IN_TURN = row("fa2-sm_90-float32-d64-dv64-causal-planned")
_ORDERED = row("fa2-sm_90-float16-d64-dv64-causal-planned-ordered")
_FILLED = row("fa2-sm_90-bfloat16-d64-dv64-causal-filled")
_FILLED_NAME = "fa2-sm_90-float16-d64-dv64-causal-filled-ordered"
_FILLED_ORDERED = row(_FILLED_NAME)
_FILLED_KEYS = row(_FILLED_NAME, "test_dead_rows.py::test_keys_that_kill_every_row")
_NAME = "fa2-sm_90-float16-d64-dv64-causal"
_CAUSAL = row(_NAME)
_DEAD_QUERIES = row(_NAME, "test_device_code.py::test_what_dead_rows_hold_reaches_nothing")
_DEAD_KEYS = row(_NAME, "test_dead_rows.py::test_keys_that_kill_every_row")
_DEAD_ROWS = row(_NAME, "test_dead_rows.py::test_rows_before_the_mask_may_hold_anything")

BUGS = (
    Bug(
        "P and dS are read before all warps have written them",
        _BACKWARD,
        "if (dead) clear_scores(c, step, i);\n    __syncthreads();",
        "if (dead) clear_scores(c, step, i);",
        backward("cuda-fa2", "full", "float32-d64-dv64"),
        _IN_TURN,
    ),
    Bug(
        "the one barrier of a backward step is missing",
        _STEPS,
        "wait_copies<Config::workspace_copies, 0>();\n  __syncthreads();",
        "wait_copies<Config::workspace_copies, 0>();",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "a backward step waits for one group too few",
        _STEPS,
        "wait_copies<Config::workspace_copies, 0>();",
        "wait_copies<Config::workspace_copies, 1>();",
        backward("cuda-fa2", "full", "float32-d64-dv64"),
        _IN_TURN,
    ),
    Bug(
        "the stage of Q is taken a step early",
        "cuda_src/tile/backward_tiles.cuh",
        "step.stage + 1 == Config::num_stages ?",
        "step.stage + 2 == Config::num_stages ?",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "P of the next step takes the place of this step's",
        _TYPES,
        "return {shared.p[step % Config::score_stages].data};",
        "return {shared.p[0].data};",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "scores take the statistics of the step before",
        _STEPS,
        "StepStatistics<Config>{c.lse(step.stage),",
        "StepStatistics<Config>{c.lse((step.stage + Config::num_stages - 1) % Config::num_stages),",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "the q tile on the diagonal is skipped",
        "cuda_src/tile/schedule.cuh",
        "first < seq.seqlen_q ? first / Config::block_q : end;",
        "first < seq.seqlen_q ? ceil_div(first, Config::block_q) : end;",
        checks("cuda-fa2"),
        _CAUSAL,
    ),
    Bug(
        "grouped gradients come from the wrong heads",
        _BACKWARD,
        "c.item.kv_begin, c.item.head * c.group, c.group);",
        "c.item.kv_begin, c.item.head, c.group);",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "heads of dout are as far apart as those of q",
        _LOADS,
        "dout.move(c.params.dout.head_stride - back",
        "dout.move(c.params.q.head_stride - back",
        backward("cuda-fa2", "full", "float16-d100-dv256"),
        row("fa2-sm_90-float16-d256-dv192-causal"),
    ),
    Bug(
        "the numbers of a head's rows follow on those of the head before",
        _LOADS,
        "numbers += c.params.padded_rows - back;",
        "numbers += c.params.padded_rows;",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "fragments of S and dP that are computed together go to one of them",
        "cuda_src/tile/product_mma.cuh",
        "second.step(cd, i);",
        "second.step(ab, i);",
        backward("cuda-fa2", "full", "float16-d100-dv256"),
        row("fa2-sm_90-float16-d256-dv256-causal-planned"),
    ),
    Bug(
        "dk of whole rows lacks the scale",
        _STEPS,
        "{ x *= factor; });",
        "{ x *= 1; });",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "whole rows go beyond the length",
        _STEPS,
        "c.seq.rows_kv - c.item.kv_begin - row0,",
        "c.seq.rows_kv - c.item.kv_begin,",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "dQ is added to what was there",
        _STATISTICS,
        "if (all_heads < params.cleared) clear_accumulator<Config>(params, first_row);",
        "",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "the second fragment of rows is added to the wrong one",
        _SUM,
        "row_stride = Config::head_dim / 8 * 32 * kLaneElements<Tile>;",
        "row_stride = 32 * kLaneElements<Tile>;",
        checks("cuda-fa2", "full"),
        _ORDERED,
    ),
    Bug(
        "all warps add to the first columns of dQ",
        _SUM,
        "auto* to = accumulator + Counted::template index<Config>(head_row, row0, column0, lane);",
        "auto* to = accumulator + Counted::template index<Config>(head_row, row0, 0, lane);",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "dq is converted without the scale",
        "cuda_src/steps/convert_dq.cu",
        "static_cast<Compute>(params.scale);",
        "Compute(1);",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "dlse is added to delta",
        _STATISTICS,
        "? 0 : sum - dlse;",
        "? 0 : sum + dlse;",
        backward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "lse stays in natural units",
        _STATISTICS,
        "lse = Logits<Config>::from_natural(given);",
        "lse = given;",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "rows beyond the length have a finite lse",
        _STATISTICS,
        "Compute given = -infinity<Compute>();  // lse",
        "Compute given = 0;",
        dead_keys("cuda-fa2"),
        _DEAD_KEYS,
    ),
    Bug(
        "dead rows keep what they hold",
        _STEPS,
        "clear_row(tile, row);",
        "continue;",
        dead_queries("cuda-fa2"),
        _DEAD_QUERIES,
    ),
    Bug(
        "dout of dead rows is kept",
        _STEPS,
        "clear_dead_rows(c, step, c.dout(step.stage));",
        "",
        dead_rows("cuda-fa2"),
        _DEAD_ROWS,
    ),
    Bug(
        "dead rows get a gradient",
        _SUM,
        "skip[group] = dead(",
        "skip[group] = false && dead(",
        dead_keys("cuda-fa2"),
        _DEAD_KEYS,
    ),
    Bug(
        "scores as keys x queries: all warps take the first keys",
        _TRANSPOSED,
        "const int key0 = static_cast<int>(threadIdx.x) / 32 * Scores::rows;",
        "const int key0 = 0;",
        FULL_DEVICE,
        _FILLED,
    ),
    Bug(
        "scores as keys x queries: the mask takes keys for queries",
        _TRANSPOSED,
        "if (!Mask<Config>::visible(c.seq, i, j)) s = Compute(0);",
        "if (!Mask<Config>::visible(c.seq, j, i)) s = Compute(0);",
        FULL_DEVICE,
        _FILLED,
    ),
    Bug(
        "scores as keys x queries: lse is of the lane's row",
        _TRANSPOSED,
        "value[n][which] = from[lane.column + Scores::column(n, which)];",
        "value[n][which] = from[lane.row + Scores::column(n)];",
        FULL_DEVICE,
        _FILLED,
    ),
    Bug(
        "scores as keys x queries: dS of dead queries is kept",
        _TRANSPOSED,
        "if (dead) clear_dead_queries(c, step, ds);",
        "",
        FULL_DEVICE_DEAD,
        _FILLED_KEYS,
    ),
    Bug(
        "scores as keys x queries: dQ of the last step is not added",
        _TRANSPOSED,
        "accumulate_q(c, before, steps.count - 1, dead_before, open);",
        "",
        FULL_DEVICE,
        _FILLED_ORDERED,
    ),
    Bug(
        "scores as keys x queries: dS takes the place of the step before",
        _TYPES,
        "block_q>{\n        shared.ds[step % Config::score_stages].data};",
        "block_q>{\n        shared.ds[0].data};",
        FULL_DEVICE,
        _FILLED,
    ),
)
