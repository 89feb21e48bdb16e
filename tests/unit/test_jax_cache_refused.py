"""What ``cuflash.jax.attention_with_kvcache`` refuses, and when."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import cuflash

from .jax_case import cpu_mesh, draw, jax, jnp

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.jax import attention_with_kvcache

Q, NEW, CACHE = (2, 3, 4, 8), (2, 3, 2, 8), (2, 16, 2, 8)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _given(dtype: str = "float32", **changed: Any) -> dict[str, Any]:
    q, k, v, k_cache, v_cache = draw(Q, NEW, NEW, CACHE, CACHE, dtype=dtype)
    given = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": 4}
    given |= changed
    return {name: value for name, value in given.items() if value is not None}


def _zeros(*shape: int, dtype: str = "float32") -> Any:
    return jnp.zeros(shape, dtype)


_TABLES = {"rotary_cos": _zeros(16, 4), "rotary_sin": _zeros(16, 4)}


def test_the_arguments_are_those_of_the_library() -> None:
    """Except destinations, ``overflow``, ``backend``, ``cache_dtype`` and packed queries."""
    theirs = inspect.signature(cuflash.attention_with_kvcache).parameters
    mine = inspect.signature(attention_with_kvcache).parameters
    others = ("overflow", "out", "lse_out", "backend", "cache_dtype")
    others += ("cu_seqlens_q", "max_seqlen_q")
    assert [*mine] == [n for n in theirs if n not in others]
    assert all(mine[n].default == theirs[n].default for n in mine)
    assert all(mine[n].kind == theirs[n].kind for n in mine)


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"k": None}, VALUE, "k: got None beside v"),
        ({"k_cache": None}, TypeError, "missing 1 required positional argument: 'k_cache'"),
        ({"k_cache": "x"}, TYPE, "k_cache: got builtins.str; expected an array"),
        ({"q": _zeros(3, 4, 8)}, VALUE, "q: got shape (3, 4, 8)"),
        ({"q": _zeros(2, 3, 5, 8)}, VALUE, "k_cache: got 2 heads beside 5 of q"),
        ({"v_cache": _zeros(2, 15, 2, 8)}, VALUE, "v_cache: got shape (2, 15, 2, 8)"),
        ({"k": _zeros(2, 3, 2, 8, dtype="bfloat16")}, TYPE, "k: got dtype bfloat16"),
        ({"cache_seqlens": None}, TypeError, "missing 1 required keyword-only argument"),
        ({"cache_seqlens": True}, TYPE, "cache_seqlens: got True"),
        ({"cache_seqlens": 4.0}, TYPE, "cache_seqlens: got 4.0"),
        ({"cache_seqlens": 17}, VALUE, "cache_seqlens: got 17; expected 0 to 16"),
        ({"cache_seqlens": -(2**40)}, VALUE, "cache_seqlens: got -1099511627776"),
        ({"cache_seqlens": _zeros(2)}, TYPE, "cache_seqlens: got dtype float32"),
        ({"cache_seqlens": _zeros(3, dtype="int32")}, VALUE, "cache_seqlens: got shape (3,)"),
        ({"page_table": _zeros(3, 1, dtype="int32")}, VALUE, "page_table: got shape (3, 1)"),
        ({"cache_leftpad": _zeros(1, dtype="int32")}, VALUE, "cache_leftpad: got shape (1,)"),
        ({"rotary_cos": _zeros(16, 4)}, VALUE, "rotary_interleaved: got None beside rotary_cos"),
        ({"rotary_interleaved": True}, VALUE, "rotary_interleaved: got True"),
        ({**_TABLES, "rotary_interleaved": 1}, TYPE, "rotary_interleaved: got 1"),
        (
            {**_TABLES, "rotary_interleaved": True, "k": None, "v": None},
            VALUE,
            "rotary_cos: got an array and no new tokens",
        ),
        ({"alibi_slopes": _zeros(3)}, VALUE, "alibi_slopes: got shape (3,)"),
        ({"sinks": _zeros(3)}, VALUE, "sinks: got shape (3,)"),
        ({"causal": 1}, TYPE, "causal: got 1"),
        ({"window_size": (-1, 0)}, VALUE, "window_size: got (-1, 0)"),
        ({"softcap": "x"}, TYPE, "softcap: got 'x'"),
        ({"kv_chunk": -1}, VALUE, "kv_chunk: got -1"),
        ({"algorithm": "fa4"}, VALUE, "algorithm: got 'fa4'"),
        ({"return_lse": 1}, TYPE, "return_lse: got 1"),
    ],
)
def test_while_it_is_traced(changed: dict[str, Any], kind: type, says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        jax.eval_shape(lambda: attention_with_kvcache(**_given(**changed)))


def test_a_traced_keyword() -> None:
    given = _given()
    with pytest.raises(TYPE, match=r"^scale: got an array that JAX is tracing"):
        jax.jit(lambda scale: attention_with_kvcache(**given, scale=scale))(0.5)
    attention_with_kvcache(**given, scale=jnp.float32(0.5))


def test_what_numpy_has_not_is_said_when_it_is_lowered() -> None:
    with pytest.raises(cuflash.UnsupportedError, match="fa3 is for Hopper"):
        attention_with_kvcache(**_given(), algorithm="fa3")


@pytest.mark.parametrize("lengths", [(17, 0), (0, -1)])
def test_lengths_out_of_range_are_an_error_of_the_computation(lengths: tuple[int, int]) -> None:
    given = _given(cache_seqlens=jnp.array(lengths, "int32"))
    with pytest.raises(Exception, match=r"cache_seqlens: got a length of .* expected 0 to 16"):
        jax.block_until_ready(attention_with_kvcache(**given))


@pytest.mark.parametrize("name", ["q", "k_cache", "v"])
def test_there_are_no_derivatives(name: str) -> None:
    given = _given()
    moving = given.pop(name)

    def loss(array: Any) -> Any:
        return attention_with_kvcache(**given, **{name: array})[0].sum()

    says = r"attention_with_kvcache has no derivatives: caches have no gradient"
    for derive in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(cuflash.UnsupportedError, match=says):
            derive(moving)
    with pytest.raises(cuflash.UnsupportedError, match=says):
        jax.jvp(loss, (moving,), (moving,))
    fixed = jax.grad(lambda array: array.sum() + loss(jax.lax.stop_gradient(array)))(moving)
    assert (fixed == 1).all()


def test_there_is_no_axis_for_vmap() -> None:
    given = _given()
    q = given.pop("q")
    for transform in (lambda f: f, jax.jit):
        mapped = transform(jax.vmap(lambda q: attention_with_kvcache(q, **given)[0]))
        with pytest.raises(cuflash.UnsupportedError, match=r"^jax.vmap of .*have a batch axis"):
            mapped(q[None])


def test_other_platforms_and_processes() -> None:
    given, name = _given(), "cuflash.jax.attention_with_kvcache"
    step = jax.jit(lambda given: attention_with_kvcache(**given))
    with pytest.raises(cuflash.UnsupportedError, match=f"^{name} is compiled for one platform"):
        step.trace(given).lower(lowering_platforms=("tpu",))
    export = pytest.importorskip("jax.export")
    with pytest.raises(cuflash.UnsupportedError, match=f"^jax.export cannot take {name}:"):
        export.export(step)(given)
    serialise = pytest.importorskip("jax.experimental.serialize_executable").serialize
    with pytest.raises(cuflash.UnsupportedError, match=f"{name} cannot be serialised"):
        serialise(step.lower(given).compile())


def test_a_mesh_of_explicit_axes() -> None:
    """Divided types are refused, but inside ``jax.shard_map`` no type is divided."""
    mesh = cpu_mesh(4, explicit=True)
    heads = jax.sharding.PartitionSpec(None, None, "x")
    with jax.sharding.use_mesh(mesh) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(mesh):
        given = {
            name: jax.device_put(
                jnp.tile(array, (1, 1, 4, 1)), jax.sharding.NamedSharding(mesh, heads)
            )
            for name, array in _given().items()
            if name != "cache_seqlens"
        }
        with pytest.raises(VALUE, match=r"^q: got an array divided as .*inside jax.shard_map"):
            jax.jit(lambda given: attention_with_kvcache(**given, cache_seqlens=4))(given)

        def step(given: Any) -> Any:
            return attention_with_kvcache(**given, cache_seqlens=4)[:3]

        each = jax.shard_map(step, in_specs=heads, out_specs=heads)
        for got, name in zip(jax.jit(each)(given), ("q", "k_cache", "v_cache"), strict=True):
            assert got.shape == given[name].shape
