"""Refusals of ``cuflash.jax`` and their messages; imports with and without JAX."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .jax_case import draw, jax, jnp

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
Q, KV = (2, 5, 4, 8), (2, 9, 2, 8)
#: Keywords that Flax's modules pass to an attention function.
FLAX = (
    "dropout_rate",
    "dropout_rng",
    "broadcast_dropout",
    "deterministic",
    "dtype",
    "precision",
    "module",
    "force_fp32_for_softmax",
    "qk_attn_weights_einsum",
    "attn_weights_value_einsum",
)

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": (5, 8)}, VALUE, r"query: got 2 axes \(5, 8\); expected \(batch, seqlen, heads"),
    ({"query": Q[1:]}, VALUE, r"key: got 4 axes .*; expected 3 axes, as query has"),
    ({"key": (3, *KV[1:])}, VALUE, "key: got batch 3; expected 2, as query has"),
    ({"key": (*KV[:3], 7)}, VALUE, "key: got head_dim 7; expected 8, as query has"),
    ({"value": (2, 4, 2, 8)}, VALUE, "value: got seqlen_kv 4; expected 9, as key has"),
    ({"value": (2, 9, 4, 8)}, VALUE, "value: got heads_kv 4; expected 2, as key has"),
    ({"key": (2, 9, 3, 8), "value": (2, 9, 3, 8)}, VALUE, "key: got 3 heads beside 4 of query"),
    ({"value": (2, 9, 2, 300)}, VALUE, "value: got head_dim 300; expected 1 to 256"),
    ({"value": "bfloat16"}, TYPE, "value: got dtype bfloat16; expected float32, as query has"),
    ({"query": "int32"}, TYPE, "query: got dtype int32; expected one of"),
    ({"query": None}, TYPE, "query: got builtins.NoneType; expected an array"),
    ({"key": ...}, TYPE, "key: got builtins.ellipsis; expected an array"),
    ({"is_causal": 1}, TYPE, "is_causal: got 1; expected True or False"),
    ({"return_lse": None}, TYPE, "return_lse: got None"),
    (
        {"deterministic_gradients": 0},
        TYPE,
        "deterministic_gradients: got 0; expected True or False",
    ),
    (
        {"residual_dtype": "float16"},
        TYPE,
        "residual_dtype: got float16 for float32 inputs; expected",
    ),
    ({"residual_dtype": "int8"}, TYPE, r"residual_dtype: got dtype\('int8'\); expected one of"),
    ({"scale": 0}, VALUE, "scale: got 0; expected a finite positive number"),
    ({"scale": "1"}, TYPE, "scale: got '1'"),
    ({"scale": np.ones(1)}, TYPE, r"scale: got array\(\[1.\]\); expected a number"),
    ({"scale": np.asarray(True)}, TYPE, "scale: got True; expected a number"),
    ({"q_offset": 0.5}, TYPE, "q_offset: got 0.5; expected an integer or None"),
    ({"algorithm": "cudnn"}, VALUE, "algorithm: got 'cudnn'"),
]


def _call(change: dict[str, Any]) -> dict[str, Any]:
    call = dict(zip(("query", "key", "value"), draw(Q, KV, KV, dtype="float32"), strict=True))
    for name, value in change.items():
        if isinstance(value, tuple):
            call[name] = jnp.ones(value, "float32")
        elif name in call and isinstance(value, str):
            call[name] = call[name].astype(value)
        else:
            call[name] = value
    return call


@pytest.mark.parametrize(("change", "error", "says"), BAD, ids=lambda item: str(item)[:40])
def test_a_bad_call_names_the_argument(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    call = _call(change)
    ran: list[Any] = []
    with dispatch.observe(ran.append):
        with pytest.raises(error, match=says):
            attention(**call)
        is_array = {name: isinstance(value, jax.Array) for name, value in call.items()}
        arrays = {name: value for name, value in call.items() if is_array[name]}
        others = {name: value for name, value in call.items() if not is_array[name]}
        with pytest.raises(error, match=says):  # while tracing, before anything is lowered
            jax.make_jaxpr(lambda given: attention(**given, **others))(arrays)
    assert not ran


def test_traced_options_are_refused() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    says = "scale: got an array that JAX is tracing; .*: multiply query by a traced one, and give"
    with pytest.raises(TYPE, match=says):
        jax.jit(lambda scale: attention(q, k, v, scale=scale))(0.5)
    with pytest.raises(TYPE, match="is_causal: got"):
        jax.jit(lambda causal: attention(q, k, v, is_causal=causal))(True)
    with pytest.raises(TYPE, match="dropout_rate: got an array that JAX is tracing"):
        jax.jit(lambda rate: attention(q, k, v, dropout_rate=rate))(0.0)


@pytest.mark.parametrize(
    "scale",
    [np.float32(0.5), np.asarray(0.5), jnp.asarray(0.5), jnp.bfloat16(0.5), np.float16(0.5)],
)
def test_a_scale_may_be_an_array_without_axes(scale: Any) -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    expected = attention(q, k, v, scale=0.5)
    assert (attention(q, k, v, scale=scale) == expected).all()
    assert (jax.jit(lambda *qkv: attention(*qkv, scale=scale))(q, k, v) == expected).all()


def test_a_traced_scale_by_way_of_the_query() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    by_query = jax.jit(lambda factor: attention(q * factor, k, v, scale=1))
    assert (by_query(0.5) == attention(q, k, v, scale=0.5)).all()


def test_a_scale_that_cannot_be_read() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    gone = jnp.asarray(0.5)
    gone.delete()
    with pytest.raises(TYPE, match=r"scale: got an array that cannot be read .*deleted"):
        attention(q, k, v, scale=gone)


def test_an_algorithm_that_the_platform_lacks_is_named() -> None:
    q, k, v = draw(Q, KV, KV, dtype="float32")
    for function in (attention, jax.jit(attention, static_argnames="algorithm")):
        with pytest.raises(cuflash.UnsupportedError, match="fa3 is for Hopper"):
            function(q, k, v, algorithm="fa3")


def test_its_arguments_are_jaxs_flaxs_or_its_own() -> None:
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    mine = inspect.signature(attention).parameters
    own = {"q_offset", "return_lse", "softcap", "score_mod", "alibi_slopes", "sinks", "algorithm"}
    own |= {"block_mask", "deterministic_gradients", "residual_dtype"}
    own |= {"cu_seqlens_q", "cu_seqlens_kv"}
    own |= {"return_residual"} - set(theirs)  # older versions of JAX lack it
    assert set(mine) - set(theirs) == own | set(FLAX)
    assert [n for n in theirs if n in mine] == [n for n in mine if n in theirs]
    for name in set(mine) & set(theirs):
        assert (mine[name].kind, mine[name].default) == (theirs[name].kind, theirs[name].default)
    q, k, v = draw(Q, KV, KV, dtype="float32")
    for name in set(theirs) - set(mine):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            attention(q, k, v, **{name: None})


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=lambda t: t.__name__)
def test_a_tracer_is_sent_here(transform: Any) -> None:
    (q,) = draw(Q, dtype="float32")
    wanted = r"{}: got jax\..*Tracer.*; expected .* call cuflash\.jax\.attention"
    layout = "shd" if transform is jax.vmap else "bshd"
    with pytest.raises(TYPE, match=wanted.format("q")):
        transform(lambda x: cuflash.attention(x, x, x, layout=layout).sum())(q)
    with pytest.raises(TYPE, match=wanted.format("q")):
        transform(lambda x: cuflash.attention_vjp(x, x, x, layout=layout)[0].sum())(q)
    with pytest.raises(TYPE, match=wanted.format("dout")):
        transform(lambda x: cuflash.attention_backward(x, x, x, x, x, x, layout=layout)[0])(q)
    with pytest.raises(TYPE, match=wanted.format("v")):
        transform(lambda x: cuflash.attention(q, q, x))(q)


def test_lists_and_numpy_arrays_are_taken() -> None:
    q, k, v = draw((2, 2, 4), (3, 1, 4), (3, 1, 4), dtype="float32")
    expected = attention(q, k, v)
    assert (attention(q.tolist(), k.tolist(), v.tolist()) == expected).all()
    assert (attention(*(jax.device_get(array) for array in (q, k, v))) == expected).all()


_WITHOUT_JAX = """
import sys
sys.modules["{missing}"] = None  # an import of it raises ImportError
import cuflash
try:
    import cuflash.jax
except cuflash.BackendUnavailableError as error:
    assert isinstance(error, ImportError) and isinstance(error, cuflash.CuflashError)
    assert "pip install 'cuflash[jax]'" in str(error), error
else:
    raise AssertionError("no error")
import numpy
q = numpy.ones((1, 2, 1, 4), numpy.float32)
assert (cuflash.attention(q, q, q, backend="numpy") == 1).all()
print("works")
"""


@pytest.mark.parametrize("missing", ["jax", "jax.experimental.buffer_callback"])
def test_without_jax_the_import_says_what_to_install(root: Path, missing: str) -> None:
    command = [sys.executable, "-c", _WITHOUT_JAX.format(missing=missing)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "works", done.stderr
