"""Merging attention over any split of the keys gives attention over all keys."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash

from ..kit import limits

_DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_SIZES = {"b": 2, "s": 5, "h": 3, "d": 4}


@st.composite
def _splits(draw: Any) -> tuple[int, list[np.ndarray]]:
    """Draw a number of keys, and the keys of each part, which may be empty."""
    keys, parts = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    of = np.array(draw(st.lists(st.integers(0, parts - 1), min_size=keys, max_size=keys)))
    return keys, [np.flatnonzero(of == part) for part in range(parts)]


def _shape(layout: str, rows: int) -> tuple[int, ...]:
    sizes = {**_SIZES, "s": rows}
    return tuple(sizes[axis] for axis in layout)


@given(
    _splits(),
    st.sampled_from(["bshd", "bhsd", "shd", "hsd", "sd"]),
    st.sampled_from([*_DTYPES]),
    st.sampled_from([1.0, 30.0]),
    st.integers(0, 2**31),
)
@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
def test_any_split_of_the_keys_is_merged(
    library: str, split: Any, layout: Any, dtype: str, scale: float, seed: int
) -> None:
    """Some rows see no key of a part, or none at all. The truth has all keys and a wider dtype."""
    xp = pytest.importorskip(library)
    if library != "numpy" and dtype == "float64":
        dtype = "float32"  # JAX's default
    (keys, parts), kind = split, _DTYPES[dtype]
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(_shape(layout, n)) for n in (_SIZES["s"], keys, keys))
    mask = rng.random((_SIZES["s"], keys)) < 0.5
    mask[0] = False  # a row that sees no key of any part
    along = layout.index("s")
    # The truth is wider than the parts: with large scores float64 would round visibly.
    wide: Any = np.longdouble if dtype == "float64" else np.float64
    call: dict[str, Any] = {"layout": layout, "scale": scale, "dtype": wide}
    outs, lses = [], []
    for part in parts:
        own = (np.take(x, part, along) for x in (k, v))
        out, lse = cuflash.reference.attention(q, *own, mask=mask[:, part], **call)
        dead = np.expand_dims(np.isneginf(lse), -1)
        if layout == "bshd":
            dead = dead.swapaxes(1, 2)
        elif layout == "shd":
            dead = dead.swapaxes(0, 1)
        outs.append(np.where(dead, rng.choice([np.nan, np.inf, 7.0]), out).astype(kind))
        lses.append(lse.astype(np.float64 if dtype == "float64" else np.float32))
    truth, truth_lse = cuflash.reference.attention(q, k, v, mask=mask, **call)
    merged, lse = cuflash.merge([*map(xp.asarray, outs)], [*map(xp.asarray, lses)], layout=layout)
    assert merged.dtype == kind
    assert lse.dtype == lses[0].dtype
    assert lse.shape == truth_lse.shape
    # Rounded are every part, their sum, and the lse of every part, from which its weight comes.
    live, largest = np.isfinite(truth_lse), np.abs(v).max()
    units = limits.OPERATIONS + np.abs(truth_lse[live]).max(initial=0)
    of_lse = 2 * limits.UNIT[lse.dtype.name] * units
    room = 2 * largest * (limits.UNIT[dtype] + of_lse)
    assert np.abs(np.asarray(merged, np.float64) - truth).max() <= room
    np.testing.assert_array_equal(np.isneginf(lse), ~live)
    assert np.abs(np.asarray(lse, np.float64)[live] - truth_lse[live]).max(initial=0) <= of_lse
