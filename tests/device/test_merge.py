"""Parts merged on the device, against attention to all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from .test_generations import APART


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "shd", "hsd", "sd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_parts_of_the_keys_are_merged(cp: Any, dtype: str, layout: Any) -> None:
    """Three parts under the causal mask; only the last rows see the last part."""
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    sizes = {"b": 2, "s": 200, "h": 3, "d": 64}
    shape = tuple(sizes[axis] for axis in layout)
    rng = np.random.default_rng(3)
    q, k, v = (cp.asarray(rng.standard_normal(shape).astype(kind)) for _ in range(3))
    along, outs, lses = layout.index("s"), [], []
    for start, end in ((0, 70), (70, 199), (199, 200)):
        at = (slice(None),) * along + (slice(start, end),)
        options = {"causal": True, "q_offset": -start, "layout": layout}
        out, lse = cuflash.attention(q, k[at], v[at], **options, return_lse=True)
        dead = (slice(None),) * along + (slice(0, start),)
        out[dead] = np.nan
        outs.append(out)
        lses.append(lse)
    merged, lse = cuflash.merge(outs, lses, layout=layout)
    expected, expected_lse = cuflash.attention(
        q, k, v, causal=True, q_offset=0, layout=layout, return_lse=True
    )
    assert (merged.dtype, merged.shape) == (expected.dtype, expected.shape)
    apart = abs(merged.get().astype(float) - expected.get().astype(float)).max()
    assert apart < APART[dtype]
    assert abs(lse.get() - expected_lse.get()).max() < min(APART[dtype], 1e-4)
