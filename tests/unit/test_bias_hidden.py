"""``bias`` in the tiled NumPy code: hidden pairs, and biases of NaN or infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_minus_infinity_hides_sees_no_key(algorithm: Any, sinks: bool) -> None:
    """Such a row adds nothing to any gradient. Its dq is 0, and so are its numbers in dbias."""
    random = np.random.default_rng(4)
    q, k, v, dout = (random.standard_normal((1, n, 2, 4)) for n in (6, 7, 7, 6))
    bias = random.standard_normal((6, 7))
    bias[[1, 4]] = -np.inf
    bias[2, 3:] = -np.inf
    logits = np.array([0.5, -1.0])
    more = {"sinks": logits} if sinks else {}
    options = {"bias": bias, "backend": "numpy", "algorithm": algorithm, "blocks": (2, 3), **more}
    out, lse = cuflash.attention(q, k, v, **options, return_lse=True)
    assert (out[:, [1, 4]] == 0).all()
    expected = logits[:, None] if sinks else -np.inf
    np.testing.assert_allclose(lse[0][:, [1, 4]], np.broadcast_to(expected, (2, 2)), rtol=1e-14)
    if not sinks:  # without sinks, no result depends on such a row
        q[:, [1, 4]], dout[:, [1, 4]] = np.nan, np.inf
    given_ = (dout, q, k, v, out, lse)
    dq, dk, dv, dbias = cuflash.attention_backward(*given_, **options, wrt=("q", "k", "v", "bias"))
    assert all(np.isfinite(one).all() for one in (dq, dk, dv, dbias))
    assert (dq[:, [1, 4]] == 0).all()
    assert (dbias[bias == -np.inf] == 0).all()
    assert (dbias[bias != -np.inf] != 0).all()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_makes_its_rows_none(algorithm: Any, value: float) -> None:
    q = np.random.default_rng(5).standard_normal((1, 6, 2, 4))
    bias = np.zeros((2, 6, 6))
    bias[1, 3, 2] = value
    options = {"backend": "numpy", "algorithm": algorithm, "blocks": (2, 2), "causal": True}
    out, lse = cuflash.attention(q, q, q, bias=bias, **options, return_lse=True)
    reached = np.zeros((6, 2), bool)
    reached[3, 1] = True
    assert (np.isnan(out[0]).all(axis=-1) == reached).all()
    assert (np.isnan(lse[0].T) == reached).all()
    hidden = np.zeros((2, 6, 6))
    hidden[1, 3, 4] = value  # a pair that the causal mask hides
    np.testing.assert_array_equal(
        cuflash.attention(q, q, q, bias=hidden, **options), cuflash.attention(q, q, q, **options)
    )


def test_the_gradient_of_pairs_that_a_mask_hides_is_zero() -> None:
    """The destination holds other numbers before the call."""
    q, target = np.random.default_rng(6).standard_normal((1, 40, 2, 4)), np.full((2, 40, 40), 7.0)
    for keywords in ({"causal": True}, {"window_size": (3, 1)}, {"q_offset": -15, "causal": True}):
        seen = np.ones((40, 40), bool)
        options = {**keywords, "bias": np.zeros((2, 40, 40)), "backend": "numpy", "blocks": (8, 8)}
        out, lse = cuflash.attention(q, q, q, **options, return_lse=True)
        target[...] = 7
        cuflash.attention_backward(q, q, q, q, out, lse, **options, wrt=("bias",), grads=(target,))
        i, j = np.indices((40, 40))
        if "window_size" in keywords:
            seen = (j >= i - 3) & (j <= i + 1)
        else:
            seen = j <= i + keywords.get("q_offset", 0)
        assert (target[:, ~seen] == 0).all()
        assert (np.abs(target[:, seen]).sum(axis=1) > 0).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (1, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_the_gradient_where_there_are_no_pairs_is_zero(shape: Any, sizes: Any) -> None:
    batch, rows, keys = sizes
    q, k = np.ones((batch, rows, 2, 4)), np.ones((batch, keys, 2, 4))
    pairs = dict(zip((-2, -1), (rows, keys), strict=True))
    own = [n if n == 1 else pairs.get(axis - len(shape), n) for axis, n in enumerate(shape)]
    bias, options = np.ones(own), {"backend": "numpy"}
    out, lse = cuflash.attention(q, k, k, bias=bias, **options, return_lse=True)
    target = np.full(own, 7.0)
    given_ = (q, q, k, k, out, lse)
    cuflash.attention_backward(*given_, bias=bias, wrt=("bias",), grads=(target,), **options)
    assert (target == 0).all()
