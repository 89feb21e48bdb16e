"""FlashAttention-2's kernel for few queries on the emulated device, called as a user does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.dispatch import observe

from ..kit.caches import CacheCase, build
from ..kit.case import Case
from ..kit.data import arrays
from ..kit.few_rows import WAYS, few_rows
from ..kit.float8 import SCALES
from ..kit.packed_queries import build_packed
from .build import compiler
from .host_cupy import host_cupy
from .test_paged_caches import attended, check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Lengths at edges of a warp's tile, of all warps' tiles, and of chunks of 256 keys.
_PLAIN = CacheCase(
    "bfloat16", lengths=(0, 1, 16, 127, 129, 256, 513, 700), slots=700, queries=1, new=None,
    heads=(4, 2), dims=(64, 64),
)  # fmt: skip
_WIDE = replace(_PLAIN, dims=(128, 128), dtype="float16", lengths=(15, 300, 512))
_PAGED = replace(_PLAIN, kind="paged", slots=16, pages=40, lengths=(0, 17, 128, 640), strides="hnd")
_CAUSAL = (("causal", True),)
_CASES = {
    "decode": _PLAIN,
    "wide": _WIDE,
    "steep": replace(_WIDE, options=(("scale", 1.0),)),
    "widest": replace(_WIDE, dims=(256, 256), lengths=(300,), slots=300),
    "two-widths": replace(_WIDE, dims=(192, 128), heads=(5, 1), lengths=(299,), slots=300),
    "three-parts": replace(_PLAIN, dims=(64, 96), lengths=(300,), slots=300),
    "narrow": replace(_PLAIN, dims=(24, 40), heads=(2, 2)),
    "sixteen-heads": replace(_WIDE, heads=(16, 1), lengths=(400,)),
    "sixteen-queries": replace(_WIDE, queries=16, lengths=(3, 300), heads=(2, 2), options=_CAUSAL),
    "features": replace(_PLAIN, queries=3, slopes=True, sinks=True, options=_CAUSAL),
    "window": replace(_WIDE, queries=4, options=(("window_size", (290, 0)), ("softcap", 2.0))),
    "drafts": replace(_WIDE, queries=8, heads=(8, 2), lengths=(5, 300, 513), slots=520,
                      options=_CAUSAL),
    "drafts-of-three-heads": replace(_PLAIN, queries=7, heads=(6, 2), options=_CAUSAL, sinks=True),
    "drafts-of-two-parts": replace(_PLAIN, queries=16, heads=(4, 1), lengths=(1, 9, 300),
                                   options=(("window_size", (33, 2)),)),
    "drafts-of-forty-heads": replace(_WIDE, queries=3, heads=(40, 1), lengths=(2, 300),
                                     options=_CAUSAL),
    "drafts-two-widths": replace(_WIDE, queries=5, heads=(4, 1), dims=(192, 128), lengths=(3, 290),
                             slots=300, options=_CAUSAL),
    "drafts-float8": replace(_WIDE, queries=6, heads=(8, 2), float8="each", lengths=(3, 257, 512),
                             options=(*_CAUSAL, ("softcap", 2.0))),
    "drafts-in-pages": replace(_PAGED, queries=4, heads=(8, 2), options=_CAUSAL, sinks=True),
    "heads-with-sinks": replace(_PLAIN, sinks=True, heads=(6, 2)),
    "narrow-window": replace(_PLAIN, options=(("window_size", (20, 0)),)),
    "pages": _PAGED,
    "pages-of-9": replace(_PAGED, slots=9, pages=60, lengths=(9, 300), new=1, counts=True),
    "padding": replace(_PLAIN, kind="indexed", lengths=(300, 600), leftpad=(37, 555)),
    "pages-of-padding": replace(_PAGED, leftpad=(0, 3, 100, 299), strides="together"),
    "float8": replace(_WIDE, float8="each", lengths=(3, 257, 512)),
    "float8-pages": replace(_PAGED, float8="mixed", dims=(128, 64), lengths=(33, 640)),
    "float8-widest": replace(_WIDE, float8="each", dims=(256, 256), lengths=(300,)),
}  # fmt: skip


@pytest.mark.in_turns(by="case", days=4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_attention_is_that_of_the_reference(case: CacheCase, way: str) -> None:
    """Rows that do not count, free pages and places after the lengths hold NaN."""
    built, plans = build(case), []
    with host_cupy() as host, few_rows(way, 256), observe(plans.append):
        check(built, *attended(host, built, "auto"))
    entries = [launch.config.entry for plan in plans for launch in plan.launches]
    assert "cuflash_fa2_forward_few" in entries
    assert ("cuflash_steps_merge" in entries) == (way == "split")


@pytest.mark.parametrize("name", ["wide", "pages", "padding", "window", "features", "float8",
                                  "drafts", "drafts-float8", "drafts-of-two-parts"])  # fmt: skip
def test_every_way_has_the_same_bits(name: str) -> None:
    """It does not matter which kernel merges, how many rows a block has, or the multiprocessors."""
    built, found = build(_CASES[name]), []
    for way, sms in (("split", 132), ("merging", 132), ("merging", 2), ("fewest rows", 132)):
        with host_cupy("90", sms) as host, few_rows(way, 128):
            _, _, results = attended(host, built, "auto")
            found.append([result.peek() for result in results])
    for other in found[1:]:
        for one, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(one, first)


def test_more_chunks_than_a_warp_has_lanes() -> None:
    """The merge continues with the references of the 32 chunks before."""
    case = replace(_PLAIN, heads=(4, 1), lengths=(2200,), slots=2200, dtype="float16")
    built, found = build(case), []
    built.caches["k_cache"][0, 2048:] *= 3  # the references rise there
    for way in WAYS:
        with host_cupy() as host, few_rows(way, 64):
            raw, arrays, results = attended(host, built, "auto")
            check(built, raw, arrays, results)
            found.append([result.peek() for result in results])
    for other in found[1:]:
        for one, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(one, first)


def test_merging_rounds_every_sum_as_split_keys_do() -> None:
    """A small log-sum-exp shows the last bits of the sum of weights."""
    case = replace(_PLAIN, heads=(4, 1), lengths=(700, 690, 680), dtype="float16")
    built, found = build(case), []
    built.arrays["q"][...] = 1
    for entry, length in enumerate(case.lengths):
        keys = built.caches["k_cache"][entry, :length]
        keys *= 0.3
        keys -= np.float16(np.log(length) / 8)  # so that a score is -log(length), about
        keys[100 * entry] = 0  # and one is 0
    for way in WAYS:
        with host_cupy() as host, few_rows(way, 64):
            found.append(attended(host, built, "auto")[2][1].peek())
    assert abs(found[0] - np.log(2)).max() < 0.25
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@st.composite
def _drawn(draw: Any) -> CacheCase:
    """A case that the kernel takes: 16-bit rows of whole chunks of 16 bytes."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def number(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    float8 = one("", "", *SCALES)
    step = 16 if float8 else 8
    kind = one("plain", "indexed", "paged")
    slots = number(1, 40) if kind == "paged" else number(1, 600)
    pages = number(1, 1 + 600 // slots) if kind == "paged" else 1
    new = one(None, number(0, min(4, slots)))
    room = slots * pages - (new or 0)
    lengths = tuple(number(0, room) for _ in range(number(1, 3)))
    leftpad = tuple(number(0, n) for n in lengths) if one(0, 1) else None
    d, dv = step * number(1, 256 // step), step * number(1, 256 // step)
    heads = number(1, 2)
    options = {"causal": one(True, False), "window_size": one(None, (0, 0), (270, None), (30, 1))}
    options |= {"softcap": one(None, 2.0), "scale": one(None, 0.2)}
    return CacheCase(
        dtype=one("float16", "bfloat16"), kind=kind, strides=one("nhd", "hnd", "together"),
        lengths=lengths, slots=slots, pages=pages, queries=one(1, 1, number(1, 16)), new=new,
        heads=(heads * one(1, 2, 3, 4, 6, 10, 16), heads), dims=(d, one(d, dv)), leftpad=leftpad,
        options=tuple(options.items()), slopes=one(True, False), sinks=one(True, False),
        float8=float8, seed=number(0, 2**20),
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_packed_queries(way: str) -> None:
    """An entry has more queries than was said, and rows of no entry fill more than a tile."""
    case = replace(_PLAIN, heads=(2, 2), sinks=True, options=_CAUSAL, lengths=(65, 0, 7, 300))
    built = build_packed(case, (1, 3, 0, 12), 19)
    with host_cupy() as host, few_rows(way, 64), observe(_takes_few):
        check(built, *attended(host, built, "auto", max_seqlen_q=7))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [(6, 2), (40, 1)])
def test_packed_queries_of_heads_that_share_keys(heads: tuple[int, int], way: str) -> None:
    """A tile ends inside the queries of a block, and an entry has several tiles."""
    case = replace(_PLAIN, heads=heads, options=_CAUSAL, lengths=(65, 0, 7, 300))
    built = build_packed(case, (1, 35, 0, 30), 19)
    with host_cupy() as host, few_rows(way, 64), observe(_takes_few):
        check(built, *attended(host, built, "auto", max_seqlen_q=4))


def _takes_few(plan: Any) -> None:
    assert any(launch.config.kernel == "forward_few" for launch in plan.launches)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_row_that_sees_nan_is_nan(name: str, way: str) -> None:
    """Also where all scores are NaN that a warp, a chunk or a block computes."""
    built = build(replace(_PLAIN, lengths=(600,), slots=600))
    given = built.arrays["q"][0, 0, 1:2] if name == "q" else built.caches["k_cache"][0, 512:, 0]
    given[...] = np.nan
    with host_cupy() as host, few_rows(way, 256):
        out, lse = (result.peek() for result in attended(host, built, "auto")[2])
    lost = [False, True, False, False] if name == "q" else [True, True, False, False]
    assert np.isnan(np.asarray(out, float)[0, 0]).all(axis=-1).tolist() == lost
    assert np.isnan(lse[0, :, 0]).tolist() == lost


def test_chunks_of_float8_caches_are_whole_tiles() -> None:
    """No other kernel of FlashAttention-2 is given bytes."""
    built = build(_CASES["float8"])
    with host_cupy("89") as host, pytest.raises(cuflash.ArgumentValueError, match="kv_chunk: got"):
        attended(host, built, "auto", kv_chunk=48)


@settings(max_examples=20)
@given(_drawn(), st.sampled_from(WAYS), st.sampled_from([64, 128, 256, None]))
def test_any_caches(case: CacheCase, way: str, chunk: int | None) -> None:
    built = build(case)
    with host_cupy() as host, few_rows(way, chunk):
        check(built, *attended(host, built, "auto"))


@pytest.mark.parametrize("chunk", [0, 64, 192, None])
def test_attention_with_few_queries(chunk: int | None) -> None:
    """The function without caches takes the same kernel, and merges in a kernel of its own."""
    x = arrays(Case(2, 6, 2, 1, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    truth = cuflash.reference.attention(x["q"], x["k"], x["v"])[0]
    with host_cupy("90", 4) as host:
        out, lse = host.call(cuflash.attention, **x, kv_chunk=chunk, return_lse=True)
        np.testing.assert_allclose(np.asarray(out, float), truth, atol=2e-3, rtol=2e-3)
        asked = host.call(cuflash.attention, **x, blocks=(64, 64), return_lse=True)
        np.testing.assert_allclose(np.asarray(lse), np.asarray(asked[1]), rtol=1e-5)


@pytest.mark.parametrize("heads", [(8, 2), (3, 3)])
def test_attention_without_caches_has_every_way(heads: tuple[int, int]) -> None:
    """The bits are those of split keys, whose chunk a caller can ask for."""
    x = arrays(Case(2, *heads, 8, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    with host_cupy("90", 4) as host:
        asked = host.call(cuflash.attention, **x, **options, kv_chunk=64)
    for way in WAYS:
        plans: list[Any] = []
        with host_cupy("90", 4) as host, few_rows(way, 64), observe(plans.append):
            found = host.call(cuflash.attention, **x, **options)
        (plan,) = plans
        assert plan.tile.rows == (32 if heads == (8, 2) and way != "fewest rows" else 16)
        assert plan.tile.chunk == (0 if way == "split" else 64)
        for one, first in zip(found, asked, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(first))


def test_heads_that_share_keys_have_their_own_sinks_where_keys_are_whole() -> None:
    x = arrays(Case(2, 6, 2, 5, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    x["sinks"] = np.linspace(-3, 9, 6, dtype=np.float32)
    truth, lse = cuflash.reference.attention(**x, causal=True)[:2]
    with host_cupy("90", 4) as host, observe(_takes_few):
        found = host.call(cuflash.attention, **x, causal=True, kv_chunk=0, return_lse=True)
    np.testing.assert_allclose(np.asarray(found[0], float), truth, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(np.asarray(found[1]), lse, atol=1e-3)


def test_rows_beyond_the_used_lengths_are_zero() -> None:
    """They are rows of the same tile as those that count."""
    x = arrays(Case(2, 4, 2, 5, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    used = {"seqused_q": np.array([2, 0], np.int32), "seqused_kv": np.array([300, 17], np.int32)}
    truth = cuflash.reference.attention(x["q"], x["k"], x["v"], **used)[0]
    with host_cupy("90", 4) as host, observe(_takes_few):
        out, lse = host.call(cuflash.attention, **x, **used, return_lse=True)
    np.testing.assert_allclose(np.asarray(out, float), truth, atol=2e-3, rtol=2e-3)
    for entry, count in enumerate(used["seqused_q"]):
        assert not np.asarray(out)[entry, count:].any()
        assert np.isneginf(np.asarray(lse)[entry, :, count:]).all()
