"""Slopes of a caller's function in every form of FlashAttention-3's backward pass, emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import ScoreMod

from .build import compiler
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Columns of K and of V: each form keeps P, and P times the slopes, in another way.
_FORMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
#: The largest difference, relative to the largest number of a head.
_LIMITS = {np.float16: 4e-3, bfloat16: 3e-2}
_DROPOUT = {"dropout_p": 0.3, "dropout_seed": 7}


def _name(widths: tuple[int, int]) -> str:
    return "d{}-dv{}".format(*widths)


def _inputs(dtype: Any, heads: int, widths: tuple[int, int]) -> dict[str, Any]:
    random = np.random.default_rng(3)
    rows, keys, (width, width_v) = 70, 90, widths
    shapes = {
        "q": (1, rows, heads, width),
        "k": (1, keys, heads, width),
        "v": (1, keys, heads, width_v),
        "dout": (1, rows, heads, width_v),
    }
    return {name: random.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}


def _found(function: ScoreMod, x: dict[str, Any], **options: Any) -> list[Any]:
    """The output and the gradients of fa3."""
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    options |= {"score_mod": function, "algorithm": "fa3", "backend": "cuda"}
    with host_cupy("90") as host:
        out, lse = host.call(cuflash.attention, q, k, v, return_lse=True, **options)
        given = (dout, q, k, v, out, lse)
        return [out, *host.call(cuflash.attention_backward, *given, **options)]


def _right(function: ScoreMod, x: dict[str, Any], **options: Any) -> list[Any]:
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    options |= {"score_mod": function, "dtype": np.float64}
    out, _ = cuflash.reference.attention(q, k, v, **options)
    return [out, *cuflash.reference.attention_backward(dout, q, k, v, **options)]


@pytest.mark.parametrize("dropout", [{}, _DROPOUT], ids=["kept", "dropped"])
@pytest.mark.parametrize("widths", _FORMS, ids=_name)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_slopes_of_any_sign_and_size(
    dtype: Any, widths: tuple[int, int], dropout: dict[str, Any]
) -> None:
    """Each head has a slope of its own."""
    factors = np.array([-1, 0, 8, -8], np.float32)
    function = ScoreMod(
        "return p.factors(head) * s;",
        numpy=lambda s, batch, head, i, j, offset, p: p.factors(head) * s,
        factors=factors,
    )
    x = _inputs(dtype, factors.size, widths)
    found, right = _found(function, x, **dropout), _right(function, x, **dropout)
    for name, got, truth in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        for head, factor in enumerate(factors):
            one, of = got[:, :, head].astype(float), truth[:, :, head]
            assert abs(one - of).max() <= _LIMITS[dtype] * abs(of).max(), (name, factor)


@pytest.mark.parametrize("widths", _FORMS, ids=_name)
def test_a_weight_of_zero_may_be_dropped_or_have_any_slope(widths: tuple[int, int]) -> None:
    """Slopes of hidden pairs are NaN or infinite."""
    seen = np.random.default_rng(6).random((70, 90)) < 0.7
    function = ScoreMod("return p.seen(i, j) ? -s : -infinity * (s * s + 1);", seen=seen)
    negated = ScoreMod("return -s;", numpy=lambda s, *_: -s)
    x = _inputs(np.float16, 1, widths)
    found = _found(function, x, **_DROPOUT)
    for got, truth in zip(found, _right(negated, x, mask=seen, **_DROPOUT), strict=True):
        assert abs(got.astype(float) - truth).max() <= 4e-3 * abs(truth).max()
