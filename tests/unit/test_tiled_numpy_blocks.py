"""The tiled NumPy backend's blocks: their choice, their order and the memory they keep to."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from cuflash import tiled_numpy
from cuflash.errors import ArgumentTypeError, ArgumentValueError
from cuflash.planning.device import DeviceLimits, HostLimits
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.tiled_numpy import gradients
from cuflash.tiled_numpy.blocks import Blocks, Tile

from .tiled_case import ALGORITHMS, DTYPES, LIMITS, Array, destinations, draw, problem, run, solve


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_memory_stays_far_below_the_square(heads_kv: int, algorithm: str) -> None:
    seqlen = 4096
    p = problem(
        storage="float32",
        batch=1,
        heads_q=2,
        heads_kv=heads_kv,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim=32,
        head_dim_v=32,
        mask="causal",
        q_offset=0,
    )
    given, into = draw(p), destinations(p)
    tracemalloc.start()
    try:
        run(p, given, into, algorithm=algorithm)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    square = seqlen * seqlen * 4
    assert peak < square / 8, f"{peak:,} bytes; the scores of one head are {square:,}"


def visits(monkeypatch: pytest.MonkeyPatch, p: AttentionProblem, algorithm: str) -> Any:
    """(query block, key block) of every tile in order, first for forward, then for backward."""
    seen: list[tuple[int, int]] = []
    apply_mask = Blocks.apply_mask

    def record(self: Blocks, scores: Array, tile: Tile) -> None:
        seen.append((tile.queries.start // 4, tile.keys.start // 4))
        apply_mask(self, scores, tile)

    monkeypatch.setattr(Blocks, "apply_mask", record)
    solve(p, draw(p), algorithm=algorithm, blocks=(4, 4))
    return seen[: len(seen) // 2], seen[len(seen) // 2 :]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loops_run_as_in_the_papers(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(
        batch=1, heads_q=1, heads_kv=1, seqlen_q=12, seqlen_kv=12, mask="causal", q_offset=0
    )
    forward, backward = visits(monkeypatch, p, algorithm)
    by_query = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]  # hidden tiles are not visited
    by_key = [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert forward == (by_key if algorithm == "fa1" else by_query)
    assert backward == by_key


@pytest.mark.parametrize(("algorithm", "times"), [("fa1", 9), ("fa2", 1)])
def test_delta_is_computed_in_every_tile_or_once(
    algorithm: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    delta = gradients.GradientRows.delta

    def record(self: gradients.GradientRows, rows: slice) -> Array:
        calls.append(rows)
        return delta(self, rows)

    monkeypatch.setattr(gradients.GradientRows, "delta", record)
    p = problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=12, seqlen_kv=12)
    solve(p, draw(p), algorithm=algorithm, blocks=(4, 4))
    assert len(calls) == times


def bytes_of_scores(chosen: Plan) -> int:
    p, tile = chosen.problem, chosen.tile
    itemsize = DTYPES[p.compute].itemsize
    return itemsize * p.group * tile.block_q * tile.block_kv * tile.block_heads


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("group", [1, 3, 64])
@pytest.mark.parametrize("seqlen", [1, 100, 128, 520, 1000, 8192])
@pytest.mark.parametrize("cache", [1 << 18, 1 << 20, 1 << 24])
def test_scores_of_a_step_fit_the_cache(
    cache: int, seqlen: int, group: int, mask: str, operation: str
) -> None:
    p = problem(
        operation=operation,
        storage="float32",
        batch=64,
        heads_q=4 * group,
        heads_kv=4,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        mask=mask,
        q_offset=0,
    )
    chosen = plan(p, HostLimits(cache))
    tile = chosen.tile
    most = cache if tile.block_q > 1 else max(cache, 8 * group)
    assert bytes_of_scores(chosen) <= most
    for length, block in ((seqlen, tile.block_q), (seqlen, tile.block_kv)):
        assert 1 <= block <= length
        last = length % block or block
        assert block - last < 16 * -(-length // block), "parted evenly"
    everything = tile.block_heads == p.batch * p.heads_kv
    assert everything or 4 * bytes_of_scores(chosen) > cache or seqlen > 512


@pytest.mark.parametrize(
    ("changes", "cache", "tile"),
    [
        ({}, 1 << 20, (352, 688, 1)),
        ({"operation": "backward"}, 1 << 20, (352, 688, 1)),  # as forward: scores round equally
        ({}, 1 << 24, (512, 1024, 8)),  # longer blocks gain nothing; more heads do
        ({"heads_q": 32}, 1 << 20, (80, 752, 1)),  # four heads of a group share a block
        ({"mask": "causal"}, 1 << 20, (352, 688, 1)),
        ({"mask": "causal", "seqlen_q": 2048}, 1 << 20, (256, 1024, 1)),
        ({"mask": "causal", "seqlen_q": 512, "seqlen_kv": 512}, 1 << 20, (128, 512, 4)),
        ({"seqlen_q": 128, "seqlen_kv": 128}, 1 << 20, (128, 128, 16)),
        ({"seqlen_q": 1}, 1 << 20, (1, 8192, 16)),  # one row: long blocks, many heads
    ],
)
def test_the_measured_choices(
    changes: dict[str, Any], cache: int, tile: tuple[int, int, int]
) -> None:
    common = {"storage": "float32", "heads_q": 8, "heads_kv": 8, "q_offset": 0}
    p = problem(**{**common, "seqlen_q": 8192, "seqlen_kv": 8192, **changes})
    chosen = plan(p, HostLimits(cache)).tile
    assert (chosen.block_q, chosen.block_kv, chosen.block_heads) == tile


def test_blocks_as_asked() -> None:
    p = problem(batch=8, seqlen_q=100, seqlen_kv=1000)
    tile = plan(p, LIMITS, blocks=(7, 300)).tile
    assert (tile.block_q, tile.block_kv) == (7, 300)
    assert tile.block_heads == 16
    assert plan(p, HostLimits(100_000), blocks=(7, 300)).tile.block_heads == 5
    tile = plan(p, LIMITS, blocks=(1 << 20, 1 << 20)).tile
    assert (tile.block_q, tile.block_kv) == (100, 1000), "no longer than the sequences"


@pytest.mark.parametrize("blocks", [(0, 8), (8, -1)])
def test_blocks_that_cannot_be(blocks: tuple[int, int]) -> None:
    with pytest.raises(ArgumentValueError, match="blocks"):
        plan(problem(), LIMITS, blocks=blocks)


def test_a_plan_of_another_backend_is_refused() -> None:
    h200 = DeviceLimits((9, 0), 232448, 233472, 65536, 132, 60 << 20)
    p = problem(storage="float32")
    given, into = draw(p), destinations(p)
    with pytest.raises(ArgumentTypeError, match="plan"):
        tiled_numpy.forward(
            plan(p, h200, algorithm="fa1"), *(given[n] for n in "qkv"), into["out"], into["lse"]
        )
