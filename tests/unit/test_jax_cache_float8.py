"""``cuflash.jax.attention_with_kvcache`` with float8 caches on the CPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash

from ..kit.caches import CacheCase, build, cases, check_close, same_bits
from ..kit.jax_caches import check_caches, in_jax
from .jax_case import alike, cpu_mesh, draw, jax, jnp, wide

__all__ = ["wide"]

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.jax import attention_with_kvcache

Q, NEW, CACHE = (2, 1, 4, 8), (2, 1, 2, 8), (2, 16, 2, 8)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
P = jax.sharding.PartitionSpec


def _drawn(dtype: str = "float16", **changed: Any) -> dict[str, Any]:
    """Arguments by name, with caches full of random numbers."""
    shapes = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "k": NEW, "v": NEW}
    arrays = dict(zip(shapes, draw(*shapes.values(), dtype=dtype), strict=True))
    for name in ("k_cache", "v_cache"):
        arrays[name] = arrays[name].astype("float8_e4m3fn")
    given = {**arrays, "cache_seqlens": 4, "k_scale": 0.37, "v_scale": 1.7, **changed}
    return {name: value for name, value in given.items() if value is not None}


def _same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert same_bits(np.asarray(a), np.asarray(b))


@settings(max_examples=60)
@given(cases(dtypes=("float16", "bfloat16"), float8=True))
def test_every_result_is_that_of_the_reference(case: CacheCase) -> None:
    """The library gives the same results for the same bytes."""
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    arrays, keywords = in_jax(built, jax)
    out, *caches, counted, lse = attention_with_kvcache(**arrays, **keywords, return_lse=True)
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    assert (out.dtype, lse.dtype) == (case.dtype, "float32")
    assert (counted.dtype, counted.tolist()) == ("int32", overflow.tolist())
    check_caches(built, raw, caches, arrays)
    given = {**built.arrays, **built.caches, **built.keywords, **built.options}
    own, own_lse = cuflash.attention_with_kvcache(**given, return_lse=True)
    finite = np.isfinite(own_lse)
    alike(np.asarray(out)[np.isfinite(own)], own[np.isfinite(own)])
    alike(np.asarray(lse)[finite], own_lse[finite])
    assert all(same_bits(a, b) for a, b in zip(built.raw, raw, strict=True))


def test_donated_caches_are_written_in_place() -> None:
    """The scales are traced, so the compiled computation takes other scales too."""
    arguments = _drawn(cache_seqlens=jnp.array([3, 15], "int32"))
    arguments |= {"k_scale": jnp.float32(0.37), "v_scale": jnp.full((2, 2), 1.7, "float32")}
    caches = {name: arguments.pop(name) for name in ("k_cache", "v_cache")}
    before = {name: np.array(cache) for name, cache in caches.items()}
    places = [cache.unsafe_buffer_pointer() for cache in caches.values()]
    step = jax.jit(lambda c, a: attention_with_kvcache(**c, **a), donate_argnums=0)
    compiled = step.lower(caches, arguments).compile()
    assert " copy(" not in compiled.as_text()
    assert "f8e4m3fn[2,16,2,8]" in compiled.as_text()
    for factor in (1, 2):
        scales = {name: factor * arguments[name] for name in ("k_scale", "v_scale")}
        out, *after, overflow = compiled(caches, arguments | scales)
        assert all(cache.is_deleted() for cache in caches.values())
        assert [cache.unsafe_buffer_pointer() for cache in after] == places
        natives = {n: np.asarray(a) for n, a in {**arguments, **scales}.items()} | before
        alike(out, cuflash.attention_with_kvcache(**natives))
        _same(after, before.values())
        assert overflow.tolist() == [0, 0]
        caches = dict(zip(caches, after, strict=True))


def test_a_loop_does_what_steps_do() -> None:
    new = draw(*[(6, *shape) for shape in (Q, NEW, NEW)], dtype="bfloat16", seed=1)
    caches = [jnp.zeros(CACHE, "float8_e4m3fn")] * 2
    scales = {"k_scale": jnp.array([[0.5, 0.3], [2, 0.7]], "float32"), "v_scale": 0.02}

    def body(carried: Any, step: Any) -> Any:
        *caches, length = carried
        q, k, v = step
        out, *caches, _ = attention_with_kvcache(
            q, *caches, k, v, cache_seqlens=length, causal=True, **scales
        )
        return (*caches, length + 1), out

    loop = jax.jit(lambda new, *a: jax.lax.scan(body, a, new), donate_argnums=(1, 2))
    start = [cache + 0 for cache in caches]
    compiled = loop.lower(new, *start, jnp.int32(2)).compile()
    assert "f8e4m3fn[2,16,2,8]{3,2,1,0} copy(" not in compiled.as_text()
    (*after, _), outs = compiled(new, *start, jnp.int32(2))
    for t, step in enumerate(zip(*new, strict=True)):
        (*caches, _), out = body((*caches, jnp.int32(2 + t)), step)
        alike(outs[t], out)
    _same(after, caches)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
@pytest.mark.parametrize("traced", [False, True])
def test_a_scale_may_be_a_number_or_an_array(shape: tuple[int, ...], traced: bool) -> None:
    arguments = _drawn()
    expected = attention_with_kvcache(**arguments)
    scales = {n: jnp.full(shape, arguments.pop(n), "float32") for n in ("k_scale", "v_scale")}
    if traced:
        got = jax.jit(lambda scales: attention_with_kvcache(**arguments, **scales))(scales)
    else:
        got = attention_with_kvcache(**arguments, **scales)
    _same(got, expected)


@pytest.mark.usefixtures("wide")
def test_a_traced_number_of_python_is_float32() -> None:
    """A traced Python number is float32 even if JAX has float64; a float64 array is refused."""
    arguments = _drawn(k_scale=None)
    step = jax.jit(lambda scale: attention_with_kvcache(**arguments, k_scale=scale))
    for scale in (0.37, 2):
        _same(step(scale), attention_with_kvcache(**arguments, k_scale=scale))
    with pytest.raises(TYPE, match=r"^k_scale: got dtype float64; expected float32"):
        step(jnp.float64(0.37))


def test_numbers_are_part_of_the_computation() -> None:
    """Scales that are numbers are constants: another number gives another computation."""
    arguments = _drawn(k_scale=None)
    step = jax.jit(lambda a, s: attention_with_kvcache(**a, k_scale=s), static_argnums=1)
    traced = [step(arguments, scale) for scale in (0.37, 0.9)]
    eager = [attention_with_kvcache(**arguments, k_scale=scale) for scale in (0.37, 0.9)]
    for one, other in zip(traced, eager, strict=True):
        _same(one, other)
    out, k_cache, v_cache, _ = (
        same_bits(np.asarray(one), np.asarray(other)) for one, other in zip(*eager, strict=True)
    )
    assert (out, k_cache, v_cache) == (False, False, True)


def test_without_new_tokens_the_caches_are_those_that_were_given() -> None:
    arguments = _drawn(k=None, v=None)
    out, k_cache, v_cache, overflow = attention_with_kvcache(**arguments)
    assert k_cache is arguments["k_cache"]
    assert v_cache is arguments["v_cache"]
    assert overflow.tolist() == [0, 0]
    natives = {n: np.asarray(a) if hasattr(a, "shape") else a for n, a in arguments.items()}
    alike(out, cuflash.attention_with_kvcache(**natives))


def test_nothing_is_called_where_there_are_no_entries() -> None:
    q, new = draw((0, 1, 4, 8), (0, 1, 2, 8), dtype="float16")
    given: dict[str, Any] = {"cache_seqlens": 0, "page_table": jnp.zeros((0, 3), "int32")}
    scales = {"k_scale": 2.0, "v_scale": jnp.zeros((0, 2))}
    pages = _drawn()["k_cache"]
    step = jax.jit(lambda p: attention_with_kvcache(q, p, p, new, new, **given, **scales))
    assert "custom_call" not in step.lower(pages).as_text()
    out, *caches, overflow = step(pages)
    assert (out.shape, out.dtype, overflow.shape) == (q.shape, q.dtype, (0,))
    _same(caches, (pages, pages))


@pytest.mark.parametrize("divided", [0, 2], ids=["batch", "heads"])
@pytest.mark.parametrize("way", ["gathered", "shard_map"])
def test_on_several_devices(way: str, divided: int) -> None:
    """Scales of each entry and head are divided as the caches are."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    shapes = ((4, 3, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8), (4, 3, 4, 8), (4, 3, 4, 8))
    q, k_cache, v_cache, k, v = draw(*shapes, dtype="float16")
    caches = (k_cache.astype("float8_e4m3fn"), v_cache.astype("float8_e4m3fn"))
    scale = jnp.linspace(0.3, 2, 16, dtype="float32").reshape(4, 4)
    arrays = (q, *caches, k, v, scale, jnp.array([3, 0, 12, 13], "int32"))

    def step(*a: Any) -> Any:
        scales = {"k_scale": a[5], "v_scale": 1.7}
        return attention_with_kvcache(*a[:5], **scales, cache_seqlens=a[6], causal=True)[:3]

    each, mesh, spec = step, cpu_mesh(4), P(*[None] * divided, "x")
    of_scale, of_lengths = (P("x"), P("x")) if divided == 0 else (P(None, "x"), P())
    specs = (*[spec] * 5, of_scale, of_lengths)
    if way == "shard_map":
        each = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(spec,) * 3)
    placed = [
        jax.device_put(array, jax.sharding.NamedSharding(mesh, one))
        for array, one in zip(arrays, specs, strict=True)
    ]
    text = jax.jit(each).lower(*placed).compile().as_text()
    assert ("all-gather" in text) == (way == "gathered")
    out, *after = jax.jit(each)(*placed)
    expected, *expected_after = step(*arrays)
    alike(out, expected)
    _same(after, expected_after)


