"""The reference's caches, against the reference's own attention and against numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 1.5},
        {"window_size": (2, 1), "scale": 0.3},
        {"window_size": (3, None), "alibi": True},
        {"causal": True, "sinks": True, "alibi": True},
    ],
)
def test_what_counts_is_attended_to(options: dict[str, Any]) -> None:
    """Results are those of attention over keys that are gathered from the pages by hand.

    The keys include the new tokens at the end, and not the padding at the beginning.
    """
    q, k, v = (_normal(i, 2, 3, heads, 8) for i, heads in enumerate((4, 2, 2)))
    pages = [_normal(3 + i, 6, 4, 2, 8) for i in range(2)]
    table, lengths, padding = np.array([[4, 0, 2], [1, 5, 3]]), [7, 4], [2, 0]
    options = dict(options)
    beside: dict[str, Any] = {}
    if options.pop("alibi", False):
        beside["alibi_slopes"] = abs(_normal(5, 2, 4))
    if options.pop("sinks", False):
        beside["sinks"] = _normal(6, 4)
    out, lse, k_pages, _, overflow = reference.attention_with_kvcache(
        q, *pages, k, v, cache_seqlens=np.array(lengths), page_table=table,
        cache_leftpad=np.array(padding), **options, **beside,
    )  # fmt: skip
    assert overflow.tolist() == [0, 0]
    assert (k_pages[table[0, 1], 3] == k[0, 0]).all()
    for b, (first, end) in enumerate(zip(padding, lengths, strict=True)):
        held = (np.concatenate(x[table[b]])[first:end] for x in pages)
        rows = (np.concatenate([x, y[b]])[None] for x, y in zip(held, (k, v), strict=True))
        own = {n: x[b : b + 1] if n == "alibi_slopes" else x for n, x in beside.items()}
        truth, truth_lse = reference.attention(q[b : b + 1], *rows, **options, **own)
        assert abs(out[b] - truth[0]).max() < 1e-14
        assert abs(lse[b] - truth_lse[0]).max() < 1e-14


@pytest.mark.parametrize(
    ("interleaved", "turned"), [(True, [-2, 1, 3, 4, 5]), (False, [-3, 2, 1, 4, 5])]
)
def test_a_quarter_of_a_turn(interleaved: bool, turned: list[float]) -> None:
    """At position 1 the first pair turns; the second pair and the last column do not change."""
    cos, sin = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 0.0], [1.0, 0.0]])
    k = np.arange(1.0, 6.0).reshape(1, 1, 1, 5)
    cache = np.zeros((1, 2, 1, 5))
    keys, values, overflow = reference.append_kv(
        k, k, cache, cache, cache_seqlens=np.array([1]), rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    assert keys[0, 1, 0].tolist() == turned
    assert values[0, 1, 0].tolist() == [1, 2, 3, 4, 5]
    assert not keys[0, 0].any()
    assert not cache.any()
    assert overflow.tolist() == [0]


def test_pairs_have_to_be_said() -> None:
    x = np.zeros((1, 1, 1, 2))
    tables = {"rotary_cos": np.ones((2, 1)), "rotary_sin": np.ones((2, 1))}
    with pytest.raises(cuflash.ArgumentValueError, match="rotary_interleaved"):
        reference.append_kv(x, x, x, x, cache_seqlens=np.array([0]), **tables)
