"""``cuflash.jax.attention`` inside the modules of Flax: Linen and NNX."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .jax_case import draw, formula, jax, jnp, near, wide
from .jax_mask_case import draw_mask

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention
linen = pytest.importorskip("flax.linen", reason="Flax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

pytestmark = pytest.mark.usefixtures("wide")

X = (2, 6, 16)
NUMBERS = "mask: got dtype float32; expected bool: dtype=bool where Flax makes the mask, or mask"
#: Shapes of masks for a batch of 2, 4 heads, 6 queries and 6 keys.
MASKS = [(2, 1, 6, 6), (2, 4, 6, 6), (1, 1, 6, 6), (1, 4, 1, 6), (2, 1, 6, 1)]


def _linen(attention_fn: Any = linen.dot_product_attention, **options: Any) -> Any:
    """A Linen module with parameters that do not depend on the attention function."""
    module = linen.MultiHeadDotProductAttention(
        num_heads=4, param_dtype=jnp.float64, attention_fn=attention_fn, **options
    )
    plain = linen.MultiHeadDotProductAttention(
        num_heads=4,
        param_dtype=jnp.float64,
        normalize_qk=options.get("normalize_qk", False),
        qkv_features=options.get("qkv_features"),
    )
    parameters = plain.init(jax.random.key(0), *draw(X))
    return functools.partial(module.apply, parameters)


def _plain(q: Any, k: Any, v: Any, *, mask: Any, is_causal: bool, **_: Any) -> Any:
    """Replaces NNX's own attention function, which rounds the weights to float32."""
    if mask is None or is_causal:
        return formula(q, k, v, mask=mask, is_causal=is_causal)
    return linen.dot_product_attention(q, k, v, mask=mask)


def _nnx(attention_fn: Any = _plain, **options: Any) -> Any:
    """An NNX module with parameters that do not depend on the attention function."""
    shared = {"in_features": 16, "decode": False, "param_dtype": jnp.float64, **options}
    shared["attention_fn"] = attention_fn
    return nnx.MultiHeadAttention(num_heads=4, rngs=nnx.Rngs(0), **shared)


MODULES = [_linen, _nnx]


def _loss(layer: Any, *others: Any, **options: Any) -> Any:
    return jax.value_and_grad(lambda x: jnp.sin(layer(x, *others, **options)).sum())


def _both(module: Any, *arrays: Any, **options: Any) -> None:
    """The loss and the gradient of the input agree with Flax's own function."""
    got, expected = (
        _loss(f, *arrays[1:], **options)(arrays[0]) for f in (module(attention), module())
    )
    near(got, expected)


@pytest.mark.parametrize("module", MODULES)
def test_without_a_mask_it_is_flaxs_own_attention(module: Any) -> None:
    (x, y) = draw(X, (2, 9, 16))
    _both(module, x)
    _both(module, x, y)
    _both(functools.partial(module, dropout_rate=0.5), x, deterministic=True)


def test_options_of_linen() -> None:
    (x,) = draw(X)
    for options in (
        {"precision": "highest"},
        {"precision": jax.lax.Precision.DEFAULT, "broadcast_dropout": False},
        {"normalize_qk": True, "qkv_features": 32},
    ):
        _both(functools.partial(_linen, **options), x)
    near(_linen(attention, force_fp32_for_softmax=True)(x), _linen()(x))


def test_options_of_nnx() -> None:
    (x,) = draw(X)
    _both(functools.partial(_nnx, num_kv_heads=2), x)
    _both(_nnx, x, is_causal=True)


def test_it_is_the_attention_of_nnx() -> None:
    (x,) = draw(X)
    for options in ({}, {"is_causal": True}):
        own = _nnx(nnx.dot_product_attention)(x, **options)
        assert jnp.abs(_nnx(attention)(x, **options) - own).max() < 2.0**-22 * jnp.abs(own).max()


@pytest.mark.parametrize("module", MODULES)
def test_its_dtype_is_a_cast(module: Any) -> None:
    (x,) = draw(X)
    got, own = module(attention, dtype=jnp.bfloat16)(x), module(dtype=jnp.bfloat16)(x)
    assert got.dtype == own.dtype == jnp.bfloat16
    assert jnp.abs(got.astype(float) - own.astype(float)).max() < 2.0**-6 * jnp.abs(own).max()


def _mask(shape: tuple[int, ...]) -> Any:
    """A random mask in which every row sees a key: Flax gives other rows the mean of values."""
    seen = draw_mask(shape, 5)
    return seen | (~seen.any(-1, keepdims=True) & (jnp.arange(shape[-1]) == 0))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_a_mask(module: Any, shape: tuple[int, ...]) -> None:
    (x,) = draw(X)
    _both(module, x, mask=_mask(shape))
    if module is _nnx and shape[2:] == (6, 6):
        diagonal = jnp.eye(6, dtype=bool)
        _both(module, x, mask=_mask(shape) | diagonal, is_causal=True)


@pytest.mark.parametrize("module", MODULES)
def test_masks_that_flax_makes(module: Any) -> None:
    """The masks are padded, causal, or both."""
    (x, y) = draw(X, (2, 9, 16))
    lengths = jnp.arange(9) < jnp.asarray([[9], [4]])
    padded = linen.make_attention_mask(jnp.ones(X[:2], bool), lengths, jnp.logical_and, dtype=bool)
    _both(module, x, y, mask=padded)
    causal = linen.make_causal_mask(x[..., 0], dtype=bool)
    both = linen.combine_masks(causal, padded[..., :6], dtype=bool)
    for mask in (causal, both):
        _both(module, x, mask=mask)
    near(jax.jit(module(attention))(x, mask=both), module()(x, mask=both))
    near(module(attention)(x, mask=causal), module(_causal)(x))