_WRONG: list[tuple[dict[str, Any], type, str]] = [
    ({"k_scale": None}, TYPE, "k_scale: got None beside float8 caches"),
    ({"v_scale": None}, TYPE, "v_scale: got None beside float8 caches"),
    ({"k_scale": 0.0}, VALUE, "k_scale: got 0.0; expected a positive number"),
    ({"v_scale": float("nan")}, VALUE, "v_scale: got nan"),
    ({"k_scale": True}, TYPE, "k_scale: got True; expected a number"),
    ({"k_scale": 1j}, TYPE, "k_scale: got 1j; expected a number"),
    ({"k_scale": "one"}, TYPE, "k_scale: got builtins.str; expected an array"),
    ({"k_scale": jnp.ones((2, 2), "float16")}, TYPE, "k_scale: got dtype float16"),
    ({"k_scale": jnp.ones((), "int32")}, TYPE, "k_scale: got dtype int32; expected float32"),
    ({"v_scale": jnp.ones(2)}, VALUE, "v_scale: got shape (2,)"),
    ({"v_scale": jnp.ones((2, 4))}, VALUE, "v_scale: got shape (2, 4)"),
    ({"k_cache": jnp.zeros(CACHE, "float16")}, TYPE, "k_cache: got dtype float16"),
    ({"v_cache": jnp.zeros(CACHE, "uint8")}, TYPE, "v_cache: got dtype uint8; expected float8"),
    ({"v_cache": jnp.zeros((2, 15, 2, 8), "float8_e4m3fn")}, VALUE, "v_cache: got shape"),
    ({"v": jnp.zeros(NEW, "bfloat16")}, TYPE, "v: got dtype bfloat16; expected float16"),
    ({"cache_seqlens": 17}, VALUE, "cache_seqlens: got 17; expected 0 to 16"),
]


