"""Planted bugs where scores of wide heads are queries x keys."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import SHARED_GRADIENTS

__all__ = ["BUGS", "HOST"]

_ROLES = "cuda_src/fa3/backward_across.cuh"
_STORE = "cuda_src/tile/store_transposed.cuh"
_PARTS = "cuda_src/fa3/backward_parts.cuh"
_TILES = "cuflash/planning/tiles/fa3.py"
_TABLES = "cuflash/planning/tiles/fa3_tables.py"

_AGAINST = "test_across.py::test_against_float64"
_FEW = f"{_AGAINST}[narrow]"
_LARGE = f"{_AGAINST}[large scores]"
_DEAD = "test_across.py::test_dead_queries_leave_no_trace"
_DEAD_ROWS = (
    "test_dead_rows.py::test_keys_that_kill_every_row[fa3-sm_90-bfloat16-d192-dv168-causal-filled]"
)
_PARTED = "test_key_parts.py::test_against_float64[(192, 192)-bfloat16-False-(4, 1)]"
_CUT = (
    "test_key_parts.py::test_cut_steps_against_float64[(192, 192)-bfloat16-(6, 2)-(150, 300)-0-3]"
)
_LAST = "test_key_parts.py::test_cut_last_tiles_against_float64[(192, 192)-bfloat16-2-3]"
_PLANS = "tests/unit/test_plan_across.py"
_LIMITS = "tests/unit/test_plan_fa3_backward_limits.py"


def _bug(name: str, find: str, replace: str, emulated: str = _FEW, file: str = _ROLES) -> Bug:
    return Bug(name, file, find, replace, SHARED_GRADIENTS, emulated=emulated)


BUGS = (
    _bug(
        "every warp takes P of the first one's queries",
        "from(c.shared.staging, 0, math.warp_row())",
        "from(c.shared.staging, 0, 0)",
    ),
    _bug(
        "gradients read Q and dO of the first stage",
        "const unsigned panel = a_step + m * (Queries::panel_bytes / 16);",
        "const unsigned panel = m * (Queries::panel_bytes / 16);",
    ),
    _bug(
        "all products of a gradient have the same columns",
        "const unsigned panel = a_step + m * (Queries::panel_bytes / 16);",
        "const unsigned panel = a_step;",
    ),
    _bug(
        "dead queries see keys",
        "if (lse.value[row] == infinity<float>()) end = 0;",
        "",
        _DEAD_ROWS,
    ),
    _bug(
        "dead rows of Q stay for dK",
        "if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.q[stage]);",
        "",
        _DEAD,
    ),
    _bug(
        "dead rows of dO stay for dV",
        "if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.dout[stage]);",
        "",
        _DEAD,
    ),
    _bug(
        "no step knows the dead rows of the one before",
        "math.advance(state, dead_rows);",
        "math.advance(state, 0);",
        _DEAD,
    ),
    _bug(
        "the lower rows of a fragment see the keys of the upper ones",
        "const int query = place.tile * Config::block_q + row;",
        "const int query = place.tile * Config::block_q + row - 8 * group;",
        f"{_AGAINST}[causal]",
    ),
    _bug(
        "dQ of the first step is left out",
        "if (number > 0) {\n      arrive_warp",
        "if (number > 1) {\n      arrive_warp",
    ),
    _bug(
        "P is written while the key role reads it",
        "if (number > 0) meet_over_weights<Config>(Numbered::weights_empty, 0);",
        "",
    ),
    _bug(
        "the key role does not wait for P",
        "meet_over_weights<Config>(Numbered::weights_full, 0);",
        "",
    ),
    _bug(
        "nobody meets the last readers of P",
        "meet_over_weights<Config>(NumberedBarriers<Config>::weights_empty, 0);",
        "",
    ),
    _bug(
        "the key role does not wait for dS of its other warps",
        "wait<Config>(c.shared.ds_full[score_ring.stage], score_ring.phase);",
        "",
    ),
    _bug(
        "dV is computed before all of P is written",
        "ptx::named_barrier(1, kWarpgroup);",
        "",
    ),
    _bug(
        "dK is stored where the other role reads K",
        "ptx::named_barrier(Numbered::scores, 2 * kWarpgroup);",
        "",
    ),
    _bug(
        "delta is not divided by the factor of P",
        "{delta.value[row] * inverse, delta.value[row + 8] * inverse}",
        "{delta.value[row], delta.value[row + 8]}",
        _LARGE,
    ),
    _bug(
        "dV of 96 keys keeps the factor of P",
        "1 / rounding_factor<Config>);",
        "1.0f);",
        _LARGE,
    ),
    _bug("dK of 96 keys lacks the scale", "static_cast<float>(c.params.scale)", "1.0f"),
    _bug(
        "a part goes on to the last step of its tile",
        "if constexpr (Config::cut) return c.steps();",
        "",
        _CUT,
    ),
    _bug(
        "whole tiles are stored as parts",
        "whole = c.has_whole_tile();",
        "whole = false;",
        _LAST,
    ),
    _bug(
        "parts of transposed tiles are in order of their own lanes",
        "const int to_lane = lane % 4 * 2 * 4 + lane / 8;",
        "const int to_lane = lane;",
        _PARTED,
        _PARTS,
    ),
    _bug(
        "the second rows of a transposed part lie beside the first",
        "at[16] = tile.value[m][n][group][1];",
        "at[1] = tile.value[m][n][group][1];",
        _PARTED,
        _PARTS,
    ),
    _bug(
        "gradients of other columns are written over those of the first 64",
        "to + m * Matrix::panel_bytes + n * 8 * 128,",
        "to + n * 8 * 128,",
        file=_STORE,
    ),
    _bug(
        "rows beyond the last key are stored",
        "row < min(valid_rows, Matrix::rows)",
        "row < Matrix::rows",
        file=_STORE,
    ),
    _bug(
        "columns beyond the last one are stored",
        "if (Matrix::first_column(panel) + chunk * 8 < valid_columns) {",
        "if (true) {",
        file=_STORE,
    ),
)

HOST = (
    Bug(
        "windows take 96 keys too",
        _TABLES,
        "if self.block_kv % 64 and (problem.uses or problem.has_first):",
        "if self.block_kv % 64 and problem.uses:",
        _PLANS,
    ),
    Bug(
        "heads with one narrow width take 96 keys too",
        _TABLES,
        "if not every and min(widths) <= self.wider_than:",
        "if not every and max(widths) <= self.wider_than:",
        _PLANS,
    ),
    Bug(
        "nobody may ask for 96 keys where one width is narrow",
        _TABLES,
        "if not every and min(widths) <= self.wider_than:",
        "if min(widths) <= self.wider_than:",
        _PLANS,
    ),
    Bug(
        "warpgroups do not share 96 keys",
        _TILES,
        "return self.block_kv < self.warpgroups * ROWS",
        "return self.block_kv == ROWS",
        _PLANS,
    ),
    Bug(
        "P of 96 keys lies in one panel",
        _TILES,
        "shared += panels(self.block_q, self.block_kv)\n        else:",
        "shared += panels(self.block_q, PANEL)\n        else:",
        _LIMITS,
    ),
)
