"""Float8 caches in CUDA memory, called as a user does; the kernels convert their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.dispatch import observe

from ..kit.caches import CacheCase, build, cases, same_bits
from ..kit.float8 import SCALES
from .build import compiler
from .host_cupy import host_cupy
from .test_append_kv import on_device
from .test_paged_caches import attended, check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Lengths at edges of tiles, 0, and the whole capacity.
_PLAIN = CacheCase(
    "bfloat16", lengths=(0, 1, 63, 64, 65, 200), slots=200, queries=1, new=None, heads=(4, 2),
    dims=(64, 64), float8="each",
)  # fmt: skip
_WIDE = replace(_PLAIN, dims=(128, 128), lengths=(0, 129, 200), dtype="float16", float8="ones")
_PAGED = replace(_PLAIN, kind="paged", slots=16, pages=12, lengths=(0, 16, 65, 192), strides="hnd")
_DECODED = replace(_PAGED, new=1, counts=True, pairs=8, table_rows=200, lengths=(3, 191, 192, 64))
_CAUSAL = (("causal", True),)
_CASES = {
    "decode": _PLAIN,
    "decode-wide": _WIDE,
    "decode-widest": replace(_WIDE, dims=(256, 256), dtype="bfloat16", float8="numbers"),
    "one-head": replace(_PLAIN, heads=(2, 2), float8="mixed"),
    "odd-widths": replace(_WIDE, dims=(80, 144), queries=3, options=_CAUSAL),
    "narrow-and-wide": replace(_WIDE, dims=(16, 240), float8="each", queries=2),
    "many-queries": replace(_WIDE, queries=70, options=_CAUSAL, float8="each", heads=(4, 1)),
    "appended": replace(_PLAIN, new=2, queries=2, pairs=16, table_rows=200, options=_CAUSAL,
                        lengths=(0, 63, 198), float8="mixed"),
    "together": replace(_PLAIN, strides="together"),
    "softcap": replace(_WIDE, queries=2, options=(("softcap", 3.0), *_CAUSAL), float8="each"),
    "slopes": replace(_PLAIN, queries=3, slopes=True, sinks=True, options=_CAUSAL),
    "window": replace(_WIDE, queries=4, options=(("window_size", (20, 0)),), sinks=True),
    "everything": replace(_PLAIN, queries=2, slopes=True, sinks=True,
                          options=(("softcap", 2.0), ("window_size", (70, 0)), ("scale", 0.3))),
    "pages": _PAGED,
    "pages-of-8": replace(_PAGED, slots=8, pages=24, strides="nhd", float8="ones"),
    "pages-of-8-wide": replace(_PAGED, slots=8, pages=24, strides="nhd", dims=(128, 128)),
    "pages-of-128": replace(_PAGED, slots=128, pages=2, dims=(128, 256), dtype="float16"),
    "pages-appended": _DECODED,
    "pages-causal": replace(_DECODED, queries=3, new=3, options=_CAUSAL, slopes=True),
    "entries": replace(_PLAIN, kind="indexed", lengths=(0, 64, 200)),
    "padding": replace(_PLAIN, kind="indexed", lengths=(0, 64, 100, 200), leftpad=(0, 3, 99, 37)),
}  # fmt: skip


@pytest.mark.in_turns(by="case", days=4)
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(case: CacheCase) -> None:
    """Unused bytes are NaN: those in free pages and those after the lengths."""
    built = build(case)
    plans: list[Any] = []
    with host_cupy() as host, observe(plans.append):
        check(built, *attended(host, built, "fa3"))
    assert [plan.algorithm for plan in plans if "k" in plan.problem.shapes][-1] == "fa3"


@st.composite
def _drawn(draw: Any) -> CacheCase:
    """Draw a case for the copy engine: widths are multiples of 16, pages multiples of 8."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def number(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    kind = one("plain", "indexed", "paged")
    slots = one(8, 16, 64) if kind == "paged" else number(1, 150)
    pages = number(1, 160 // slots) if kind == "paged" else 1
    new = one(None, number(0, min(4, slots)))
    room = slots * pages - (new or 0)
    lengths = tuple(number(0, room) for _ in range(number(1, 3)))
    leftpad = tuple(number(0, n) for n in lengths) if kind != "paged" and one(0, 1) else None
    d, dv = 16 * number(1, 16), 16 * number(1, 16)
    pairs = number(0, d // 2) if new is not None else 0
    heads = number(1, 2)
    options = {"causal": one(True, False), "window_size": one(None, (0, 0), (70, None), (3, 1))}
    options |= {"softcap": one(None, 2.0), "scale": one(None, 0.2)}
    return CacheCase(
        dtype=one("float16", "bfloat16"), kind=kind, strides=one("nhd", "hnd", "together"),
        lengths=lengths, slots=slots, pages=pages, queries=number(1, 4), new=new,
        heads=(heads * number(1, 3), heads), dims=(d, one(d, dv)), leftpad=leftpad, pairs=pairs,
        interleaved=one(True, False), table_rows=200 * bool(pairs), options=tuple(options.items()),
        slopes=one(True, False), sinks=one(True, False), float8=one(*SCALES), seed=number(0, 2**20),
    )  # fmt: skip


@settings(max_examples=30)
@given(_drawn())
def test_any_float8_caches(case: CacheCase) -> None:
    built = build(case)
    with host_cupy() as host:
        check(built, *attended(host, built, "fa3"))


@pytest.mark.parametrize("kind", ["plain", "paged"])
def test_parts_of_keys_add_up(kind: str) -> None:
    """Keys in chunks, each with its own scaled result, and in one piece; sinks are applied once."""
    case = replace(_WIDE, lengths=(0, 1, 130, 512), slots=512, sinks=True, float8="each")
    if kind == "paged":
        case = replace(case, kind="paged", slots=64, pages=8)
    built = build(case)
    for chunk in (0, 64, 256):
        with host_cupy() as host:
            more = {"blocks": (64, 64), "kv_chunk": chunk}
            check(built, *attended(host, built, "fa3", **more))


@pytest.mark.parametrize("blocks", [(64, 64), (64, 128)])
def test_every_tile(blocks: tuple[int, int]) -> None:
    built = build(replace(_WIDE, float8="each", queries=2, lengths=(0, 127, 128, 200)))
    with host_cupy() as host:
        check(built, *attended(host, built, "fa3", blocks=blocks))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    built = build(replace(_PLAIN, lengths=(200, 77, 3, 150, 0, 199), float8="each"))
    with host_cupy() as host:
        _, _, (out, lse) = attended(host, built, "fa3")
        for b in range(2):
            arrays = {n: a[b : b + 1] for n, a in {**built.arrays, **built.caches}.items()}
            arrays = {name: host.array(array) for name, array in arrays.items()}
            keywords = {**built.keywords, "return_lse": True, "algorithm": "fa3"}
            alone = host.call(cuflash.attention_with_kvcache, **arrays, **keywords)
            assert same_bits(alone[0].peek(), out.peek()[b : b + 1])
            assert same_bits(alone[1].peek(), lse.peek()[b : b + 1])


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_every_byte_is_its_number(dtype: Any) -> None:
    """With one key the output is its values, and the log-sum-exp its score; NaN stays NaN."""
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256)
    numbers = every.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    q = np.zeros((16, 1, 1, 256), dtype)
    k = np.zeros((16, 1, 1, 256), np.uint8)
    for entry in range(16):  # the query selects a column; every entry has another byte there
        q[entry, ..., 16 * entry] = 1
        k[entry, ..., 16 * entry] = 17 * entry
    arrays = {"q": q, "k_cache": k, "v_cache": np.repeat(every, 16, axis=0)}
    arrays["cache_seqlens"] = np.ones(16, np.int32)
    with host_cupy() as host:
        out, lse = host.call(
            cuflash.attention_with_kvcache,
            **{name: host.array(array) for name, array in arrays.items()},
            cache_dtype="float8_e4m3fn", k_scale=0.375, v_scale=8.0, scale=1.0, return_lse=True,
        )  # fmt: skip
        found, scores = out.peek().astype(np.float64), lse.peek()
    expected = 0.375 * numbers[0, 0, 0, 17 * np.arange(16)]
    values = np.repeat(8.0 * numbers, 16, axis=0)
    values[np.isnan(expected)] = np.nan
    assert np.array_equal(found, values, equal_nan=True)
    assert np.allclose(scores[:, 0, 0], expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_number_becomes_the_nearest_byte(dtype: Any, scale: float) -> None:
    """The nearest by ml_dtypes, whose own conversion does not saturate."""
    every = np.arange(65536, dtype=np.uint16).view(dtype).reshape(1, 16, 16, 256)
    quotient = every.astype(np.float32) / np.float32(scale)
    expected = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expected[np.isnan(quotient)] = 0x7F
    lengths = np.zeros(1, np.int32)
    given = {"k": every, "v": every, "cache_seqlens": lengths}
    caches = {name: np.full(every.shape, 0x55, np.uint8) for name in ("k_cache", "v_cache")}
    scales = {"k_scale": scale, "v_scale": np.array([scale], np.float32)}
    cuflash.append_kv(**given, **caches, **scales, cache_dtype="float8_e4m3fn")
    with host_cupy() as host:
        arrays = {name: host.array(array) for name, array in {**given, **caches}.items()}
        for name in caches:
            arrays[name][...] = 0x55
        own = {**scales, "v_scale": host.array(scales["v_scale"])}
        host.call(cuflash.append_kv, **arrays, **own, cache_dtype="float8_e4m3fn")
        for name, cache in caches.items():
            assert same_bits(cache, expected)
            assert same_bits(arrays[name].peek(), expected)


@settings(max_examples=30)
@given(st.data())
def test_appended_bytes_are_those_of_the_reference(data: Any) -> None:
    built = build(data.draw(cases(dtypes=("float16", "bfloat16"), appends=True, float8=True)))
    raw, _ = built.expected(attends=False)
    with host_cupy() as host:
        buffers, arrays = on_device(host, built)
        own = {name: arrays[name] for name in (*built.appended, "k_cache", "v_cache")}
        own.setdefault("overflow", host.array(np.full(built.case.batch, -7, np.int32)))
        host.call(cuflash.append_kv, **own, **built.keywords)
        assert all(same_bits(a.peek(), b) for a, b in zip(buffers, raw, strict=True))


def test_arrays_of_float8_need_no_word() -> None:
    built = build(_PLAIN)
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        for name in ("k_cache", "v_cache"):
            arrays[name] = arrays[name].view(ml_dtypes.float8_e4m3fn)
        results = host.call(cuflash.attention_with_kvcache, **arrays, return_lse=True)
        check(built, raw, arrays, results)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dims": (72, 64)}, "fa3 loads through the copy engine"),
        ({"dims": (64, 8)}, "fa3 loads through the copy engine"),
        ({"strides": "gaps"}, "fa3 loads through the copy engine"),
        ({"kind": "paged", "slots": 12, "pages": 4, "lengths": (3,)}, "pages of a multiple of 8"),
        ({"kind": "paged", "slots": 16, "pages": 4, "lengths": (30,), "leftpad": (1,)},
         "fa3 takes no cache_leftpad beside a page_table"),
    ],
)  # fmt: skip
def test_what_fa3_does_not_take_is_refused(change: dict[str, Any], said: str) -> None:
    """No other algorithm reads float8 caches for so many queries, and no cache is written."""
    many = {"queries": 17, "new": 1, "lengths": (3,), "slots": 20}
    built = build(replace(_PLAIN, **{**many, **change}))
    with host_cupy() as host:
        raw, arrays = on_device(host, built)
        with pytest.raises(cuflash.UnsupportedError, match=said) as raised:
            host.call(cuflash.attention_with_kvcache, **arrays, **built.keywords)
        assert "does not read float8 caches (k_scale and v_scale)" in str(raised.value)
        assert all(same_bits(a.peek(), b) for a, b in zip(raw, built.raw, strict=True))


@pytest.mark.parametrize(
    ("architecture", "algorithm"), [("80", "auto"), ("86", "fa2"), ("90", "fa1")]
)
def test_other_kernels_refuse_float8_caches(architecture: str, algorithm: str) -> None:
    built = build(replace(_PLAIN, new=1, lengths=(3,)))
    with host_cupy(architecture) as host:
        raw, arrays = on_device(host, built)
        said = r"fa[12] does not read float8 caches \(k_scale and v_scale\) here: fa3 does"
        with pytest.raises(cuflash.UnsupportedError, match=said):
            host.call(
                cuflash.attention_with_kvcache, **arrays, **built.keywords, algorithm=algorithm
            )
        assert all(same_bits(a.peek(), b) for a, b in zip(raw, built.raw, strict=True))
