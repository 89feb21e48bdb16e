"""The ends of the accepted range: scales, values, keys that share a large component."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

from ..kit import whole_matrix
from .common import skip_without

#: Exponents by which q is multiplied; the keys take the rest of the scale.
SHIFTS = {"bfloat16": (-60, 60), "float32": (-60, 60), "float64": (-400, 400)}
#: Exponent of the largest and the smallest scale.
ENDS = {"bfloat16": 100, "float32": 100, "float64": 900}


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _algorithms(dtype: str) -> tuple[str, ...]:
    return ("fa1", "fa2", "fa3") if dtype in ("float16", "bfloat16") else ("fa1", "fa2")


_EACH = [(dtype, a) for dtype in ENDS for a in _algorithms(dtype)]


def _shifted(array: Any, exponent: int) -> Any:
    return (array.astype(np.float64) * 2.0**exponent).astype(array.dtype)


def _error(found: Any, truth: Any) -> float:
    return whole_matrix.error(found.get().astype(np.float64), truth.astype(np.float64))


@pytest.mark.parametrize("end", [-1, 1])
@pytest.mark.parametrize(("dtype", "algorithm"), _EACH)
def test_scales_at_either_end(cp: Any, dtype: str, algorithm: Any, end: int) -> None:
    """Powers of two move between q, k and the scale, and results are as accurate as without."""
    skip_without(algorithm)
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((2, 200, 3, 64)).astype(_dtype(dtype)) for _ in range(4))
    of_q = SHIFTS[dtype][end > 0] * -1
    of_k = -end * ENDS[dtype] - of_q
    wide = [a.astype(np.float64) for a in (q, k, v, dout)]
    truth, pull = cuflash.attention_vjp(*wide[:3], scale=1.0, backend="numpy")
    expected = (truth, *pull(wide[3]))

    def errors(of_q: int, of_k: int) -> list[float]:
        x = [cp.asarray(a) for a in (_shifted(q, of_q), _shifted(k, of_k), v)]
        scale = 2.0 ** -(of_q + of_k)
        out, pullback = cuflash.attention_vjp(*x, scale=scale, algorithm=algorithm)
        found = (out, *pullback(cp.asarray(dout)))
        shifts = (0, -of_q, -of_k, 0)
        return [
            _error(one, right * 2.0**by)
            for one, right, by in zip(found, expected, shifts, strict=True)
        ]

    for plain, moved in zip(errors(0, 0), errors(of_q, of_k), strict=True):
        assert moved <= 1.05 * plain


@pytest.mark.parametrize("end", [-1, 1])
@pytest.mark.parametrize(("dtype", "algorithm"), _EACH)
def test_queries_of_zero_give_the_mean(cp: Any, dtype: str, algorithm: Any, end: int) -> None:
    skip_without(algorithm)
    x = cp.ones((1, 70, 2, 64), _dtype(dtype))
    scale = 2.0 ** (end * ENDS[dtype])
    out, lse = cuflash.attention(0 * x, x, x, scale=scale, algorithm=algorithm, return_lse=True)
    assert bool((out == 1).all())
    assert float(abs(lse - np.log(70)).max()) < 1e-5


@pytest.mark.parametrize("keys", [1, 70, 1000])
@pytest.mark.parametrize(("dtype", "algorithm"), _EACH)
def test_values_within_the_bound_of_the_contract(
    cp: Any, dtype: str, algorithm: Any, keys: int
) -> None:
    """The largest values with finite sums before the division; maxima rise from tile to tile."""
    skip_without(algorithm)
    most = {"bfloat16": 8e34, "float32": 3.4e38, "float64": 1.79e308}[dtype] / keys
    rng = np.random.default_rng(keys)
    q, k = (rng.standard_normal((1, n, 1, 64)).astype(_dtype(dtype)) for n in (130, keys))
    k = (k * np.linspace(0, 3, keys)[:, None, None]).astype(k.dtype)
    v = np.full((1, keys, 1, 64), most).astype(_dtype(dtype))
    out = cuflash.attention(*map(cp.asarray, (q, k, v)), algorithm=algorithm)
    allowed = (4 + keys**0.5) * float(ml_dtypes.finfo(_dtype(dtype)).eps)  # for a sum over the keys
    assert _error(out / most, np.ones(out.shape)) < allowed


@pytest.mark.parametrize("common", [30.0, 3000.0, 30000.0])
@pytest.mark.parametrize(("dtype", "algorithm"), [*_EACH, *(("float16", f"fa{n}") for n in "123")])
def test_keys_with_a_large_common_component(
    cp: Any, dtype: str, algorithm: Any, common: float
) -> None:
    """Gradients err no more than twice as much as whole matrices in the same precision.

    16-bit types have a float32 output; both round P and dS.
    """
    skip_without(algorithm)
    rng = np.random.default_rng(8)
    q, dout = (rng.standard_normal((1, 256, 2, 64)) for _ in range(2))
    k, v = (rng.standard_normal((1, 2048, 2, 64)) for _ in range(2))
    k[..., 0], q[..., 0] = common, 8
    x = [a.astype(_dtype(dtype)) for a in (q, k, v, dout)]
    truth = whole_matrix.gradients(*(a.astype(np.longdouble) for a in x))
    half = x[0].dtype.itemsize == 2
    operands, compute = (_dtype(dtype), np.float32) if half else (None, _dtype(dtype))
    by_hand = whole_matrix.gradients(*(a.astype(compute) for a in x), operands=operands)
    by_hand = [a.astype(_dtype(dtype)) for a in by_hand]
    options = {"algorithm": algorithm, **({"residual_dtype": "float32"} if half else {})}
    on_device = [cp.asarray(a) for a in x]
    grads = cuflash.attention_vjp(*on_device[:3], **options)[1](on_device[3])
    for name, found, hand, right in zip(("dq", "dk", "dv"), grads, by_hand, truth, strict=True):
        allowed = 2 * whole_matrix.error(hand.astype(np.float64), right)
        assert _error(found, right) <= allowed, name


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_residual(cp: Any, dtype: str, algorithm: Any) -> None:
    """The output has the same bits, and dq a smaller error; P and dS are still rounded."""
    skip_without(algorithm)
    rng = np.random.default_rng(4)
    q, k, v, dout = (rng.standard_normal((2, 320, 2, 64)) for _ in range(4))
    k += 16 * rng.standard_normal(64)
    x = [cp.asarray(a.astype(_dtype(dtype))) for a in (q, k, v, dout)]
    wide = [a.get().astype(np.float64) for a in x]
    truth = cuflash.attention_vjp(*wide[:3], backend="numpy")[1](wide[3])[0]
    plain, pullback = cuflash.attention_vjp(*x[:3], algorithm=algorithm)
    out, kept = cuflash.attention_vjp(*x[:3], algorithm=algorithm, residual_dtype="float32")
    assert out.dtype == plain.dtype
    assert bool((out.view(np.uint16) == plain.view(np.uint16)).all())
    assert kept.saved["out"].dtype == np.float32
    assert _error(kept(x[3])[0], truth) < 0.95 * _error(pullback(x[3])[0], truth)
