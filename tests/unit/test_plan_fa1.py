"""Plans of FlashAttention-1 on every architecture, without a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest

from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles import fa1
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS, register_limit

from ..architectures import KIB, LIMITS
from .test_plan import PLAIN, problem

fa1_plan = functools.partial(plan, algorithm="fa1")


def combinations() -> list[tuple[str, str, str, int]]:
    return list(
        product(LIMITS, ("forward", "backward"), DTYPES, (1, 8, 40, 64, 100, 128, 192, 256))
    )


@pytest.mark.parametrize(("architecture", "operation", "dtype", "head_dim"), combinations())
def test_a_tile_fits_every_device(
    architecture: str, operation: str, dtype: str, head_dim: int
) -> None:
    limits = LIMITS[architecture]
    wanted = problem(operation=operation, storage=dtype, head_dim=head_dim, head_dim_v=head_dim)
    if architecture == "75" and dtype == "bfloat16":
        with pytest.raises(UnsupportedError, match=r"bfloat16 matrix instructions.*8\.0.*7\.5"):
            fa1_plan(wanted, limits)
        return
    if architecture == "75" and dtype == "float64" and head_dim > 192:
        with pytest.raises(UnsupportedError, match=r"smallest tile 8x8 needs 66,\d+ bytes"):
            fa1_plan(wanted, limits)
        return
    chosen = fa1_plan(wanted, limits)
    assert chosen.algorithm == "fa1"
    for launch in chosen.launches:
        config = launch.config
        assert config.shared_bytes <= limits.shared_per_block
        assert config.threads <= 1024
        assert config.threads * register_limit(limits, config.threads) <= 65536
    assert chosen.tile.footprint.excess(limits) is None


@pytest.mark.parametrize("architecture", LIMITS)
def test_the_paper_rule_is_where_tiles_start(architecture: str) -> None:
    limits = LIMITS[architecture]
    elements = limits.shared_per_block // 2
    assert fa1.paper_blocks(PLAIN, limits) == (64, -(-elements // 256))
    tile = fa1_plan(PLAIN, limits).tile
    block_q, block_kv = fa1.paper_blocks(PLAIN, limits)
    assert tile.block_q <= block_q
    assert tile.block_kv <= block_kv


def test_the_paper_rule_by_hand() -> None:
    """227 KiB of float16 at head_dim 64: B_c = ceil(116224 / 256) = 454, B_r = 64."""
    assert fa1.paper_blocks(PLAIN, LIMITS["90"]) == (64, 454)
    assert fa1.paper_blocks(problem(head_dim=128, head_dim_v=128), LIMITS["90"]) == (128, 227)
    assert fa1.paper_blocks(problem(storage="float64"), LIMITS["75"]) == (32, 32)


def test_small_heads_do_not_ask_for_thousands_of_keys() -> None:
    tiny = problem(head_dim=8, head_dim_v=8)
    assert fa1.paper_blocks(tiny, LIMITS["90"])[1] > 1000
    assert fa1_plan(tiny, LIMITS["90"]).tile.block_kv == fa1.BLOCK_KV_CAP


def test_the_rule_alone_would_overflow_at_wide_heads() -> None:
    wide = problem(head_dim=256, head_dim_v=256)
    limits = LIMITS["90"]
    block_q, block_kv = fa1.paper_blocks(wide, limits)
    whole = fa1.tiles_of_blocks(wide, block_q // 16 * 16, block_kv // 16 * 16)
    assert all(tile.footprint.excess(limits) for tile in whole)
    chosen = fa1_plan(wide, limits)
    assert "the nearest that fits" in chosen.reason


def test_more_shared_memory_never_gives_a_smaller_tile() -> None:
    pairs = []
    for kib in (64, 99, 163, 227):
        tile = fa1_plan(PLAIN, replace(LIMITS["90"], shared_per_block=kib * KIB)).tile
        pairs.append(tile.block_q * tile.block_kv)
    assert pairs == sorted(pairs)
    assert pairs[0] < pairs[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"seqlen_q": 1},
        {"seqlen_q": 123_457, "seqlen_kv": 99},
        {"batch": 70_000},
        {"heads_q": 64, "heads_kv": 8},
        {"scale": 3.0},
        {"q_offset": -7},
        {"head_dim": 63, "head_dim_v": 64},
    ],
)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_what_is_known_at_run_time_costs_no_compile(
    operation: str, change: dict[str, object]
) -> None:
    one = fa1_plan(problem(operation=operation), LIMITS["90"])
    other = fa1_plan(problem(operation=operation, **change), LIMITS["90"])
    assert [made.config for made in one.launches] == [made.config for made in other.launches]


def test_fifty_lengths_one_compile() -> None:
    configs = {
        launch.config
        for length in range(1, 5000, 100)
        for launch in fa1_plan(
            problem(seqlen_q=length, seqlen_kv=2 * length), LIMITS["90"]
        ).launches
    }
    assert len(configs) == 1


def test_the_number_of_kernels_is_known() -> None:
    """There is one for each bucket, mask and pass; one more is one more compile for users."""
    configs: set[KernelConfig] = set()
    for operation, dtype, head_dim, mask in product(
        ("forward", "backward"), DTYPES, range(1, 257), ("full", "causal")
    ):
        wanted = problem(
            operation=operation, storage=dtype, head_dim=head_dim, head_dim_v=head_dim, mask=mask
        )
        configs |= {launch.config for launch in fa1_plan(wanted, LIMITS["90"]).launches}
    deltas = len(DTYPES)
    assert len(configs) == len(HEAD_DIM_BUCKETS) * len(DTYPES) * 2 * 2 + deltas


def test_asked_blocks_are_taken() -> None:
    chosen = fa1_plan(PLAIN, LIMITS["90"], blocks=(32, 128))
    assert (chosen.tile.block_q, chosen.tile.block_kv) == (32, 128)
    assert "as asked" in chosen.reason


def test_blocks_that_do_not_fit_name_bytes_and_the_nearest() -> None:
    with pytest.raises(ArgumentValueError) as caught:
        fa1_plan(problem(head_dim=128, head_dim_v=128), LIMITS["75"], blocks=(64, 128))
    error = caught.value
    assert error.argument == "blocks"
    assert "bytes of shared memory, the device has 65,536" in error.got
    nearest = eval(error.expected.split("nearest ")[1])
    assert fa1_plan(problem(head_dim=128, head_dim_v=128), LIMITS["75"], blocks=nearest)


def test_blocks_that_need_too_many_registers_say_so() -> None:
    with pytest.raises(ArgumentValueError, match=r"about \d+ registers for each of \d+ threads"):
        fa1_plan(PLAIN, LIMITS["90"], blocks=(128, 320))


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_blocks_beyond_any_device_name_the_nearest(operation: str) -> None:
    for blocks in ((1048576, 64), (80000, 64), (64, 1048576), (2**30, 2**30)):
        with pytest.raises(ArgumentValueError, match=r"blocks: got \(.*needs .*the nearest \("):
            fa1_plan(problem(operation=operation), LIMITS["90"], blocks=blocks)


def test_blocks_where_nothing_fits_are_unsupported() -> None:
    wide = problem(storage="float64", head_dim=256, head_dim_v=256)
    with pytest.raises(UnsupportedError, match=r"smallest tile 8x8 needs 66,\d+ bytes"):
        fa1_plan(wide, LIMITS["75"], blocks=(8, 8))


def test_blocks_of_no_instruction_name_the_step() -> None:
    with pytest.raises(ArgumentValueError, match=r"\(100, 100\); expected multiples of 16"):
        fa1_plan(PLAIN, LIMITS["90"], blocks=(100, 100))


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_workspace_grows_with_the_sequence_not_its_square(operation: str) -> None:
    limits = LIMITS["90"]
    sizes = [
        fa1_plan(problem(operation=operation, seqlen_q=n, seqlen_kv=n), limits).workspace_bytes
        for n in (4096, 8192, 16384)
    ]
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == 4 * sizes[0]


def test_workspace_buffers_are_aligned_and_apart() -> None:
    check_workspace(fa1_plan(problem(seqlen_q=777), LIMITS["90"]))


def check_workspace(chosen: Plan) -> None:
    """Buffers are aligned and do not overlap, and the workspace ends with the last buffer."""
    end = 0
    for buffer in chosen.workspace:
        assert buffer.offset % 256 == 0
        assert buffer.offset >= end
        end = buffer.offset + buffer.nbytes
    assert chosen.workspace_bytes == end


def test_the_unit_follows_the_device() -> None:
    def depth(architecture: str, dtype: str) -> int:
        return fa1_plan(problem(storage=dtype), LIMITS[architecture]).launches[-1].config.mma_depth

    assert (depth("75", "float16"), depth("80", "float16"), depth("90", "bfloat16")) == (8, 16, 16)
    assert (depth("90", "float32"), depth("90", "float64")) == (0, 0)
    copies = {a: fa1_plan(PLAIN, LIMITS[a]).launches[-1].config.copies for a in ("75", "80")}
    assert copies == {"75": "vector", "80": "asynchronous"}
    unaligned = fa1_plan(replace(PLAIN, alignment="element"), LIMITS["80"])
    assert unaligned.launches[-1].config.copies == "element"
