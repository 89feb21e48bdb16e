"""``cuflash.jax.attention_with_kvcache`` with float8 caches, by the handler and by Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from ..kit.caches import CacheCase, build, check_close, same_bits
from ..kit.float8 import bytes_of_numbers
from ..kit.jax_caches import check_caches, in_jax
from .common import skip_without
from .test_jax import jax

__all__ = ["jax"]

_PLAIN = CacheCase(
    "bfloat16", lengths=(0, 1, 63, 64, 1000, 2046), slots=2048, queries=2, new=2, heads=(16, 4),
    dims=(128, 128), pairs=32, table_rows=2100, counts=True, options=(("causal", True),),
    float8="each",
)  # fmt: skip
_CASES = {
    "rotated": _PLAIN,
    "rows-of-64-bytes": replace(_PLAIN, dims=(64, 64), dtype="float16", float8="numbers"),
    "odd-widths": replace(_PLAIN, dims=(80, 144), pairs=0, float8="mixed"),
    "wide": replace(_PLAIN, dims=(256, 256), float8="ones"),
    "nothing-new": replace(_PLAIN, new=None, queries=1, pairs=0, counts=False),
    "features": replace(
        _PLAIN, slopes=True, sinks=True, options=(("softcap", 3.0), ("window_size", (400, 0)))
    ),
    "pages": replace(_PLAIN, kind="paged", slots=16, pages=128),
    "entries": replace(_PLAIN, kind="indexed", leftpad=(0, 1, 3, 37, 999, 5)),
}
_SHAPES = (2, 1, 8, 64), (2, 1, 2, 64), (2, 1, 2, 64)
_CACHE = (2, 64, 2, 64)


def _caches(seed: int) -> list[Any]:
    """Bytes of two caches."""
    rng = np.random.default_rng(seed)
    return [bytes_of_numbers(rng, _CACHE) for _ in range(2)]


def _of_float8(jax: Any, stored: Any) -> Any:
    """An array of JAX of its own memory, which may be donated."""
    return jax.numpy.array(stored.view(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_every_result_is_that_of_the_reference(jax: Any, case: CacheCase) -> None:
    from cuflash.jax import attention_with_kvcache

    skip_without("fa3")
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    arrays, keywords = in_jax(built, jax)
    step = jax.jit(lambda arrays: attention_with_kvcache(**arrays, **keywords, return_lse=True))
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        out, *caches, counted, lse = step(arrays)
        jax.block_until_ready(out)
    assert not ran  # neither the tiled NumPy code nor a call that plans by itself
    assert next(iter(out.devices())).platform == "gpu"
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    check_caches(built, raw, caches, arrays)
    assert np.asarray(counted).tolist() == np.asarray(overflow).tolist()


def test_a_loop_of_tokens_does_what_calls_of_the_library_do(cp: Any, jax: Any) -> None:
    """The bits are the same; donated caches stay where they are and are not copied."""
    from cuflash.jax import attention_with_kvcache

    skip_without("fa3")
    rng = np.random.default_rng(3)
    new = [rng.standard_normal((40, *shape)).astype(np.float16) for shape in _SHAPES]
    stored = _caches(4)
    scale = rng.uniform(0.3, 2, (2, 2)).astype(np.float32)

    def loop(new: Any, k_cache: Any, v_cache: Any, scale: Any) -> Any:
        def body(carried: Any, step: Any) -> Any:
            *caches, length = carried
            q, k, v = step
            options = {"cache_seqlens": length, "causal": True, "k_scale": scale, "v_scale": 0.02}
            out, *caches, _ = attention_with_kvcache(q, *caches, k, v, **options)
            return (*caches, length + 1), out

        return jax.lax.scan(body, (k_cache, v_cache, jax.numpy.int32(5)), new)

    given = [_of_float8(jax, cache) for cache in stored]
    places = [cache.unsafe_buffer_pointer() for cache in given]
    more = [jax.numpy.asarray(array) for array in new], jax.numpy.asarray(scale)
    compiled = jax.jit(loop, donate_argnums=(1, 2)).lower(more[0], *given, more[1]).compile()
    text = compiled.as_text()
    assert "f8e4m3fn[2,64,2,64]{3,2,1,0} copy(" not in text
    assert "bitcast-convert(" not in text
    (*caches, length), outs = compiled(more[0], *given, more[1])
    assert [cache.unsafe_buffer_pointer() for cache in caches] == places
    assert int(length) == 45
    natives = [cp.asarray(cache) for cache in stored]
    for t in range(40):
        q, k, v = (cp.asarray(array[t]) for array in new)
        out = cuflash.attention_with_kvcache(
            q, *natives, k, v, cache_seqlens=cp.full(2, 5 + t, np.int32), causal=True,
            cache_dtype="float8_e4m3fn", k_scale=cp.asarray(scale), v_scale=0.02,
        )  # fmt: skip
        assert same_bits(np.asarray(outs[t]), out.get())
    for cache, native in zip(caches, natives, strict=True):
        assert same_bits(np.asarray(cache).view(np.uint8), native.get())


def test_scales_are_read_as_the_computation_runs(cp: Any, jax: Any) -> None:
    """One computation takes other scales, of every shape that scales may have."""
    from cuflash.jax import attention_with_kvcache

    skip_without("fa3")
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in _SHAPES)
    stored, lengths = _caches(6), np.array([3, 60], np.int32)
    arrays = [jax.numpy.asarray(array) for array in (q, k, v)]
    caches = [_of_float8(jax, cache) for cache in stored]

    traced: list[Any] = []

    @jax.jit
    def step(k_scale: Any, v_scale: Any) -> Any:
        traced.append(k_scale.shape)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return attention_with_kvcache(
            arrays[0], *caches, *arrays[1:], cache_seqlens=lengths, **scales
        )

    for shape in ((), (1,), (2, 2)):
        for _ in range(3):
            scales = [rng.uniform(0.3, 2, shape).astype(np.float32) for _ in range(2)]
            out, *after, _ = step(*scales)
            natives = [cp.asarray(cache) for cache in stored]
            given = dict(zip(("k_scale", "v_scale"), map(cp.asarray, scales), strict=True))
            expected = cuflash.attention_with_kvcache(
                cp.asarray(q), *natives, cp.asarray(k), cp.asarray(v), **given,
                cache_seqlens=cp.asarray(lengths), cache_dtype="float8_e4m3fn",
            )  # fmt: skip
            assert same_bits(np.asarray(out), expected.get())
            for cache, native in zip(after, natives, strict=True):
                assert same_bits(np.asarray(cache).view(np.uint8), native.get())
    assert traced == [(), (1,), (2, 2)]


def test_other_algorithms_are_refused_when_it_is_lowered(jax: Any) -> None:
    from cuflash.jax import attention_with_kvcache

    q, cache = jax.numpy.ones(_SHAPES[0], "float16"), _of_float8(jax, _caches(7)[0])
    given: dict[str, Any] = {"cache_seqlens": 3, "k_scale": 1.0, "v_scale": 1.0}
    step = jax.jit(lambda q, c: attention_with_kvcache(q, c, c, **given, algorithm="fa1"))
    with pytest.raises(cuflash.UnsupportedError, match="fa1 does not read float8 caches"):
        step.lower(q, cache)
