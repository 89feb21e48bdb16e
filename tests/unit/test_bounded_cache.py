"""A cache that is emptied before it grows beyond its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.bounded_cache import BoundedCache


@given(most=st.integers(1, 5), stored=st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_it_never_holds_more_and_what_it_holds_is_right(
    most: int, stored: list[tuple[int, int]]
) -> None:
    cache: BoundedCache[int, int] = BoundedCache(most)
    last: dict[int, int] = {}
    for key, value in stored:
        was = len(cache)
        known = key in cache
        cache[key] = last[key] = value
        assert cache.get(key) == value
        expected = was if known else (1 if was == most else was + 1)
        assert len(cache) == expected
        assert all(last[k] == v for k, v in cache.items())


def test_what_it_never_held_is_absent() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    assert cache.get("a") is None
    with pytest.raises(KeyError):
        cache["a"]
