"""Planted bugs in the host code."""

from __future__ import annotations

from .bug import Bug, checks

_FA2 = "cuflash/planning/fa2.py"
_FA2_PLANS = "tests/unit/test_plan_fa2.py::"
_FA3 = "cuflash/planning/fa3.py"
_ORDER = "cuflash/planning/row_order.py"
_ROW_ORDER = "tests/unit/test_row_order.py::"

BUGS = (
    Bug(
        "the default alignment is top-left",
        "cuflash/features/window.py",
        "offset = seqlen_kv - seqlen_q if q_offset is None",
        "offset = 0 if q_offset is None",
        checks("numpy-fa2"),
    ),
    Bug(
        "v may be of another length than k",
        "cuflash/checks.py",
        '("v", "seqlen_kv", v_seqlen, seqlen_kv, "k"),',
        '("v", "seqlen_kv", v_seqlen, v_seqlen, "k"),',
        "tests/unit/test_arguments.py",
    ),
    Bug(
        "packed gradients count as overlapping",
        "cuflash/arrays/overlap.py",
        "return can_reach((*a.axes, *b.axes), start - a.itemsize + 1, start + b.itemsize - 1)",
        "return True",
        "tests/unit/test_arrays.py",
    ),
    Bug(
        "lengths reach the compile key",
        "cuflash/planning/kernel.py",
        "constants=tuple(constants.items()),",
        "constants=(*constants.items(), ('seqlen_q', problem.seqlen_q)),",
        "tests/unit/test_plan_fa2.py",
    ),
    Bug(
        "an edited header is not noticed",
        "cuflash/cuda/source.py",
        'name.encode() + b"\\0" + file.data + b"\\0"',
        "name.encode()",
        "tests/unit/test_source.py",
    ),
    Bug(
        "the grid of kv tiles follows the queries",
        _FA2,
        "problem.tiles(problem.seqlen_kv, tile.block_kv)",
        "problem.tiles(problem.seqlen_q, tile.block_kv)",
        _FA2_PLANS + "test_grids_cover_every_row",
    ),
    Bug(
        "rows of the workspace are not padded",
        "cuflash/planning/row_steps.py",
        "return self.problem.tiles(self.problem.seqlen_q, steps.ROWS) * steps.ROWS",
        "return self.problem.seqlen_q",
        _FA2_PLANS + "test_rows_of_the_workspace_are_padded",
    ),
    Bug(
        "a q tile has turns for one warp",
        _FA2,
        "turns = steps.ROWS // tile.block_q * tile.warps if",
        "turns = steps.ROWS // tile.block_q if",
        _FA2_PLANS + "test_every_warp_of_a_q_tile_has_a_turn",
    ),
    Bug(
        "the plan ignores deterministic",
        "cuflash/planning/tiles/fa2.py",
        "problem.deterministic,",
        "False,",
        _FA2_PLANS + "test_an_order_changes_the_kernels_that_have_one",
    ),
    Bug(
        "head groups are as wide as the cache alone",
        "cuflash/planning/head_groups.py",
        "min(max(held, enough), heads, cap or heads)",
        "min(held, heads, cap or heads)",
        _FA2_PLANS + "test_a_head_group_has_work_for_every_multiprocessor",
    ),
    Bug(
        "the main kernel is not told that parts are heads",
        "cuflash/planning/key_parts.py",
        'return [("heads_kv", self.heads), *self._both]',
        "return [*self._both]",
        "tests/unit/test_plan_key_parts.py::test_the_main_kernel_takes_a_part_for_a_head",
    ),
    Bug(
        "parts of tiles that a mask makes unequal are as few as of equal ones",
        "cuflash/planning/parts_choice.py",
        "return self.shortest == self.longest",
        "return self.longest > 0",
        "tests/unit/test_plan_parts_choice.py::test_parts_where_blocks_are_few",
    ),
    Bug(
        "sums of the first query head of a group are cleared before",
        _FA3,
        "cleared = order.heads_ahead * problem.group * problem.heads_kv // keys.heads",
        "cleared = order.heads_ahead",
        _ROW_ORDER + "test_a_launch_has_the_numbers_of_its_order",
    ),
    Bug(
        "a head has one counter",
        _FA3,
        "return 2 + steps.ROWS",
        "return 1 + steps.ROWS",
        _ROW_ORDER + "test_every_counter_has_a_place_and_is_cleared",
    ),
    Bug(
        "blocks clear for the head group that they are in",
        _ORDER,
        "ceil_div(of_head_group + _ROUNDS * self.num_sms, of_head_group)",
        "ceil_div(_ROUNDS * self.num_sms, of_head_group)",
        _ROW_ORDER + "test_no_tile_waits_for_a_later_block_or_for_one_that_began_with_it",
    ),
    Bug(
        "the first heads are not whole head groups",
        _ORDER,
        "head_groups * self.head_group)",
        "head_groups * self.head_group - 1)",
        _ROW_ORDER + "test_every_share_is_cleared_once",
    ),
    Bug(
        "the last head group is what is left",
        "cuflash/planning/head_groups.py",
        "if 2 * (heads % s or s) >= s)",
        "if s)",
        "tests/unit/test_plan_fa3_limits.py::test_the_last_head_group_is_at_least_half_of_the_others",
    ),
    Bug(
        "the last of the heads that take turns comes alone",
        "cuflash/planning/head_groups.py",
        "return ceil_div(heads, ceil_div(heads, most)) if heads else 1",
        "return most",
        "tests/unit/test_plan_fa3_backward_head_groups.py",
    ),
    Bug(
        "heads of ordered sums come singly without a mask",
        "cuflash/planning/backward_head_group.py",
        "    if tile.ordered:\n        return taking_turns(",
        '    if tile.ordered and problem.mask == "causal":\n        return taking_turns(',
        "tests/unit/test_plan_fa3_backward_head_groups.py",
    ),
)
