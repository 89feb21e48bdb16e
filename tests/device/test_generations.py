"""The generations on the device and the tiled NumPy code agree on the same problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays, raise_scores
from ..kit.oracle import judge
from ..kit.runners import ApiRunner
from .common import last_heads, skip_without

_NAMES = ("out", "lse", "dq", "dk", "dv")
#: The most that two results may differ, relative to the largest value: each may err by half of it.
APART = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 4e-5, "float64": 1e-12}
DTYPES = tuple(APART)


def _results(runner: ApiRunner, case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    return dict(zip(_NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_agree(dtype: str, causal: bool) -> None:
    case = Case(2, 6, 2, 300, 450, 64, 64, dtype, causal=causal)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    expected = _results(ApiRunner("numpy", "fa2"), case, x)
    for algorithm in ("fa1", "fa2", "auto"):  # the last is fa3 where there is one
        got = _results(ApiRunner("cuda", algorithm), case, x)
        for name, one in expected.items():
            a, b = one.astype(np.float64), got[name].astype(np.float64)
            assert np.abs(a - b).max() <= APART[dtype] * np.abs(a).max(), (algorithm, name)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_rows(cp: Any, dtype: str, head_dim: int, causal: bool, algorithm: str) -> None:
    """The tiles of long sequences, with maxima that hold, jump, or rise all the time.

    The heads fill the device, because the plan takes other tiles for few; some are checked.
    """
    skip_without(algorithm)
    named: dict[str, Any] = {"dtype": dtype, "causal": causal, "algorithm": algorithm}
    for values, rising in (("normal", False), ("x8", False), ("normal", True)):
        dims = (head_dim, head_dim)
        case = Case(6, 12, 6, 300, 2100, *dims, dtype, causal=causal, values=values)
        shapes = [case.shape(name) for name in "qkv"]
        tile: Any = cuflash.prepare(*shapes, **named).plan.tile
        if algorithm == "fa2" and not tile.maxima_on_demand:
            assert cp.cuda.Device().compute_capability != "90", tile  # Hopper's table has it
            pytest.skip(f"not on this device: {tile}")
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        if rising:
            raise_scores(x, tile.block_kv, 5.0)
        results = _results(ApiRunner("cuda", algorithm), case, x)
        last = replace(case, batch=1, heads_q=2, heads_kv=1)
        truth = judge(last, {name: last_heads(last, name, array) for name, array in x.items()})
        for name, got in results.items():
            compare(truth, name, last_heads(last, name, got)).check()


@pytest.mark.parametrize("q_offset", [-1000, -299, -70, -1, 0, 1, 64, 449, 1000])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_offsets_of_any_sign(dtype: str, q_offset: int) -> None:
    """Grouped heads, with a gradient of lse; rows and tiles see none, some or all of the keys."""
    case = Case(1, 6, 2, 300, 450, 64, 40, dtype, causal=True, q_offset=q_offset)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(case, x)
    for algorithm in ("fa2", "auto"):
        for name, got in _results(ApiRunner("cuda", algorithm), case, x).items():
            compare(truth, name, got).check()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_two_streams_at_once(cp: Any, algorithm: str) -> None:
    """Passes that run at the same time on two streams have their own workspaces."""
    skip_without(algorithm)
    rng = np.random.default_rng(1)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    forward: dict[str, Any] = {"causal": True, "algorithm": algorithm}
    backward = {**forward, "algorithm": algorithm, "deterministic": True}
    problems = [
        [cp.asarray(rng.standard_normal((1, 2000, 4, 64)).astype(np.float16)) for _ in range(4)]
        for _ in streams
    ]

    def run(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
        out, lse = cuflash.attention(q, k, v, return_lse=True, **forward)
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, **backward)
        return [out, lse, *grads]

    expected = [run(*problem) for problem in problems]
    cp.cuda.Device().synchronize()
    made: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, problem, results in zip(streams, problems, made, strict=True):
            with stream:
                results.append(run(*problem))
    for stream in streams:
        stream.synchronize()
    for alone, together in zip(expected, made, strict=True):
        for results in together:
            for a, b in zip(alone, results, strict=True):
                assert bool((a == b).all())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (5, 24), (40, 64), (64, 33)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_of_a_full_device(
    cp: Any, dtype: str, dims: tuple[int, int], deterministic: bool
) -> None:
    """Enough grouped heads for the first tile of the table; the last heads are checked."""
    for lengths, q_offset in (((70, 100), None), ((37, 130), 20), ((70, 33), -40)):
        case = _filling(cp, lengths, dims, dtype, q_offset)
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        runner = ApiRunner("cuda", "fa2", options=(("deterministic", deterministic),))
        results = _results(runner, case, x)
        last = replace(case, batch=1, heads_q=2, heads_kv=1)
        truth = judge(last, {name: last_heads(last, name, array) for name, array in x.items()})
        for name, got in results.items():
            compare(truth, name, last_heads(last, name, got)).check()


def test_dead_rows_of_a_full_device(cp: Any) -> None:
    """Keys that kill every row of a batch entry, beside values that are not finite."""
    case = _filling(cp, (40, 70), (64, 64), "float16", 30)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = -np.inf
    x["v"][0, 20:] = np.inf
    results = _results(ApiRunner("cuda", "fa2"), case, x)
    for name in ("out", "dq", "dk", "dv"):
        assert (results[name][0] == 0).all(), name
        assert np.isfinite(results[name][1]).all(), name


def _filling(
    cp: Any, lengths: tuple[int, int], dims: tuple[int, int], dtype: str, q_offset: int | None
) -> Case:
    """Enough heads to give every multiprocessor a block of the backward pass."""
    device = cp.cuda.Device()
    batch = -(-device.attributes["MultiProcessorCount"] // 2)
    case = Case(batch, 4, 2, *lengths, *dims, dtype, causal=True, q_offset=q_offset, seed=1)
    shapes = [case.shape(name) for name in "qkv"]
    named: dict[str, Any] = {"dtype": dtype, "operation": "backward", "algorithm": "fa2"}
    plan: Any = cuflash.prepare(*shapes, **named).plan
    assert plan.tile.transposed or device.compute_capability != "90", plan  # as in its table
    return case
