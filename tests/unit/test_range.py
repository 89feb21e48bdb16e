"""The range of ``scale`` and of the values: accepted calls are right, other calls are refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.planning.problem import DTYPES

#: Exponents of the largest and smallest scale.
RANGE = {"float16": 100, "bfloat16": 100, "float32": 100, "float64": 900}
#: The largest exponents of the powers of two by which arrays of standard normal values are
#: multiplied; float16 has no such range.
EXPONENTS = {"bfloat16": 110, "float32": 110, "float64": 950}
CPU: dict[str, Any] = {"backend": "numpy"}


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _ones(dtype: str) -> Any:
    return np.ones((1, 3, 1, 8), _dtype(dtype))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_scales_outside_of_the_range_are_refused_by_name(dtype: str, factor: float) -> None:
    beyond = 2.0 ** (RANGE[dtype] if factor > 1 else -RANGE[dtype]) * factor
    x = _ones(dtype)
    out, lse = cuflash.attention(x, x, x, return_lse=True, **CPU)
    for call in (
        lambda: cuflash.attention(x, x, x, scale=beyond, **CPU),
        lambda: cuflash.attention_vjp(x, x, x, scale=beyond, **CPU),
        lambda: cuflash.attention_backward(x, x, x, x, out, lse, scale=beyond, **CPU),
        lambda: cuflash.explain(x, x, x, scale=beyond, **CPU),
    ):
        with pytest.raises(cuflash.ArgumentValueError, match=f"^scale: .* for {dtype} inputs"):
            call()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("sign", [-1, 1])
def test_queries_of_zero_give_the_mean_at_either_end(dtype: str, sign: int) -> None:
    x = _ones(dtype)
    out, lse = cuflash.attention(
        0 * x, x, x, scale=2.0 ** (sign * RANGE[dtype]), return_lse=True, **CPU
    )
    assert (out == 1).all()
    np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", list(EXPONENTS))
@given(st.data())
def test_powers_of_two_move_between_queries_keys_and_scale(
    dtype: str, algorithm: Any, data: st.DataObject
) -> None:
    """The scores do not change, whatever the magnitude of q, of k and of their product."""
    most, limit = EXPONENTS[dtype], RANGE[dtype]
    of_q = data.draw(st.integers(-most, most), label="exponent of q")
    of_k = data.draw(
        st.integers(max(-most, -limit - of_q), min(most, limit - of_q)), label="exponent of k"
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    q, k, v, dout = (rng.standard_normal((1, 19, 2, 8)).astype(_dtype(dtype)) for _ in range(4))
    options: dict[str, Any] = {**CPU, "algorithm": algorithm}
    expected, pullback = cuflash.attention_vjp(q, k, v, scale=1.0, **options)
    out, moved = cuflash.attention_vjp(
        _shifted(q, of_q), _shifted(k, of_k), v, scale=2.0 ** -(of_q + of_k), **options
    )
    _close(out, expected, dtype)
    (dq, dk, dv), (expected_q, expected_k, expected_v) = moved(dout), pullback(dout)
    _close(dv, expected_v, dtype)
    _close(_shifted(dq, of_q), expected_q, dtype)
    _close(_shifted(dk, of_k), expected_k, dtype)


def _shifted(array: Any, exponent: int) -> Any:
    return (array.astype(np.float64) * 2.0**exponent).astype(array.dtype)


def _close(found: Any, expected: Any, dtype: str, units: float = 8) -> None:
    allowed = units * float(ml_dtypes.finfo(_dtype(dtype)).eps)
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert np.linalg.norm(found - expected) <= allowed * np.linalg.norm(expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 8e34), ("float32", 3.4e38), ("float64", 1.79e308)]
)
@pytest.mark.parametrize("keys", [1, 7, 300])
def test_values_within_the_bound_of_the_contract_are_averaged(
    dtype: str, most: float, algorithm: Any, keys: int
) -> None:
    """The largest values whose un-normalised sum is finite in every algorithm and backend."""
    rng = np.random.default_rng(keys)
    q, k = (rng.standard_normal((1, n, 1, 16)).astype(_dtype(dtype)) for n in (5, keys))
    v = np.full((1, keys, 1, 16), most / keys).astype(_dtype(dtype))
    out = cuflash.attention(q, k, v, algorithm=algorithm, **CPU)
    _close(out.astype(np.float64) / (most / keys), np.ones(out.shape), dtype)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 126), ("float64", 1022)])
@settings(max_examples=100)
@given(st.data())
def test_a_column_of_large_values_beside_ordinary_ones(
    dtype: str, most: int, algorithm: Any, data: st.DataObject
) -> None:
    """The large values have either sign, and weights differ widely: every path is taken."""
    keys = data.draw(st.integers(2, 40), label="keys")
    sign = data.draw(st.sampled_from((-1, 1)), label="sign")
    largest = st.integers(most - 20, most - 6)
    exponent = data.draw(st.integers(0, most - 6) | largest, label="exponent")
    ordinary = data.draw(st.integers(0, keys - 1), label="keys of ordinary values")
    longest = data.draw(st.sampled_from((20.0, 1.0, 100.0)), label="largest score")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    q, k = (rng.standard_normal((1, n, 1, 2)) for n in (300, keys))
    q *= longest / (np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max())
    v = np.abs(rng.standard_normal((1, keys, 1, 3))).clip(0.1, 2)
    v[:, ordinary:, :, 1:] *= sign * 2.0 ** (exponent - 1)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out = cuflash.attention(q, k, v, scale=1.0, algorithm=algorithm, **CPU)
    shrunk = v.astype(np.float64)
    shrunk[..., 1:] *= 2.0**-exponent
    expected, _ = cuflash.reference.attention(q, k, shrunk, scale=1.0)
    found = out.astype(np.float64)
    found[..., 1:] *= 2.0**-exponent
    for column in range(3):  # the largest score adds as many units of rounding
        _close(found[..., column], expected[..., column], dtype, 8 + longest)
