"""Plans of FlashAttention-2 on every architecture, without a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest

from cuflash.errors import UnsupportedError
from cuflash.planning.fa2 import fa2_plan
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles import fa2, steps
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS, ceil_div, register_limit

from ..architectures import LIMITS
from .test_plan import PLAIN, problem

planned = functools.partial(plan, algorithm="fa2")

PASSES = ("forward", "backward")
#: Pairs of widths without a tile that is small enough, all on sm_75 in float64. FlashAttention-1
#: takes over those for which it has a tile.
GAPS = {
    "forward": {(192, 256), (256, 128), (256, 192), (256, 256)},
    "backward": {(256, 256)},
}
#: Long enough that every multiprocessor has work with any tile.
LONG = {"seqlen_q": 100_000, "seqlen_kv": 100_000}


def main_launch(chosen: Plan) -> object:
    """The launch of the kernel that does the attention."""
    return next(x for x in chosen.launches if x.config.generation == "fa2")


def combinations() -> list[tuple[str, str, str]]:
    every = product(LIMITS, PASSES, DTYPES)
    return [row for row in every if (row[0], row[2]) != ("75", "bfloat16")]


def _check_fits(chosen: Plan, architecture: str) -> None:
    limits = LIMITS[architecture]
    assert chosen.algorithm == "fa2"
    assert chosen.tile.footprint.excess(limits) is None
    for launch in chosen.launches:
        config = launch.config
        assert config.shared_bytes <= limits.shared_per_block
        assert config.threads <= 1024
        assert config.threads * register_limit(limits, config.threads) <= 65536
        if config.blocks_per_sm > 1:  # a thread block takes one KiB more than it requests
            assert config.blocks_per_sm * (config.shared_bytes + 1024) <= limits.shared_per_sm


@pytest.mark.parametrize(("architecture", "operation", "dtype"), combinations())
def test_every_pair_of_widths_has_a_tile(architecture: str, operation: str, dtype: str) -> None:
    """A few pairs of widths have none; another algorithm may have a tile for them."""
    missing = GAPS[operation] if (architecture, dtype) == ("75", "float64") else set()
    for d, dv in product(HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS):
        wanted = problem(operation=operation, storage=dtype, head_dim=d, head_dim_v=dv, **LONG)
        if (d, dv) in missing:
            with pytest.raises(UnsupportedError, match=r"fa2 .*the smallest tile 8x8 needs"):
                planned(wanted, LIMITS[architecture])
        else:
            _check_fits(planned(wanted, LIMITS[architecture]), architecture)


@pytest.mark.parametrize("operation", PASSES)
def test_bfloat16_needs_its_instructions(operation: str) -> None:
    wanted = problem(operation=operation, storage="bfloat16")
    with pytest.raises(UnsupportedError, match=r"fa2 in bfloat16.*8\.0.*7\.5"):
        planned(wanted, LIMITS["75"])


#: By architecture and dtype: kind of products, depth of the instruction, rows of a fragment.
_UNITS = {
    ("75", "float16"): ("tensor_cores", 8, 16),
    ("80", "float16"): ("tensor_cores", 16, 16),
    ("90", "bfloat16"): ("tensor_cores", 16, 16),
    ("75", "float32"): ("scalar", 0, 8),
    ("80", "float32"): ("tf32", 8, 16),
    ("120", "float32"): ("tf32", 8, 16),
    ("75", "float64"): ("scalar", 0, 8),
    ("86", "float64"): ("fp64", 4, 8),
    ("90", "float64"): ("fp64", 8, 16),
}


@pytest.mark.parametrize("operation", PASSES)
@pytest.mark.parametrize(("architecture", "dtype"), _UNITS)
def test_the_unit_follows_the_device(architecture: str, dtype: str, operation: str) -> None:
    chosen = planned(problem(operation=operation, storage=dtype), LIMITS[architecture])
    for launch in chosen.launches:
        config = launch.config
        rows = dict(config.constants)["fragment_rows"]
        assert (config.products, config.mma_depth, rows) == _UNITS[architecture, dtype]
    fast = "vector" if architecture == "75" else "asynchronous"
    assert {x.config.copies for x in chosen.launches} == {fast}


@pytest.mark.parametrize("operation", PASSES)
@pytest.mark.parametrize("architecture", LIMITS)
def test_few_tiles_become_smaller_ones(architecture: str, operation: str) -> None:
    """If there are fewer of the best tiles than multiprocessors, smaller tiles are taken."""
    limits, smaller = LIMITS[architecture], 0
    long = planned(problem(operation=operation, **LONG), limits)
    assert main_launch(long).grid >= limits.num_sms
    for length in range(64, 4096, 64):
        few = problem(operation=operation, seqlen_q=length, seqlen_kv=length)
        short = planned(few, limits)
        fitting = (t for t in fa2.candidates(few, limits) if t.footprint.excess(limits) is None)
        best = next(fitting)
        as_long = fa2_plan(few, limits, None, (), tile=best)
        if short.tile == best:
            continue
        smaller += 1
        assert main_launch(as_long).grid < limits.num_sms
        assert main_launch(as_long).grid <= main_launch(short).grid
        assert short.tile.block_q <= max(64, best.block_q)
        assert short.tile.block_kv <= best.block_kv
        assert "for more or smaller blocks" in short.reason
    assert smaller


@pytest.mark.parametrize("operation", PASSES)
def test_fifty_lengths_few_compiles(operation: str) -> None:
    """One tile serves lengths with work for every multiprocessor, at most two serve the others."""
    configs = {
        main_launch(
            planned(problem(operation=operation, seqlen_q=n, seqlen_kv=2 * n), LIMITS["90"])
        ).config
        for n in range(1, 5000, 100)
    }
    assert 1 < len(configs) <= 3


@pytest.mark.parametrize(
    "change",
    [
        {"seqlen_q": 123_457, "seqlen_kv": 99_999},
        {"batch": 70_000},
        {"heads_q": 64, "heads_kv": 8},
        {"scale": 3.0},
        {"q_offset": -7},
        {"head_dim": 63, "head_dim_v": 64},
    ],
)
@pytest.mark.parametrize("operation", PASSES)
def test_what_is_known_at_run_time_costs_no_compile(
    operation: str, change: dict[str, object]
) -> None:
    plain = problem(operation=operation, **LONG)
    one, other = planned(plain, LIMITS["90"]), planned(replace(plain, **change), LIMITS["90"])
    assert [x.config for x in one.launches] == [x.config for x in other.launches]


def test_auto_falls_back_where_nothing_fits() -> None:
    """The first algorithm that has a tile for the problem is chosen."""
    wide = problem(operation="forward", storage="float64", head_dim=192, head_dim_v=256)
    with pytest.raises(UnsupportedError, match="fa2"):
        planned(wide, LIMITS["75"])
    chosen = plan(wide, LIMITS["75"])
    assert chosen.algorithm == "fa1"
    assert [name for name, _ in chosen.rejected] == ["fa3", "fa2"]


@pytest.mark.parametrize(
    ("architecture", "dtype"), [*product(("75", "90"), ("float16", "float64"))]
)
def test_grids_cover_every_row(architecture: str, dtype: str) -> None:
    for batch, heads, sq, skv in ((1, (1, 1), 1, 1), (3, (8, 2), 777, 1234), (2, (6, 6), 130, 9)):
        changes = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1]}
        wanted = problem(storage=dtype, seqlen_q=sq, seqlen_kv=skv, **changes)
        chosen = planned(wanted, LIMITS[architecture])
        tiles = ceil_div(sq, chosen.tile.block_q)
        assert [x.grid for x in chosen.launches] == [batch * heads[0] * tiles]
        chosen = planned(replace(wanted, operation="backward"), LIMITS[architecture])
        rows = batch * heads[0] * ceil_div(sq, steps.ROWS)
        tiles = ceil_div(skv, chosen.tile.block_kv)
        assert [x.grid for x in chosen.launches] == [rows, batch * heads[1] * tiles, rows]
        assert steps.ROWS % chosen.tile.block_q == 0


@pytest.mark.parametrize("operation", PASSES)
@pytest.mark.parametrize("architecture", LIMITS)
def test_a_head_group_has_work_for_every_multiprocessor(architecture: str, operation: str) -> None:
    limits = LIMITS[architecture]
    for length, heads in product((1, 100, 4096, 65536), (1, 8, 64, 4096)):
        changes = {"seqlen_q": length, "seqlen_kv": length, "heads_q": heads, "heads_kv": heads}
        wanted = problem(operation=operation, batch=1, **changes)
        launch = main_launch(planned(wanted, limits))
        head_group = dict(launch.arguments)["head_group"]
        assert 1 <= head_group <= heads
        tiles = launch.grid // heads
        assert (
            head_group == heads
            or head_group * tiles >= limits.num_sms * launch.config.blocks_per_sm
        )


def test_the_workspace_is_linear() -> None:
    assert planned(PLAIN, LIMITS["90"]).workspace_bytes == 0
    for deterministic in (False, True):
        wanted = problem(operation="backward", deterministic=deterministic)
        sizes = [
            planned(replace(wanted, seqlen_q=n, seqlen_kv=7 * n), LIMITS["90"]).workspace_bytes
            for n in (4096, 8192, 16384)
        ]
        assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
        names = {b.name: b.nbytes for b in planned(wanted, LIMITS["90"]).workspace}
        assert ("turns" in names) == deterministic


def test_rows_of_the_workspace_are_padded() -> None:
    wanted = problem(operation="backward", seqlen_q=777)
    chosen = planned(wanted, LIMITS["90"])
    padded = ceil_div(777, steps.ROWS) * steps.ROWS
    rows = wanted.batch * wanted.heads_q * padded
    sizes = {b.name: b.nbytes for b in chosen.workspace}
    assert sizes == {"row_lse": 4 * rows, "delta": 4 * rows, "dq_accumulator": 256 * rows}
    assert all(dict(x.arguments)["padded_rows"] == padded for x in chosen.launches)
    end = 0
    for buffer in chosen.workspace:
        assert buffer.offset % 256 == 0
        assert buffer.offset >= end
        end = buffer.offset + buffer.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_warp_of_a_q_tile_has_a_turn(dtype: str) -> None:
    wanted = problem(operation="backward", storage=dtype, deterministic=True, seqlen_q=1000)
    chosen = planned(wanted, LIMITS["90"])
    tile = chosen.tile
    turns = next(b.nbytes for b in chosen.workspace if b.name == "turns") // 4
    tiles = wanted.batch * wanted.heads_q * ceil_div(1000, steps.ROWS) * steps.ROWS // tile.block_q
    assert turns == tiles * tile.warps
    cleared = dict(chosen.launches[0].config.constants)["turns"] * chosen.launches[0].grid
    assert cleared == turns


@pytest.mark.parametrize("operation", PASSES)
def test_an_order_changes_the_kernels_that_have_one(operation: str) -> None:
    plain = problem(operation=operation)
    one = planned(plain, LIMITS["90"])
    other = planned(replace(plain, deterministic=True), LIMITS["90"])
    differ = [a.config.kernel for a, b in zip(one.launches, other.launches, strict=True) if a != b]
    assert differ == ([] if operation == "forward" else ["statistics", "backward"])


def test_more_blocks_than_a_launch_may_have() -> None:
    """fa2 refuses many heads with many rows; FlashAttention-1 has one thread block for a head."""
    for operation, lengths in (
        ("forward", (2**20, 64)),
        ("backward", (64, 2**20)),
        ("backward", (2**20, 64)),  # in the kernels before and after
    ):
        changes = {"batch": 2**10, "heads_q": 2**10, "heads_kv": 2**10}
        wanted = problem(operation=operation, seqlen_q=lengths[0], seqlen_kv=lengths[1], **changes)
        with pytest.raises(UnsupportedError, match=r"fa2 would need [\d,]+ thread blocks"):
            planned(wanted, LIMITS["90"])
        assert plan(wanted, LIMITS["90"]).algorithm == "fa1"


def test_a_given_tile_is_taken() -> None:
    every = [t for t in fa2.candidates(PLAIN, LIMITS["90"]) if not t.footprint.excess(LIMITS["90"])]
    assert len(every) > 1
    assert [fa2_plan(PLAIN, LIMITS["90"], None, (), tile=t).tile for t in every] == every
