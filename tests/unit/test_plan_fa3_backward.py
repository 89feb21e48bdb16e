"""Plans of FlashAttention-3's backward pass: choices, refusals and needs."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.planning.fa3 import fa3_plan, needs_newer_compiler
from cuflash.planning.kernel import KernelLaunch
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_tables import BACKWARD, BackwardRow

from ..architectures import LIMITS
from ..kit.backward_rows import widths_of
from ..kit.runners import fa3_serves
from .test_plan_fa3 import ANY, HOPPER, mapped, planned

of_gradients = functools.partial(mapped, operation="backward")

#: Another file tests groups in parts. Here groups stay whole, however few tiles there are.
pytestmark = pytest.mark.usefixtures("whole_groups")

#: The kernels of a pass, in the order they run. The last is left out if blocks of the main kernel
#: convert the sums of dq. If groups have parts, one more kernel follows.
KERNELS = [("steps", "statistics"), ("fa3", "backward"), ("steps", "convert_dq")]


def main_of(chosen: Plan) -> KernelLaunch:
    kernels = [(x.config.generation, x.config.kernel) for x in chosen.launches]
    assert isinstance(chosen.tile, fa3.Fa3BackwardTile)
    after = [("fa3", "sum_parts")] if "parts" in dict(chosen.launches[1].arguments) else []
    own = KERNELS[:2] if chosen.tile.kv_tiles_per_convert_block else KERNELS
    assert kernels == [*own, *after]
    return chosen.launches[1]


#: head_dim, head_dim_v: the tile and the widths of its kernel.
_TAKEN = {
    (8, 8): ((128, 128), (32, 32)),
    (32, 32): ((128, 128), (32, 32)),
    (32, 40): ((128, 128), (64, 64)),
    (33, 8): ((128, 128), (64, 64)),
    (64, 64): ((128, 128), (64, 64)),
    (65, 65): ((64, 128), (96, 96)),
    (72, 72): ((64, 128), (96, 96)),
    (72, 8): ((64, 128), (96, 96)),
    (96, 64): ((64, 128), (96, 96)),
    (8, 96): ((64, 128), (96, 96)),
    (96, 96): ((64, 128), (96, 96)),
    (97, 97): ((64, 128), (128, 128)),
    (96, 104): ((64, 128), (128, 128)),
    (104, 8): ((64, 128), (128, 128)),
    (128, 128): ((64, 128), (128, 128)),
    (64, 128): ((64, 128), (128, 128)),
    (128, 64): ((64, 128), (128, 128)),
    (129, 8): ((64, 128), (192, 128)),
    (136, 64): ((64, 128), (192, 128)),
    (160, 128): ((64, 128), (192, 128)),
    (192, 128): ((64, 128), (192, 128)),
    (129, 129): ((64, 96), (192, 192)),
    (136, 136): ((64, 96), (192, 192)),
    (192, 129): ((64, 96), (192, 192)),
    (64, 136): ((64, 64), (192, 192)),
    (128, 192): ((64, 64), (192, 192)),
    (192, 192): ((64, 96), (192, 192)),
    (192, 193): ((64, 64), (256, 256)),
    (200, 64): ((64, 64), (256, 256)),
    (128, 200): ((64, 64), (256, 256)),
    (256, 256): ((64, 64), (256, 256)),
}


@pytest.mark.parametrize(("d", "dv"), _TAKEN)
def test_the_two_widths_choose_the_tile(d: int, dv: int) -> None:
    blocks, widths = _TAKEN[d, dv]
    for mask, length in product(("full", "causal"), (1, 1000, ANY)):
        chosen = planned(of_gradients(head_dim=d, head_dim_v=dv, mask=mask, seqlen=length))
        tile = chosen.tile
        assert isinstance(tile, fa3.Fa3BackwardTile)
        assert (tile.block_q, tile.block_kv) == blocks
        assert (tile.num_stages, tile.score_stages) == (2, 2)
        assert (tile.head_dim, tile.head_dim_v) == widths
        of_round = 8 if widths in ((96, 96), (128, 128)) else 0
        assert tile.kv_tiles_per_convert_block == of_round
        config = main_of(chosen).config
        assert dict(config.constants)["kv_tiles_per_convert_block"] == of_round
        assert (config.head_dim, config.head_dim_v, config.mask) == (*widths, mask)
        assert config.architecture == "sm_90a"
        assert config.entry == "cuflash_fa3_backward"


def problem_of(row: BackwardRow) -> AttentionProblem:
    """A problem of the row's widths, with the narrowest window that it is for."""
    d, dv = widths_of(row)
    plain = of_gradients(head_dim=d, head_dim_v=dv)
    if not row.fewest_of_window:
        return plain
    long = replace(plain, seqlen_q=2 * row.fewest_of_window, seqlen_kv=2 * row.fewest_of_window)
    return replace(long, mask="band", q_first=1 - row.fewest_of_window)


