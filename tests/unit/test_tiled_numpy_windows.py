"""Windows in the tiled NumPy backend, against a mask written out pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.tiled_numpy import fa2
from cuflash.tiled_numpy.blocks import Blocks, Tile

from .tiled_case import ALGORITHMS, GIVEN, WANTED, Answer, Array, check, definition, draw, problem

Window = tuple[int | None, int | None]
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def pairs_seen(
    seqlen_q: int, seqlen_kv: int, window: Window | None, offset: int | None, causal: bool = False
) -> Array:
    """Which query sees which key, by the sentence that defines a window."""
    left, right = window or (None, None)
    at = seqlen_kv - seqlen_q if offset is None else offset
    seen = np.zeros((seqlen_q, seqlen_kv), bool)
    for i, j in np.ndindex(*seen.shape):
        after_left = left is None or i + at - left <= j
        before_right = right is None or j <= i + at + right
        seen[i, j] = after_left and before_right and not (causal and j > i + at)
    return seen


def solve(given: dict[str, Array], **options: Any) -> Answer:
    """Both passes through the public functions."""
    q, k, v, dout, dlse = (given[name] for name in GIVEN)
    options = {"backend": "numpy", **options}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return Answer(out, lse, *grads)


def bits(answer: Answer) -> list[bytes]:
    return [getattr(answer, name).tobytes() for name in WANTED]


sides = st.none() | st.integers(0, 6) | st.integers(0, 60)


@st.composite
def cases(draw_: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    seqlen_q, seqlen_kv = draw_(st.integers(1, 45)), draw_(st.integers(0, 45))
    heads_kv = draw_(st.integers(1, 2))
    changes = {
        "storage": draw_(st.sampled_from(sorted(TOLERANCES))),
        "batch": draw_(st.integers(1, 2)),
        "heads_kv": heads_kv,
        "heads_q": heads_kv * draw_(st.integers(1, 3)),
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
        "head_dim_v": draw_(st.sampled_from((8, 3))),
        "scale": 0.35,
    }
    options = {
        "window_size": draw_(st.tuples(sides, sides)),
        "causal": draw_(st.booleans()),
        "q_offset": draw_(st.none() | st.integers(-seqlen_q - 8, seqlen_kv + 8)),
        "algorithm": draw_(st.sampled_from(ALGORITHMS)),
        "blocks": draw_(st.none() | st.tuples(st.integers(1, 24), st.integers(1, 24))),
    }
    return changes, options


@settings(max_examples=300)
@given(cases(), st.integers(0, 3))
def test_windows_are_attention_under_their_mask(case: Any, seed: int) -> None:
    changes, options = case
    p = problem(**changes)
    arrays = draw(p, seed)
    got = solve(arrays, scale=p.scale, **options)
    seen = pairs_seen(
        p.seqlen_q, p.seqlen_kv, options["window_size"], options["q_offset"], options["causal"]
    )
    check(got, definition(p, arrays, seen), TOLERANCES[p.storage], least=1)
    dead = ~seen.any(axis=1)
    assert (got.out[:, dead] == 0).all()
    assert (got.dq[:, dead] == 0).all()


@pytest.mark.parametrize("way", ["_block", "_small_block", "few_rows_block"])
@pytest.mark.parametrize("common", [0.0, 50.0])
@pytest.mark.parametrize("window", [(3, 2), (0, 0), (None, 2), (9, None), (30, 30)])
@pytest.mark.parametrize("offset", [None, -9, 13])
def test_every_way_through_a_block(
    offset: int | None, window: Window, common: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa2, "FEW_ROWS", 10**9 if way == "few_rows_block" else 0)
    monkeypatch.setattr(fa2, "_ROWS_TO_MEASURE", 1 if way == "_small_block" else 10**9)
    p = problem(heads_q=4, seqlen_q=29, seqlen_kv=31)
    arrays = draw(p)
    arrays["k"][..., 2] += common
    got = solve(arrays, scale=p.scale, window_size=window, q_offset=offset, blocks=(4, 5))
    check(got, definition(p, arrays, pairs_seen(29, 31, window, offset)), 1e-12)


@settings(max_examples=100)
@given(cases(), st.integers(0, 3))
def test_causal_is_the_window_without_keys_to_come(case: Any, seed: int) -> None:
    changes, options = case
    arrays = draw(problem(**changes), seed)
    left = options["window_size"][0]
    shared = {"scale": 0.35} | {n: options[n] for n in ("q_offset", "algorithm", "blocks")}
    causal = solve(arrays, causal=True, window_size=(left, None), **shared)
    assert bits(causal) == bits(solve(arrays, window_size=(left, 0), **shared))
    if left is None:
        assert bits(causal) == bits(solve(arrays, causal=True, **shared))


@settings(max_examples=100)
@given(cases(), st.integers(0, 3))
def test_a_bound_that_hides_nothing_changes_no_bit(case: Any, seed: int) -> None:
    changes, options = case
    p = problem(**changes)
    arrays = draw(p, seed)
    offset = options["q_offset"]
    at = p.seqlen_kv - p.seqlen_q if offset is None else offset
    left, right = options["window_size"]
    farthest_left, farthest_right = p.seqlen_q - 1 + at, p.seqlen_kv - 1 - at
    before = solve(arrays, **options)
    if left is None and farthest_left >= 0:
        same = solve(arrays, **{**options, "window_size": (farthest_left, right)})
        assert bits(before) == bits(same)
    if right is None and not options["causal"] and farthest_right >= 0:
        same = solve(arrays, **{**options, "window_size": (left, farthest_right)})
        assert bits(before) == bits(same)


def tiles_visited(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, int]]:
    """(query block, key block) of every product of scores, in blocks of 4."""
    visited: list[tuple[int, int]] = []
    plain = getattr(Blocks, name)

    def record(self: Blocks, scores: Array, tile: Tile) -> None:
        visited.append((tile.queries.start // 4, tile.keys.start // 4))
        assert scores.shape[2] == tile.keys.stop - tile.keys.start
        plain(self, scores, tile)

    monkeypatch.setattr(Blocks, name, record)
    return visited


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.tuples(sides, sides),
    st.none() | st.integers(-35, 35),
    st.sampled_from(ALGORITHMS),
    st.booleans(),
)
@example(30, 30, (3, 0), None, "fa2", True)
@example(30, 30, (0, 0), -40, "fa1", False)
def test_only_tiles_of_the_band_are_visited_and_each_once(
    seqlen_q: int, seqlen_kv: int, window: Window, offset: int | None, algorithm: str, few: bool
) -> None:
    p = problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    arrays = draw(p)
    arrays["k"][..., 0] -= 0.1  # no common part, whose products would be visits too
    seen = pairs_seen(seqlen_q, seqlen_kv, window, offset)
    blocks = {(i // 4, j // 4) for i, j in zip(*np.nonzero(seen), strict=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa2, "FEW_ROWS", 16 if few else 0)
        visited = tiles_visited(patch, "apply_mask")
        patch.setattr("cuflash.tiled_numpy.operands.common_part", lambda *_: None)
        options = {"window_size": window, "q_offset": offset, "algorithm": algorithm}
        solve(arrays, blocks=(4, 4), **options)
    assert sorted(visited) == sorted([*blocks, *blocks]), "once forward, once backward"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", ["_block", "few_rows_block"])
def test_what_lies_outside_the_band_of_a_block_is_not_read(
    way: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values on both sides of the band of a block of queries are NaN."""
    monkeypatch.setattr(fa2, "FEW_ROWS", 10**9 if way == "few_rows_block" else 0)
    p = problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=32, seqlen_kv=32)
    arrays = draw(p)
    options = {"window_size": (3, 2), "blocks": (8, 8), "algorithm": algorithm}
    clean = solve(arrays, **options)
    for block in range(4):
        queries = slice(8 * block, 8 * block + 8)
        spoilt = {name: array.copy() for name, array in arrays.items()}
        for name in "kv":  # keys from 3 before to 2 after the block are seen
            spoilt[name][:, : max(0, queries.start - 3)] = np.nan
            spoilt[name][:, queries.stop + 2 :] = np.nan
        got = solve(spoilt, **options)
        np.testing.assert_allclose(got.out[:, queries], clean.out[:, queries], atol=1e-13)
        np.testing.assert_allclose(got.dq[:, queries], clean.dq[:, queries], atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("offset", "dead"), [(-5, [*range(3)]), (21, [*range(15, 20)]), (60, [*range(20)])]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_queries_that_see_nothing_decide_nothing(
    bad: float, offset: int, dead: list[int], algorithm: str
) -> None:
    """Such queries are above the band or below it; the keys have a common part."""
    p = problem(heads_q=4, seqlen_q=20, seqlen_kv=33)
    window = (3, 2)
    assert (~pairs_seen(20, 33, window, offset).any(axis=1)).nonzero()[0].tolist() == dead
    arrays = draw(p)
    arrays["k"][..., 0] += 30
    options = {"window_size": window, "q_offset": offset, "algorithm": algorithm}
    before = solve(arrays, **options)
    for name in ("q", "dout"):
        arrays[name][:, dead] = bad
    arrays["dlse"][:, :, dead] = bad
    assert bits(before) == bits(solve(arrays, **options))


def test_keys_that_no_query_sees_decide_nothing() -> None:
    """Keys before the band and after it are NaN; no shortcut that looks at keys may use them."""
    p = problem(storage="float32", heads_q=2, heads_kv=1, seqlen_q=300, seqlen_kv=400)
    arrays = draw(p)
    arrays["k"][..., 0] += 100
    options: dict[str, Any] = {"window_size": (5, 6), "q_offset": 50, "blocks": (64, 64)}
    seen = slice(45, 356)
    before = solve(arrays, **options)
    for name in "kv":
        hidden = arrays[name].copy()
        hidden[:, seen] = np.nan
        arrays[name] = np.where(np.isnan(hidden), arrays[name], np.float32(np.nan))
    after = solve(arrays, **options)
    assert bits(before) == bits(after)
    assert (after.dk[:, :45] == 0).all()
    assert (after.dk[:, 356:] == 0).all()
