"""Planted bugs in FlashAttention-2's wide heads: pairs of warps, K and V in one stage."""

from __future__ import annotations

from .bug import PAIRS, SINGLE_STAGE, Bug, row

_FORWARD = "cuda_src/fa2/forward.cu"
_PAIRED = "cuda_src/fa2/forward_paired.cuh"
_STEPS = "cuda_src/fa2/forward_steps.cuh"
_STORE = "cuda_src/fa2/forward_store.cuh"
_OF_PAIRS = row("fa2-sm_90-float16-d64-dv64-causal-paired")
_UNEVEN = row("fa2-sm_90-float16-d40-dv192-full-paired")
_SINGLE = row("fa2-sm_80-bfloat16-d64-dv64-causal-single-stage")

_WRITE_P = (
    "    store_shared<Config::architecture>(part, c.p(), c.row0, Aligned{c.first_key() + first});\n"
)
_UNTIL_ANNOUNCED = """\
    part.for_each([&](Compute& x, int m, int n, int group, int which) {
      scores.value[m][first / 8 + n][group][which] = x;
    });
    sums.for_each([&](Compute& x, int m, int group) { state.sum.value[m][group] += x; });
"""
_ANNOUNCE_P = """\
    if (first + columns == Scores::columns) {
      ptx::named_barrier_arrive(own_barrier(), kThreadsOfPair);
    }
"""

BUGS = (
    Bug(
        "pairs: references of each warp follow its own half of the keys",
        _PAIRED,
        "[](Compute a, Compute b) { return larger(a, b); });",
        "[&](Compute a, Compute b) { return c.part() == 0 ? a : b; });",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: the other half of P is not waited for",
        _PAIRED,
        "  ptx::named_barrier(other_barrier(), kThreadsOfPair);\n",
        "",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: a warp waits for its own half of P",
        _PAIRED,
        "  ptx::named_barrier(other_barrier(), kThreadsOfPair);",
        "  ptx::named_barrier(own_barrier(), kThreadsOfPair);",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: P is announced before it is written",
        _PAIRED,
        _WRITE_P + _UNTIL_ANNOUNCED + _ANNOUNCE_P,
        _ANNOUNCE_P + _WRITE_P + _UNTIL_ANNOUNCED,
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: both write the first half of P",
        _PAIRED,
        "c.p(), c.row0, Aligned{c.first_key() + first});",
        "c.p(), c.row0, Aligned{first});",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: one warp alone posts its maxima",
        _FORWARD,
        "    post_numbers(c, maxima);",
        "    if (c.part() == 0) post_numbers(c, maxima);",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: the other half of P is this warp's own",
        _PAIRED,
        "state.output, rows_by_depth(c.p(), c.row0, Aligned{other_key}),",
        "state.output, rows_by_depth(c.p(), c.row0, Aligned{c.first_key()}),",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: the other half of P meets this half of V",
        _PAIRED,
        "depth_by_rows(c.v(step), column0, other_key));",
        "depth_by_rows(c.v(step), column0, c.first_key()));",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: both compute the first half of the scores",
        _STEPS,
        "rows_by_depth(c.k(step), c.first_key()));",
        "rows_by_depth(c.k(step), 0));",
        PAIRS,
        _UNEVEN,
    ),
    Bug(
        "pairs: both halves of the scores are masked as the first",
        _STEPS,
        "block.index * Config::block_kv + c.first_key(), block.edge);",
        "block.index * Config::block_kv, block.edge);",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: a row's sum is that of one half of the keys, twice",
        _PAIRED,
        "  combine_numbers(c, sums, add);",
        "  combine_numbers(c, sums, [](Compute a, Compute) { return a + a; });",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: sums are read before the other warp has posted its own",
        _PAIRED,
        "  meet_in_pair();\n  combine_numbers",
        "  __syncwarp();\n  combine_numbers",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: the end is met at the barrier of P",
        _PAIRED,
        "ptx::named_barrier(9 + static_cast<int>(threadIdx.x) / kThreadsOfPair, kThreadsOfPair);",
        "ptx::named_barrier(own_barrier() | 1, kThreadsOfPair);",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: both write the first half of the output's columns",
        _STORE,
        "return part_offset<typename Types::OutTile, Output::columns>(c.part());",
        "return part_offset<typename Types::OutTile, Output::columns>(0);",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "pairs: rows leave before the other warp has written its columns",
        _STORE,
        "    meet_in_pair();",
        "    __syncwarp();",
        PAIRS,
        _OF_PAIRS,
    ),
    Bug(
        "one stage: K of the next step comes while others read this one",
        _FORWARD,
        "  __syncthreads();\n  load_k_tile(c, step + Config::num_stages);",
        "  if constexpr (Config::num_stages > 1) __syncthreads();\n"
        "  load_k_tile(c, step + Config::num_stages);",
        SINGLE_STAGE,
        _SINGLE,
    ),
    Bug(
        "one stage: V of the next step is loaded before all have read this one",
        _FORWARD,
        "    wait_copies<Config::copies, 0>();\n    __syncthreads();\n    load_v_tile",
        "    wait_copies<Config::copies, 0>();\n    load_v_tile",
        SINGLE_STAGE,
        _SINGLE,
    ),
    Bug(
        "one stage: the scores do not wait for K",
        _FORWARD,
        "    wait_copies<Config::copies, 0>();\n    __syncthreads();\n    load_v_tile",
        "    __syncthreads();\n    load_v_tile",
        SINGLE_STAGE,
        _SINGLE,
    ),
    Bug(
        "one stage: K is loaded a step too late",
        _FORWARD,
        "load_k_tile(c, step + Config::num_stages);",
        "load_k_tile(c, step + 2);",
        SINGLE_STAGE,
        _SINGLE,
    ),
)