@pytest.mark.parametrize(("changed", "kind", "says"), _WRONG, ids=[one[2] for one in _WRONG])
def test_refused_while_it_is_traced(changed: dict[str, Any], kind: type, says: str) -> None:
    arguments = _drawn(**changed)
    for name in ("k_scale", "v_scale"):
        if name in changed and changed[name] is None:
            arguments[name] = None
    with pytest.raises(kind, match=f"^{re.escape(says)}") as raised:
        jax.eval_shape(lambda: attention_with_kvcache(**arguments))
    assert type(raised.value) is kind
    assert "cache_dtype" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float8_e5m2"])
def test_refused_of_other_dtypes(dtype: str) -> None:
    """Float32 queries of float8 caches are refused, and so are caches of three other dtypes."""
    caches = {name: jnp.zeros(CACHE, dtype) for name in ("k_cache", "v_cache")}
    if dtype == "float32":
        wider = {name: _drawn()[name].astype(dtype) for name in "qkv"}
        with pytest.raises(TYPE, match=r"^q: got dtype float32; .* beside float8 caches"):
            attention_with_kvcache(**_drawn(**wider))
        with pytest.raises(VALUE, match=r"^k_scale: got 0.37; expected None: it goes with float8"):
            attention_with_kvcache(**_drawn(dtype, **caches))
        return
    with pytest.raises(TYPE, match=rf"^k_cache: got dtype {dtype}; expected .*float"):
        attention_with_kvcache(**_drawn(**caches, k_scale=None, v_scale=None))


def test_what_is_neither_derived_nor_mapped() -> None:
    arguments = _drawn()
    scale = jnp.float32(arguments.pop("k_scale"))

    def of(scale: Any) -> Any:
        return attention_with_kvcache(**arguments, k_scale=scale)[0].sum()

    with pytest.raises(cuflash.UnsupportedError, match="has no derivatives"):
        jax.grad(of)(scale)
    with pytest.raises(cuflash.UnsupportedError, match="have a batch axis"):
        jax.vmap(of)(scale[None])


def test_what_numpy_has_not_is_said_when_it_is_lowered() -> None:
    with pytest.raises(cuflash.UnsupportedError, match="fa3 is for Hopper"):
        attention_with_kvcache(**_drawn(), algorithm="fa3")
