"""Block masks on the device, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask

from ..kit.block_masks import LEFT_OUT, ROWS, Row
from .common import skip_without

#: Lengths at which lists have more than a word, and blocks draw several tiles.
_LONG = [
    replace(row, lengths=(700, 4500), heads=(4, 2))
    for row in ROWS
    if not row.more and row.architecture == "90"
]


def _results(cp: Any, row: Row, x: dict[str, Any]) -> dict[str, np.ndarray]:
    """The results of both passes."""
    skip_without(row.algorithm)
    given = {n: cp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in row.given(x).items()}
    given["block_mask"] = BlockMask(cp.asarray(x["block_mask"].blocks), row.block)
    given |= {"algorithm": row.algorithm}
    out, lse = cuflash.attention(**given, return_lse=True)
    grads = cuflash.attention_backward(
        cp.asarray(x["dout"]), out=out, lse=lse, deterministic=row.deterministic, **given
    )
    every = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
    return {name: array.get() for name, array in every}


@pytest.mark.parametrize("row", [*ROWS, *_LONG], ids=lambda row: row.name)
def test_against_the_reference(cp: Any, row: Row) -> None:
    x = row.arrays()
    row.check(_results(cp, row, x), row.expected(x))


@pytest.mark.parametrize("row", LEFT_OUT, ids=lambda row: row.name)
def test_hidden_blocks_are_never_read(cp: Any, row: Row) -> None:
    x = row.arrays()
    expected = row.expected(x)
    row.check(_results(cp, row, row.spoiled(x)), expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_graph_sees_other_blocks(cp: Any, problem: dict[str, Any], algorithm: Any) -> None:
    """Every run makes its lists anew."""
    skip_without(algorithm)
    lengths = [problem[name].shape[1] for name in "qk"]
    rng = np.random.default_rng(3)
    shape = tuple(-(-length // 64) for length in lengths)
    first, second = (cp.asarray(rng.random(shape) < 0.5) for _ in range(2))
    options: dict[str, Any] = {"algorithm": algorithm}
    expected = [
        cuflash.attention(**problem, block_mask=BlockMask(blocks, (64, 64)), **options)
        for blocks in (first, second)
    ]
    assert bool((expected[0] != expected[1]).any())
    mask, out = BlockMask(first.copy(), (64, 64)), cp.full_like(problem["q"], np.nan)
    prepared = cuflash.prepare(*problem.values(), block_mask=mask, **options)
    workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cuflash.attention(**problem, block_mask=mask, **options, out=out, workspace=workspace)
        graph = stream.end_capture()
        for new, result in zip((first, second), expected, strict=True):
            mask.blocks[...] = new
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
            assert bool((out == result).all())
