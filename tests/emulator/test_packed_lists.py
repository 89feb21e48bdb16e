"""The begins of packed sequences and the lists of their tiles, as kernels read them."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.planning.kernel import KernelConfig

from .apart import apart
from .build import compiler, emulate
from .host_cupy import host_cupy
from .host_cupy.runtime import Launch

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_Lists = dict[str, np.ndarray]
_NAMES = "cu_seqlens_q", "cu_seqlens_kv"
#: Numbers of an item: a sequence, one of its tiles, and begin and count of its queries and keys.
_ITEM = 6
#: Numbers of sequences, near those of lanes of a warp and of warps and threads of a block.
_COUNTS = (0, 1, 2, 3, 5, 8, 31, 32, 33, 40, 65, 1023, 1024, 1025, 2100)


def _make(config: KernelConfig) -> Any:
    """The kernel that makes the lists; other kernels do nothing."""
    return emulate(config) if config.kernel == "list_items" else lambda *_: None


def _lists(operation: str, rows: tuple[int, int], offsets: list[Any], **options: Any) -> _Lists:
    """The lists that the main kernel of a pass gets, and the rows of a tile."""
    with host_cupy("90", make=_make) as host:
        (queries, keys), found, audit = rows, {}, host.runtime.audit

        def look(launch: Launch) -> None:
            audit(launch)
            if launch.config.kernel == operation:
                found.update(_read(launch, operation, len(offsets[0])))

        host.runtime.audit = look
        q, k = (np.zeros((n, heads, 64), np.float16) for n, heads in ((queries, 2), (keys, 1)))
        at = dict(zip(_NAMES, map(host.array, offsets), strict=True))
        given = {"q": host.array(q), "k": host.array(k), "v": host.array(k), **at}
        options |= {"layout": "shd", "backend": "cuda"}
        if operation == "forward":
            host.call(cuflash.attention, **given, **options)
        else:
            saved = {"dout": host.array(q), "out": host.array(q)}
            lse = host.array(np.zeros((2, queries), np.float32))
            host.call(cuflash.attention_backward, **saved, lse=lse, **given, **options)
    return found


def _read(launch: Launch, operation: str, count: int) -> _Lists:
    given = launch.parameters["packed_lengths"]
    found = {name: _ints(int(given[name]), count + 1).copy() for name in ("q_begins", "kv_begins")}
    name, tile = ("q_items", "block_q") if operation == "forward" else ("kv_items", "block_kv")
    first = _ints(int(given[name]), 1)
    items = _ints(int(given[name]), _ITEM * (1 + int(first[0]))).reshape(-1, _ITEM)
    rows = dict(launch.config.constants)[tile]
    return found | {"items": items[1:].copy(), "rows": np.array(rows)}


def _ints(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (count,))


def _begins(offsets: np.ndarray, total: int) -> np.ndarray:
    """The begins for any offsets: each the nearest that is in the array and does not decrease."""
    clamped = np.clip(offsets, 0, total)
    clamped[0] = 0
    return np.array([*np.maximum.accumulate(clamped), total])


def _check(
    algorithm: str, operation: str, rows: tuple[int, int], offsets: list[Any], ordered: bool
) -> None:
    options = {"algorithm": algorithm, "causal": ordered}
    if operation == "backward":
        options["deterministic"] = ordered
    found = _lists(operation, rows, offsets, **options)
    begins = [_begins(at, total) for at, total in zip(offsets, rows, strict=True)]
    for name, expected in zip(("q_begins", "kv_begins"), begins, strict=True):
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    queries, keys = map(np.diff, begins)
    of_tiles, loops = (queries, keys) if operation == "forward" else (keys, queries)
    loops = [*loops[:-1], 0]  # rows after the last sequence have no loop
    hides = rows[0] > 1  # the mask of a single query hides nothing, and the plan has none
    last_first = operation == "forward" or (ordered and (algorithm == "fa3" or hides))
    for begin, (at, counts) in zip((2, 4), zip(begins, (queries, keys), strict=True), strict=True):
        entries, rows_of_entry = found["items"][:, 0], found["items"][:, begin : begin + 2]
        expected = np.stack([at[entries], counts[entries]], axis=1)
        np.testing.assert_array_equal(rows_of_entry, expected, err_msg="rows of an item")
    _check_items(found["items"], [-(-int(n) // int(found["rows"])) for n in of_tiles], last_first)
    seen = [int(loops[entry]) for entry in found["items"][:, 0]]
    for before, after in pairwise(seen):
        assert 2 * after < 3 * before or after == before, "a longer loop after a shorter one"


def _check_items(items: np.ndarray, tiles: list[int], last_first: bool) -> None:
    """Check that every tile is listed once, and that a sequence's tiles are together, in order."""
    assert len(items) == sum(tiles)
    place = 0
    while place < len(items):
        entry = items[place, 0]
        own = items[place : place + tiles[entry]]
        assert (own[:, 0] == entry).all(), "tiles of a sequence apart"
        expected = np.arange(tiles[entry])
        np.testing.assert_array_equal(own[:, 1], expected[::-1] if last_first else expected)
        place += tiles[entry]
    assert len({(entry, tile) for entry, tile in items[:, :2].tolist()}) == len(items)


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[tuple[int, int], list[Any]]:
    """Draw the rows of the arrays, and offsets: valid ones of any lengths, or arbitrary ones."""
    count, random = draw(st.sampled_from(_COUNTS)), np.random.default_rng(draw(st.integers(0, 99)))
    rows, offsets = [], []
    for _ in range(2):
        longest = draw(st.sampled_from((3, 150) if count > 100 else (3, 300, 5000)))
        lengths = random.integers(0, longest + 1, count)
        lengths[random.random(count) < 0.3] = 0
        total = int(lengths.sum()) + draw(st.sampled_from((0, 1, 400)))
        at = np.array([0, *np.cumsum(lengths)], np.int32)
        if draw(st.booleans()):
            wild = random.random(len(at)) < 0.3
            far = random.integers(-(2**31), 2**31 - 1, len(at))
            at = np.where(wild, np.where(random.random(len(at)) < 0.5, far, at[::-1]), at)
        rows.append(max(total, 1))
        offsets.append(at.astype(np.int32))
    return (rows[0], rows[1]), offsets


@pytest.mark.parametrize("ordered", [False, True], ids=["any", "ordered"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@settings(max_examples=15)
@given(drawn=_drawn())
def test_tiles_are_listed(algorithm: str, operation: str, ordered: bool, drawn: Any) -> None:
    """Longer loops come first, to within half a power of two."""
    apart(partial(_check, algorithm, operation, *drawn, ordered))
