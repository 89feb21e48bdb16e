"""Planted bugs in FlashAttention-3's backward pass; see ``fa3``.

Two kinds of bugs are missing here. ``fa3_order`` has missing fences and some missing waits for
products. Other waits may be missing without effect, because their condition holds a step or two
earlier.
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import GRADIENTS, NARROW_GRADIENTS, ORDERED_GRADIENTS, SHARED_GRADIENTS

_KERNEL = "cuda_src/fa3/backward.cu"
_LOAD = "cuda_src/fa3/backward_load.cuh"
_MATH = "cuda_src/fa3/backward_math.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_TYPES = "cuda_src/fa3/backward_types.cuh"
_TURNS = "cuda_src/fa3/backward_turns.cuh"
_WIDE = "cuda_src/fa3/backward_wide.cuh"

#: Text of a whole step; a hidden step has another one.
_DQ_HAS_COME = """    ptx::wgmma_wait<2>();
    ptx::wgmma_hold(dq.value[0]);
    if (Config::stays ? state.has_before() : number > 0) {
      """
_DV_BESIDE = """
    }
    advance(state, dead_rows);
    draw_ahead<"""

BUGS = (
    Bug(
        "Q is loaded before the one before is read",
        _LOAD,
        "await_step<Config>(step % stages);",
        "",
        GRADIENTS,
    ),
    Bug(
        "the last of the first q tiles is loaded twice",  # before and after the block's barrier
        _LOAD,
        "for (int step = 0; step < stages; ++step) walk.advance();",
        "for (int step = 1; step < stages; ++step) walk.advance();",
        GRADIENTS,
    ),
    Bug(
        "the phase of a place never turns",  # the second round reads the first round's data
        _TYPES,
        "phase(static_cast<unsigned>(step) / stages % 2)",
        "phase(static_cast<unsigned>(step) / stages % 1)",
        GRADIENTS,
    ),
    Bug(
        "the numbers of the rows are not expected",  # and count as bytes of Q
        _LOAD,
        "Matrix::bytes + bytes);",
        "Matrix::bytes);",
        GRADIENTS,
    ),
    Bug(
        "dS is not waited for",
        _MATH,
        "if (exists) wait<Config>(c.shared.ds_full[ring.stage], ring.phase);",
        "",
        GRADIENTS,
    ),
    Bug(
        "warps do not arrive when they have read dS",
        _MATH,
        f"{_DQ_HAS_COME}arrive_warp<Config>(c.shared.ds_empty[ScoreRing(number - 1).stage]);",
        _DQ_HAS_COME,
        GRADIENTS,
    ),
    Bug(
        "dQ goes to the q tile of its next step",
        _MATH,
        f"add_q(place_before(c, state, number), state.dead_before, dq, number - 1);{_DV_BESIDE}",
        f"add_q(state.place, state.dead_before, dq, number - 1);{_DV_BESIDE}",
        GRADIENTS,
    ),
    Bug(
        "both warpgroups have the first columns of dQ",
        _MATH,
        "unsigned b_step = warpgroup * of_part;",
        "unsigned b_step = 0 * of_part;",
        GRADIENTS,
    ),
    Bug(
        "both warpgroups have the first rows of dQ",
        _MATH,
        "(Types::q_parted_by_rows ? warpgroup * (kRowsOfProduct * 128 / 16) : 0);",
        "0;",
        NARROW_GRADIENTS,
    ),
    Bug(
        "the last dQ of a tile is dropped",
        _KERNEL,
        "  math.add_q(place_before(c, state, steps), state.dead_before, dq, steps - 1);",
        "",
        NARROW_GRADIENTS,
    ),
    Bug(
        "both warpgroups have the first keys",
        _MATH,
        "unsigned a_step = part * (kKeysOfWarpgroup * 128 / 16);",
        "unsigned a_step = 0;",
        GRADIENTS,
    ),
    Bug(
        "a tile counts as whole if its first keys see it whole",
        _MATH,
        "is_edge<Config::block_q, kKeysOfWarpgroup>(",
        "is_edge<Config::block_q, 1>(",
        GRADIENTS,
    ),
    Bug(
        "dead queries keep what Q and dO hold",
        _MATH,
        "return clear_dead(state.place, lse, c.shared.q[stage], c.shared.dout[stage]);",
        "return 0;",
        GRADIENTS,
    ),
    Bug(
        "dQ of dead queries is what zeros times K give",
        _MATH,
        "if (dead >> group & 1) x = 0;",
        "if (dead >> group & 0) x = 0;",
        NARROW_GRADIENTS,
    ),
    Bug(
        "weights of dead queries stay",
        _SCORE,
        "if (dead || !Mask<Config>::visible(seq, place.query0 + column, key)) {",
        "if (!Mask<Config>::visible(seq, place.query0 + column, key)) {",
        NARROW_GRADIENTS,
    ),
    Bug(
        "a key is seen by the query before the first",
        _SCORE,
        "? key - seq.q_last - place.query0 - lane.column : 0;",
        "? key - 1 - seq.q_last - place.query0 - lane.column : 0;",
        GRADIENTS,
    ),
    Bug(
        "all lanes hide the queries of the first",
        _SCORE,
        "place.query0 - lane.column : 0;",
        "place.query0 : 0;",
        NARROW_GRADIENTS,
    ),
    Bug(
        "delta is of the other stage",
        _MATH,
        "p, dp, c.shared.delta[stage], weights);",
        "p, dp, c.shared.delta[stage ^ 1], weights);",
        GRADIENTS,
    ),
    Bug(
        "chunks of dS are not exchanged",
        _SCORE,
        "(chunk ^ lane % 8) * 16;",
        "chunk * 16;",
        GRADIENTS,
    ),
    Bug(
        "P and dS of a pair of fragments change places",
        _SCORE,
        "const int part = n % 2 * 2 + group;",
        "const int part = group * 2 + n % 2;",
        NARROW_GRADIENTS,
    ),
    Bug(
        "a group begins with the kv head's number",
        _TYPES,
        "{item.head * group, blocks.begin}",
        "{item.head, blocks.begin}",
        GRADIENTS,
    ),
    Bug(
        "keys that no query sees keep their gradients",
        _KERNEL,
        "store_zeros(c, c.params.dv, c.params.shape.head_dim_v, 0, threads);",
        "",
        GRADIENTS,
    ),
    Bug(
        "dK lacks the scale",
        _MATH,
        "static_cast<float>(c.params.scale));",
        "1.0f);",
        GRADIENTS,
    ),
    Bug(
        "P is read before it is there",
        _WIDE,
        "meet_over_weights<Config>(Numbered::weights_full, score_ring.stage);",
        "",
        SHARED_GRADIENTS,
    ),
    Bug(
        "P of the other stage is read",
        _WIDE,
        "take_weights(weights, passed_weights(c.shared, score_ring.stage));",
        "take_weights(weights, passed_weights(c.shared, score_ring.stage ^ 1));",
        SHARED_GRADIENTS,
    ),
    Bug(
        "P of one group of rows is taken for that of the other",
        _SCORE,
        "unpack(Storage{}, weights.value[i][part]);",
        "unpack(Storage{}, weights.value[i][part ^ 1]);",
        SHARED_GRADIENTS,
    ),
    Bug(
        "only the key role arrives when dS has been read",
        _WIDE,
        "if (number > 0) {\n      arrive_warp<Config>(",
        "if (number > 0) {\n      if (math.warpgroup == 1) arrive_warp<Config>(",
        SHARED_GRADIENTS,
    ),
    Bug(
        "the second role has the columns of dQ of the first",
        _MATH,
        "Types::q_parted_by_rows ? 0 : warpgroup * Types::q_columns;",
        "0;",
        SHARED_GRADIENTS,
    ),
    Bug(
        "masked keys keep their weights",
        _WIDE,
        "apply_mask<Config>(lse, c.seq, place, p);",
        "",
        SHARED_GRADIENTS,
    ),
    Bug(
        "dP of dead queries stays",
        _WIDE,
        "if (dead || math.is_edge(state.place)) apply_mask<Config>(lse, c.seq, place, dp);",
        "",
        SHARED_GRADIENTS,
    ),
    Bug(
        "dO keeps what dead queries hold",
        _WIDE,
        "if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.dout[stage]);",
        "",
        SHARED_GRADIENTS,
    ),
    Bug(
        "Q keeps what dead queries hold",
        _WIDE,
        "if (dead) dead_rows = math.clear_dead(state.place, lse, c.shared.q[stage]);",
        "",
        SHARED_GRADIENTS,
    ),
    Bug(
        "dQ is added out of turn",
        _TURNS,
        "while (ptx::read_turn(turn_of(c, place)) != before)",
        "while (false)",
        ORDERED_GRADIENTS,
    ),
    Bug(
        "a turn is passed on before dQ is added",
        _TURNS,
        "wait<Config>(c.shared.added[ring.stage], ring.phase);",
        "",
        ORDERED_GRADIENTS,
    ),
    Bug(
        "math does not wait for its turn",
        _MATH,
        "wait<Config>(c.shared.turn_full[ring.stage], ring.phase);",
        "",
        ORDERED_GRADIENTS,
    ),
    Bug(
        "all q tiles of a head have one counter",
        _TURNS,
        "c.head_row(place.head) / Config::block_q + place.tile;",
        "c.head_row(place.head) / Config::block_q;",
        ORDERED_GRADIENTS,
    ),
)
