"""``cuflash.jax.attention_with_kvcache`` on the CPU: what it returns, and what is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash

from ..kit.caches import CacheCase, build, cases, check_close, same_bits
from ..kit.jax_caches import check_caches, in_jax
from .jax_case import alike, cpu_mesh, draw, jax, jnp, near, wide

__all__ = ["wide"]

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.jax import attention, attention_with_kvcache

Q, NEW, CACHE = (2, 1, 4, 8), (2, 1, 2, 8), (2, 16, 2, 8)
P = jax.sharding.PartitionSpec


def _draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    return draw(*shapes, dtype="float32", seed=seed)


def _check(case: CacheCase) -> None:
    """All results are those of the reference, and the given caches do not change."""
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    arrays, keywords = in_jax(built, jax)
    out, *caches, counted, lse = attention_with_kvcache(**arrays, **keywords, return_lse=True)
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    assert (out.dtype, lse.dtype) == (arrays["q"].dtype, truth_lse.astype(lse.dtype).dtype)
    assert (counted.dtype, counted.tolist()) == ("int32", overflow.tolist())
    check_caches(built, raw, caches, arrays)


@settings(max_examples=60)
@given(cases(dtypes=("float16", "bfloat16", "float32")))
def test_every_result_is_that_of_the_reference(case: CacheCase) -> None:
    _check(case)


@pytest.mark.usefixtures("wide")
def test_float64() -> None:
    _check(CacheCase("float64", pairs=3, table_rows=10, counts=True, options=(("causal", True),)))


def test_donated_caches_are_written_in_place() -> None:
    q, k, v, k_cache, v_cache = _draw(Q, NEW, NEW, CACHE, CACHE)
    lengths = jnp.array([3, 15], "int32")
    step = jax.jit(
        lambda *a: attention_with_kvcache(*a[:5], cache_seqlens=a[5]), donate_argnums=(1, 2)
    )
    whole = np.array(k_cache), np.array(v_cache)
    places = k_cache.unsafe_buffer_pointer(), v_cache.unsafe_buffer_pointer()
    compiled = step.lower(q, k_cache, v_cache, k, v, lengths).compile()
    assert " copy(" not in compiled.as_text()
    out, *caches, overflow = compiled(q, k_cache, v_cache, k, v, lengths)
    assert k_cache.is_deleted()
    assert v_cache.is_deleted()
    assert tuple(cache.unsafe_buffer_pointer() for cache in caches) == places
    natives = [np.asarray(q), *whole, np.asarray(k), np.asarray(v)]
    alike(out, cuflash.attention_with_kvcache(*natives, cache_seqlens=np.asarray(lengths)))
    assert all(same_bits(np.asarray(a), b) for a, b in zip(caches, whole, strict=True))
    assert overflow.tolist() == [0, 0]


def test_caches_that_are_one_array_become_two() -> None:
    q, k, v, cache = _draw(Q, NEW, NEW, CACHE)
    _, *caches, _ = jax.jit(lambda c: attention_with_kvcache(q, c, c, k, v, cache_seqlens=5))(cache)
    for after, new in zip(caches, (k, v), strict=True):
        assert same_bits(np.asarray(after), np.asarray(cache.at[:, 5:6].set(new)))


def test_without_new_tokens_the_caches_are_those_that_were_given() -> None:
    q, k_cache, v_cache = _draw((2, 3, 4, 8), CACHE, CACHE)
    results = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=[5, 0], return_lse=True)
    out, k_after, v_after, overflow, lse = results
    assert k_after is k_cache
    assert v_after is v_cache
    assert (overflow.dtype, overflow.tolist()) == ("int32", [0, 0])
    alike(out[:1], attention(q[:1], k_cache[:1, :5], v_cache[:1, :5]))
    assert not out[1].any()
    assert (lse[1] == -jnp.inf).all()


def _steps(count: int) -> tuple[list[Any], list[Any]]:
    new = _draw(*[(count, *shape) for shape in (Q, NEW, NEW)])
    return new, _draw(CACHE, CACHE, seed=1)


def test_a_loop_of_tokens_is_one_causal_pass() -> None:
    """A ``lax.scan`` carries the caches and the length, and does not copy the caches.

    Tokens after the last slot are counted in ``overflow``, and change no cache.
    """
    new, caches = _steps(20)

    def loop(new: Any, k_cache: Any, v_cache: Any) -> Any:
        def body(carried: Any, step: Any) -> Any:
            *caches, length = carried
            q, k, v = step
            given: dict[str, Any] = {"cache_seqlens": length, "causal": True}
            out, *caches, overflow = attention_with_kvcache(q, *caches, k, v, **given)
            return (*caches, jnp.minimum(length + 1, CACHE[1])), (out, overflow)

        return jax.lax.scan(body, (k_cache, v_cache, jnp.int32(0)), new)

    compiled = jax.jit(loop, donate_argnums=(1, 2)).lower(new, *caches).compile()
    assert "f32[2,16,2,8]{3,2,1,0} copy(" not in compiled.as_text()
    (k_cache, v_cache, _), (outs, overflow) = compiled(new, *caches)
    q, k, v = (jnp.swapaxes(array[:, :, 0], 0, 1) for array in new)
    alike(k_cache, k[:, :16])
    alike(v_cache, v[:, :16])
    near(*(np.float64(a) for a in (overflow[:, 0], np.arange(20) >= 16)))
    whole = attention(q[:, :16], k[:, :16], v[:, :16], is_causal=True)
    check_close(CacheCase("float32"), jnp.swapaxes(outs[:16, :, 0], 0, 1), np.float64(whole))


@pytest.mark.parametrize("kind", ["number", "scalar", "uint8", "int16", "list"])
def test_lengths_may_be_given_in_any_way(kind: str) -> None:
    q, k, v, k_cache, v_cache = _draw(Q, NEW, NEW, CACHE, CACHE)
    lengths: Any = {"number": 7, "scalar": jnp.int32(7), "list": [7, 7]}.get(kind)
    if lengths is None:
        lengths = jnp.full(2, 7, kind)
    expected = attention_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=jnp.full(2, 7, "int32")
    )
    got = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    for one, other in zip(got, expected, strict=True):
        assert same_bits(np.asarray(one), np.asarray(other))


def test_nothing_is_called_where_there_are_no_entries() -> None:
    q, new, pages = _draw((0, 1, 4, 8), (0, 1, 2, 8), CACHE)
    table = jnp.zeros((0, 3), "int32")
    step = jax.jit(
        lambda p: attention_with_kvcache(q, p, p, new, new, cache_seqlens=0, page_table=table)
    )
    assert "custom_call" not in step.lower(pages).as_text()
    out, k_cache, v_cache, overflow = step(pages)
    assert (out.shape, overflow.shape) == (q.shape, (0,))
    assert same_bits(np.asarray(k_cache), np.asarray(pages))
    assert same_bits(np.asarray(v_cache), np.asarray(pages))


@pytest.mark.parametrize("divided", [0, 2], ids=["batch", "heads"])
@pytest.mark.parametrize("way", ["gathered", "shard_map"])
def test_on_several_devices(way: str, divided: int) -> None:
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    spec = P(*[None] * divided, "x")
    shapes = ((4, 3, 8, 8), (4, 3, 4, 8), (4, 3, 4, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    q, k, v, k_cache, v_cache = _draw(*shapes)
    lengths = jnp.array([3, 0, 13, 15], "int32")
    of_lengths = P("x") if divided == 0 else P()

    def step(*a: Any) -> Any:
        return attention_with_kvcache(*a[:5], cache_seqlens=a[5], causal=True)

    def part(*a: Any) -> Any:
        *results, overflow = step(*a)  # JAX cannot know that all heads have the same overflow
        return (*results, jax.lax.pmax(overflow, "x") if divided else overflow)

    each, mesh = step, cpu_mesh(4)
    specs = ((spec,) * 5 + (of_lengths,), (spec, spec, spec, of_lengths))
    if way == "shard_map":
        each = jax.shard_map(part, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    arrays = [
        jax.device_put(array, jax.sharding.NamedSharding(mesh, one))
        for array, one in zip((q, k_cache, v_cache, k, v, lengths), specs[0], strict=True)
    ]
    text = jax.jit(each).lower(*arrays).compile().as_text()
    assert ("all-gather" in text) == (way == "gathered")
    expected = step(q, k_cache, v_cache, k, v, lengths)
    for one, other in zip(jax.jit(each)(*arrays), expected, strict=True):
        if one.dtype == "float32":
            alike(one, other)
        else:
            assert one.tolist() == other.tolist() == [0, 0, 0, 2]
