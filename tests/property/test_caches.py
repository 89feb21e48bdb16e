"""Caches on the host against the reference, over kinds, lengths, tables, strides and dtypes.

Unused rows, free pages and gaps of strides hold NaN or infinity.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

import cuflash

from ..kit.caches import Built, CacheCase, build, cases, check_close, same_bits


def _check_buffers(built: Built, raw: list[np.ndarray], overflow: np.ndarray) -> None:
    """Check caches, the memory around them, and the missing tokens that overflow reports."""
    assert all(same_bits(a, b) for a, b in zip(built.raw, raw, strict=True))
    if built.case.counts:
        assert built.arrays["overflow"].tolist() == overflow.tolist()


@settings(max_examples=400)
@given(cases())
def test_attention_is_that_of_the_reference(case: CacheCase) -> None:
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    kept = {name: a.copy() for name, a in built.arrays.items() if name != "overflow"}
    result = np.full(truth.shape, np.nan, built.raw[0].dtype)
    given = {**built.caches, **built.arrays, **built.keywords, **built.options}
    out, lse = cuflash.attention_with_kvcache(**given, out=result, return_lse=True)
    assert out is result
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    _check_buffers(built, raw, overflow)
    assert all(same_bits(built.arrays[name], array) for name, array in kept.items())


@settings(max_examples=300)
@given(cases(appends=True))
def test_appended_bits_are_those_of_the_reference_and_no_other_changes(case: CacheCase) -> None:
    built = build(case)
    raw, overflow = built.expected(attends=False)
    cuflash.append_kv(**built.caches, **built.appended, **built.keywords)
    _check_buffers(built, raw, overflow)


@settings(max_examples=200)
@given(cases(dtypes=("float16", "bfloat16"), float8=True))
def test_attention_over_float8_caches_is_that_of_the_reference(case: CacheCase) -> None:
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    result = np.full(truth.shape, np.nan, built.arrays["q"].dtype)
    given = {**built.caches, **built.arrays, **built.keywords, **built.options}
    out, lse = cuflash.attention_with_kvcache(**given, out=result, return_lse=True)
    assert out is result
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    _check_buffers(built, raw, overflow)


@settings(max_examples=200)
@given(cases(dtypes=("float16", "bfloat16"), appends=True, float8=True))
def test_appended_bytes_are_those_of_the_reference_and_no_other_changes(case: CacheCase) -> None:
    built = build(case)
    raw, overflow = built.expected(attends=False)
    cuflash.append_kv(**built.caches, **built.appended, **built.keywords)
    _check_buffers(built, raw, overflow)
