"""Dropout, on every backend and algorithm: the dropped weights, and all results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import VALUES, Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.oracle import judge
from ..kit.problem import cases
from ..kit.runners import ApiRunner
from .sweep import examples, ordered, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs

_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
#: Dropped shares, the smallest and the largest among them, and kinds of seeds.
_DROPOUTS = ("0.1", "0.5:2", "0.25:4", "0.9", "0.00003:4", "0.99992")
#: Values of cases with sinks; ``test_sinks`` says why.
_VALUES = tuple(values for values in VALUES if values != "equal")
#: Features beside dropout of each width: another feature is another kernel to compile.
_BESIDE: dict[int, dict[str, Any]] = {
    40: {"values": _VALUES},
    64: {},
    128: {"biases": ("1hqk", "11qk-inf")},
}

_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


def _results(
    runner: ApiRunner, case: Case, x: dict[str, np.ndarray], **beside: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], **beside)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, **beside)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(runner: ApiRunner, case: Case) -> None:
    """Judge the results of both passes."""
    x = inputs(case)
    truth = judge(case, x)
    for name, got in _results(runner, case, x).items():
        compare(truth, name, got).check()


@sweep(((40, 40), (64, 64), (128, 128)))
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    options: dict[str, Any] = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype]}
    sunk = ("float64" if dtype == "float64" else "float32") if dims == (40, 40) else ""
    windowed = causal and dims == (64, 64)
    drawn = cases(
        *(dtype, *dims),
        **(options | _BESIDE[dims[0]]),
        dropouts=_DROPOUTS,
        sinks=(sunk,),
        windowed=windowed,
    )
    first = replace(several_tiles(tile, dtype, dims, causal), dropout="0.3")
    examples(runner, drawn, lambda case: _check(runner, case), 48, first=first)


@sweep(((64, 64),))
def test_checks(runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "forward")
    kinds = ("0.1", "0.5:4")

    def check(case: Case) -> None:
        require(case, run_checks(runner, case))

    first = replace(several_tiles(tile, dtype, dims, causal), dropout=kinds[0])
    drawn = cases(dtype, *dims, causal=causal, tile=tile, values=("normal",), dropouts=kinds)
    examples(runner, drawn, check, 32, first=first)


@_of_runners
@_of_dtypes
def test_each_feature_beside_it(runner: ApiRunner, dtype: str) -> None:
    plain = Case(2, 4, 2, 90, 136, dtype=dtype, causal=True, dropout="0.3:2", seed=3)
    beside: list[dict[str, Any]] = [
        {"softcap": 2.0},
        {"alibi": "batch"},
        {"bias": "bhqk"},
        {"mask": "1hqk"},
        {"window": "40:10"},
        {"sinks": plain.statistics.name},
        {"softcap": 2.0, "alibi": "heads", "mask": "b11k", "sinks": plain.statistics.name},
    ]
    for more in beside:
        _check(runner, replace(plain, **more))


def _kept(case: Case) -> np.ndarray:
    shape = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    return cuflash.dropout_mask(shape, dropout_p=case.dropout_p, dropout_seed=case.dropout_seed)


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_both_passes_keep_what_the_mask_says(runner: ApiRunner, dtype: str, causal: bool) -> None:
    """All weights are equal, and each column of v and of dout selects one pair."""
    case = Case(2, 4, 2, 150, 190, dtype=dtype, causal=causal, dropout="0.5:4", seed=8)
    runner, kept, sees = ordered(runner), _kept(case), case.sees()
    zero = {name: np.zeros(case.shape(name), case.storage) for name in ("q", "k", "v", "dout")}
    for first in range(0, 190, 64):
        v = np.zeros(case.shape("v"), case.storage)
        columns = np.arange(first, min(first + 64, 190))
        v[:, columns, :, columns - first] = 1
        out, _ = runner.forward(case, zero["q"], zero["k"], v)
        found = out.swapaxes(1, 2)[..., : columns.size] != 0
        assert (found == (kept & sees)[..., columns]).all()
    out, lse = runner.forward(case, zero["q"], zero["k"], zero["v"])
    for first in range(0, 150, 64):
        dout = np.zeros(case.shape("dout"), case.storage)
        rows = np.arange(first, min(first + 64, 150))
        dout[:, rows, :, rows - first] = 1
        grads = runner.backward(case, dout, zero["q"], zero["k"], zero["v"], out, lse)
        found = grads[2].swapaxes(1, 2)[..., : rows.size].swapaxes(2, 3) != 0
        both = (kept & sees)[:, :, rows].reshape(2, 2, 2, rows.size, 190).any(axis=2)
        assert (found == both).all()


@_of_runners
@_of_dtypes
def test_the_bits_are_those_of_the_part(runner: ApiRunner, dtype: str) -> None:
    """A call with fewer queries and keys has the same draws: lengths do not affect them."""
    case = Case(1, 2, 2, 200, 260, dtype=dtype, causal=True, q_offset=60, dropout="0.4", seed=2)
    x, runner = inputs(case), ordered(runner)
    whole = _results(runner, case, x)
    rows, keys = 70, 140
    part = replace(case, seqlen_q=rows, seqlen_kv=keys)
    assert (case.sees()[:rows, keys:] == 0).all()
    some = {n: a[:, : keys if n in "kv" else rows] for n, a in x.items() if n != "dlse"}
    some["dlse"] = x["dlse"][:, :, :rows]
    truth = judge(part, some)
    got = {"out": whole["out"][:, :rows], "lse": whole["lse"][:, :, :rows]}
    got["dq"] = whole["dq"][:, :rows]
    for name, array in got.items():
        compare(truth, name, np.ascontiguousarray(array)).check()


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_seed_of_three_spellings(runner: ApiRunner, dtype: str) -> None:
    """An integer, its two words, and these with an offset of 0 give the same bits."""
    case = Case(2, 4, 2, 150, 208, dtype=dtype, dropout="0.3", seed=5)
    x, runner, seed = inputs(case), ordered(runner), case.dropout_seed
    words = np.array([seed % 2**32, seed // 2**32, 0, 0], np.uint32)
    expected = _results(runner, case, x)
    for count in (2, 4):
        one = replace(case, dropout=f"0.3:{count}")
        for name, got in _results(runner, one, x, dropout_seed=words[:count]).items():
            assert got.tobytes() == expected[name].tobytes(), name
    for number in range(4):
        other = words.copy()
        other[number] ^= 1
        found = _results(runner, replace(case, dropout="0.3:4"), x, dropout_seed=other)
        assert not np.array_equal(found["out"], expected["out"])
        np.testing.assert_array_equal(found["lse"], expected["lse"])


@_of_runners
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_mean_is_what_it_is_without(runner: ApiRunner, dtype: str) -> None:
    """The mean over many seeds, each of which drops other weights."""
    case = Case(1, 4, 4, 64, 128, dtype=dtype, dropout="0.25:2", seed=1)
    x = inputs(case)
    plain, lse = runner.forward(replace(case, dropout=""), x["q"], x["k"], x["v"])
    outs = []
    for seed in range(60):
        words = np.array([seed, 7], np.uint32)
        out, own = runner.forward(case, x["q"], x["k"], x["v"], dropout_seed=words)
        np.testing.assert_array_equal(own, lse)
        outs.append(out.astype(np.float64))
    error = (np.mean(outs, axis=0) - plain) / (np.std(outs, axis=0, ddof=1) / np.sqrt(60))
    assert 0.9 < np.sqrt((error**2).mean()) < 1.15
