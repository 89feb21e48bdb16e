"""``residual_dtype`` of ``cuflash.jax.attention``: the output that gradients are made from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .jax_case import alike, draw, formula, jax, jnp, wide

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

QKV = (0, 1, 2)
Q, KV = (2, 96, 4, 32), (2, 128, 2, 32)


def _shifted(dtype: str, shift: float) -> list[Any]:
    """Queries, keys, values and a cotangent; all keys but the first have a large common part.

    The first key lacks it, because the NumPy backend subtracts a part that all keys share.
    """
    q, k, v, common, dout = draw(Q, KV, KV, (1, 1, 1, 32), Q, dtype="float32", seed=5)
    return [array.astype(dtype) for array in (q, k.at[:, 1:].add(shift * common), v, dout)]


def _gradients(function: Any, arrays: list[Any], **options: Any) -> tuple[Any, Any]:
    *qkv, dout = arrays
    out, pull = jax.vjp(lambda *x: function(*x, **options), *qkv)
    return out, pull(dout.astype(out.dtype))


def _worst(dtype: str, shift: float, **options: Any) -> float:
    """Largest error of dq against float64, in units of its largest entry."""
    arrays = _shifted(dtype, shift)
    _, (dq, *_) = _gradients(attention, arrays, **options)
    _, (truth, *_) = _gradients(formula, [np.asarray(a, np.float64) for a in arrays])
    error = np.abs(np.asarray(dq, np.float64) - np.asarray(truth)).max()
    return float(error / np.abs(np.asarray(truth)).max())


@pytest.mark.parametrize(("dtype", "units"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_dq_is_as_exact_as_its_rounding_allows(wide: None, dtype: str, units: float) -> None:
    """With a common part 1024 times the differences, a rounded output costs digits."""
    rounded = _worst(dtype, 1024.0)
    exact = _worst(dtype, 1024.0, residual_dtype="float32")
    assert exact < units
    assert exact < rounded / 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_returned_does_not_change(dtype: str) -> None:
    arrays = _shifted(dtype, 1.0)
    for options in ({}, {"is_causal": True, "return_lse": True}):
        plain = attention(*arrays[:3], **options)
        for asked in ("float32", np.float32, jnp.float32, dtype):
            for function in (attention, jax.jit(attention, static_argnames=tuple(OPTIONS))):
                got = function(*arrays[:3], residual_dtype=asked, **options)
                for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
                    assert one.dtype == other.dtype
                    alike(one, other)
    out, _ = _gradients(attention, arrays, residual_dtype="float32")
    assert out.dtype == dtype
    alike(out, attention(*arrays[:3]))


OPTIONS = ("residual_dtype", "is_causal", "return_lse")


def test_the_default_keeps_the_output_as_it_is() -> None:
    arrays = _shifted("bfloat16", 4.0)
    _, plain = _gradients(attention, arrays)
    _, same = _gradients(attention, arrays, residual_dtype="bfloat16")
    _, other = _gradients(attention, arrays, residual_dtype="float32")
    for one, two in zip(plain, same, strict=True):
        alike(one, two)
    assert np.asarray(plain[0]).tobytes() != np.asarray(other[0]).tobytes()


def test_it_is_the_float32_output_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_BACKEND", "numpy")
    arrays = _shifted("bfloat16", 4.0)
    _, got = _gradients(attention, arrays, residual_dtype="float32")
    q, k, v, dout = (np.asarray(array) for array in arrays)
    out, lse = cuflash.attention(q, k, v, out_dtype="float32", return_lse=True)
    expected = cuflash.attention_backward(dout, q, k, v, out, lse)
    for one, two in zip(got, expected, strict=True):
        alike(one, two)


def test_a_call_without_gradients_keeps_nothing() -> None:
    arrays = _shifted("bfloat16", 1.0)
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        jax.block_until_ready(attention(*arrays[:3], residual_dtype="float32"))
        jax.block_until_ready(_gradients(attention, arrays, residual_dtype="float32"))
    assert [plan.problem.operation for plan in ran] == ["forward", "forward", "backward"]
    assert [plan.problem.output for plan in ran] == ["bfloat16", "float32", "float32"]


def test_vmap_and_checkpoint() -> None:
    arrays = _shifted("bfloat16", 4.0)
    expected = _gradients(attention, arrays, residual_dtype="float32")[1]

    def kept(*qkv: Any) -> Any:
        return attention(*qkv, residual_dtype="float32")

    for function in (
        jax.checkpoint(kept),
        lambda *x: jax.vmap(kept)(*(a[:, None] for a in x))[:, 0],
    ):
        for one, two in zip(_gradients(function, arrays)[1], expected, strict=True):
            alike(one, two)


def test_float64_keeps_float64(wide: None) -> None:
    arrays = draw(Q, KV, KV)
    says = "residual_dtype: got float32 for float64 inputs; expected float64"
    with pytest.raises(cuflash.ArgumentTypeError, match=says):
        attention(*arrays, residual_dtype="float32")
    assert attention(*arrays, residual_dtype="float64").dtype == np.float64
