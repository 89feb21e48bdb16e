"""Planted bugs where blocks cut the steps of a kv tile, and in rows beyond the length."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import PARTED_GRADIENTS

__all__ = ["BUGS", "HOST"]

_TYPES = "cuda_src/fa3/backward_types.cuh"
_CUTS = "cuda_src/fa3/backward_parts.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_PARTS = "cuflash/planning/key_parts.py"
_CHOICE = "cuflash/planning/parts_choice.py"
_PLAN = "cuflash/planning/fa3.py"

_CUT = "test_key_parts.py::test_cut_steps_against_float64"
_UNIT = "tests/unit/test_plan_key_parts.py::"
_CHOICES = "tests/unit/test_plan_parts_choice.py::"


def _bug(name: str, find: str, replace: str, file: str = _CUTS, test: str = _CUT) -> Bug:
    return Bug(name, file, find, replace, PARTED_GRADIENTS, emulated=test)


BUGS = (
    _bug(
        "a cut begins at the first q tile of its head",
        "return {kv_head() * group + heads, blocks.begin + this->cut_begin - heads * tiles};",
        "return {kv_head() * group + heads, blocks.begin};",
        _TYPES,
    ),
    _bug(
        "a cut begins in the first head of its group",
        "return {kv_head() * group + heads, blocks.begin + this->cut_begin - heads * tiles};",
        "return {kv_head() * group, blocks.begin + this->cut_begin - heads * tiles};",
        _TYPES,
    ),
    _bug(
        "a cut of a later head begins behind the last q tile",
        "return {kv_head() * group + heads, blocks.begin + this->cut_begin - heads * tiles};",
        "return {kv_head() * group + heads, blocks.begin + this->cut_begin};",
        _TYPES,
    ),
    _bug(
        "all cuts have equally many steps, and some are left out",
        "cut_count = static_cast<int>(each + others * (part + 1) / parts - earlier);",
        "cut_count = static_cast<int>(each);",
    ),
    _bug(
        "every cut has the steps of the first",
        "unsigned part = static_cast<unsigned>(item.head) % parts;",
        "unsigned part = 0;",
    ),
    _bug(
        "a cut has the query heads of a part",
        "return params.shape.heads_q / (params.shape.heads_kv / static_cast<int>(params.parts));",
        "return params.shape.heads_q / params.shape.heads_kv;",
    ),
    _bug(
        "dead queries stay in a tile that reaches beyond the length",
        "dead |= query0 + query < seq.seqlen_q && lse.value[query] == infinity<float>();",
        "dead |= query0 + Config::block_q <= seq.seqlen_q && "
        "lse.value[query] == infinity<float>();",
        _SCORE,
        "test_dead_rows.py",
    ),
    _bug(
        "the last query of a ragged tile stays though it is dead",
        "dead |= query0 + query < seq.seqlen_q && lse.value[query] == infinity<float>();",
        "dead |= query0 + query < seq.seqlen_q - 1 && lse.value[query] == infinity<float>();",
        _SCORE,
        "test_dead_rows.py",
    ),
    _bug(
        "what lies behind a used length is not cleared",
        "  if constexpr (Config::Lengths::vary) return true;  "
        "// behind a sequence there may be another one\n",
        "",
        _SCORE,
        "test_used_lengths.py",
    ),
)

HOST = (
    Bug(
        "steps are cut in a fixed order too",
        _CHOICE,
        "return not (problem.uses or problem.deterministic)",
        "return not problem.uses",
        _CHOICES + "test_no_steps_are_cut_in_a_fixed_order_or_with_features",
    ),
    Bug(
        "steps are cut with features too",
        _CHOICE,
        "return not (problem.uses or problem.deterministic)",
        "return not problem.deterministic",
        _CHOICES + "test_no_steps_are_cut_in_a_fixed_order_or_with_features",
    ),
    Bug(
        "blocks of rows convert sums of cut steps",
        _PLAN,
        "if shared.cut and not shared.last:  # no block has all rows of a head",
        "if False:",
        _UNIT + "test_of_cut_steps_another_kernel_clears_and_converts_all_rows",
    ),
    Bug(
        "blocks clear sums for others where steps are cut",
        _PLAN,
        "clears = not (tile.stays or (shared.cut and not shared.last))",
        "clears = not tile.stays",
        _UNIT + "test_of_cut_steps_another_kernel_clears_and_converts_all_rows",
    ),
    Bug(
        "a head group has a part of a kv tile",
        "cuflash/planning/backward_head_group.py",
        "return whole * shared.number",
        "return whole",
        _UNIT + "test_of_cut_steps_another_kernel_clears_and_converts_all_rows",
    ),
    Bug(
        "the main kernel is not told that steps are cut",
        _PARTS,
        '"cut": int(shared.cut)',
        '"cut": 0',
        _UNIT + "test_of_cut_steps_another_kernel_clears_and_converts_all_rows",
    ),
    Bug(
        "head groups are as large whatever their queries take",
        "cuflash/planning/backward_head_group.py",
        "if _bytes_of_queries(problem) > limits.l2 // 2:",
        "if False:",
        "tests/unit/test_plan_fa3_backward_head_groups.py",
    ),
    Bug(
        "a head group of cuts is as large as without",
        "cuflash/planning/backward_head_group.py",
        "backward_head_group(problem, limits, tile, tiles * shared.number, ONE_PART)",
        "backward_head_group(problem, limits, tile, tiles, ONE_PART)",
        _UNIT + "test_of_cut_steps_another_kernel_clears_and_converts_all_rows",
    ),
    Bug(
        "the sums of dQ of one entry are cleared and converted",
        _CHOICE,
        "rows = problem.batch * problem.heads_q * problem.seqlen_q",
        "rows = problem.heads_q * problem.seqlen_q",
        "tests/unit/test_plan_key_parts_time.py",
    ),
    Bug(
        "steps of many tiles are counted",
        _CHOICE,
        "if problem.batch * problem.heads_kv * tiles > _MANY_ROUNDS * at_once:",
        "if False:",
        "tests/unit/test_plan_key_parts_time.py",
    ),
    Bug(
        "parts are free",
        _CHOICE,
        "time += _SUM + 8 * numbers / _PARTS_RATE",
        "time += _SUM",
        _CHOICES + "test_parts_where_blocks_are_few",
    ),
    Bug(
        "sums of dQ that other kernels clear and convert are free",
        _CHOICE,
        "time += rows * tile.head_dim * _BYTES_OF_SUM / _SUMS_RATE",
        "time += 0",
        _CHOICES + "test_parts_where_blocks_are_few",
    ),
    Bug(
        "the longest block has no tail",
        _CHOICE,
        "steps = max(block, share + tail * block)",
        "steps = max(block, share)",
        _CHOICES + "test_parts_where_blocks_are_few",
    ),
)
