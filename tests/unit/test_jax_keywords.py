"""Keywords that networks pass leave the answer as it is, or an error names one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import BlockMask

from .jax_case import alike, draw, jax, jnp

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

Q, KV = (2, 3, 4, 8), (2, 5, 2, 8)
ARRAY = np.zeros((2, 4, 3, 5), np.float32)
SEEN = ARRAY == 0
BLOCKS = BlockMask(np.ones((1, 1), bool), (64, 64))
KEYS = (jax.random.PRNGKey(0), jax.random.key(0))

#: Values that leave the answer as it is, and values that are refused.
HARMLESS: dict[str, list[Any]] = {
    "bias": [None, ARRAY, jnp.asarray(ARRAY)],
    "mask": [None, True, SEEN, jnp.asarray(SEEN), SEEN[0, 0], [[True]], np.ones((4, 1, 1), bool)],
    "block_mask": [None, BLOCKS, BlockMask(jnp.ones((4, 1, 1), np.uint8), (128, 64))],
    "dropout_rng": [None, *KEYS],
    "dropout_rate": [0, 0.0, np.float32(0), np.asarray(0.0)],
    "broadcast_dropout": [True, False, np.True_],
    "deterministic": [True, False],
    "precision": [
        None,
        "highest",
        "float32",
        "bfloat16",
        jax.lax.Precision.DEFAULT,
        (jax.lax.Precision.HIGH, None),
    ],
    "module": [None],
    "force_fp32_for_softmax": [True, False],
    "qk_attn_weights_einsum": [None],
    "attn_weights_value_einsum": [None],
    "dtype": [None, "float32", np.float16, jnp.bfloat16],
    "is_causal": [True, False],
    "local_window_size": [None, 9, (9, 9), (np.int64(20), 9)],
}
REFUSED: dict[str, list[Any]] = {
    "bias": [ARRAY[..., :2], ARRAY > 0, 0, False],
    "mask": [ARRAY, jnp.ones((3, 5), int), SEEN[..., :2], SEEN[:, :3], 1, [[1]]],
    "block_mask": [SEEN, 1, BlockMask(SEEN[..., :2], (64, 64)), BlockMask(ARRAY[0, 0, :1, :1])],
    "dropout_rng": [0, "key"],
    "dropout_rate": [-0.1, 1.5, float("nan"), float("inf"), "0", None, True, 1j, np.zeros(1)],
    "broadcast_dropout": [0, None],
    "deterministic": [1, None, "yes"],
    "precision": ["exact", 17, jax.lax.Precision, (None, None, None), ("high", "exact")],
    "module": [object(), 0],
    "force_fp32_for_softmax": [1, None],
    "qk_attn_weights_einsum": [jnp.einsum],
    "attn_weights_value_einsum": [jnp.einsum],
    "dtype": ["int32", "complex64", "bf16", object(), "float64"],
    "is_causal": [1, None],
    "local_window_size": [True, 1.0, "1", (1,), (None, 1), jnp.zeros(2, int)],
}


def _keywords(values: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(choices) for name, choices in values.items()}
    )


def _arrays() -> list[Any]:
    return draw(Q, KV, KV, dtype="float32")


def _same(got: Any, keywords: dict[str, Any]) -> None:
    dtype = keywords.get("dtype")
    arrays = [a if dtype is None else a.astype(dtype) for a in _arrays()]
    expected = attention(*arrays, is_causal=keywords.get("is_causal", False))
    assert got.dtype == expected.dtype
    alike(got, expected)


@settings(deadline=None)
@given(_keywords(HARMLESS))
def test_what_changes_nothing_is_taken(keywords: dict[str, Any]) -> None:
    _same(attention(*_arrays(), **keywords), keywords)


@settings(deadline=None)
@given(_keywords(HARMLESS), _keywords(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(
    harmless: dict[str, Any], refused: dict[str, Any]
) -> None:
    keywords = {**harmless, **refused}
    if not refused:
        _same(attention(*_arrays(), **keywords), keywords)
        return
    with pytest.raises((cuflash.ArgumentTypeError, cuflash.ArgumentValueError)) as raised:
        attention(*_arrays(), **keywords)
    assert raised.value.argument in refused


@given(
    rate=st.floats(0, 1) | st.sampled_from([np.float32(0.5), np.asarray(0.25), jnp.asarray(0.1)]),
    deterministic=st.booleans(),
    rng=st.sampled_from([None, *KEYS]),
)
@settings(deadline=None)
def test_dropout_needs_a_key_and_leaves_something(rate: Any, deterministic: bool, rng: Any) -> None:
    keywords = {"dropout_rate": rate, "deterministic": deterministic, "dropout_rng": rng}
    if deterministic or rate == 0:
        _same(attention(*_arrays(), **keywords), {})
        return
    kept = round(2**14 * (1 - float(rate)))
    if rng is not None and kept > 0:
        assert np.isfinite(attention(*_arrays(), **keywords)).all()
        return
    says = "dropout_rate: got .*; expected (a number|at most)"
    if rng is None:
        says = "dropout_rng: got None with dropout_rate .* and deterministic=False; expected a key"
    with pytest.raises(cuflash.ArgumentValueError, match=says):
        attention(*_arrays(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"bias": ARRAY[:, :2]}, r"bias: got shape \(2, 2, 3, 5\); expected \(2, 4, 3, 5\)"),
        ({"mask": ARRAY}, r"mask: got dtype float32; expected bool: .* numbers to add are bias"),
        ({"mask": SEEN[:, :2]}, r"mask: got shape \(2, 2, 3, 5\); expected \(2, 4, 3, 5\)"),
        ({"module": object()}, r"module: got builtins.object; expected None: .*sow_weights=False"),
        ({"dropout_rng": 3}, r"dropout_rng: got 3; expected a key of jax.random, or None"),
        ({"dropout_rate": 2}, r"dropout_rate: got 2.0; expected 0 to 1"),
        (
            {"dropout_rate": 0.5, "dropout_rng": jax.random.split(KEYS[1])},
            r"dropout_rng: got shape \(2, 2\); expected one key of jax.random, of 2 or 4 words",
        ),
        (
            {"dropout_rate": 0.5, "dropout_rng": jnp.zeros(2)},
            r"dropout_rng: got dtype float32; expected one key of jax.random, of 2 or 4 words",
        ),
        ({"precision": "exact"}, r"precision: got 'exact'; expected None, one or two settings of"),
        ({"dtype": "float64"}, r"dtype: got float64; expected float64 only with jax_enable_x64"),
        ({"dtype": "int8"}, r"dtype: got dtype\('int8'\); expected one of"),
        ({"qk_attn_weights_einsum": 1}, r"qk_attn_weights_einsum: got 1; expected None: the prod"),
        ({"deterministic": 0}, r"deterministic: got 0; expected True or False"),
    ],
)
def test_the_message_says_what_to_do(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(cuflash.CuflashError, match=says):
        attention(*_arrays(), **keywords)
    with pytest.raises(cuflash.CuflashError, match=says):
        jax.jit(lambda *qkv: attention(*qkv, **keywords))(*_arrays())


def test_positions_are_those_of_jax() -> None:
    q, k, v = _arrays()
    assert (attention(q, k, v, None, None) == attention(q, k, v)).all()
    assert (attention(q, k, v, ARRAY + 1) == attention(q, k, v, bias=ARRAY + 1)).all()
    seen = np.tri(3, 5, dtype=bool)
    assert (attention(q, k, v, None, seen) == attention(q, k, v, mask=seen)).all()
    alike(attention(q, k, v, None, seen), attention(q, k, v, is_causal=True))


def test_dtype_casts_integers_and_not_complex_numbers() -> None:
    whole = [jnp.round(3 * array).astype("int32") for array in _arrays()]
    expected = attention(*(array.astype("float32") for array in whole))
    assert (attention(*whole, dtype="float32") == expected).all()
    with pytest.raises(cuflash.ArgumentTypeError, match="query: got dtype complex64; expected one"):
        attention(*(array.astype("complex64") for array in _arrays()), dtype="float32")
