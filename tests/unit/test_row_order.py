"""The order in which blocks of FlashAttention-3's backward pass clear, multiply and finish."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.planning import row_order
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.key_parts import ONE_PART, Parts
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.row_order import RowOrder
from cuflash.planning.tiles import fa3

from .launched_order import Launched
from .launched_order import launched as of_order
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")

#: Blocks per multiprocessor between a block that clears or adds and a block that needs the result.
ROUNDS = row_order._ROUNDS


@st.composite
def _orders(draw: st.DrawFn) -> Launched:
    """Orders of some hundred tiles on devices so small that blocks clear the rows of many tiles."""
    tiles = draw(st.integers(1, 30))
    heads = draw(st.integers(1, max(1, 600 // tiles)))
    head_group, shares = draw(st.integers(1, min(heads, 9))), draw(st.integers(0, 12))
    num_sms, shared = draw(st.integers(1, 12)), ONE_PART
    if draw(st.booleans()):  # then heads come one at a time, and fewer tiles than a round are cut
        last = draw(st.integers(1, min(num_sms, heads * tiles)))
        head_group, shared = 1, Parts(draw(st.integers(2, 9)), True, last)
    return of_order(RowOrder(heads, tiles, head_group, shares, num_sms, shared=shared))


#: Orders of 132 multiprocessors: one head; no row cleared inside; one head group; many short heads.
_REAL = [
    of_order(RowOrder(*of, shares, 132))
    for of in ((1, 1, 1), (80, 4, 8), (117, 3, 8), (12, 30, 8), (700, 1, 5))
    for shares in (0, 8)
]
ORDERS = st.one_of(_orders(), _orders(), st.sampled_from(_REAL))
thoroughly = settings(max_examples=200)


@thoroughly
@given(ORDERS)
def test_every_tile_is_done_by_one_block_and_each_of_the_last_by_all_its_parts(
    launched: Launched,
) -> None:
    shared, whole = launched.shared, launched.every - launched.shared.last
    blocks = Counter(tile for tile, _ in launched.of_tiles())
    assert blocks == {tile: 1 if tile < whole else shared.number for tile in range(launched.every)}
    tiles = Counter(launched.head(tile) for tile in blocks)
    assert tiles == dict.fromkeys(range(launched.heads), launched.tiles)


@thoroughly
@given(ORDERS)
def test_every_share_is_cleared_once(launched: Launched) -> None:
    """The kernel before clears all shares of the first heads and none of others: it has no tiles.

    A tile reads its head's counter if its own position says that blocks clear for it. Therefore
    blocks must clear all shares of a head or none.
    """
    assert sorted(tile for tile, _ in launched.clearing()) == list(
        range(launched.ahead, launched.every)
    )
    heads, rest = divmod(launched.ahead, launched.tiles)
    assert rest == 0
    assert [launched.head(tile) < heads for tile in range(launched.every)] == [
        tile < launched.ahead for tile in range(launched.every)
    ]


@thoroughly
@given(ORDERS)
def test_every_share_is_finished_once(launched: Launched) -> None:
    """No share is finished here if there are no blocks of rows: then every block has a tile."""
    inside = [tile for _, finished in launched.of_rows() for tile in finished]
    assert sorted(inside) == list(range(launched.every if launched.tiles_of_round else 0))


@thoroughly
@given(ORDERS)
def test_no_tile_waits_for_a_later_block_or_for_one_that_began_with_it(launched: Launched) -> None:
    """All shares of a head are cleared long before the first of its tiles begins."""
    assert ROUNDS >= 1
    of_head = launched.first_and_last()
    for tile, block in launched.clearing():
        first, _ = of_head[launched.head(tile)]
        assert first - block >= ROUNDS * launched.num_sms


@thoroughly
@given(ORDERS)
def test_no_share_is_finished_before_the_last_tile_of_its_head(launched: Launched) -> None:
    """While other tiles run, shares are finished long after that tile, the last after all tiles."""
    of_head = launched.first_and_last()
    for block, finished in launched.of_rows():
        for tile in finished:
            _, last = of_head[launched.head(tile)]
            assert block > last
            assert block >= launched.after_all or block - last >= ROUNDS * launched.num_sms


@thoroughly
@given(ORDERS)
def test_there_is_no_block_too_many(launched: Launched) -> None:
    """After the rounds each block finishes a share; only the last round may have idle blocks."""
    after_all = launched.after_all
    assert launched.grid >= after_all
    assert launched.tiles_of_round or launched.grid == launched.places
    for block, finished in launched.of_rows():
        assert len(finished) == 1 or block < after_all
        assert (
            block % (launched.tiles_of_round + 1) == 0
            or block >= after_all - launched.tiles_of_round
        )


@thoroughly
@given(ORDERS)
def test_nothing_is_cleared_before_or_left_that_need_not_be(launched: Launched) -> None:
    """If a head group less were cleared before, or less were left to the end, blocks could wait."""
    of_head_group, far = launched.tiles * launched.head_group, ROUNDS * launched.num_sms
    assert launched.ahead < far + 2 * of_head_group
    assert launched.convert_lag <= far + of_head_group + launched.tiles_of_round
    assert launched.grid - launched.after_all <= launched.convert_lag


def _problems() -> st.SearchStrategy[AttentionProblem]:
    """Problems with both sizes of kv tiles and of q tiles."""
    return st.builds(
        lambda batch, heads, group, **more: of_gradients(
            **{"batch": batch, "heads_q": heads * group, "heads_kv": heads, **more}
        ),
        st.integers(1, 4),
        st.integers(1, 20),
        st.integers(1, 4),
        width=st.sampled_from((64, 96, 128, 256)),
        deterministic=st.booleans(),
        output=st.sampled_from(("float16", "float32")),
        seqlen_q=st.integers(1, 1000),
        seqlen_kv=st.integers(1, 1500),
        mask=st.sampled_from(("full", "causal")),
    )


@thoroughly
@given(_problems(), st.integers(1, 40), st.integers(0, 12))
def test_a_launch_has_the_numbers_of_its_order(
    problem: AttentionProblem, num_sms: int, shares: int
) -> None:
    """The kernel before clears the other rows: those of all query heads of the first kv heads."""
    limits = replace(HOPPER, num_sms=num_sms)
    tile = planned(problem).tile
    assert isinstance(tile, fa3.Fa3BackwardTile)
    chosen = fa3_plan(
        problem, limits, None, (), tile=replace(tile, kv_tiles_per_convert_block=shares)
    )
    main, arguments = main_of(chosen), dict(main_of(chosen).arguments)
    seen = arguments.get("heads_kv", problem.heads_kv)  # each part of a group counts as a head
    heads, tiles = problem.batch * seen, -(-problem.seqlen_kv // tile.block_kv)
    constants, shared = dict(main.config.constants), ONE_PART
    if constants["cut_last"]:
        shared = Parts(arguments["parts"], True, heads * tiles - arguments["whole_tiles"])
        assert shared.last == heads * tiles % num_sms
    cut = constants["cut"] and not shared.last  # then blocks clear and convert no rows
    shares = 0 if cut else shares
    order = RowOrder(heads, tiles, arguments["head_group"], shares, num_sms, not cut, shared)
    launched = of_order(order)
    assert (main.grid, arguments["ahead"]) == (launched.grid, launched.ahead)
    assert arguments.get("convert_lag") == (launched.convert_lag if shares else None)
    assert constants["kv_tiles_per_convert_block"] == shares
    before, every = chosen.launches[0], problem.batch * problem.heads_q
    cleared = every if cut else launched.ahead // tiles * (problem.heads_q // seen)
    assert dict(before.arguments)["cleared"] == cleared
    # Delta and lse still cover every row.
    assert before.grid == every * -(-problem.seqlen_q // 128)


@thoroughly
@given(_problems(), st.integers(1, 40))
def test_every_counter_has_a_place_and_is_cleared(problem: AttentionProblem, num_sms: int) -> None:
    """The kernel before clears two counters for every kv head, and then one for every q tile."""
    chosen = planned(problem, limits=replace(HOPPER, num_sms=num_sms))
    before, turns = chosen.launches[0], {b.name: b.nbytes for b in chosen.workspace}["turns"]
    cleared = dict(before.config.constants)["turns"]
    of_block = 128 // chosen.tile.block_q * problem.deterministic
    assert cleared == 2 + of_block  # whatever the lengths: it is part of the compiled kernel
    assert turns == 4 * before.grid * cleared
    seen = dict(chosen.launches[1].arguments).get("heads_kv", problem.heads_kv)
    constants = dict(chosen.launches[1].config.constants)
    if constants["cut"] and not constants["cut_last"]:
        return  # no block counts rows
    counters = 2 * problem.batch * seen
    if problem.deterministic:
        padded = -(-problem.seqlen_q // 128) * 128
        rows = problem.batch * problem.heads_q * padded
        counters += rows // chosen.tile.block_q  # one for every q tile of every head
    assert turns >= 4 * counters
