"""``attention_vjp``: what it keeps, the tiles of its passes, and the value of delta."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.dispatch import observe

HALVES = [np.float16, ml_dtypes.bfloat16]
CPU: dict[str, Any] = {"backend": "numpy"}


def _arrays(dtype: Any, common: float = 0.0, seed: int = 0) -> list[Any]:
    """q, k, v and dout; all keys but the first have ``common`` times one vector in common.

    The NumPy backend would subtract a part that all keys share.
    """
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((2, 96, 2, 32)) for _ in range(4))
    k[:, 1:] += common * rng.standard_normal(32)
    return [a.astype(dtype) for a in (q, k, v, dout)]


def _error_of_dq(arrays: list[Any], **options: Any) -> float:
    q, k, v, dout = arrays
    dq = cuflash.attention_vjp(q, k, v, **CPU, **options)[1](dout)[0]
    wide = [np.asarray(a, np.float64) for a in arrays]
    truth = cuflash.attention_vjp(*wide[:3], **CPU)[1](wide[3])[0]
    return float(np.linalg.norm(dq.astype(np.float64) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_residual_takes_the_rounding_of_out_from_the_gradients(dtype: Any) -> None:
    """The keys have a common component, which multiplies the rounding error of delta."""
    arrays = _arrays(dtype, common=64.0)
    plain = _error_of_dq(arrays)
    kept = _error_of_dq(arrays, residual_dtype="float32")
    assert kept < plain / 4
    assert kept < 4 * np.finfo(np.float32).eps + 4 * float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_the_output_is_the_same_with_a_float32_residual(dtype: Any, out_dtype: Any) -> None:
    q, k, v, _ = _arrays(dtype)
    plain = cuflash.attention(q, k, v, out_dtype=out_dtype, **CPU)
    out, pullback = cuflash.attention_vjp(
        q, k, v, out_dtype=out_dtype, residual_dtype=np.float32, **CPU
    )
    assert out.dtype == plain.dtype
    assert out.tobytes() == plain.tobytes()
    assert pullback.saved["out"].dtype == np.float32


def test_the_residual_is_the_output_unless_it_is_asked_for() -> None:
    q, k, v, _ = _arrays(np.float16)
    for options in ({}, {"out_dtype": "float32"}, {"residual_dtype": "float16"}):
        out, pullback = cuflash.attention_vjp(q, k, v, **CPU, **options)
        assert pullback.saved["out"] is out


@pytest.mark.parametrize(
    ("dtype", "options", "kind"),
    [
        ("float32", {"residual_dtype": "float16"}, cuflash.ArgumentTypeError),
        ("float64", {"residual_dtype": "float32"}, cuflash.ArgumentTypeError),
        ("float16", {"residual_dtype": "float64"}, cuflash.ArgumentTypeError),
        ("float16", {"residual_dtype": "int8"}, cuflash.ArgumentTypeError),
        (
            "float16",
            {"residual_dtype": "float16", "out_dtype": "float32"},
            cuflash.ArgumentValueError,
        ),
    ],
)
def test_a_residual_that_cannot_be_is_refused_by_name(
    dtype: str, options: dict[str, Any], kind: type[Exception]
) -> None:
    q, k, v, _ = _arrays(dtype)
    with pytest.raises(kind, match=r"^residual_dtype: "):
        cuflash.attention_vjp(q, k, v, **CPU, **options)


def test_an_output_that_cannot_be_keeps_its_own_name() -> None:
    q, k, v, _ = _arrays("float32")
    with pytest.raises(cuflash.ArgumentTypeError, match=r"^out_dtype: "):
        cuflash.attention_vjp(q, k, v, out_dtype="float16", **CPU)


def test_each_pass_takes_its_own_blocks() -> None:
    q, k, v, dout = _arrays(np.float32)
    tiles: list[Any] = []
    with observe(lambda plan: tiles.append((plan.tile.block_q, plan.tile.block_kv))):
        _, pullback = cuflash.attention_vjp(
            q, k, v, blocks=(16, 24), backward_blocks=(32, 40), **CPU
        )
        pullback(dout)
    assert tiles == [(16, 24), (32, 40)]


@pytest.mark.parametrize("name", ["blocks", "backward_blocks"])
def test_wrong_blocks_are_refused_before_anything_runs(name: str) -> None:
    q, k, v, _ = _arrays(np.float32)
    ran: list[Any] = []
    with observe(ran.append), pytest.raises(cuflash.ArgumentValueError, match=f"^{name}: "):
        cuflash.attention_vjp(q, k, v, **CPU, **{name: (0, 4)})
    assert not ran


def test_the_pullback_pickles() -> None:
    q, k, v, dout = _arrays(np.float32)
    _, pullback = cuflash.attention_vjp(q, k, v, causal=True, q_offset=3, scale=0.3, **CPU)
    again = pickle.loads(pickle.dumps(pullback))
    for one, other in zip(pullback(dout), again(dout), strict=True):
        assert one.tobytes() == other.tobytes()
