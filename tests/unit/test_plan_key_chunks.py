"""Split keys in plans: permitted problems, launches, and the workspace."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.features.packed_group import with_packed_group
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.device import HostLimits
from cuflash.planning.fa2_few import FewWork
from cuflash.planning.forward_time import ForwardWork
from cuflash.planning.invariant import batch_invariant_plan
from cuflash.planning.key_chunks import chunk_of, divides, may_split
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa2_few import Fa2FewTile

from ..architectures import LIMITS
from ..kit.few_rows import of_its_bits
from .test_forward_time import few
from .test_plan_fa3 import filling

H200 = LIMITS["90"]
HOST = HostLimits(cache=1 << 20)
PLAIN = few(2, (4, 2), (200, 1000), 64, storage="float16")


def _operand(name: str, problem: AttentionProblem) -> Operand:
    shapes = {
        "sinks": (problem.heads_q,),
        "bias": (1, 1, problem.seqlen_q, problem.seqlen_kv),
        "mask": (1, 1, problem.seqlen_q, problem.seqlen_kv),
        "block_mask": (1, 1, problem.q_blocks, problem.kv_blocks),
        **dict.fromkeys(("seqused_q", "seqused_kv"), (problem.batch,)),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), (3,)),
    }
    dtypes = {"sinks": "float32", "bias": problem.storage, "mask": "bool", "block_mask": "bool"}
    return Operand(name, dtypes.get(name, "int32"), shapes[name])


def _with(*names: str, problem: AttentionProblem = PLAIN, **keywords: Any) -> AttentionProblem:
    operands = {name: _operand(name, problem) for name in names}
    return with_features(problem, keywords, operands, bottom_right=True)


def _packed() -> AttentionProblem:
    return _with("cu_seqlens_q", "cu_seqlens_kv", problem=replace(PLAIN, batch=1, sequences=3))


def _blocks() -> AttentionProblem:
    return _with("block_mask", problem=replace(PLAIN, block=(64, 64)), block_mask=(64, 64))


def _kernels(chosen: Plan) -> list[str]:
    return [launch.config.kernel for launch in chosen.launches]


#: Problems that cannot have chunks, and the messages of the refusals.
_REFUSED = {
    "fa1": (PLAIN, H200, "fa1", "fa1 walks all keys of a row in one block"),
    "packed": (_packed(), H200, "fa2", "kv_chunk with packed_lengths: lists of tiles"),
    "packed on Hopper": (_packed(), H200, "fa3", "kv_chunk with packed_lengths"),
    "a mask": (_with("mask"), H200, "fa2", "kv_chunk with mask"),
    "a mask on Hopper": (_with("mask"), H200, "fa3", "kv_chunk with mask"),
    "blocks": (_blocks(), H200, "fa3", "kv_chunk with block_mask"),
    "NumPy": (PLAIN, HOST, "auto", "the NumPy backend walks all keys of a row"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_has_no_chunks_refuses_them(name: str) -> None:
    problem, limits, algorithm, said = _REFUSED[name]
    with pytest.raises(UnsupportedError, match=said):
        plan(problem, limits, algorithm=algorithm, kv_chunk=128)
    plan(problem, limits, algorithm=algorithm, kv_chunk=0)  # 0 asks for whole rows, which it has


@pytest.mark.parametrize("limits", [H200, LIMITS["80"], HOST], ids=["fa3", "fa2", "host"])
@pytest.mark.parametrize("chunk", [0, 128])
def test_a_backward_pass_has_no_chunks_of_keys(limits: Any, chunk: int) -> None:
    problem = replace(PLAIN, operation="backward")
    with pytest.raises(ArgumentValueError, match=r"kv_chunk: .* chunks are of the forward pass"):
        plan(problem, limits, kv_chunk=chunk)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_chunk_is_of_whole_tiles(algorithm: Any) -> None:
    with pytest.raises(ArgumentValueError, match=r"kv_chunk: got 100; expected a multiple"):
        plan(PLAIN, H200, algorithm=algorithm, kv_chunk=100)
    with pytest.raises(ArgumentValueError, match=r"kv_chunk: got 64; expected a multiple"):
        plan(PLAIN, H200, algorithm=algorithm, blocks=(64, 128), kv_chunk=64)
    for chunk in (64, 192, 1024, 4096):
        chosen = plan(PLAIN, H200, algorithm=algorithm, kv_chunk=chunk)
        assert chunk % chosen.tile.block_kv == 0
        assert chunk_of(chosen.problem) == chunk
    assert divides(None, 128)
    assert divides(0, 128)
    assert divides(256, 128)
    assert not divides(192, 128)


def test_chunks_need_no_more_blocks_than_a_launch_has() -> None:
    """Here only chunks need too many blocks; whole rows and the merge need few enough."""
    most = 2**31 - 1
    problem = few(2**22, (8, 8), (2, 64 * 64), 64, storage="float16")
    assert plan(problem, H200, algorithm="fa2").launches[0].grid == 2**25
    assert plan(problem, H200, algorithm="fa2", kv_chunk=128).launches[0].grid == 2**30
    said = f"splitting keys would need {2**31:,} thread blocks, a launch has at most {most:,}"
    with pytest.raises(UnsupportedError, match=said):
        plan(problem, H200, algorithm="fa2", kv_chunk=64)


def test_a_chunk_that_no_tile_of_fa3_divides_goes_on_to_fa2() -> None:
    chosen = plan(PLAIN, H200, kv_chunk=32)
    assert chosen.algorithm == "fa2"
    assert chosen.rejected[0][0] == "fa3"
    assert "kv_chunk: got 32" in chosen.rejected[0][1]


def test_whoever_fills_the_device_may_have_chunks_too() -> None:
    for chunk in (64, 80, 1024):
        chosen = plan(filling(width=128, batch=300), H200, algorithm="fa3", kv_chunk=chunk)
        assert chunk_of(chosen.problem) == chunk
        assert chosen.reason == "the first of the table for these lengths"


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_no_chunk_is_no_split(algorithm: Any) -> None:
    chosen = plan(PLAIN, H200, algorithm=algorithm, kv_chunk=0)
    assert _kernels(chosen) == ["forward"]
    assert {buffer.name for buffer in chosen.workspace} <= {"tile_counter"}
    config = chosen.launches[0].config
    assert (config.output, config.features) == ("float16", ())


_SPLIT = [
    (algorithm, batch, heads, rows, keys, width, chunk)
    for algorithm, batch, heads, (rows, keys), width, chunk in product(
        ("fa2", "fa3"),
        (1, 3),
        ((4, 2), (3, 3)),
        ((200, 1000), (7, 4096), (64, 129)),
        (64, 80, 256),
        (64, 128, 1024),
    )
]


@pytest.mark.parametrize("storage", ["float16", "float32", "float64"])
def test_the_workspace_holds_a_part_of_every_row_and_chunk(storage: str) -> None:
    """It has an output, a reference and a sum of each part, in the compute type."""
    for algorithm, batch, heads, rows, keys, width, chunk in _SPLIT:
        if (algorithm == "fa3") != (storage == "float16"):
            continue
        problem = few(batch, heads, (rows, keys), width, storage=storage)
        chosen = plan(problem, H200, algorithm=algorithm, kv_chunk=chunk)  # type: ignore[arg-type]
        chunks, every = ceil_div(keys, chunk), batch * heads[0] * rows
        itemsize = 8 if storage == "float64" else 4
        sizes = {b.name: b.nbytes for b in chosen.workspace if b.name != "tile_counter"}
        numbers = itemsize * chunks * every
        assert sizes == {
            "out_parts": numbers * width,
            "reference_parts": numbers,
            "sum_parts": numbers,
        }
        main, merge = chosen.launches
        tiles = batch * heads[0] * ceil_div(rows, chosen.tile.block_q) * chunks
        slots = H200.num_sms * main.config.blocks_per_sm
        assert main.grid == (min(tiles, slots) if algorithm == "fa3" else tiles)
        assert (main.config.output, main.config.compute) == (problem.compute, problem.compute)
        assert merge.config.output == storage
        constants = dict(merge.config.constants)
        assert constants["shared_rows"] == (chunks > 8 and rows <= 64)
        assert merge.grid == (every if constants["shared_rows"] else ceil_div(every, 8))
        blocks = (constants["block_q"], constants["block_kv"])
        assert blocks == (chosen.tile.block_q, chosen.tile.block_kv)


def test_warps_that_share_a_row_have_room_for_their_columns_and_sums() -> None:
    for width, storage in ((20, "float32"), (64, "float16"), (256, "float16"), (64, "float64")):
        problem = few(1, (1, 1), (5, 4096), width, storage=storage, alignment="element")
        merge = plan(problem, H200, algorithm="fa2", kv_chunk=64).launches[-1].config
        size = 8 if storage == "float64" else 4
        columns = ceil_div(merge.head_dim_v, 32) * 32
        assert dict(merge.constants)["shared_rows"] == 1
        assert merge.shared_bytes >= 8 * (columns + 1) * size
    few_chunks = plan(problem, H200, algorithm="fa2", kv_chunk=1024).launches[-1].config
    assert few_chunks.shared_bytes <= 128


def test_sinks_are_of_rows_that_have_been_merged() -> None:
    for algorithm in ("fa2", "fa3"):
        chosen = plan(_with("sinks"), H200, algorithm=algorithm, kv_chunk=128)  # type: ignore[arg-type]
        main, merge = ([f.name for f in one.config.features] for one in chosen.launches)
        assert main == ["kv_chunks"]
        assert merge == ["sinks", "kv_chunks"]


def test_lengths_are_known_to_whoever_merges() -> None:
    for algorithm in ("fa2", "fa3"):
        problem = _with("seqused_q", "seqused_kv")
        chosen = plan(problem, H200, algorithm=algorithm, kv_chunk=128)  # type: ignore[arg-type]
        for launch in chosen.launches:
            assert [f.name for f in launch.config.features] == ["used_lengths", "kv_chunks"]


def test_what_cannot_be_split_is_planned_as_before() -> None:
    """However few its tiles are, the plan takes the first row of the table, without predictions."""
    for problem in (_packed(), _with("mask"), _blocks(), _with("bias")):
        chosen = plan(problem, H200, algorithm="fa3")
        assert chosen.reason == "the first of the table for these lengths"
        assert chunk_of(chosen.problem) == 0
    assert may_split(PLAIN)
    assert may_split(_with("seqused_kv", "sinks"))
    assert not any(map(may_split, (_packed(), _with("mask"), _blocks())))


def test_blocks_that_are_asked_for_are_walked_whole() -> None:
    """Requested blocks determine the bits of a row, so the plan adds no chunks."""
    chosen = plan(few(1, (1, 1), (1, 100_000)), H200, blocks=(64, 64))
    assert chunk_of(chosen.problem) == 0
    assert chosen.tile.block_q == 64


@pytest.mark.parametrize(
    "lengths", [(1, 8192), (8, 8192), (1, 131072), (300, 700), (1, 0)], ids=str
)
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_a_batch_of_any_size_has_the_same_tile_and_chunk(
    lengths: tuple[int, int], architecture: str
) -> None:
    """Neither a block's rows nor where chunks are merged changes a bit."""
    taken = set()
    for batch in (1, 2, 3, 7, 8, 16, 33, 64):
        chosen = batch_invariant_plan(few(batch, (32, 8), lengths), LIMITS[architecture])
        assert chosen.problem.batch == batch
        tile, chunk = chosen.tile, chunk_of(chosen.problem)
        if isinstance(tile, Fa2FewTile):
            chunk = chunk or tile.chunk
            taken.add((chosen.algorithm, chunk, of_its_bits(tile)))
            continue
        configs = tuple(launch.config for launch in chosen.launches)
        taken.add((chosen.algorithm, chunk, configs))
    assert len(taken) == 1


