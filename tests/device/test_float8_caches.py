"""Float8 caches on the device, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from .common import skip_without

#: Lengths at edges of tiles, 0, and the whole capacity.
_PLAIN = CacheCase(
    "bfloat16", lengths=(0, 1, 63, 64, 1000, 2047, 2048), slots=2048, queries=1, new=None,
    heads=(16, 4), dims=(128, 128), float8="each",
)  # fmt: skip
_PAGED = replace(_PLAIN, kind="paged", slots=16, pages=128)
_CAUSAL = (("causal", True),)
_CASES = {
    "decode": _PLAIN,
    "decode-float16": replace(_PLAIN, dtype="float16", float8="ones"),
    "decode-d64": replace(_PLAIN, dims=(64, 64), float8="numbers"),
    "decode-d256": replace(_PLAIN, dims=(256, 256), float8="mixed"),
    "odd-widths": replace(_PLAIN, dims=(80, 144), queries=3, options=_CAUSAL),
    "many-queries": replace(_PLAIN, queries=70, options=_CAUSAL),
    "appended": replace(_PLAIN, new=2, queries=2, pairs=32, table_rows=2100, options=_CAUSAL,
                        lengths=(0, 63, 1000, 2046)),
    "softcap": replace(_PLAIN, queries=2, options=(("softcap", 3.0), *_CAUSAL)),
    "slopes": replace(_PLAIN, queries=3, slopes=True, sinks=True, options=_CAUSAL),
    "window": replace(_PLAIN, queries=4, options=(("window_size", (400, 0)),), sinks=True),
    "together": replace(_PLAIN, strides="together", float8="numbers"),
    "pages-of-16": _PAGED,
    "pages-of-8-d64": replace(_PAGED, slots=8, pages=256, dims=(64, 64), dtype="float16"),
    "pages-of-64-d256": replace(_PAGED, slots=64, pages=32, dims=(256, 256)),
    "pages-appended": replace(_PAGED, new=1, counts=True, pairs=32, table_rows=2100),
    "heads-first": replace(_PAGED, strides="hnd"),
    "entries": replace(_PLAIN, kind="indexed"),
    "padding": replace(_PLAIN, kind="indexed", leftpad=(0, 0, 3, 37, 999, 5, 64)),
}  # fmt: skip


def _attended(cp: Any, built: Built, **options: Any) -> tuple[list[Any], Any]:
    raw = [cp.asarray(buffer) for buffer in built.raw]
    arrays = {name: cp.asarray(array) for name, array in built.arrays.items()}
    arrays |= dict(zip(("k_cache", "v_cache"), built.views(raw), strict=True))
    given = {**arrays, **built.keywords, **built.options, **options}
    return raw, cuflash.attention_with_kvcache(**given, return_lse=True)


@pytest.mark.parametrize("algorithm", ["auto", "fa3"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(cp: Any, case: CacheCase, algorithm: str) -> None:
    """Unused bytes are NaN. Few queries have a kernel of FlashAttention-2."""
    skip_without("fa3")
    built = build(case)
    truth, truth_lse, expected, _ = built.expected()
    raw, (out, lse) = _attended(cp, built, algorithm=algorithm)
    check_close(case, out.get(), truth)
    check_close(case, lse.get(), truth_lse)
    assert all(same_bits(a.get(), b) for a, b in zip(raw, expected, strict=True))


@pytest.mark.parametrize("blocks", [(64, 64), (64, 128)])
@pytest.mark.parametrize("chunk", [0, 128, 1024])
def test_the_same_bits_every_time(cp: Any, blocks: tuple[int, int], chunk: int) -> None:
    skip_without("fa3")
    built = build(replace(_PLAIN, lengths=(2048, 77, 1300) * 8))
    options = {"blocks": blocks, "kv_chunk": chunk}
    truth, *_ = build(replace(_PLAIN, lengths=(2048, 77, 1300) * 8)).expected()
    _, (first, first_lse) = _attended(cp, built, **options)
    check_close(built.case, first.get(), truth)
    for _ in range(30):
        _, (out, lse) = _attended(cp, built, **options)
        assert same_bits(out.get(), first.get())
        assert same_bits(lse.get(), first_lse.get())


def test_every_byte_is_its_number(cp: Any) -> None:
    skip_without("fa3")
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256)
    numbers = every.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        q, k = np.zeros((1, 1, 1, 256), dtype), np.zeros((1, 1, 1, 256), np.uint8)
        given = {"q": q, "k_cache": k, "v_cache": every, "cache_seqlens": np.ones(1, np.int32)}
        out = cuflash.attention_with_kvcache(
            **{name: cp.asarray(array) for name, array in given.items()},
            cache_dtype="float8_e4m3fn", k_scale=1.0, v_scale=8.0,
        )  # fmt: skip
        found = out.get().astype(np.float64)
        assert np.array_equal(found, 8.0 * numbers, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_number_becomes_the_nearest_byte(cp: Any, dtype: Any, scale: float) -> None:
    """The same bytes as on the host, on any device."""
    every = np.arange(65536, dtype=np.uint16).view(dtype).reshape(1, 16, 16, 256)
    lengths, caches = np.zeros(1, np.int32), np.zeros((2, *every.shape), np.uint8)
    told = {"cache_dtype": "float8_e4m3fn", "k_scale": scale, "v_scale": scale}
    cuflash.append_kv(every, every, *caches, cache_seqlens=lengths, **told)
    on_device = cp.zeros(caches.shape, np.uint8)
    given = cp.asarray(every), cp.asarray(every), on_device[0], on_device[1]
    cuflash.append_kv(*given, cache_seqlens=cp.asarray(lengths), **told)
    assert same_bits(on_device.get(), caches)
