"""The oracle refuses what attention would refuse, in Python's own errors."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash import reference


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_scales_must_be_finite_and_positive(scale: float) -> None:
    x = np.zeros((2, 4))
    with pytest.raises(ValueError, match="finite and positive"):
        reference.attention(x, x, x, scale=scale)
    with pytest.raises(ValueError, match="finite and positive"):
        reference.attention_backward(x, x, x, x, scale=scale)


def test_kv_heads_must_divide_query_heads() -> None:
    q, kv, none = (np.zeros((1, 3, heads, 4)) for heads in (4, 3, 0))
    for other in (kv, none):
        with pytest.raises(ValueError, match="does not divide heads_q=4"):
            reference.attention(q, other, other)


def test_a_layout_has_the_axes_of_the_arrays() -> None:
    x = np.zeros((2, 3, 4))
    with pytest.raises(ValueError, match="of 3 axes"):
        reference.attention(x, x, x, layout="bshd")