def test_a_batch_invariant_plan_has_what_is_asked_for() -> None:
    problem = few(3, (8, 2), (1, 4096))
    chosen = batch_invariant_plan(problem, H200, blocks=(64, 128), kv_chunk=256)
    assert (chosen.tile.block_q, chosen.tile.block_kv) == (64, 128)
    assert chunk_of(chosen.problem) == 256
    with pytest.raises(UnsupportedError, match="NumPy"):
        batch_invariant_plan(problem, HOST, kv_chunk=256)
    assert batch_invariant_plan(problem, HOST) == plan(problem, HOST)


def test_a_batch_invariant_plan_is_that_of_a_usual_batch() -> None:
    """Where plans predict no time, it has the very same tile, not another tile of equal blocks."""
    for architecture, width, mask in product(("80", "90"), (64, 128, 256), ("full", "causal")):
        of_device = LIMITS[architecture]
        for lengths in ((17, 8192), (300, 700)) * (architecture == "80") + ((4096, 4096),):
            offset = lengths[1] - lengths[0]
            problem = few(8, (8, 2), lengths, width, mask=mask, q_offset=offset)
            assert batch_invariant_plan(problem, of_device) == plan(problem, of_device)
    fa1 = [make(PLAIN, H200, algorithm="fa1") for make in (plan, batch_invariant_plan)]
    assert (fa1[0].algorithm, fa1[0].tile.block_q) == (fa1[1].algorithm, fa1[1].tile.block_q)


@pytest.mark.parametrize("keys", [2048, 8192, 131072])
@pytest.mark.parametrize(("heads", "width"), [((32, 8), 128), ((64, 8), 64), ((16, 2), 256)])
def test_a_batch_invariant_plan_is_nearly_the_fastest(
    heads: tuple[int, int], width: int, keys: int
) -> None:
    """Its predicted time is less than 1.35 times that of the plan that knows the batch."""
    for batch in (1, 2, 3, 8, 24, 64, 128):
        problem = few(batch, heads, (1, keys), width)
        times = [_reckoned(make(problem, H200)) for make in (batch_invariant_plan, plan)]
        assert times[0] < 1.35 * times[1], batch


def _reckoned(chosen: Plan) -> float:
    """The predicted microseconds of a forward pass."""
    tile, packed = chosen.tile, with_packed_group(chosen.problem)
    if isinstance(tile, Fa2FewTile):
        chunk = chunk_of(chosen.problem) or tile.chunk
        return FewWork(packed, H200, tile, chunk, merges=tile.chunk > 0).time
    blocks = tile.block_q, tile.block_kv, tile.footprint.blocks_per_sm
    return ForwardWork(packed, H200, *blocks, chunk_of(chosen.problem)).time(tile.step)
