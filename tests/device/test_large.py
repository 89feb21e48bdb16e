"""Sizes at which 32-bit offsets and grid limits break."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash

from .common import same_gradients, skip_without


def _census(out: Any, lse: Any, visible: int) -> None:
    """Check results for q = 0 and v = 1: a row's sum of exponentials is its number of keys."""
    assert bool((out == 1).all())
    assert abs(float(lse.max()) - np.log(visible)) < 1e-5
    assert abs(float(lse.min()) - np.log(visible)) < 1e-5


_SERVED = (*product(("float16", "float32"), ("fa1", "fa2")), ("float16", "fa3"))


@pytest.mark.parametrize(("dtype", "algorithm"), _SERVED)
@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1100, 64)])
def test_more_heads_than_a_grid_axis_holds(
    cp: Any, dtype: str, algorithm: str, batch: int, heads: int
) -> None:
    skip_without(algorithm)
    q = cp.zeros((batch, 1, heads, 16), dtype)
    k = cp.ones((batch, 3, heads, 16), dtype)
    out, lse = cuflash.attention(q, k, k, return_lse=True, algorithm=algorithm)
    _census(out, lse, 3)
    given = (out, q, k, k, out, lse)
    dq, dk, dv = cuflash.attention_backward(*given, algorithm=algorithm)
    assert bool((dq == 0).all())
    assert bool((dk == 0).all())
    third = np.dtype(dtype).type(1 / 3)
    assert float(cp.abs(dv - third).max()) < 1e-3


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_more_than_two_to_the_31_elements(cp: Any, algorithm: str) -> None:
    """One tensor of 2^31 + 2^13 elements; its last rows are the ones that would wrap."""
    skip_without(algorithm)
    rows = 2**25 + 128
    q = cp.zeros((1, rows, 1, 64), np.float16)
    k = cp.ones((1, 100, 1, 64), np.float16)
    q[0, -1] = 4
    k[0, 7] = 8
    v = cp.ones((1, 100, 1, 64), np.float16)
    v[0, 7] = 2
    out, lse = cuflash.attention(q, k, v, return_lse=True, algorithm=algorithm)
    mean = out[:, :-1]  # the mean of 99 ones and a two
    assert float(mean.max()) - 1.01 < 1e-3
    assert 1.01 - float(mean.min()) < 1e-3
    _census(cp.ones(1), lse[..., :-1], 100)
    assert bool((out[0, -1] == 2).all())


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_strides_beyond_two_to_the_31_elements(
    cp: Any, problem: dict[str, Any], name: str, algorithm: str
) -> None:
    """Small data far apart: the second batch entry lies 2^31 + 64 elements after the first."""
    skip_without(algorithm)
    expected, lse = cuflash.attention(**problem, return_lse=True, algorithm=algorithm)
    given = (expected, *problem.values(), expected, lse)
    backward: dict[str, Any] = {"algorithm": algorithm, "deterministic": True}
    grads = cuflash.attention_backward(*given, **backward)
    shape = expected.shape if name == "out" else problem[name].shape
    inner = int(np.prod(shape[1:]))
    far = 2**31 + 64
    memory = cp.empty(far + inner, np.float16)
    strides = (far * 2, *(2 * int(np.prod(shape[i + 1 :])) for i in range(1, 4)))
    apart = cp.lib.stride_tricks.as_strided(memory, shape, strides)
    call = dict(problem)
    if name == "out":
        apart[...] = np.nan
        got = cuflash.attention(**problem, out=apart, algorithm=algorithm)
    else:
        apart[...] = problem[name]
        call[name] = apart
        got = cuflash.attention(**call, algorithm=algorithm)
    assert bool((got == expected).all())
    out = apart if name == "out" else expected
    again = cuflash.attention_backward(expected, *call.values(), out, lse, **backward)
    assert same_gradients(again, grads, ordered=True)
