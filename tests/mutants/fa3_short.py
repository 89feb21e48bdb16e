"""Planted bugs in FlashAttention-3's backward pass for short heads."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import NARROW_GRADIENTS

__all__ = ["BUGS", "HOST"]

_TYPES = "cuda_src/fa3/backward_short_types.cuh"
_LOAD = "cuda_src/fa3/backward_short_load.cuh"
_MATH = "cuda_src/fa3/backward_short_math.cuh"
_PLAN = "cuflash/planning/fa3_short.py"
_ROWS = "cuflash/planning/row_steps.py"
_TILES = "cuflash/planning/tiles/fa3_short.py"

_FILE = "test_short_heads.py::"
_UNIT = "tests/unit/test_plan_short.py::"
_NAMED = {
    "dead": "test_dead_queries_leave_no_trace[q]",
    "dead keys": "test_dead_queries_leave_no_trace[k]",
    "infinite": "test_an_infinite_key_reaches_no_gradient_of_what_gives_it_no_weight[197]",
}


def _bug(name: str, file: str, find: str, replace: str, of: str = "full") -> Bug:
    test = _FILE + _NAMED.get(of, f"test_against_float64[{of}]")
    return Bug(name, file, find, replace, NARROW_GRADIENTS, emulated=test)


BUGS = (
    _bug(
        "every head of a block is its first one",
        _TYPES,
        "return blockIdx.x + static_cast<unsigned>(round) * gridDim.x;",
        "return blockIdx.x + (round > 1 ? 99999999u : 0u);",
    ),
    _bug(
        "kv tiles that only the last query sees are not seen",
        _TYPES,
        "keys = min(keys, seq.rows_q + seq.q_last);",
        "keys = min(keys, seq.rows_q + seq.q_last - 128);",
        "causal",
    ),
    _bug(
        "steps of every head count from zero",
        _TYPES,
        "return round * seen_tiles() + tile; }",
        "return tile; }",
        "uneven widths",
    ),
    _bug(
        "Q of the next head overwrites one that is still read",
        _LOAD,
        "    wait_empty<Config>(shared.q_empty[i], c.phase());\n",
        "",
    ),
    _bug(
        "numbers of all q tiles are those of the first",
        _LOAD,
        "static_cast<const float*>(all_numbers) + c.head_row() + row, bytes",
        "static_cast<const float*>(all_numbers) + c.head_row(), bytes",
    ),
    _bug(
        "both warpgroups have dQ of the first q tile of a pair",
        _MATH,
        "warpgroup * (kRowsOfProduct * PairScores::row_bytes / 16);",
        "0 * warpgroup;",
    ),
    _bug(
        "both q tiles of a pair store dS in one place",
        _MATH,
        "    place.to += q_tile % tiles_of_pair * (Config::block_q * PairScores::row_bytes);\n",
        "",
    ),
    _bug(
        "dQ of a pair reads dS of the first one",
        _MATH,
        "pair * (sizeof(PairScores) / 16) +",
        "0 *",
    ),
    _bug(
        "dQ of short heads does not wait for the other warpgroup",
        _MATH,
        "    wait<Config>(c.shared.ds_full[pair], step % 2);\n",
        "",
        "narrow",
    ),
    _bug(
        "dS of short heads is stored before dQ has read the one before",
        _MATH,
        "      if (begins) wait_empty<Config>(c.shared.ds_empty[pair], step % 2);\n",
        "",
    ),
    _bug(
        "the first pair's dQ is left out where all q tiles see a tile",
        _MATH,
        "const bool late = begins && pair > 0;",
        "const bool late = begins && pair > 1;",
    ),
    _bug(
        "the last pair's dQ is left out",
        _MATH,
        "      math.multiply_q(dq[last], last, step);\n",
        "      if (tile > 0) math.multiply_q(dq[last], last, step);\n",
    ),
    _bug(
        "a pair that sees nothing leaves the phase of its dS behind",
        _MATH,
        "        arrive_warp<Config>(c.shared.ds_full[pair]);\n"
        "        arrive_warp<Config>(c.shared.ds_empty[pair]);\n",
        "        arrive_warp<Config>(c.shared.ds_empty[pair]);\n",
        "causal",
    ),
    _bug(
        "a q tile that sees nothing keeps what dS held before",
        _MATH,
        "      store_scores(Operand{}, i);\n",
        "",
        "unseen half",
    ),
    _bug(
        "q tiles that do not exist count where some see nothing",
        _MATH,
        "if (c.q_tiles() == Config::q_tiles && !c.template",
        "if (!c.template",
        "narrow",
    ),
    _bug(
        "dead rows of Q and dO stay",
        _MATH,
        "if (tile == 0 && must_clear<Config>(lse, c.seq, place.query0)) clear_dead(q_tile);",
        "",
        "dead",
    ),
    _bug(
        "dead rows of dQ are stored",
        _MATH,
        "x = dead >> group & 1 ? 0 : x * scale; });",
        "x = dead >> group & 4 ? 0 : x * scale; });",
        "dead keys",
    ),
    _bug(
        "rows of short heads beyond the length have P and dS",
        _MATH,
        "    if (has_dead_queries<Config>(lse)) {",
        "    if (has_dead_queries<Config>(lse) && place.query0 == 0) {",
        "infinite",
    ),
    _bug(
        "masks are left out of tiles at their edge",
        _MATH,
        "      apply_mask_to_live_queries<Config>(c.seq, place, weights, gradients);\n",
        "",
        "every query lives",
    ),
    _bug(
        "dQ is not scaled",
        _MATH,
        "? 0 : x * scale; });",
        "? 0 : x; });",
    ),
)

#: Bugs of the host.
HOST = (
    Bug(
        "every head of a short pass has a block",
        _PLAN,
        'min(launchable(problem.batch * problem.heads_q, "fa3"), limits.num_sms)',
        'launchable(problem.batch * problem.heads_q, "fa3")',
        f"{_UNIT}test_a_plan_has_two_kernels_and_no_sums_of_dq",
    ),
    Bug(
        "statistics clears sums that do not exist",
        _ROWS,
        "        cleared *= self.sums_dq\n",
        "",
        f"{_UNIT}test_a_plan_has_two_kernels_and_no_sums_of_dq",
    ),
    Bug(
        "sums that do not exist are converted",
        _ROWS,
        'after = (self._launch("convert_dq", {}),) if self.sums_dq else ()',
        'after = (self._launch("convert_dq", {}),)',
        f"{_UNIT}test_a_plan_has_two_kernels_and_no_sums_of_dq",
    ),
    Bug(
        "groups of heads have the tile for short heads",
        _TILES,
        "    if problem.group > 1:\n",
        "    if problem.group > 2:\n",
        f"{_UNIT}test_others_have_none",
    ),
    Bug(
        "257 queries have the tile for short heads",
        _TILES,
        "if problem.seqlen_q > rows:",
        "if problem.seqlen_q > rows + 1:",
        f"{_UNIT}test_others_have_none",
    ),
    Bug(
        "features have the tile for short heads",
        _TILES,
        "    if problem.uses:\n",
        "    if not problem:\n",
        f"{_UNIT}test_wide_heads_and_features_have_none",
    ),
)
