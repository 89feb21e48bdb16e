"""Split keys, packed groups and tiles for few queries on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.split_keys import ROWS, Row
from .common import own_stream, skip_without

pytestmark = pytest.mark.few_tiles


def _called(function: Any, *arrays: Any, **options: Any) -> Any:
    return function(*arrays, **options)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_against_float64(cp: Any, row: Row) -> None:
    skip_without(row.algorithm)
    workspace = cp.full(1 << 24, 0xFF, np.uint8)  # NaN of any type
    row.check(_called, cp.asarray, cp.asnumpy, workspace=workspace)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("width", [64, 128])
def test_a_row_has_the_same_bits_in_any_batch(cp: Any, algorithm: str, width: int) -> None:
    """Tile and chunk are given; there is one query, or a few, with packed groups and without."""
    skip_without(algorithm)
    for heads, queries in (((8, 2), 1), ((8, 2), 7), ((2, 2), 200)):
        case = Case(40, *heads, queries, 3000, width, width, "bfloat16", seed=5)
        x = {name: cp.asarray(array) for name, array in arrays(case, "q", "k", "v").items()}
        options = {"algorithm": algorithm, "blocks": (64, 64), "kv_chunk": 512, "causal": True}
        every = cuflash.attention(**x, **options, return_lse=True)
        for first, last in ((0, 1), (3, 5), (39, 40), (0, 17)):
            some = {name: array[first:last] for name, array in x.items()}
            for part, whole in zip(
                cuflash.attention(**some, **options, return_lse=True), every, strict=True
            ):
                cp.testing.assert_array_equal(part, whole[first:last])


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_rows_that_do_not_count_change_no_bit(cp: Any, algorithm: str) -> None:
    skip_without(algorithm)
    x = arrays(Case(3, 2, 1, 100, 300, 64, 64, "float16", seed=10), "q", "k", "v")
    used = {"seqused_q": [100, 70, 0], "seqused_kv": [130, 300, 200]}
    lengths = {name: cp.asarray(counts, np.int32) for name, counts in used.items()}
    options = {"algorithm": algorithm, "blocks": (64, 64), "kv_chunk": 128, "causal": True}
    found = []
    for value in (1, 40, np.nan, np.inf):
        given = {name: cp.asarray(array) for name, array in x.items()}
        for b, (q, kv) in enumerate(zip(*used.values(), strict=True)):
            given["q"][b, q:] = value
            given["k"][b, kv:] = given["v"][b, kv:] = value
        found.append(cuflash.attention(**given, **lengths, **options, return_lse=True))
        for one, first in zip(found[-1], found[0], strict=True):
            cp.testing.assert_array_equal(one, first)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_runs_are_equal_beside_other_work(cp: Any, hog: Any, algorithm: str) -> None:
    """The bits do not depend on which block draws a chunk, or when."""
    skip_without(algorithm)
    x = arrays(Case(1, 8, 2, 1, 60_000, 128, 128, "float16", seed=6), "q", "k", "v")
    given = {name: cp.asarray(array) for name, array in x.items()}
    options = {"algorithm": algorithm, "blocks": (64, 64), "kv_chunk": 1024}
    first = cuflash.attention(**given, **options)
    for _ in range(20):
        hog.copy()
        cp.testing.assert_array_equal(cuflash.attention(**given, **options), first)


def test_a_captured_graph_has_the_bits_of_the_call(cp: Any) -> None:
    """A graph of a prepared call reads its lengths again in every replay."""
    x = arrays(Case(3, 8, 2, 1, 5000, 128, 128, "float16", seed=7), "q", "k", "v")
    given = {name: cp.asarray(array) for name, array in x.items()}
    used = cp.asarray([5000, 17, 2600], np.int32)
    out = cp.empty_like(given["q"])
    options = {"kv_chunk": 512, "seqused_kv": used}
    stream = own_stream(cp)
    with stream:
        cuflash.attention(**given, **options, out=out)  # compiles
        workspace = cp.empty(1 << 24, np.uint8)
        stream.begin_capture()
        cuflash.attention(**given, **options, out=out, workspace=workspace)
        graph = stream.end_capture()
        for lengths in ([5000, 17, 2600], [1, 0, 4999], [512, 513, 511]):
            used.set(np.array(lengths, np.int32))
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            replayed = out.copy()
            cp.testing.assert_array_equal(replayed, cuflash.attention(**given, **options))


def test_what_the_planner_takes_is_right(cp: Any) -> None:
    """Decoding steps and small grids, with which the planner was timed, agree with float64."""
    for heads, lengths, width, causal in (
        ((32, 8), (1, 16384), 128, False),
        ((64, 8), (1, 1024), 128, False),
        ((1, 1), (4096, 4096), 128, True),
        ((8, 8), (77, 4096), 64, False),
    ):
        case = Case(1, *heads, *lengths, width, width, "bfloat16", seed=8, causal=causal)
        x = {name: cp.asarray(array) for name, array in arrays(case, "q", "k", "v").items()}
        chosen = cuflash.prepare(**x, causal=causal).plan
        assert chosen.algorithm != "fa3" or chosen.reason == "the fastest for so few tiles"
        got = cuflash.attention(**x, causal=causal)
        truth = judge(case, {name: cp.asnumpy(array) for name, array in x.items()})
        compare(truth, "out", cp.asnumpy(got)).check()
