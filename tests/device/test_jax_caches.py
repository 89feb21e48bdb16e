"""``cuflash.jax.attention_with_kvcache`` on the device, with the handler and with callbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from ..kit.caches import CacheCase, build, check_close, same_bits
from ..kit.jax_caches import check_caches, in_jax
from .common import skip_without
from .test_jax import jax

__all__ = ["jax"]

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17, 31), slots=32, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),),
)  # fmt: skip
_PAGED = replace(_CASE, kind="paged", slots=16, pages=2)
_CASES = {
    "rotated": _CASE,
    "positions": replace(_CASE, positions=(0, 5, 9, 1), queries=1),
    "plain": replace(_CASE, pairs=0, slopes=True, sinks=True),
    "nothing new": replace(_CASE, new=None, pairs=0, counts=False),
    "pages": _PAGED,
    "entries": replace(_CASE, kind="indexed", pairs=0),
    "padding": replace(_CASE, leftpad=(1, 0, 17, 20)),
    "one token": replace(
        _CASE, queries=1, new=1, heads=(16, 2), dims=(128, 128), lengths=(0, 100, 900, 1023),
        slots=1024, pairs=64, table_rows=1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["auto", "fa2", "fa3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_every_result_is_that_of_the_reference(
    jax: Any, case: CacheCase, dtype: str, algorithm: str
) -> None:
    from cuflash.jax import attention_with_kvcache

    skip_without(algorithm)
    if algorithm == "fa3" and dtype in ("float32", "float64"):
        pytest.skip("FlashAttention-3 takes 16-bit arrays")
    built = build(replace(case, dtype=dtype))
    truth, truth_lse, raw, overflow = built.expected()
    arrays, keywords = in_jax(built, jax)
    keywords |= {"return_lse": True, "algorithm": algorithm}
    step = jax.jit(lambda arrays: attention_with_kvcache(**arrays, **keywords))
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        out, *caches, counted, lse = step(arrays)
        jax.block_until_ready(out)
    assert not ran  # neither the tiled NumPy code nor a call that plans by itself
    check_close(built.case, out, truth)
    check_close(built.case, lse, truth_lse)
    check_caches(built, raw, caches, arrays)
    assert np.asarray(counted).tolist() == np.asarray(overflow).tolist()


def test_tokens_that_do_not_fit_are_counted_and_nothing_else_is_written(jax: Any) -> None:
    """Lengths out of range are clamped."""
    from cuflash.jax import attention_with_kvcache

    built = build(replace(_CASE, pairs=0, lengths=(32, 31, 30, 29)))
    lengths = np.array([40, 31, -5, 29], np.int32)
    names = ("q", "k_cache", "v_cache", "k", "v")
    arrays = [jax.numpy.asarray({**built.arrays, **built.caches}[name]) for name in names]
    step = jax.jit(lambda lengths, *a: attention_with_kvcache(*a, cache_seqlens=lengths))
    _, *caches, overflow = step(lengths, *arrays)
    assert overflow.tolist() == [3, 2, 0, 0]
    written = {(1, 31), (2, 0), (2, 1), (2, 2), (3, 29), (3, 30), (3, 31)}
    for before, after in zip(arrays[1:3], caches, strict=True):
        bits = (np.asarray(array).view("u2") for array in (before, after))
        changed = np.not_equal(*bits).any((2, 3))
        assert {tuple(place) for place in np.argwhere(changed).tolist()} == written


@pytest.mark.parametrize("algorithm", ["auto", "fa3"])
def test_a_loop_of_tokens_does_what_calls_of_the_library_do(
    cp: Any, jax: Any, algorithm: Any
) -> None:
    """The bits are the same; donated caches are updated in place."""
    from cuflash.jax import attention_with_kvcache

    skip_without(algorithm)
    rng = np.random.default_rng(3)
    shapes = [(40, 2, 1, heads, 64) for heads in (8, 2, 2)] + [(2, 64, 2, 64)] * 2
    *new, k_cache, v_cache = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)

    def loop(new: Any, k_cache: Any, v_cache: Any) -> Any:
        def body(carried: Any, step: Any) -> Any:
            *caches, length = carried
            q, k, v = step
            options = {"cache_seqlens": length, "causal": True, "algorithm": algorithm}
            out, *caches, _ = attention_with_kvcache(q, *caches, k, v, **options)
            return (*caches, length + 1), out

        return jax.lax.scan(body, (k_cache, v_cache, jax.numpy.int32(5)), new)

    given = [jax.numpy.asarray(cache) for cache in (k_cache, v_cache)]
    places = [cache.unsafe_buffer_pointer() for cache in given]
    compiled = jax.jit(loop, donate_argnums=(1, 2)).lower(new, *given).compile()
    assert "f16[2,64,2,64]{3,2,1,0} copy(" not in compiled.as_text()
    (*caches, length), outs = compiled([jax.numpy.asarray(array) for array in new], *given)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == places
    assert int(length) == 45
    natives = [cp.asarray(array) for array in (k_cache, v_cache)]
    for t in range(40):
        q, k, v = (cp.asarray(array[t]) for array in new)
        lengths = cp.full(2, 5 + t, np.int32)
        out = cuflash.attention_with_kvcache(
            q, *natives, k, v, cache_seqlens=lengths, causal=True, algorithm=algorithm
        )
        assert same_bits(np.asarray(outs[t]), out.get())
    assert all(same_bits(np.asarray(a), b.get()) for a, b in zip(caches, natives, strict=True))


def test_it_allocates_nothing(cp: Any, jax: Any) -> None:
    from cuflash.jax import attention_with_kvcache

    shapes = (2, 1, 8, 64), (2, 1, 2, 64), (2, 256, 2, 64)
    q, new, cache = (jax.numpy.ones(shape, "float16") for shape in shapes)
    step = jax.jit(
        lambda c, d, n: attention_with_kvcache(q, c, d, new, new, cache_seqlens=n, causal=True),
        donate_argnums=(0, 1),
    )
    caches = [cache, cache + 1]
    _, *caches, _ = step(*caches, 0)
    jax.block_until_ready(caches)
    cp.get_default_memory_pool().free_all_blocks()
    before = cp.get_default_memory_pool().total_bytes()
    for n in range(1, 9):
        _, *caches, _ = step(*caches, n)
    jax.block_until_ready(caches)
    assert cp.get_default_memory_pool().total_bytes() == before
