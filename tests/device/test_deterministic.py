"""Deterministic gradients have the same bits, whatever else the device does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from .common import Gradients, Hog, skip_without

#: Runs with float16; other dtypes have fewer.
RUNS = 200

#: (batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, causal): many kv tiles on a q tile,
#: grouped heads, dead rows, few heads and many.
SHAPES = (
    (1, 1000, 3000, 2, 2, 64, False),
    (2, 900, 900, 8, 2, 128, True),
    (1, 700, 500, 4, 1, 40, True),
    (4, 333, 2500, 16, 16, 64, True),
)


#: For FlashAttention-3, with warpgroups that share keys, and enough heads that blocks clear sums.
WIDE = ((2, 700, 500, 4, 2, 256, True), (2, 500, 777, 4, 2, 192, False))
MANY = ((4, 333, 1500, 16, 16, 128, True), (4, 200, 500, 16, 16, 256, True))


def _clears(shape: tuple[Any, ...], dtype: Any) -> bool:
    """Whether some blocks of FlashAttention-3 clear sums for others."""
    batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, causal = shape
    keys = (batch, seqlen_kv, heads_kv, head_dim)
    plan = cuflash.prepare(
        (batch, seqlen_q, heads_q, head_dim),
        keys,
        keys,
        dtype=dtype,
        operation="backward",
        causal=causal,
        deterministic=True,
        algorithm="fa3",
    ).plan
    tiles = batch * heads_kv * -(-seqlen_kv // plan.tile.block_kv)
    return dict(plan.launches[1].arguments)["ahead"] < tiles


def _problems() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    yield from product(["fa2"], ["float16", "bfloat16", "float32", "float64"], SHAPES)
    yield from product(["fa3"], ["float16", "bfloat16"], (*SHAPES, *WIDE, *MANY))


@pytest.mark.parametrize(("algorithm", "dtype", "shape"), list(_problems()), ids=str)
def test_gradients_are_bit_equal_beside_copies(
    cp: Any, hog: Hog, algorithm: str, dtype: str, shape: tuple[Any, ...]
) -> None:
    import ml_dtypes

    skip_without(algorithm)
    batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, causal = shape
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    if shape in MANY:
        assert _clears(shape, kind), "no block clears sums"
    rng = np.random.default_rng(3)

    def normal(*sizes: int) -> Any:
        return cp.asarray(rng.standard_normal(sizes).astype(kind))

    q = normal(batch, seqlen_q, heads_q, head_dim)
    k, v = (normal(batch, seqlen_kv, heads_kv, head_dim) for _ in range(2))
    shared: dict[str, Any] = {"causal": causal, "algorithm": algorithm}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **shared)
    dout = normal(*out.shape)

    def gradients() -> list[Any]:
        made = cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=True, **shared)
        return [g.view(np.uint8) for g in made]

    first = gradients()
    assert all(bool(g.any()) for g in first)
    wrong = cp.zeros((), np.int64)
    for _ in range(RUNS if dtype == "float16" else RUNS // 8):
        hog.copy()
        for got, expected in zip(gradients(), first, strict=True):
            wrong += (got != expected).sum()
    assert int(wrong) == 0


#: (kv heads, lengths, dims, causal) for FlashAttention-3: several groups of heads, most with fewer
#: heads in the last one. With more kv tiles per head a group has fewer heads, down to one.
HEAD_GROUPS = (
    (17, (300, 2000), (96, 96), False),
    (17, (600, 2048), (96, 96), True),
    (33, (500, 1500), (64, 64), True),
    (20, (200, 4200), (160, 128), False),
    (20, (500, 4200), (192, 128), True),
    (10, (200, 8400), (128, 128), False),
    (5, (200, 16_800), (64, 64), True),
    (2, (200, 17_000), (128, 128), True),
)


@pytest.mark.parametrize(("heads", "lengths", "dims", "causal"), HEAD_GROUPS, ids=str)
def test_heads_in_groups_have_the_same_bits(
    cp: Any, hog: Hog, heads: int, lengths: tuple[int, int], dims: tuple[int, int], causal: bool
) -> None:
    """The gradients of the last heads are right too."""
    skip_without("fa3")
    case = Case(1, 2 * heads, heads, *lengths, *dims, "bfloat16", causal=causal, seed=4)
    gradients = Gradients(cp, case, ordered=True)
    head_group = dict(gradients.prepare().plan.launches[1].arguments)["head_group"]
    assert 1 <= head_group < heads
    first, again = gradients.first(), gradients.destinations()
    wrong = cp.zeros((), np.int64)
    for _ in range(RUNS // 8):
        hog.copy()
        gradients.poison(again)
        gradients.launch(again)
        wrong += gradients.differ(again, first)
    assert int(wrong) == 0


@pytest.mark.parametrize("bias", [(1, 4, 300, 520), (1, 4, 1, 520), (3, 1, 300, 1)], ids=str)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_gradients_of_arguments_are_bit_equal_beside_copies(
    cp: Any, hog: Hog, algorithm: str, bias: tuple[int, ...]
) -> None:
    """Gradients of a bias, slopes and sinks, also where dQ is added in any order."""
    skip_without(algorithm)
    rng = np.random.default_rng(6)

    def normal(*sizes: int, dtype: Any = np.float16) -> Any:
        return cp.asarray(rng.standard_normal(sizes).astype(dtype))

    q, k, v = normal(3, 300, 4, 64), normal(3, 520, 2, 64), normal(3, 520, 2, 64)
    given = {"bias": normal(*bias), "alibi_slopes": normal(4, dtype=np.float32), "sinks": normal(4)}
    shared: dict[str, Any] = {"causal": True, "algorithm": algorithm, **given}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **shared)
    dout = normal(*out.shape)

    def gradients() -> list[Any]:
        made = cuflash.attention_backward(dout, q, k, v, out, lse, wrt=tuple(given), **shared)
        return [cp.ascontiguousarray(g).view(np.uint8) for g in made]

    first = gradients()
    assert all(bool(g.any()) for g in first)
    wrong = cp.zeros((), np.int64)
    for _ in range(RUNS):
        hog.copy()
        for got, expected in zip(gradients(), first, strict=True):
            wrong += (got != expected).sum()
    assert int(wrong) == 0
