"""Attention resumed from a state, part after part, on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from ..kit.caches import same_bits
from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..property.test_resume import part_by_part, splits
from .common import skip_without

_CASE = Case(2, 8, 2, 200, 700, 64, 64, "float16", causal=True, q_offset=500, seed=3)


@pytest.mark.parametrize("algorithm", ["auto", "fa1", "fa2", "fa3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_split_of_the_keys(cp: Any, dtype: str, algorithm: str) -> None:
    skip_without(algorithm)
    if algorithm == "fa3" and dtype in ("float32", "float64"):
        pytest.skip("FlashAttention-3 takes 16-bit arrays")

    @settings(max_examples=15, deadline=None)
    @given(st.data(), st.booleans())
    def check(data: Any, in_place: bool) -> None:
        case = replace(_CASE, dtype=dtype, q_offset=data.draw(st.integers(-3, 700)))
        parts = data.draw(splits(case.seqlen_kv))
        if algorithm == "fa3":  # fa3 needs a key
            parts = [(begin, end) for begin, end in parts if begin < end]
        x = arrays(case, "q", "k", "v")
        truth = judge(case, x)
        on_device = {name: cp.asarray(array) for name, array in x.items()}
        out, lse = part_by_part(case, on_device, parts, in_place, algorithm=algorithm)
        assert out.dtype == lse.dtype == case.statistics
        compare(truth, "out", out.get()).check()
        compare(truth, "lse", lse.get()).check()

    check()


def test_states_of_no_key_do_not_count(cp: Any) -> None:
    x = arrays(_CASE, "q", "k", "v")
    qkv = [cp.asarray(x[name]) for name in "qkv"]
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    plain = cuflash.attention(*qkv, **options, q_offset=0, out_dtype="float32")
    shapes = _CASE.shape("out"), _CASE.shape("lse")
    dead = cp.full(shapes[0], np.nan, "float32"), cp.full(shapes[1], -np.inf, "float32")
    made = cuflash.attention(*qkv, **options, q_offset=0, resume=dead)
    again = cuflash.attention(*qkv, **options, q_offset=-999, resume=made)
    for one, two, three in zip(plain, made, again, strict=True):
        assert same_bits(one.get(), two.get())
        assert same_bits(one.get(), three.get())


def test_a_graph_that_goes_on_in_place(cp: Any) -> None:
    x = arrays(_CASE, "q", "k", "v")
    q, k, v = (cp.asarray(x[name]) for name in "qkv")
    first = cuflash.attention(q, k, v, return_lse=True, out_dtype="float32")
    state = tuple(array.copy() for array in first)
    given = {"resume": state, "out": state[0], "lse_out": state[1]}
    cuflash.attention(q, k, v, **given)  # compiles
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        for array, before in zip(state, first, strict=True):
            array[...] = before
        stream.begin_capture()
        cuflash.attention(q, k, v, **given)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
    stream.synchronize()
    expected = first
    for _ in range(3):
        expected = cuflash.attention(q, k, v, resume=expected, return_lse=True)
    for one, other in zip(state, expected, strict=True):
        assert same_bits(one.get(), other.get())
