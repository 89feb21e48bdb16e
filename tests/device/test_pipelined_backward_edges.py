"""FlashAttention-3's backward pass at its edges: lengths, masks, values, invisible rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.runners import ApiRunner
from .common import skip_without
from .test_pipelined_backward import DIMS, block_kv


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


#: Lengths and q_offset under a mask: tails, rows that see nothing, tiles of keys that no row sees.
EDGES = (
    ((200, 333), None),
    ((256, 256), None),
    ((500, 300), None),
    ((300, 700), -40),
    ((150, 900), 100),
    ((130, 300), -130),
    ((1, 300), 0),
    ((300, 1), None),
)


#: Valid columns end inside a panel, inside a half of K, or where a role's columns of dQ begin.
INSIDE = (
    (72, 72),
    (72, 128),
    (136, 40),
    (160, 128),
    (136, 136),
    (200, 136),
    (64, 256),
)


def _edge(
    dims: tuple[int, int], lengths: tuple[int, int], q_offset: int | None, dtype: str = "float16"
) -> Case:
    return Case(2, 8, 2, *lengths, *dims, dtype, causal=True, q_offset=q_offset, seed=2)


def _gradients(
    case: Case, x: dict[str, np.ndarray], saved: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, ...]:
    runner = ApiRunner("cuda", "fa3")
    return runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])


def _check(
    case: Case, x: dict[str, np.ndarray], other: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, ...]:
    """Compare every gradient with the truth; the same with some inputs replaced by ``other``."""
    saved = ApiRunner("cuda", "fa3").forward(case, x["q"], x["k"], x["v"])
    grads, truth = _gradients(case, x, saved), judge(case, x)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, got).check()
    if other is not None:
        dq, *of_keys = _gradients(case, other, saved)
        compare(truth, "dq", dq).check()
        assert [a.tobytes() for a in of_keys] == [a.tobytes() for a in grads[1:]]
    return grads


@pytest.mark.parametrize(("lengths", "q_offset"), EDGES, ids=str)
@pytest.mark.parametrize("dims", [*DIMS, *INSIDE], ids=str)
def test_edges(dims: tuple[int, int], lengths: tuple[int, int], q_offset: int | None) -> None:
    for dtype in ("float16", "bfloat16"):
        case = _edge(dims, lengths, q_offset, dtype)
        dq, dk, dv = _check(case, arrays(case, "q", "k", "v", "dout", "dlse"))
        seen = case.visible()
        for array in (dk[:, seen.max() :], dv[:, seen.max() :], dq[:, seen == 0]):
            assert not array.any()


@pytest.mark.parametrize("lengths", [(200, 333), (129, 128), (1, 1), (65, 1000)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_without_a_mask(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    for dtype in ("float16", "bfloat16"):
        case = replace(_edge(dims, lengths, None, dtype), causal=False)
        _check(case, arrays(case, "q", "k", "v", "dout", "dlse"))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("values", ["x8", "x30", "outliers"])
def test_weights_of_every_size(values: str, dims: tuple[int, int]) -> None:
    """Gradients of keys with tiny weights are as accurate as those of other keys."""
    for dtype in ("float16", "bfloat16"):
        case = Case(1, 2, 1, 200, 300, *dims, dtype, values=values, seed=2)
        _check(case, arrays(case, "q", "k", "v", "dout", "dlse"))


@pytest.mark.parametrize(("lengths", "q_offset"), [((300, 333), -40), ((900, 500), None)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dead_rows_may_hold_anything(
    dtype: str, dims: tuple[int, int], lengths: tuple[int, int], q_offset: int | None
) -> None:
    """Dead rows beside live rows of their tile, and in separate tiles."""
    case = _edge(dims, lengths, q_offset, dtype)
    dead = -case.offset
    assert dead > 0
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    other = {name: array.copy() for name, array in x.items()}
    other["q"][:, :dead] = np.nan
    other["q"][:, : dead // 2] = np.inf
    other["dout"][:, :dead] = np.inf
    other["dout"][:, : dead // 3] = np.nan
    other["dlse"][:, :, :dead] = np.nan
    _check(case, x, other)


@pytest.mark.parametrize(("lengths", "q_offset"), [((300, 700), -40), ((150, 900), 100)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_that_no_row_sees_may_hold_anything(
    dtype: str, dims: tuple[int, int], lengths: tuple[int, int], q_offset: int
) -> None:
    case = _edge(dims, lengths, q_offset, dtype)
    unseen = -(-int(case.visible().max()) // block_kv(case)) * block_kv(case)
    assert unseen < case.seqlen_kv
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    other = {name: array.copy() for name, array in x.items()}
    other["k"][:, unseen:] = np.nan
    other["v"][:, unseen:] = np.inf
    _check(case, x, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_rows_beyond_the_length_may_hold_nan(cp: Any, dims: tuple[int, int], causal: bool) -> None:
    """All matrices are the first rows of longer arrays, whose other rows are NaN."""
    case = replace(_edge(dims, (150, 333), None), causal=causal)
    x = arrays(case, "q", "k", "v", "dout", "dlse")

    def first_rows(array: Any) -> Any:
        batch, rows, heads, width = array.shape
        longer = np.full((batch, rows + 200, heads, width), np.nan, array.dtype)
        longer[:, :rows] = array
        return cp.asarray(longer)[:, :rows]

    q, k, v, dout = (first_rows(x[name]) for name in ("q", "k", "v", "dout"))
    named: dict[str, Any] = {"causal": causal, "algorithm": "fa3"}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **named)
    given = (dout, q, k, v, first_rows(out.get()), lse)
    grads = cuflash.attention_backward(*given, dlse=cp.asarray(x["dlse"]), **named)
    truth = judge(case, x)
    for name, array in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, array.get()).check()


@pytest.mark.parametrize("deterministic", [False, True])
def test_heads_whose_keys_no_query_sees(cp: Any, deterministic: bool) -> None:
    """Blocks that finish rows need not wait for tiles that add nothing."""
    batch, rows, heads = 40, 3000, 8
    q, dout = (cp.ones((batch, rows, heads, 128), np.float16) for _ in range(2))
    k = cp.ones((batch, 100, heads, 128), np.float16)
    named: dict[str, Any] = {"causal": True, "q_offset": -rows, "algorithm": "fa3"}
    out, lse = cuflash.attention(q, k, k, return_lse=True, **named)
    plan = cuflash.prepare(q, k, k, operation="backward", deterministic=deterministic, **named)
    workspace = cp.empty(plan.workspace_bytes, np.uint8)
    grads = tuple(cp.empty_like(x) for x in (q, k, k))
    for _ in range(20):
        for array in (workspace, *grads):
            array.view(np.uint8)[...] = 0xFF  # NaN
        cuflash.attention_backward(
            dout,
            q,
            k,
            k,
            out,
            lse,
            grads=grads,
            deterministic=deterministic,
            workspace=workspace,
            **named,
        )
        assert [bool(array.any()) for array in grads] == [False] * 3
