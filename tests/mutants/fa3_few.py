"""Planted bugs in FlashAttention-3's backward pass for few queries."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import NARROW_GRADIENTS

__all__ = ["BUGS", "HOST"]

_KERNEL = "cuda_src/fa3/backward_few.cu"
_TYPES = "cuda_src/fa3/backward_few_types.cuh"
_PLAN = "cuflash/planning/fa3_few.py"
_TILES = "cuflash/planning/tiles/fa3_few.py"

_TEST = "test_few_queries.py::test_against_float64"
_UNIT = "tests/unit/test_plan_few.py"


_DEAD = "test_few_queries.py::test_dead_queries_leave_no_trace"
_INFINITE = (
    "test_few_queries.py::test_an_infinite_key_reaches_no_gradient_of_what_gives_it_no_weight"
)


def _bug(name: str, file: str, find: str, replace: str, of: str = "full-5") -> Bug:
    test = f"{_DEAD}[{of}]" if of in "qkv" else f"{_TEST}[{of}]"
    test = _INFINITE if of == "infinite" else test
    return Bug(name, file, find, replace, NARROW_GRADIENTS, emulated=test)


BUGS = (
    _bug(
        "every block has the first split",
        _TYPES,
        "const unsigned split = blockIdx.x % splits;",
        "const unsigned split = 0;",
        "wide-5",
    ),
    _bug(
        "a split ends where the next one's second tile begins",
        _TYPES,
        "static_cast<int>(tiles * (split + 1) / splits)};",
        "static_cast<int>(min(tiles, tiles * (split + 1) / splits + 1))};",
        "wide-5",
    ),
    _bug(
        "a tile counts as hidden by its first 64 keys",
        _TYPES,
        "hides_all<Config::block_q, Config::block_kv>(\n        seq, 0, tile * Config::block_kv);",
        "hides_all<Config::block_q, 64>(\n        seq, 0, tile * Config::block_kv + 64);",
        "unseen keys-1",
    ),
    _bug(
        "both warpgroups score the first 64 keys",
        _KERNEL,
        "stage * (sizeof(Keys) / 16) + warpgroup * (kKeysOfWarpgroup * Keys::row_bytes / 16);",
        "stage * (sizeof(Keys) / 16);",
    ),
    _bug(
        "scores read the first stage of the ring",
        _KERNEL,
        "stage * (sizeof(Keys) / 16) + warpgroup",
        "warpgroup",
        "full-1",
    ),
    _bug(
        "both warpgroups multiply the first 64 rows of dS",
        _KERNEL,
        "warpgroup * (kRowsOfProduct * Types::ScorePanels::row_bytes / 16);",
        "0;",
    ),
    _bug(
        "dQ reads the first stage of K",
        _KERNEL,
        "const unsigned b_step = stage * (sizeof(typename Types::KPanels) / 16);",
        "const unsigned b_step = 0;",
        "full-1",
    ),
    _bug(
        "dK and dV of a tile are added to those before",
        _KERNEL,
        "    gradient.fill(0);\n    ptx::wgmma_fence();",
        "    ptx::wgmma_fence();",
        "full-1",
    ),
    _bug(
        "dQ does not begin at zero",
        _KERNEL,
        "  dq.fill(0);\n  bool dead",
        "  bool dead",
    ),
    _bug(
        "a tile without dead queries is not masked",
        _KERNEL,
        "if (dead || is_edge(key0)) {",
        "if (dead) {",
        "every query lives-1",
    ),
    _bug(
        "dead queries do not count as such",
        _KERNEL,
        "if (!must_clear<Config>(c.shared.lse, c.seq, 0)) return false;",
        "return false;",
        "q",
    ),
    _bug(
        "rows beyond the length have P and dS",
        _KERNEL,
        "      clear_surplus(weights, gradients);\n",
        "",
        "infinite",
    ),
    _bug(
        "the last row that there is has no P and no dS",
        _KERNEL,
        "left >= 2 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0;",
        "left >= 2 ? 0xffffffffu : 0;",
        "full-1",
    ),
    _bug(
        "tiles that no query sees keep what was there",
        _KERNEL,
        "      math.template store_zeros<Config::head_dim_v>"
        "(c.params.dv, c.params.shape.head_dim_v, tile);\n",
        "",
        "unseen keys-1",
    ),
    _bug(
        "dK is not scaled",
        _KERNEL,
        "key0, static_cast<float>(c.params.scale));",
        "key0, 1.0f);",
    ),
    _bug(
        "dQ of the second warpgroup goes to the rows of the first",
        _KERNEL,
        "const int row = warpgroup * kRowsOfProduct + warp_row;",
        "const int row = warp_row;",
    ),
    _bug(
        "dead rows of dQ are added",
        _KERNEL,
        "return c.shared.lse.value[row + i] == infinity<float>(); });",
        "return i < 0; });",
        "k",
    ),
    _bug(
        "dS is stored before dQ has read the one before",
        _KERNEL,
        "    wait_empty<Config>(c.shared.ds_empty, of_ds.phase);\n",
        "",
        "full-1",
    ),
    _bug(
        "K is released before dQ has read it",
        _KERNEL,
        "    issue_q(dq, stage);\n",
        "    arrive_warp<Config>(c.shared.k_empty[stage]);\n    issue_q(dq, stage);\n",
        "wide-1",
    ),
    _bug(
        "V is never released",
        _KERNEL,
        "    arrive_warp<Config>(c.shared.v_empty[of_v.stage]);\n",
        "",
        "full-1",
    ),
)

#: Bugs of the host.
HOST = (
    Bug(
        "sums of dQ in one order have several blocks",
        _PLAN,
        "problem.deterministic or ",
        "",
        f"{_UNIT}::test_splits_take_the_fewest_steps",
    ),
    Bug(
        "blocks begin and end in no time",
        _PLAN,
        "_STEPS_OF_BLOCK = 2",
        "_STEPS_OF_BLOCK = 0",
        f"{_UNIT}::test_splits_take_the_fewest_steps",
    ),
    Bug(
        "heads of keys have blocks, not query heads of all entries",
        _PLAN,
        "heads = problem.batch * problem.heads_q",
        "heads = problem.heads_q",
        f"{_UNIT}::test_splits_take_the_fewest_steps",
    ),
    Bug(
        "groups of heads have the tile",
        _TILES,
        "    if problem.group > 1:\n",
        "    if problem.group > 2:\n",
        f"{_UNIT}::test_others_have_none",
    ),
    Bug(
        "129 queries have the tile",
        _TILES,
        "if problem.seqlen_q > rows:",
        "if problem.seqlen_q > rows + 1:",
        f"{_UNIT}::test_others_have_none",
    ),
    Bug(
        "features have the tile",
        _TILES,
        "    if problem.uses:\n",
        "    if not problem:\n",
        f"{_UNIT}::test_wide_heads_and_features_have_none",
    ),
)
