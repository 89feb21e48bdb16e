"""Planted bugs in windows: masks that have a first key."""

from __future__ import annotations

from .bug import Bug, row
from .hopper_problems import CAUSAL, GRADIENTS

__all__ = ["BUGS", "HOPPER"]

_MASK = "cuda_src/tile/mask.cuh"
_SCHEDULE = "cuda_src/tile/schedule.cuh"
_FEATURE = "cuda_src/features/window.cuh"
_FA1 = "cuda_src/fa1/forward.cu"
_MATH = "cuda_src/fa3/forward_math.cuh"
_SOFTMAX = "cuda_src/fa3/forward_softmax.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_BACKWARD = "cuda_src/fa3/backward_math.cuh"

_HOST = "cuflash/features/window.py"

_NUMPY = "tests/property/test_windows.py::test_against_float64[numpy-fa2-float16-d64-dv64-full]"
_TEST = "tests/property/test_windows.py::test_against_float64[cuda-{}-float16-d64-dv64-full]"
_FLOAT64 = "test_windows.py::test_against_float64"
_LOADED = "test_windows.py::test_no_tile_outside_of_the_band_is_loaded"
_ROWS = {
    "fa1": "fa1-sm_90-float16-d64-dv64-band",
    "fa2": "fa2-sm_90-float16-d64-dv64-band",
    "narrow": "fa3-sm_90-float16-d64-dv64-band-filled",
    "wide": "fa3-sm_90-bfloat16-d128-dv128-band-filled-192x80",
}


def _bug(name: str, file: str, find: str, replace: str, of: str, emulated: str = _FLOAT64) -> Bug:
    test = _TEST.format("fa1" if of == "fa1" else "fa2")
    return Bug(name, file, find, replace, test, row(_ROWS[of], emulated))


def _hopper(name: str, file: str, find: str, replace: str, of: str, test: str) -> Bug:
    return Bug(name, file, find, replace, test, row(_ROWS[of], _FLOAT64))


BUGS = (
    _bug(
        "the first key of a window is hidden",
        _MASK,
        "j >= i + seq.q_first);",
        "j > i + seq.q_first);",
        "fa2",
    ),
    _bug(
        "the key before a window is seen",
        _MASK,
        "j >= i + seq.q_first);",
        "j >= i + seq.q_first - 1);",
        "fa1",
    ),
    _bug(
        "the first query of a tile decides about its left edge",
        _MASK,
        "kv_begin < q_end - 1 + seq.q_first;",
        "kv_begin < q_begin + seq.q_first;",
        "fa2",
    ),
    _bug(
        "the last query that sees a key is left out",
        _MASK,
        "kv_last - seq.q_first + 1)) : seq.seqlen_q;",
        "kv_last - seq.q_first)) : seq.seqlen_q;",
        "fa2",
    ),
    _bug(
        "the range of keys begins a tile late",
        _SCHEDULE,
        "min(first_key / Config::block_kv, end)",
        "min(first_key / Config::block_kv + 1, end)",
        "fa2",
    ),
    _bug(
        "the range of keys begins a tile early",  # that tile is hidden, but it is loaded
        _SCHEDULE,
        "min(first_key / Config::block_kv, end)",
        "min(max(first_key / Config::block_kv - 1, 0), end)",
        "fa2",
        _LOADED,
    ),
    _bug(
        "keys beyond the length are seen by later queries",  # these queries then load them
        _SCHEDULE,
        "const int kv_last = min(kv_begin + Config::block_kv, seq.seqlen_kv) - 1;",
        "const int kv_last = kv_begin + Config::block_kv - 1;",
        "fa2",
        _LOADED,
    ),
    _bug(
        "the first key has the wrong sign",
        _FEATURE,
        "static_cast<int>(params.window.first);",
        "-static_cast<int>(params.window.first);",
        "fa2",
    ),
    Bug(
        "a window begins a key late on the host",
        _HOST,
        "offset - left)",
        "offset - left + 1)",
        _NUMPY,
    ),
    Bug(
        "a window ends a key late on the host",
        _HOST,
        "max(-seqlen_q, offset + right)",
        "max(-seqlen_q, offset + right + 1)",
        _NUMPY,
    ),
    _bug(
        "keys before all windows end the loop",
        _FA1,
        "if (Mask<Config>::has_first) continue;",
        "if (Mask<Config>::has_first) break;",
        "fa1",
    ),
    _bug(
        "queries behind all keys are not written",
        _FA1,
        "} else if (!Mask<Config>::has_first && !Config::Score::skips && !Config::Lengths::vary) {",
        "} else {",
        "fa1",
    ),
)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _hopper(
        "a block counts as whole if the first row sees its first key",
        _MATH,
        "whole.begin = ceil_div(Mask<Config>::visible_begin(seq, last_row),",
        "whole.begin = ceil_div(Mask<Config>::visible_begin(seq, row0),",
        "wide",
        CAUSAL,
    ),
    _hopper(
        "the third loop hides nothing",
        _MATH,
        "for (; block >= blocks.seen.begin; --block) step<true>(",
        "for (; block >= blocks.seen.begin; --block) step<false>(",
        "narrow",
        CAUSAL,
    ),
    _hopper(
        "a warpgroup skips one block too few after its own",
        _MATH,
        "skip(blocks.seen.begin - tile.kv.begin);",
        "skip(blocks.seen.begin - tile.kv.begin - 1);",
        "narrow",
        CAUSAL,
    ),
    _hopper(
        "the first block of a tile has no left edge",
        _MATH,
        "(Mask<Config>::has_first && seen.end <= whole.begin);",
        "false;",
        "narrow",
        CAUSAL,
    ),
    _hopper(
        "the first key of a row is hidden",
        _SOFTMAX,
        "column < begin[group];",
        "column <= begin[group];",
        "wide",
        CAUSAL,
    ),
    _hopper(
        "the last query that sees a key is hidden",
        _SCORE,
        "key - seq.q_first - place.query0 - lane.column + 1;",
        "key - seq.q_first - place.query0 - lane.column;",
        "wide",
        GRADIENTS,
    ),
    _hopper(
        "a warpgroup skips keys that the last query sees",
        _MASK,
        "(has_last && kv_begin > q_last + seq.q_last)",
        "(has_last && kv_begin >= q_last + seq.q_last)",
        "wide",
        GRADIENTS,
    ),
    _hopper(
        "a warpgroup skips keys that the first query sees",
        _MASK,
        "(has_first && kv_last < q_begin + seq.q_first)",
        "(has_first && kv_last <= q_begin + seq.q_first)",
        "wide",
        GRADIENTS,
    ),
    _hopper(
        "dS of a skipped step is what an older step has left",
        _BACKWARD,
        "store_gradients<Config>(ScoreOperand<Config>{}, c.shared.ds[0], score_ring.stage, part);",
        "",
        "wide",
        GRADIENTS,
    ),
    _hopper(
        "a skipped step is followed by the dead rows of the step before",
        _BACKWARD,
        "has_dead_queries(lse) ? dead_rows_of_q(lse) : 0;",
        "state.dead_before;",
        "wide",
        GRADIENTS,
    ),
)
