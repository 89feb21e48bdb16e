"""Tables of angles without elements, which have no address: CUDA and NumPy agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from .build import compiler
from .host_cupy import host_cupy
from .test_append_kv import on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Positions that begin at the first angle, across the fourth, after it, or before the first.
_CASE = CacheCase(
    lengths=(3, 2, 7, 1, 0), positions=(0, 2, 4, -1, 0), new=3, queries=3, counts=True,
    options=(("causal", True),),
)  # fmt: skip
_SHAPES = [(0, 3), (0, 0), (4, 0)]


def _built(shape: tuple[int, int], case: CacheCase = _CASE) -> Built:
    built = build(case)
    tables = {name: np.zeros(shape, np.float32) for name in ("rotary_cos", "rotary_sin")}
    return replace(built, arrays=built.arrays | tables)


def _called(call: Any, arrays: dict[str, Any], interleaved: bool, attends: bool) -> Any:
    given = arrays | {"rotary_interleaved": interleaved}
    if attends:
        return call(cuflash.attention_with_kvcache, **given, causal=True, return_lse=True)
    return call(cuflash.append_kv, **{name: a for name, a in given.items() if name != "q"})


def _on_host(function: Any, **keywords: Any) -> Any:
    return function(**keywords)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_an_empty_table_has_angles_for_as_many_positions(
    shape: tuple[int, int], attends: bool, interleaved: bool
) -> None:
    """Tokens without an angle are dropped and counted; rotated columns of such queries are NaN."""
    built, numpy = _built(shape), _built(shape)
    truth = _called(_on_host, numpy.arrays | numpy.caches, interleaved, attends)
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        for name in ("rotary_cos", "rotary_sin"):
            arrays[name] = host.cupy.empty(shape, np.float32)
            assert arrays[name].data.ptr == 0
        results = _called(host.call, arrays, interleaved, attends)
        for got, wanted in zip(results or (), truth or (), strict=True):
            check_close(built.case, got.peek(), wanted)
        assert all(same_bits(a.peek(), b) for a, b in zip(raw, numpy.raw, strict=True))
        missing = arrays["overflow"].peek().tolist()
    assert missing == numpy.arrays["overflow"].tolist()
    assert missing == ([0, 1, 3, 3, 0] if shape[0] else [3] * 5)
    if attends:
        lost = np.isnan(truth[0]).any((1, 2, 3)).tolist()
        assert lost == [bool(shape[1])] * 4 + [False]  # the last entry has no keys
