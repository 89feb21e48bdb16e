"""Masks with a first key on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import WINDOWED
from .rows import ROWS, Row, params
from .tiles_seen import rows_of_tiles, tiles_seen, visit_one_tile

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_NAMES = ("out", "lse", "dq", "dk", "dv")


def results(row: Row, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"])
    grads = row.runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    return dict(zip(_NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("row", params(*WINDOWED))
def test_against_float64(row: Row) -> None:
    for case in (*row.cases(), _last_query_alone(row)):
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        truth = judge(case, x)
        for name, got in results(row, case, x).items():
            compare(truth, name, got).check()


def _last_query_alone(row: Row) -> Case:
    """A window whose last query of the first kv tile is the first query of a q tile.

    That query sees one key of the kv tile.
    """
    case = Case(1, 1, 1, 64, 64, *row.dims, row.dtype, seed=3)
    block_q, block_kv = row.runner.tiles(row.windowed(case, 1, 1), "backward")
    left = (1 - block_kv) % block_q
    last = block_kv + left - 1
    assert last % block_q == 0
    case = replace(case, seqlen_q=last + 20, seqlen_kv=block_kv + last + 30, q_offset=0)
    return row.windowed(case, left, 1)


def test_under_a_wide_window_blocks_of_rows_finish_dq() -> None:
    """The main kernel converts dq itself for narrow heads; otherwise a separate kernel does."""
    row = next(r for r in WINDOWED if r.algorithm == "fa3" and r.dims == (64, 64) and r.filled)
    case = Case(1, 4, 2, 150, 1300, *row.dims, row.dtype, q_offset=1100, seed=2)
    case = row.windowed(case, 1100, 100)
    assert row.runner.kernels(case, "backward") == ["statistics", "backward"]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(case, x)
    for name, got in results(row, case, x).items():
        compare(truth, name, got).check()


_COPYING = [row for row in WINDOWED if row.architecture != "75" and row.dims[0] % 8 == 0]


@pytest.mark.parametrize("row", params(*_COPYING))
def test_no_tile_outside_of_the_band_is_loaded(row: Row) -> None:
    """Passes read the bytes of exactly the tiles with a visible pair."""
    for case in row.cases()[:4]:
        case = replace(case, strides=Case().strides)
        x = arrays(case)
        read = row.runner.reads(case, x)
        for operation in ("forward", "backward"):
            tile = row.runner.tiles(case, operation)
            seen = tiles_seen(case, tile)
            by_kv_tile = operation == "backward" or row.algorithm == "fa1"
            if row.algorithm == "fa3" and operation == "forward":
                visit_one_tile(case, seen, tile[0])
            if by_kv_tile:
                expected = {"q": rows_of_tiles(case.seqlen_q, tile[0]) @ seen.sum(axis=1)}
            else:
                of_kv = seen.sum(axis=0) @ rows_of_tiles(case.seqlen_kv, tile[1])
                expected = {"k": of_kv, "v": of_kv}
            width = {"q": case.head_dim, "k": case.head_dim, "v": case.head_dim_v}
            heads = case.batch * case.heads_q * case.storage.itemsize
            found = {name: read[operation][name] for name in expected}
            assert found == {n: rows * width[n] * heads for n, rows in expected.items()}, (
                operation,
                case.repro,
            )


@pytest.mark.parametrize("row", params(*WINDOWED))
def test_queries_that_see_no_key_may_hold_anything(row: Row) -> None:
    """Queries before all keys, and in a band also those after them."""
    case = Case(1, 2, 1, 210, 70, *row.dims, row.dtype, q_offset=-60, seed=1)
    case = row.windowed(case, 20, 3)
    dead = case.visible() == 0
    assert dead[-1]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    expected = results(row, case, x)
    x["q"][:, dead], x["dout"][:, dead], x["dlse"][:, :, dead] = np.nan, np.inf, np.nan
    for name, got in results(row, case, x).items():
        assert got.tobytes() == expected[name].tobytes(), name
    assert (expected["lse"][:, :, dead] == -np.inf).all()
    assert (expected["out"][:, dead] == 0).all()
    assert (expected["dq"][:, dead] == 0).all()


_SHOWN = [r for r in WINDOWED if r.dims == (64, 64) and not r.forward_row and r.dtype != "float64"]


@pytest.mark.parametrize("row", params(*_SHOWN))
@pytest.mark.parametrize("place", [0.1, 0.6])
def test_who_sees_what_is_not_finite(row: Row, place: float) -> None:
    small = row.blocks or not (row.planned or row.filled)
    lengths, slack = ((170, 260), 64) if small else ((600, 700), 256)
    case = Case(1, 2, 1, *lengths, *row.dims, row.dtype, q_offset=-20, seed=1)
    case = row.windowed(case, 40, 20)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, slack)
        one.check(results(row, case, one.x))


#: One row of each generation and mask.
_FIRST = {(row.algorithm, row.causal): row for row in reversed(ROWS) if row.dims == (64, 64)}

#: Sides of a window, and whether the causal mask is all that remains for 70 queries and 100 keys.
_NEEDLESS = ((":0", True), ("99:0", True), ("99:69", False), (":1000", False), ("1000:", False))


@pytest.mark.parametrize("row", params(*(_FIRST[key] for key in sorted(_FIRST))))
def test_a_bound_that_hides_nothing_changes_nothing(row: Row) -> None:
    """The same kernels run and give the same bits."""
    plain = Case(1, 2, 1, 70, 100, *row.dims, row.dtype, causal=row.causal, seed=1)
    x = arrays(plain, "q", "k", "v", "dout", "dlse")
    expected = results(row, plain, x)
    for window, causal in _NEEDLESS:
        if causal != row.causal:
            continue
        for keyword in {causal, False} if window.endswith(":0") else {causal}:
            case = replace(plain, window=window, causal=keyword)
            assert row.runner.configs(case) == row.runner.configs(plain)
            for name, got in results(row, case, x).items():
                assert got.tobytes() == expected[name].tobytes(), (name, case.repro)
