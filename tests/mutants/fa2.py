"""Planted bugs in FlashAttention-2's forward pass, and in what both of its passes share."""

from __future__ import annotations

from .bug import HEAD_GROUPS, LONG_ROWS, STREAMS, Bug, checks, dead_keys, forward, row

_FORWARD = "cuda_src/fa2/forward.cu"
_STEPS = "cuda_src/fa2/forward_steps.cuh"
_STORE = "cuda_src/fa2/forward_store.cuh"
_TYPES = "cuda_src/fa2/forward_types.cuh"
_COPY = "cuda_src/tile/copy.cuh"
_MMA = "cuda_src/tile/product_mma.cuh"
_SCHEDULE = "cuda_src/tile/schedule.cuh"
_SOFTMAX = "cuda_src/tile/softmax.cuh"
_TILE_IO = "cuda_src/tile/tile_io.cuh"
_CAUSAL = row("fa2-sm_90-float16-d64-dv64-causal")
_FULL = row("fa2-sm_90-bfloat16-d64-dv64-full")

BUGS = (
    Bug(
        "the one barrier of a forward step is missing",
        _FORWARD,
        "wait_copies<Config::copies, 0>();\n  __syncthreads();",
        "wait_copies<Config::copies, 0>();",
        STREAMS,
        _FULL,
    ),
    Bug(
        "the first scores wait for one group too few",
        _FORWARD,
        "wait_copies<Config::copies, 1>();",
        "wait_copies<Config::copies, 2>();",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "a step waits for one group too few",
        _FORWARD,
        "\n  wait_copies<Config::copies, 0>();",
        "\n  wait_copies<Config::copies, 1>();",
        STREAMS,
        _FULL,
    ),
    Bug(
        "V of a step goes to the stage that is read",
        _STEPS,
        "c.v_stream.template load<!first>(c.v(step),",
        "c.v_stream.template load<!first>(c.v(step + 1),",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "the last tile of V is copied as if it were whole",
        _STEPS,
        "c.v_stream.template load<!first>(",
        "c.v_stream.template load<true>(",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "streams go up through the keys",
        _COPY,
        "next + (up ? row_step : -row_step) * row_stride",
        "next + row_step * row_stride",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "K has one stage where it needs two",
        _TYPES,
        "return {shared.k[step % Config::num_stages].data};",
        "return {shared.k[0].data};",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "references move and sums do not",
        _STEPS,
        "state.sum.for_each([&](Compute& x, int m, int group) { x *=",
        "state.sum.for_each([&](Compute x, int m, int group) { x *=",
        forward("cuda-fa2"),
        _CAUSAL,
    ),
    Bug(
        "references move and the output does not",
        _STEPS,
        "state.output.for_each([&](Compute& x, int m, int, int group, int) { x *=",
        "state.output.for_each([&](Compute x, int m, int, int group, int) { x *=",
        forward("cuda-fa2"),
        _CAUSAL,
    ),
    Bug(
        "references move within the slack and nothing follows",
        _SOFTMAX,
        "x = candidate;\n      moved = true;\n    }",
        "moved = true;\n    }\n    x = larger(x, candidate);",
        forward("cuda-fa2"),
        _CAUSAL,
    ),
    Bug(
        "the last kv tile is taken for whole",
        _STEPS,
        "block.edge);",
        "block.edge && step > 0);",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "kv tiles begin one too late",
        _SCHEDULE,
        "const int index = range.end - 1 - step;",
        "const int index = range.end - step;",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "q tiles begin one too late",
        _SCHEDULE,
        "static_cast<int>(tiles) - 1 - item.q_tile;",
        "static_cast<int>(tiles) - item.q_tile;",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "the last head group is as wide as the others",
        _SCHEDULE,
        "width = min(head_group, shape.batch * heads - first);",
        "width = head_group;",
        HEAD_GROUPS,
        row("fa2-sm_90-float16-d64-dv64-causal", "test_schedules.py::test_heads_in_groups"),
    ),
    Bug(
        "a head group begins at its number",
        _SCHEDULE,
        "block / (head_group * tiles) * head_group;",
        "block / (head_group * tiles);",
        HEAD_GROUPS,
        row("fa2-sm_90-float16-d64-dv64-causal", "test_schedules.py::test_heads_in_groups"),
    ),
    Bug(
        "query heads read the kv head of the same number",
        _FORWARD,
        "item.head / (shape.heads_q / shape.heads_kv);",
        "item.head % shape.heads_kv;",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "row sums stay apart in four lanes",
        _STORE,
        "sum = combine_row_lanes(sum,",
        "combine_row_lanes(sum,",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "references begin at zero",
        "cuda_src/tile/score.cuh",
        "reference = -infinity<Compute>();",
        "reference = Compute(0);",
        checks("cuda-fa2", "full"),
        row("fa2-sm_90-float16-d64-dv64-causal", "test_device_code.py::test_six_checks"),
    ),
    Bug(
        "weights that come out too large are kept",
        _STEPS,
        "if (!__all_sync(0xffffffffu, fits)) {",
        "if (!fits && factor < 0) {",
        LONG_ROWS,
        _CAUSAL,
    ),
    Bug(
        "weights that come out too large are not recomputed",
        _STEPS,
        "      part = exponentiate<Part::count>(first);\n",
        "",
        LONG_ROWS,
        _CAUSAL,
    ),
    Bug(
        "recomputed weights keep the sums of before",
        _STEPS,
        "part = exponentiate<Part::count>(first);",
        "part.operands = exponentiate<Part::count>(first).operands;",
        LONG_ROWS,
        _CAUSAL,
    ),
    Bug(
        "weights of later keys are not looked at",
        _MMA,
        "if (more) weights.settle(next, first + part);",
        "if (more) next.sums.for_each([](float&, int, int) {});",
        LONG_ROWS,
        row("fa2-sm_90-float16-d256-dv192-causal"),
    ),
    Bug(
        "the offsets stay when a reference has moved",
        _STEPS,
        "      offset = offsets_of(state.reference);\n",
        "\n",
        LONG_ROWS,
        _CAUSAL,
    ),
    Bug(
        "every warp's output leaves from the first rows",
        _STORE,
        "copy_out(c.staging(), c.row0 + first,",
        "copy_out(c.staging(), first,",
        forward("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "two 8x8 matrices change places on their way out",
        _TILE_IO,
        "column0 / 8 + lane / 16};",
        "column0 / 8 + 1 - lane / 16};",
        checks("cuda-fa2", "full"),
        _FULL,
    ),
    Bug(
        "a dead row is divided by its sum",
        _SOFTMAX,
        "return inverse == 0.0f ? 0.0f : x * inverse;",
        "return x * inverse;",
        dead_keys("cuda-fa2"),
        row(
            "fa2-sm_90-float16-d64-dv64-causal", "test_dead_rows.py::test_keys_that_kill_every_row"
        ),
    ),
)