def test_every_row_of_the_table_is_taken() -> None:
    for row in (row for row in BACKWARD if row.lengths == (0, 0)):
        tile = planned(problem_of(row)).tile
        numbers = row.block_q, row.block_kv, row.num_stages, row.widest, row.widest_v
        more = row.kv_tiles_per_convert_block, row.zero_bytes
        assert tile == fa3.Fa3BackwardTile(*numbers, False, *more)


def test_a_narrower_window_takes_the_row_of_any_mask() -> None:
    row = next(row for row in BACKWARD if row.fewest_of_window)
    wide = problem_of(row)
    narrow = replace(wide, q_first=wide.q_first + 1)
    assert wide.visibility.most_keys == row.fewest_of_window
    assert planned(narrow).tile == planned(replace(narrow, mask="causal", q_first=0)).tile
    assert planned(narrow).tile != planned(wide).tile


def test_some_tiles_have_blocks_of_rows_and_some_have_not() -> None:
    """The tests cover tiles with blocks that convert sums of dQ, and tiles without."""
    rows = [row for row in BACKWARD if not row.fewest_of_window and row.lengths == (0, 0)]
    with_some = [row for row in rows if row.kv_tiles_per_convert_block]
    assert {(row.widest, row.widest_v) for row in with_some} == {(96, 96), (128, 128)}
    assert {(row.widest, row.widest_v) for row in rows if row not in with_some} == {
        (32, 32),
        (64, 64),
        (192, 128),
        (192, 192),
        (256, 256),
    }


#: The faults, and their messages.
_REFUSED = {
    "an older device": (of_gradients(), replace(HOPPER, compute_capability=(8, 0)), r"has 8\.0"),
    "a newer device": (of_gradients(), LIMITS["100"], r"compute capability 9\.0.* has 10\.0"),
    "float32": (of_gradients(storage="float32"), HOPPER, "float16 and bfloat16, not float32"),
    "float64": (of_gradients(storage="float64"), HOPPER, "float16 and bfloat16, not float64"),
    "strides": (of_gradients(alignment="vector"), HOPPER, "copy engine.* multiples of 16 bytes"),
    "unaligned": (of_gradients(alignment="element"), HOPPER, "copy engine.* multiples of 16 bytes"),
    "no key": (of_gradients(seqlen_kv=0), HOPPER, "needs at least one key"),
    "an older compiler": (
        of_gradients(),
        replace(HOPPER, nvrtc=(12, 8)),
        r"needs NVRTC 12\.9 or newer, this is 12\.8: "
        r"pip install -U 'cuflash\[cuda12\]', or '\.\[cuda12\]' in a checkout",
    ),
    "little shared memory": (
        of_gradients(),
        replace(HOPPER, shared_per_block=98_304),
        "has no tile for head_dim 64/64 in 98,304 bytes",
    ),
    "too many tiles": (
        of_gradients(batch=2**10, heads_q=2**10, heads_kv=2**10, seqlen_kv=2**20),
        HOPPER,
        "would need 8,589,934,592 thread blocks, a launch has at most 2,147,483,647",
    ),
    "too many rows": (  # of queries, in the kernels before and after
        of_gradients(batch=2**10, heads_q=2**11, heads_kv=2, seqlen_q=2**20, seqlen_kv=1),
        HOPPER,
        "would need 17,179,869,184 thread blocks, a launch has at most 2,147,483,647",
    ),
}


@pytest.mark.parametrize("fault", _REFUSED)
def test_a_refusal_gives_its_reason_and_the_next_serves(fault: str) -> None:
    wanted, limits, said = _REFUSED[fault]
    with pytest.raises(UnsupportedError, match=f"^fa3 .*{said}") as caught:
        plan(wanted, limits, algorithm="fa3")
    chosen = plan(wanted, limits)
    assert chosen.rejected[0] == ("fa3", str(caught.value))
    assert chosen.algorithm == ("fa1" if fault.startswith("too many") else "fa2")
    assert chosen.launches == plan(wanted, limits, algorithm=chosen.algorithm).launches


@pytest.mark.parametrize("nothing", [{"seqlen_q": 0}, {"heads_q": 0}], ids=str)
def test_a_pass_without_queries_is_left_to_others(nothing: dict[str, Any]) -> None:
    """The driver makes no map of a tensor without rows; dk and dv are still zeros."""
    wanted = of_gradients(**nothing)
    assert not wanted.empty
    with pytest.raises(UnsupportedError, match="fa3 needs at least one quer"):
        planned(wanted)
    assert plan(wanted, HOPPER).algorithm == "fa2"


