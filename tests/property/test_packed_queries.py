"""Packed queries over caches on the host, against the reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

import cuflash

from ..kit.caches import check_close, same_bits
from ..kit.packed_queries import PackedCase, build_packed, packed_cases


def _check(drawn: PackedCase, asks_lse: bool) -> None:
    built = build_packed(*drawn)
    truth, truth_lse, raw, overflow = built.expected()
    kept = {name: a.copy() for name, a in built.arrays.items() if name != "overflow"}
    given = {**built.caches, **built.arrays, **built.keywords, **built.options}
    given |= {"out": np.full(truth.shape, np.nan, built.arrays["q"].dtype)}
    if asks_lse:
        given["lse_out"] = np.full(truth_lse.shape, np.nan, np.float32)
        given["lse_out"] = given["lse_out"].astype(np.result_type(np.float32, given["out"].dtype))
    out, lse = cuflash.attention_with_kvcache(**given, max_seqlen_q=max(drawn[1]), return_lse=True)
    assert out is given["out"]
    assert lse is given["lse_out"] if asks_lse else True
    check_close(built.case, out, truth)
    check_close(built.case, lse, truth_lse)
    assert all(same_bits(a, b) for a, b in zip(built.raw, raw, strict=True))
    if built.case.counts:
        assert built.arrays["overflow"].tolist() == overflow.tolist()
    assert all(same_bits(built.arrays[name], array) for name, array in kept.items())


@settings(max_examples=400)
@given(packed_cases())
def test_attention_is_that_of_the_reference(drawn: PackedCase) -> None:
    _check(drawn, asks_lse=drawn[2] != 1 and drawn[0].dtype in ("float32", "float64"))


@settings(max_examples=150)
@given(packed_cases(dtypes=("float16", "bfloat16"), float8=True))
def test_attention_over_float8_caches_is_that_of_the_reference(drawn: PackedCase) -> None:
    _check(drawn, asks_lse=False)
