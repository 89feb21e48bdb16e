"""FlashAttention-3 with many tiny tiles, and with NaN in memory beyond the lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .common import Problem, skip_without
from .test_generations import APART


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (65, 1), (65, 65)], ids=str)
def test_many_tiles_of_tiny_sequences(
    cp: Any, lengths: tuple[int, int], head_dim: int, causal: bool
) -> None:
    """Blocks draw ten tiles or more. All heads are compared with fa2, the last with the truth."""
    case = Case(700, 4, 2, *lengths, head_dim, head_dim, "float16", causal=causal)
    assert case.batch * case.heads_q > 10 * cp.cuda.Device().attributes["MultiProcessorCount"]
    problem = Problem(cp, case)
    got = [array.get().astype(np.float32) for array in problem.typed(problem.first())]
    other = cuflash.attention(
        *problem.inputs, return_lse=True, **{**problem.options, "algorithm": "fa2"}
    )
    for one, array in zip(got, other, strict=True):
        expected = array.get().astype(np.float32)
        dead = np.isneginf(expected)
        assert np.array_equal(np.isneginf(one), dead)
        error = np.abs(np.where(dead, 0, one) - np.where(dead, 0, expected))
        assert error.max() <= APART["float16"] * np.abs(expected[~dead]).max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_beyond_the_length_may_hold_nan(
    cp: Any, dtype: str, head_dim: int, causal: bool
) -> None:
    """q, k and v are the first rows of longer arrays, whose other rows are NaN."""
    case = Case(2, 4, 2, 150, 333, head_dim, head_dim, dtype, causal=causal, seed=2)
    x = arrays(case, "q", "k", "v")
    truth, inputs = judge(case, x), []
    for name in "qkv":
        batch, rows, heads, width = case.shape(name)
        longer = np.full((batch, rows + 200, heads, width), np.nan, case.storage)
        longer[:, :rows] = x[name]
        inputs.append(cp.asarray(longer)[:, :rows])
    results = cuflash.attention(*inputs, causal=causal, algorithm="fa3", return_lse=True)
    for name, array in zip(("out", "lse"), results, strict=True):
        compare(truth, name, array.get()).check()
