"""Arguments that calls with float8 caches refuse, and conversions between bytes and numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.caches.float8 import check_cache_dtype, dequantised, quantised

from ..kit.caches import CacheCase, build
from .cache_case import Row, T, V, check, setting, wrong

_CASE = CacheCase("float16", lengths=(3, 0), new=2, float8="each")
_NUMBERS = CacheCase("float16", lengths=(3, 0), new=2, float8="numbers")
_HALVES = CacheCase("float16", lengths=(3, 0), new=2)

#: Refused by ``append_kv`` and by ``attention_with_kvcache``.
_BOTH: list[Row] = [
    (_CASE, setting(cache_dtype="float8_e5m2"), V, "cache_dtype: got 'float8_e5m2'"),
    (_CASE, setting(cache_dtype=np.uint8), V, "cache_dtype: got "),
    (_CASE, setting(cache_dtype=8), V, "cache_dtype: got 8"),
    (_CASE, setting(cache_dtype=None), T, "k_cache: got dtype uint8; expected cache_dtype="),
    (_HALVES, setting(cache_dtype="float8_e4m3fn"), T, "k_cache: got dtype float16"),
    (_CASE, wrong("v_cache", lambda x: x.astype(np.float16)), T, "v_cache: got dtype float16"),
    (_CASE, setting(k_scale=None), T, "k_scale: got None beside float8 caches"),
    (_CASE, setting(v_scale=None), T, "v_scale: got None beside float8 caches"),
    (_HALVES, setting(k_scale=1.0), V, "k_scale: got 1.0; expected None: it goes with float8"),
    (_HALVES, setting(v_scale=np.ones(1, np.float32)), V, "v_scale: got "),
    (_NUMBERS, setting(k_scale=0.0), V, "k_scale: got 0.0; expected a positive number"),
    (_NUMBERS, setting(v_scale=-1), V, "v_scale: got -1; expected a positive number"),
    (_NUMBERS, setting(v_scale=float("nan")), V, "v_scale: got nan"),
    (_NUMBERS, setting(v_scale=10**400), V, "v_scale: got "),
    (_NUMBERS, setting(k_scale=True), T, "k_scale: got True; expected a number"),
    (_NUMBERS, setting(k_scale=1j), T, "k_scale: got 1j; expected a number"),
    (_NUMBERS, setting(k_scale="one"), T, "k_scale: got builtins.str"),
    (_CASE, setting(k_scale=np.ones((2, 2))), T, "k_scale: got dtype float64; expected float32"),
    (_CASE, setting(v_scale=np.ones(2, np.float32)), V, "v_scale: got shape (2,)"),
    (_CASE, setting(v_scale=np.ones((2, 4), np.float32)), V, "v_scale: got shape (2, 4)"),
    (_CASE, setting(k_scale=np.ones((2, 4), np.float32)[:, ::2]), V, "k_scale: got strides"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "kind", "text"), _BOTH, ids=[x[3] for x in _BOTH])
@pytest.mark.parametrize("attends", [False, True])
def test_of_both(case: CacheCase, change: Any, kind: type, text: str, attends: bool) -> None:
    function = cuflash.attention_with_kvcache if attends else cuflash.append_kv
    check(function, case, change, kind, text, attends)


@pytest.mark.parametrize(
    ("attends", "text"),
    [
        (True, "k: got dtype bfloat16; expected float16"),
        (False, "v: got dtype float16; expected bfloat16"),
    ],
)
def test_new_tokens_have_one_dtype(attends: bool, text: str) -> None:
    function = cuflash.attention_with_kvcache if attends else cuflash.append_kv
    change = wrong("k", lambda x: x.astype(ml_dtypes.bfloat16))
    check(function, _CASE, change, T, text, attends)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_queries_beside_float8_caches_have_16_bits(dtype: Any) -> None:
    built = build(_CASE)
    arrays = {n: a.astype(dtype) if n in "qkv" else a for n, a in built.arrays.items()}
    said = rf"^q: got dtype {np.dtype(dtype)}; expected one of 'float16', 'bfloat16' beside float8"
    with pytest.raises(cuflash.ArgumentTypeError, match=said):
        cuflash.attention_with_kvcache(**built.caches, **arrays, **built.keywords)


@pytest.mark.parametrize(
    "named", ["float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)]
)
def test_the_dtype_has_several_names(named: Any) -> None:
    assert check_cache_dtype(named, {"k_cache": "uint8", "v_cache": "float8_e4m3fn"})
    assert not check_cache_dtype(None, {"k_cache": "float16", "v_cache": "float16"})


def test_another_dtype_is_refused_whatever_its_text_is() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(V, match=r"^cache_dtype: got a value of type "):
        check_cache_dtype(Silent(), {"k_cache": "uint8"})


def test_arrays_of_float8_need_no_word() -> None:
    built = build(_CASE)
    caches = {n: a.view(ml_dtypes.float8_e4m3fn) for n, a in built.caches.items()}
    own = {**built.arrays, "k_scale": 0.5, "v_scale": np.array(3.0, np.float32)}
    own.pop("overflow", None)
    out = cuflash.attention_with_kvcache(**caches, **own)
    again = build(_CASE)
    told = cuflash.attention_with_kvcache(**again.caches, **own, cache_dtype="float8_e4m3fn")
    assert out.tobytes() == told.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(built.raw, again.raw, strict=True))


def test_what_bytes_stand_for() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256)
    numbers = dequantised(every, np.full((1, 1), 0.5, np.float32))[0, 0, 0]
    expected = 0.5 * every[0, 0, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(numbers, expected, equal_nan=True)
    assert numbers[1] == 2.0**-10
    assert numbers[126] == 224


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.sampled_from([1.0, 0.3, 7.0]))
def test_numbers_become_the_nearest_bytes(numbers: list[float], scale: float) -> None:
    """The reference searches all bytes for the nearest number; ml_dtypes does not saturate."""
    x = np.array(numbers, np.float32).reshape(1, -1)
    found = quantised(x, np.full(1, scale, np.float32))[0]
    cache = np.zeros((1, 1, 1, x.size), np.uint8)
    k = x.reshape(1, 1, 1, -1)
    given_ = {"cache_seqlens": np.zeros(1, np.int32), "k_scale": scale, "v_scale": scale}
    stored, *_ = reference.append_kv(k, k, cache, cache, **given_)
    assert found.tobytes() == stored.tobytes()


def test_the_edges_of_rounding() -> None:
    """Halfway cases round to even, numbers that are too large become 448, and NaN stays NaN."""
    x = [0.0, -0.0, 2.0**-10, 1.5 * 2.0**-9, 2.0**-9, 464.0, 465.0, 1e9, -np.inf, np.nan, -1.0625]
    expected = [0, 128, 0, 2, 1, 126, 126, 126, 254, 127, 128 + 0x38]
    found = quantised(np.array([x], np.float32), np.ones(1, np.float32))
    assert found[0].tolist() == expected
