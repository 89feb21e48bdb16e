"""Planted bugs in FlashAttention-3, for a GPU of compute capability 9.0 and for the emulator.

``test`` names the list of problems in ``hopper_problems`` that must kill a bug. The comment beside
a bug says why it is wrong and not only slow. These edits are not here, because results stay right:

- a missing wait for a product: ptxas sees it, adds a wait and warns, and ``tests/compile`` looks
  for the warning; ``fa3_order`` has such bugs for the emulator
- turns that any warpgroup may take
- a missing barrier between lanes of a warp that has not diverged
- a counter that the last ticket but one resets: wrong only if the last ticket is drawn several
  microseconds later
- an early release of V, Q or a skipped block: the loads that would do harm wait for K as well
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import CAUSAL, NARROW

_LOAD = "cuda_src/fa3/forward_load.cuh"
_MATH = "cuda_src/fa3/forward_math.cuh"
_SOFTMAX = "cuda_src/fa3/forward_softmax.cuh"
_STORE = "cuda_src/fa3/forward_store.cuh"
_TYPES = "cuda_src/fa3/forward_types.cuh"
_PANELS = "cuda_src/tile/panels.cuh"
_PIPELINE = "cuda_src/tile/pipeline.cuh"
_QUEUE = "cuda_src/tile/tile_queue.cuh"
_STAGED = "cuda_src/tile/store_staged.cuh"
_COUNTER = "cuflash/cuda/tile_counter.py"

#: The code from the wait for K to its release.
_WAITS = """\
wait_k() const {{ wait<Config>(c.shared.k_full[k_place.stage], k_place.phase);{after} }}
  __device__ void wait_v() const {{ wait<Config>(c.shared.v_full[v_place.stage], v_place.phase); }}
  __device__ void wait_q() const {{
    wait<Config>(c.shared.q_full[q_place.stage][warpgroup], q_place.phase);
  }}
  __device__ void release_k() {{
{before}"""

_BARRIERS = (
    Bug(
        "the filler of a buffer waits for the wrong phase",  # which never ends: no load begins
        _PIPELINE,
        "wait<Config>(barrier, phase ^ 1);",
        "wait<Config>(barrier, phase);",
        CAUSAL,
    ),
    Bug(
        "the phase of a ring never turns",  # the second round reads the first round's data
        _PIPELINE,
        "phase ^= stage == 0;",
        "phase ^= stage == stages;",
        CAUSAL,
    ),
    Bug(
        "K is read in the phase before its own",  # which has ended: K has not arrived
        _MATH,
        "wait<Config>(c.shared.k_full[k_place.stage], k_place.phase);",
        "wait<Config>(c.shared.k_full[k_place.stage], k_place.phase ^ 1);",
        CAUSAL,
    ),
    Bug(
        "V is not waited for",  # it is loaded after K
        _MATH,
        "wait<Config>(c.shared.v_full[v_place.stage], v_place.phase);",
        "",
        CAUSAL,
    ),
    Bug(
        "K is released when it has arrived",  # a turn or two before the last warpgroup reads it
        _MATH,
        _WAITS.format(after="", before="    arrive_warp<Config>(c.shared.k_empty[k_place.stage]);"),
        _WAITS.format(after=" arrive_warp<Config>(c.shared.k_empty[k_place.stage]);", before=""),
        CAUSAL,
    ),
    Bug(
        "half the bytes are expected",  # the rest counts for the next phase, which ends at once
        _LOAD,
        "arrive_expecting<Config>(full, Matrix::bytes);",
        "arrive_expecting<Config>(full, Matrix::bytes / 2);",
        CAUSAL,
    ),
    Bug(
        "a warpgroup skips one hidden block too few",  # and computes it in place of the next
        _MATH,
        "skip(tile.kv.end - blocks.seen.end);",
        "skip(tile.kv.end - blocks.seen.end - 1);",
        NARROW,
    ),
    Bug(
        "V comes from the stage of K",  # K is a block ahead
        _MATH,
        "v_step = v_place.stage *",
        "v_step = k_place.stage *",
        CAUSAL,
    ),
    Bug(
        "the last turn goes to the second warpgroup",  # the first waits for its turn for ever
        _MATH,
        "warpgroup + 1 == Types::warpgroups ? 0 :",
        "warpgroup + 1 == Types::warpgroups ? 1 :",
        CAUSAL,
    ),
)

_TILES = (
    Bug(
        "the tile counter is never reset",  # the next launch draws no valid tile
        _QUEUE,
        "if (ticket == tiles - 1)",
        "if (ticket < 0)",
        CAUSAL,
    ),
    Bug(
        "the tile counter is reset too early",  # tickets come again, and it is not 0 at the end
        _QUEUE,
        "if (ticket == tiles - 1)",
        "if (ticket == tiles - static_cast<int>(gridDim.x) / 2)",
        CAUSAL,
    ),
    Bug(
        "tickets begin one tile too late",  # no block has the first drawn tile
        _QUEUE,
        "return ticket + static_cast<int>(gridDim.x);",
        "return ticket + static_cast<int>(gridDim.x) + 1;",
        CAUSAL,
    ),
    Bug(
        "all streams share a tile counter",  # two launches at once take each other's tickets
        _COUNTER,
        "key = (device_id, stream, owner)",
        "key = (device_id, 0, 0)",
        CAUSAL,
    ),
    Bug(
        "captured launches have the counter of their stream",  # graphs of it may run at once
        _COUNTER,
        "if workspace and is_capturing(stream):",
        "if False:",
        CAUSAL,
    ),
    Bug(
        "a captured counter does not begin at zero",
        _COUNTER,
        "memsetAsync(workspace, 0, 4, stream)",
        "memsetAsync(workspace, 1, 4, stream)",
        CAUSAL,
    ),
    Bug(
        "every warpgroup has the first rows of Q",
        _LOAD,
        "tile.q_begin() + w * kRowsOfWarpgroup,",
        "tile.q_begin(),",
        CAUSAL,
    ),
    Bug(
        "query heads read the kv head of their number",  # but a group shares one
        _TYPES,
        "item.head / (shape.heads_q / shape.heads_kv)",
        "item.head % shape.heads_kv",
        CAUSAL,
    ),
    Bug(
        "depth beyond a panel begins again",  # 64 columns are read twice, 64 never
        _PANELS,
        "(column / part_columns * part_panels + within / kPanelColumns) * panel_bytes +",
        "column / part_columns * part_panels * panel_bytes +",
        CAUSAL,
    ),
    Bug(
        "the second panel of V lies beside the first",  # 16 bytes on, not a panel
        _PANELS,
        "static_cast<unsigned long long>(Matrix::panel_bytes / 16) << 16",
        "1ull << 16",
        CAUSAL,
    ),
)

_ROWS = (
    Bug(
        "a future key leaks",
        _SOFTMAX,
        "if (before || column >= end[group])",
        "if (before || column > end[group])",
        CAUSAL,
    ),
    Bug(
        "the mask is a block of keys off",  # keys that are seen are hidden
        _MATH,
        "const int key0 = block * Config::block_kv;",
        "const int key0 = (block + 1) * Config::block_kv;",
        CAUSAL,
    ),
    Bug(
        "a block counts as whole if the last row sees it whole",  # the first rows do not
        _MATH,
        "whole.end = Mask<Config>::visible_end(seq, row0) /",
        "whole.end = Mask<Config>::visible_end(seq, last_row) /",
        CAUSAL,
    ),
    Bug(
        "the output is not rescaled with its reference",
        _MATH,
        "state.output.for_each([&](float& x, int m, int, int group, int) { x *= keep",
        "state.output.for_each([&](float x, int m, int, int group, int) { x *= keep",
        CAUSAL,
    ),
    Bug(
        "sums are not rescaled with their references",
        _SOFTMAX,
        "rows.sum.value[m][group] *= x;",
        "",
        CAUSAL,
    ),
    Bug(
        "a row that has seen nothing subtracts minus infinity",  # hidden scores become NaN
        _SOFTMAX,
        "reference = subtrahend(reference);",
        "",
        CAUSAL,
    ),
    Bug(
        "every lane has a reference of its own",  # products mix the weights of four of them
        _SOFTMAX,
        "combine_row_lanes(x, [](float a, float b) { return larger(a, b); });",
        "x;",
        CAUSAL,
    ),
    Bug(
        "weights beyond their limit are kept",  # and overflow 16 bits
        _MATH,
        "if (raise || __all_sync(0xffffffffu, fits)) break;",
        "break;",
        NARROW,
    ),
    Bug(
        "lse lacks the reference",
        "cuda_src/tile/softmax.cuh",
        "lse_of_row<Config>(seq, row, reference, sum);",
        "log_of(sum);",
        CAUSAL,
    ),
    Bug(
        "dead rows keep what weights of zero made",  # NaN, if values are not finite
        _STORE,
        "if (inverse.value[m][group] == 0.0f) x = 0.0f;",
        "if (inverse.value[m][group] == 0.0f) x += 0.0f;",
        CAUSAL,
    ),
    Bug(
        "rows beyond the length are written",  # over the next batch entry, and past the end
        _STORE,
        "const int valid_rows = tile.seq.rows_q - row0;",
        "const int valid_rows = 16;",
        CAUSAL,
    ),
    Bug(
        "all warps stage their rows in one place",  # the four of a warpgroup at the same time
        _STORE,
        "c.shared.out[threadIdx.x / 32 - 4]",
        "c.shared.out[0]",
        CAUSAL,
    ),
    Bug(
        "staged chunks are read where they were not put",
        _STAGED,
        "staging.chunks[row][lane % 8 ^ row % 8]",
        "staging.chunks[row][lane % 8]",
        CAUSAL,
    ),
)

BUGS = (*_BARRIERS, *_TILES, *_ROWS)