def _causal(*qkv: Any, **_: Any) -> Any:
    return attention(*qkv, is_causal=True)


@pytest.mark.parametrize("module", MODULES)
def test_rows_that_see_no_key_are_zeros(module: Any) -> None:
    (x,) = draw(X)
    mask = _mask((2, 1, 6, 6)).at[:, :, 2].set(False)
    got, expected = (module(f)(x, mask=mask) for f in (attention, module.__defaults__[0]))
    near(jnp.delete(got, 2, axis=1), jnp.delete(expected, 2, axis=1))
    near(got[:, 2], module(lambda q, *_, **__: jnp.zeros_like(q))(x)[:, 2])


@pytest.mark.parametrize("module", MODULES)
def test_a_mask_of_numbers_is_refused(module: Any) -> None:
    """Flax makes masks of numbers unless it gets a dtype."""
    (x,) = draw(X)
    mask = linen.make_causal_mask(x[..., 0])
    with pytest.raises(cuflash.ArgumentTypeError, match=NUMBERS):
        module(attention)(x, mask=mask)
    _both(module, x, mask=mask != 0)


def _dropping(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any,
    dropout_rate: float,
    dropout_rng: Any,
    broadcast_dropout: bool,
    **_: Any,
) -> Any:
    """The formula with Flax's arguments: the key's words say which weights are dropped."""
    words = np.asarray(jax.random.key_data(dropout_rng))
    first = (1, 1) if broadcast_dropout else (q.shape[0], q.shape[2])
    sizes = (*first, q.shape[1], k.shape[1])
    kept = cuflash.dropout_mask(sizes, dropout_p=dropout_rate, dropout_seed=words)
    assert not kept.all()
    return formula(q, k, v, mask=mask, left=kept / (1 - dropout_rate))


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("module", MODULES)
def test_dropout(module: Any, broadcast: bool) -> None:
    """The key comes from Flax, and another key drops other weights."""
    (x,) = draw(X)
    mask = draw_mask((2, 1, 6, 6))
    results = []
    for function, seed in ((attention, 1), (_dropping, 1), (attention, 2)):
        layer = module(function, dropout_rate=0.25, broadcast_dropout=broadcast)
        options = {"rngs": {"dropout": jax.random.key(seed)}}
        if module is _nnx:
            options = {"rngs": nnx.Rngs(dropout=seed)}
        results.append(layer(x, mask=mask, deterministic=False, **options))
    near(results[0], results[1])
    assert not np.allclose(results[0], results[2])


@pytest.mark.parametrize("module", MODULES)
def test_weights_are_not_sown(module: Any) -> None:
    (x,) = draw(X)
    options = {"mutable": ["intermediates"]} if module is _linen else {}
    says = r"module: got flax\..*MultiHead.*; expected None: .*sow_weights=False"
    with pytest.raises(cuflash.ArgumentValueError, match=says):
        module(attention)(x, sow_weights=True, **options)


@functools.wraps(attention)
def _boolean(*qkv: Any, mask: Any = None, **others: Any) -> Any:
    """Make a mask boolean: the mask of decoding always has numbers."""
    return attention(*qkv, mask=None if mask is None else mask != 0, **others)


def _decode_linen(attention_fn: Any, steps: Any) -> Any:
    module = linen.MultiHeadDotProductAttention(
        num_heads=4, decode=True, param_dtype=jnp.float64, attention_fn=attention_fn
    )
    variables = dict(module.init(jax.random.key(0), steps))
    outs = []
    for step in jnp.split(steps, steps.shape[1], axis=1):
        out, changed = module.apply(variables, step, mutable=["cache"])
        variables |= changed
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


def _decode_nnx(attention_fn: Any, steps: Any) -> Any:
    layer = _nnx(attention_fn, decode=True)
    layer.init_cache(steps.shape, jnp.float64)
    return jnp.concatenate([layer(x) for x in jnp.split(steps, steps.shape[1], axis=1)], axis=1)


@pytest.mark.parametrize(
    ("decode", "own"), [(_decode_linen, linen.dot_product_attention), (_decode_nnx, _plain)]
)
def test_decoding(decode: Any, own: Any) -> None:
    """Decoding step by step needs a boolean mask; the mask that Flax makes is refused."""
    (x,) = draw(X)
    near(decode(_boolean, x), decode(own, x))
    with pytest.raises(cuflash.ArgumentTypeError, match=NUMBERS):
        decode(attention, x)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_quantized_products_are_refused(name: str) -> None:
    (x,) = draw(X)
    layer = _linen(attention, **{f"{name}_cls": lambda: jnp.einsum})
    with pytest.raises(cuflash.ArgumentValueError, match=f"{name}: got builtins.function"):
        layer(x)


def test_deterministic_of_flax_chooses_no_slower_gradients() -> None:
    """The keyword says that there is no dropout; it does not fix the order of sums."""
    (x,) = draw(X)
    ran: list[Any] = []
    for module in MODULES:
        layer = module(attention, dropout_rate=0.5)
        with dispatch.observe(ran.append):
            step = jax.grad(lambda x, f=layer: f(x, deterministic=True).sum())
            jax.block_until_ready(step(x))
    assert [plan.problem.operation for plan in ran] == ["forward", "backward"] * 2
    assert not any(plan.problem.deterministic for plan in ran)
