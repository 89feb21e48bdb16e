"""Planted bugs in two tiles of FlashAttention-3's backward pass; see ``hopper``.

One is for head_dim 192 with head_dim_v 128: a warpgroup computes one tile of scores after the
other, and dK reads dS from shared memory. The other is for head_dim 96: each half of K has a panel
that it does not fill.

These edits are not here, because results stay right:

- no barrier between dS and dK: the warps of dK read the keys that they wrote themselves
- no turns to make scores: results are the same, or never come
- no mask of dP: zeros of P multiply it
- weights of dead queries that are not cleared: lse makes them zero
- dS written before dQ of two steps ago has read it: a GPU is never that fast (``fa3_order`` has it)
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import HALVES_GRADIENTS, SERIAL_GRADIENTS, SERIAL_TURNS

__all__ = ["BUGS"]

_CLEAR = "cuda_src/fa3/backward_clear.cuh"
_SERIAL = "cuda_src/fa3/backward_serial.cuh"
_MATH = "cuda_src/fa3/backward_math.cuh"
_PANELS = "cuda_src/tile/panels.cuh"
_ROWS = "cuda_src/fa3/backward_rows.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_TYPES = "cuda_src/fa3/backward_types.cuh"

_HALVES = (
    Bug(
        "the second half of K begins in the last panel of the first",
        _MATH,
        "Types::KPanels::byte_of(Types::q_columns) / 16;",
        "Types::q_columns / kPanelColumns * Types::KPanels::panel_bytes / 16;",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "panels are filled as if K had no halves",  # 16 of the columns are then in no panel
        _PANELS,
        "return panel / part_panels * part_columns + panel % part_panels * kPanelColumns;",
        "return panel * kPanelColumns;",
        HALVES_GRADIENTS,
    ),
    Bug(
        "columns of the second half are looked for in the first",
        _PANELS,
        "(column / part_columns * part_panels + within / kPanelColumns)",
        "(within / kPanelColumns)",
        HALVES_GRADIENTS,
    ),
    Bug(
        "a part of 32 columns of dQ is stored as 64",  # half of them hold old numbers
        _ROWS,
        "return columns % 64 == 0 ? rest : min(columns, rest);",
        "return rest;",
        HALVES_GRADIENTS,
    ),
    Bug(
        "a copy clears half of its bytes",
        _CLEAR,
        "ptx::shared_address(c.shared.zeros), bytes);",
        "ptx::shared_address(c.shared.zeros), bytes / 2);",
        HALVES_GRADIENTS,
    ),
)

_PRODUCTS = (
    Bug(
        "dK has the dS of the other warpgroup's keys",
        _SERIAL,
        "math.part * (Panels::panel_bytes / 16);",
        "(math.part ^ 1) * (Panels::panel_bytes / 16);",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "dK has the dS of the step before",
        _SERIAL,
        "score_stage * (sizeof(Panels) / 16) +",
        "(score_stage ^ 1) * (sizeof(Panels) / 16) +",
        SERIAL_TURNS,
    ),
    Bug(
        "dV keeps the factor of P",
        _SERIAL,
        "1 / serial.factor);",
        "1.0f);",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "dS keeps the factor of P",
        _SCORE,
        "constexpr float inverse = 1 / rounding_factor<Config>;",
        "constexpr float inverse = 1;",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "rounded P meets delta of the other stage",
        _SERIAL,
        "sloped : weights, dp,\n                            c.shared.delta[ring.stage]);",
        "sloped : weights, dp,\n                            c.shared.delta[ring.stage ^ 1]);",
        SERIAL_TURNS,
    ),
    Bug(
        "the last dQ of a serial tile is dropped",
        _SERIAL,
        "  serial.add_q(state, dq, steps - 1);",
        "",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "the step before a head's first q tile has the same tile",  # dQ of the last goes there
        _TYPES,
        "first ? blocks.end - 1 : place.tile - 1",
        "first ? blocks.begin : place.tile - 1",
        SERIAL_GRADIENTS,
    ),
)

_HIDDEN = (
    Bug(
        "masked keys keep their rounded weights",
        _SERIAL,
        "if (dead || edge) apply_mask<Config>(lse, c.seq, place, p);",
        "if (dead) apply_mask<Config>(lse, c.seq, place, p);",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "dP of dead queries meets zeros of P",  # which make NaN of what is not finite
        _SERIAL,
        "    if (dead) {\n      apply_mask<Config>(c.shared.lse[ring.stage], c.seq, place, dp);\n"
        "    } else if (edge) {",
        "    if (edge) {",
        SERIAL_TURNS,
    ),
    Bug(
        "a serial step keeps what Q and dO hold of dead queries",
        _SERIAL,
        "math.clear_dead(state.place, c.shared.lse[stage], c.shared.q[stage], "
        "c.shared.dout[stage]);",
        "",
        SERIAL_GRADIENTS,
    ),
    Bug(
        # dQ of these queries is zeros of dS times K, which may hold anything.
        "a step forgets that the step before had dead queries",
        _SERIAL,
        "math.advance(state, dead);",
        "math.advance(state, 0);",
        SERIAL_TURNS,
    ),
    Bug(
        "dead rows of dQ are looked for in the q tile of its next step",
        _SERIAL,
        "before.tile * Config::block_q + math.warp_row() + lane.row;",
        "state.place.tile * Config::block_q + math.warp_row() + lane.row;",
        SERIAL_GRADIENTS,
    ),
    Bug(
        "a lane's second row of dQ is dead where the first is",
        _SERIAL,
        "(lse[8] == infinity<float>() ? 2u : 0u);",
        "(lse[0] == infinity<float>() ? 2u : 0u);",
        SERIAL_GRADIENTS,
    ),
)

BUGS = (*_HALVES, *_PRODUCTS, *_HIDDEN)
