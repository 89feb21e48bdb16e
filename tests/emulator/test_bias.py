"""A bias on the emulated device."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ..kit.arena import Arena
from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from ..kit.strides import CONTIGUOUS, Strides
from . import device
from .build import compiler
from .featured_rows import BIASED
from .rows import Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _rows(*names: str) -> Any:
    """Parameters of a test: rows with these algorithms and biases."""
    chosen = [row for row in BIASED if f"{row.algorithm} {row.bias}" in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("row", params(*chosen))


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **beside: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **beside)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **beside)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _inputs(case: Case) -> dict[str, np.ndarray]:
    return arrays(case, "q", "k", "v", "dout", "dlse")


def _check(row: Row, case: Case) -> dict[str, np.ndarray]:
    x = _inputs(case)
    truth, found = judge(case, x), _results(row, case, x)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


#: Rows that also run a single query and a single key. The bias then has fewer axes, and other
#: kernels run.
_ALONE = ("fa1 1hqk-inf", "fa2 b1q1:float32", "fa2 bh1k", "fa3 1hqk")


@pytest.mark.parametrize("row", params(*BIASED))
def test_against_float64(row: Row) -> None:
    alone = f"{row.algorithm} {row.bias}" in _ALONE
    for case in row.cases():
        if alone or min(case.seqlen_q, case.seqlen_kv) > 1:
            _check(row, case)


@_rows("fa1 bhqk", "fa2 bh1k", "fa2 hqk", "fa3 1hqk", "fa3 b11k:float32")
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@_rows("fa2 11qk:float32", "fa2 bh1k", "fa2 1hq1", "fa2 b111")
def test_every_way_to_broadcast(row: Row) -> None:
    """Every way to broadcast over entries and heads; strides follow from the seed."""
    axes, mark, dtype = row.bias.partition(":")
    case = replace(row.cases()[0], batch=2, seqlen_q=40, seqlen_kv=50, bias=row.bias)
    for first in ("bh", "1h", "b1", "11", "h", "1", ""):
        bias = f"{first}{axes[-2:]}{mark}{dtype}"
        _check(row, replace(case, bias=bias, seed=len(first)))
    for bias in ("k", "1") * (axes[-2] == "1"):
        if bias in axes[-1]:
            _check(row, replace(case, bias=bias))


@_rows("fa1 bhqk", "fa2 bh1k", "fa2 11qk:float32", "fa3 1hqk", "fa3 b11k:float32")
def test_a_bias_of_zero_changes_nothing(row: Row) -> None:
    """A bias of zero changes results only where the feature changes the order of roundings."""
    case = row.cases()[0]
    x = _inputs(case)
    none = np.zeros(case.shape("bias"), case.dtype_of("bias"))
    truth = judge(replace(case, bias=""), x)
    got = _results(row, case, x, bias=none)
    assert np.isfinite(got.pop("dbias")).all()
    for name, array in got.items():
        compare(truth, name, array).check()


@_rows("fa1 k:float32", "fa2 hqk", "fa2 1hq1", "fa2 b111", "fa3 qk", "fa3 h11")
def test_the_gradient_of_a_bias_is_the_same_every_time(row: Row) -> None:
    case = row.cases()[1]
    x = _inputs(case)
    first, second = (_results(row, case, x)["dbias"] for _ in range(2))
    assert first.tobytes() == second.tobytes()


@_rows("fa1 bhqk", "fa2 11qk:float32", "fa3 1hqk", "fa3 qk")
def test_the_gradient_of_a_pair_that_the_mask_hides_is_zero(row: Row) -> None:
    """Hidden pairs fill whole tiles and parts of tiles; dead rows may hold anything."""
    case = replace(row.cases()[2], strides=Case().strides)
    seen = case.sees()
    dead = ~seen.any(axis=1)
    assert dead.any()
    x = _inputs(case)
    expected = _check(row, case)
    assert (expected["dbias"][..., ~seen] == 0).all()
    for name in ("q", "dout"):
        case.heads_first(name, x[name])[:, :, dead] = np.nan
    for name, got in _results(row, case, x).items():
        if name in ("out", "lse", "dq", "dbias") or row.deterministic:
            assert got.tobytes() == expected[name].tobytes(), name


@_rows("fa1 1hqk-inf", "fa2 b1qk-inf", "fa2 1hq1", "fa3 1hqk", "fa3 11qk-inf", "fa1 k:float32")
def test_rows_that_minus_infinity_hides_whole(row: Row) -> None:
    """Such rows are dead, or have only their sink; hidden pairs have no gradient."""
    case = row.cases()[1]
    x, bias = _inputs(case), tensor(case, "bias").copy()
    if case.bias_axes.endswith("qk"):
        bias[..., 5:30, :] = -np.inf
        bias[..., 31, 40:] = -np.inf
        bias[..., -1, :-1] = -np.inf
    elif case.bias_axes == "k":
        bias[:] = -np.inf
    else:
        bias[..., -1, :] = -np.inf
    truth = judge(case, {**x, "bias": bias})
    found = _results(row, case, x, bias=bias)
    for name, got in found.items():
        compare(truth, name, got).check()
    assert (found["dbias"][bias == -np.inf] == 0).all()
    lse = truth.results["lse"]
    assert (lse == -np.inf).any() or case.sinks
    assert (found["out"] == 0).any()


@_rows("fa1 bhqk", "fa2 11qk:float32", "fa2 1hq1", "fa3 1hqk")
def test_queries_that_minus_infinity_hides_whole_may_hold_anything(row: Row) -> None:
    """The backward pass recognises such queries by their lse."""
    case = replace(row.cases()[1], sinks="")
    x, bias = _inputs(case), tensor(case, "bias").copy()
    bias[..., 5:20, :] = -np.inf
    expected = _results(row, case, x, bias=bias)
    forward = {name: expected.pop(name) for name in ("out", "lse")}
    for name in ("q", "dout"):
        case.heads_first(name, x[name])[:, :, 5:20] = np.nan
    given = (x["dout"], x["q"], x["k"], x["v"], *forward.values(), x["dlse"])
    grads = row.runner.backward(case, *given, bias=bias)
    for name, got in zip(case.gradients, grads, strict=True):
        if name in ("dq", "dbias") or row.deterministic:
            assert got.tobytes() == expected[name].tobytes(), name


@_rows("fa1 bhqk", "fa2 bh1k", "fa2 1hq1", "fa3 1hqk")
@pytest.mark.parametrize("place", [0.1, 0.7])
def test_one_element_that_is_not_finite(row: Row, place: float) -> None:
    """Tiles of the gradient of a bias have up to 128 queries and keys."""
    case = Case(1, 2, 1, 170, 260, *row.dims, row.dtype, causal=row.causal, seed=1)
    case = replace(case, bias=row.bias, softcap=row.softcap, sinks=row.sinks)
    if row.window:
        case = row.windowed(replace(case, causal=False, q_offset=-20), 40, 20)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 128)
        one.check(_results(row, case, one.x))


@_rows("fa1 bhqk", "fa2 bh1k", "fa3 1hqk")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_of_the_bias_that_is_not_finite(row: Row, value: float) -> None:
    """It makes exactly the rows that see it NaN."""
    case = Case(1, 2, 1, 70, 100, *row.dims, row.dtype, causal=True, bias=row.bias, q_offset=20)
    x, bias = _inputs(case), tensor(case, "bias").copy()
    bias[..., -1, :, 50] = value
    found = _results(row, case, x, bias=bias)
    seen = case.sees()
    whole = np.broadcast_to(bias, (1, 2, 70, 100))[0]
    reached = ((~np.isfinite(whole)) & seen).any(axis=-1)
    assert reached.any()
    assert not reached.all()
    assert (np.isnan(found["lse"][0]) == reached).all()
    assert (np.isnan(found["out"][0]).all(axis=-1) == reached.T).all()
    assert np.isfinite(found["dq"][0][~reached.T]).all()


class _Walled(Arena):
    """Puts a bias directly before or after memory that the process may not read."""

    behind = False

    def input(self, name: str, values: np.ndarray, recipe: Strides = CONTIGUOUS) -> Any:
        if name != "bias":
            return super().input(name, values, recipe)
        page = mmap.PAGESIZE
        size = -(-values.nbytes // page) * page
        raw = mmap.mmap(-1, size + 2 * page)
        held = np.frombuffer(raw, np.uint8)
        for wall in (0, page + size):
            place = ctypes.c_void_p(held.ctypes.data + wall)
            assert ctypes.CDLL(None, use_errno=True).mprotect(place, page, 0) == 0
        start = page if self.behind else page + size - values.nbytes
        flat = held[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        view = flat[(slice(None, None, -1),) * flat.ndim] if self.behind else flat
        view[...] = values
        self.kept = raw
        return view


@_rows("fa1 bhqk", "fa2 hqk", "fa2 bh1k", "fa2 1hq1", "fa3 qk")
@pytest.mark.parametrize("behind", [False, True])
def test_nothing_is_read_beyond_the_bias(row: Row, behind: bool) -> None:
    """Tiles reach beyond the lengths; a read beyond the bias would kill the process."""
    if behind and row.algorithm == "fa3":
        pytest.skip("the copy engine reads no array backwards")
    case = Case(1, 2, 1, 70, 101, *row.dims, row.dtype, causal=row.causal, bias=row.bias, seed=3)
    case = replace(case, softcap=row.softcap, alibi=row.alibi)
    if row.algorithm == "fa3":
        case = replace(case, seqlen_kv=104)
    if row.window:
        case = row.windowed(replace(case, causal=False), 40, 20)
    walled = type("_Place", (_Walled,), {"behind": behind})
    with mock.patch.object(device, "Arena", walled):
        _check(row, case)


@_rows("fa1 bhqk", "fa2 bh1k", "fa2 hqk", "fa2 b111")
def test_the_gradient_where_there_are_no_heads_is_zero(row: Row) -> None:
    bias = {"bhqk": "qk", "hqk": "qk", "bh1k": "k", "b111": "1"}[row.bias]
    case = Case(1, 0, 0, 16, 24, *row.dims, row.dtype, causal=row.causal, bias=bias)
    assert not _results(row, case, _inputs(case))["dbias"].any()