def test_the_kit_expects_what_is_planned() -> None:
    """Tests on a device expect of "auto" what ``fa3_serves`` says, which agrees with the plan."""
    widths = (8, 64, 72, 128, 136, 256)
    for operation, storage, d, dv, alignment, deterministic, seqlen_kv in product(
        ("forward", "backward"),
        ("bfloat16", "float32"),
        widths,
        widths,
        ("vector", "tensor_map"),
        (False, True),
        (0, 100),
    ):
        wanted = mapped(operation=operation, storage=storage, seqlen_kv=seqlen_kv)
        wanted = replace(wanted, head_dim=d, head_dim_v=dv, alignment=alignment)
        wanted = replace(wanted, deterministic=deterministic)
        assert fa3_serves(wanted) == (plan(wanted, HOPPER).algorithm == "fa3"), wanted


@pytest.mark.parametrize(
    "change",
    [{"width": 64}, {"width": 128}, {"width": 136}, {"head_dim_v": 136}, {"width": 256}],
    ids=str,
)
def test_auto_takes_it_first(change: dict[str, Any]) -> None:
    for mask, deterministic in product(("full", "causal"), (False, True)):
        wanted = of_gradients(**change, mask=mask, deterministic=deterministic)
        chosen = plan(wanted, HOPPER)
        assert (chosen.algorithm, chosen.rejected) == ("fa3", ())
        assert chosen == planned(wanted)


@pytest.mark.parametrize(("width", "counters"), [(64, 1), (128, 2), (160, 2), (256, 2)])
def test_ordered_sums_have_a_counter_for_every_q_tile(width: int, counters: int) -> None:
    """Each block of rows has two counters for kv heads, then one for each of its q tiles."""
    wanted = of_gradients(width=width, seqlen_q=888)
    free, ordered = planned(wanted), planned(replace(wanted, deterministic=True))
    assert isinstance(free.tile, fa3.Fa3BackwardTile)
    assert ordered.tile == replace(free.tile, ordered=True)
    blocks = wanted.batch * wanted.heads_q * 7  # of 128 rows
    assert blocks >= wanted.batch * wanted.heads_kv
    for chosen, of_block in ((free, 2), (ordered, 2 + counters)):
        assert dict(chosen.launches[0].config.constants)["turns"] == of_block
        assert {b.name: b.nbytes for b in chosen.workspace}["turns"] == 4 * blocks * of_block
        assert dict(main_of(chosen).config.constants)["ordered"] == (chosen is ordered)
    for one, other in zip(free.launches, ordered.launches, strict=True):
        assert (one.grid, one.arguments) == (other.grid, other.arguments)
    assert ordered.launches[2:] == free.launches[2:]
    # The forward pass has no order to keep.
    assert planned(mapped(deterministic=True)).launches == planned(mapped()).launches


def test_a_newer_compiler_is_asked_for_where_it_would_help() -> None:
    old = replace(HOPPER, nvrtc=(12, 8))
    for change in ({}, {"deterministic": True}, {"width": 136}):
        said = needs_newer_compiler(of_gradients(**change), old)
        assert said is not None
        assert "needs NVRTC 12.9" in said
    for change in ({"alignment": "vector"}, {"storage": "float32"}):
        assert needs_newer_compiler(of_gradients(**change), old) is None


def test_blocks_are_those_of_the_table() -> None:
    for algorithm in ("fa3", "auto"):
        chosen = plan(of_gradients(width=128), HOPPER, algorithm=algorithm, blocks=(64, 128))
        assert (chosen.algorithm, chosen.reason) == ("fa3", "blocks as asked")
    with pytest.raises(ArgumentValueError, match=r"blocks: got \(128, 128\).* one of \(64, 128\)$"):
        planned(of_gradients(width=128), blocks=(128, 128))
    chosen = plan(of_gradients(width=128), HOPPER, blocks=(64, 64))
    assert (chosen.algorithm, chosen.tile.block_q, chosen.tile.block_kv) == ("fa2", 64, 64)


def test_a_given_tile_is_taken() -> None:
    wanted = of_gradients()
    every = list(fa3.candidates(wanted, HOPPER, every=True))
    # Tiles for wider heads, for windows and for other lengths would do as well.
    assert [tile.head_dim for tile in every] == [64, 64, 64, 96, 128, 192]
    assert [fa3_plan(wanted, HOPPER, None, (), tile=t).tile for t in every] == every
    old = replace(HOPPER, compute_capability=(8, 0))
    with pytest.raises(UnsupportedError, match="fa3 is for Hopper"):
        fa3_plan(wanted, old, None, (), tile=every[0])


@pytest.mark.parametrize(
    "change",
    [
        {"seqlen_q": 123_457, "seqlen_kv": 99_999},
        {"seqlen_q": 1, "seqlen_kv": 1},
        {"batch": 70_000},
        {"heads_q": 64, "heads_kv": 8},
        {"scale": 3.0},
        {"q_offset": -7},
        {"head_dim": 40},
    ],
    ids=str,
)
def test_what_is_known_at_run_time_costs_no_compile(change: dict[str, Any]) -> None:
    plain: AttentionProblem = of_gradients()
    one, other = planned(plain), planned(replace(plain, **change))
    assert [x.config for x in one.launches] == [x.config for x in other.launches]
