"""Packed sequences of ``cuflash.jax``: values, gradients, vmap, bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import draw, jax, jnp, near, wide
from .jax_mask_case import QKV
from .jax_packed_case import HEADS, KV, LENGTHS, SINKS, Q, looped, offsets, pulled

__all__ = ["wide"]

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

_VALUE, _TYPE, _UNSUPPORTED = (
    cuflash.ArgumentValueError,
    cuflash.ArgumentTypeError,
    cuflash.UnsupportedError,
)
_NAMES = "cu_seqlens_q", "cu_seqlens_kv"

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "q_offset": None},
    {"local_window_size": (2, 1), "q_offset": 1},
    {"local_window_size": 3, "q_offset": None, "scale": 0.4, "softcap": 1.5},
]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(wide: None, options: dict[str, Any], jitted: bool) -> None:
    """Both passes agree with a loop over the sequences. Under ``jax.jit`` offsets are traced."""
    arrays = draw(Q, KV, KV)
    mine, theirs = pulled(attention, **options), pulled(looped, **options)
    near((jax.jit(mine) if jitted else mine)(arrays, offsets()), theirs(arrays, offsets()))


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_sinks_and_slopes(wide: None, options: dict[str, Any]) -> None:
    """The gradient of the sinks is a sum over all sequences; a gradient of slopes is refused."""
    *arrays, slopes = draw(Q, KV, KV, SINKS, HEADS)
    more = {"alibi_slopes": slopes / 4}
    mine, theirs = (
        pulled(function, names=("sinks",), **options, **more) for function in (attention, looped)
    )
    near(jax.jit(mine)(arrays, offsets()), theirs(arrays, offsets()))
    with pytest.raises(_UNSUPPORTED, match="packed_lengths with gradient of alibi_slopes: "):
        pulled(attention, names=("alibi_slopes",))([*arrays[:3], slopes], offsets())


def test_it_is_what_jax_makes_of_each_sequence() -> None:
    """The results equal JAX's own for each sequence, if every query sees a key."""
    q, k, v = draw((12, 4, 8), (14, 2, 8), (14, 2, 8), dtype="float32")
    at = {"cu_seqlens_q": jnp.asarray([0, 5, 6, 12]), "cu_seqlens_kv": jnp.asarray([0, 5, 8, 14])}

    def other(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> Any:
        given = ((q, cu_seqlens_q), (k, cu_seqlens_kv), (v, cu_seqlens_kv))
        parts = zip(*(jnp.split(x, at[1:-1]) for x, at in given), strict=True)
        return jnp.concatenate(
            [jax.nn.dot_product_attention(*part, is_causal=True) for part in parts]
        )

    assert np.abs(attention(q, k, v, is_causal=True, **at) - other(q, k, v, **at)).max() < 1e-5


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("words", ["threefry2x32", "rbg"])
def test_dropout_draws_by_sequence(wide: None, broadcast: bool, words: str) -> None:
    """Each sequence and head has its own draws, or all share the same with ``broadcast_dropout``.

    A pair's position counts from the start of its sequence.
    """
    key, arrays = jax.random.key(5, impl=words), draw(Q, KV, KV)
    shape = (1, 1, 9, 12) if broadcast else (len(LENGTHS), Q[1], 9, 12)
    kept = cuflash.dropout_mask(
        shape, dropout_p=0.3, dropout_seed=np.asarray(jax.random.key_data(key))
    )
    left = np.broadcast_to(kept * (2**14 / round(2**14 * 0.7)), (len(LENGTHS), Q[1], 9, 12))
    options = {"dropout_rate": 0.3, "dropout_rng": key, "broadcast_dropout": broadcast}
    found = jax.jit(pulled(attention, is_causal=True, **options))(arrays, offsets())
    near(found, pulled(looped, is_causal=True, left=left)(arrays, offsets()))


def _table(s: Any, batch: Any, head: Any, i: Any, j: Any, offset: Any, p: Any) -> Any:
    return s * p.table(batch, head) + np.cos(i + offset - j)


def test_a_function_of_scores_is_given_the_sequence(wide: None) -> None:
    arrays = draw(Q, KV, KV)
    table = np.linspace(0.2, 1.5, len(LENGTHS) * 4).reshape(-1, 4)
    text = "return s * p.table(batch, head) + cos(i + offset - j);"
    score = cuflash.ScoreMod(text, numpy=_table, table=jnp.asarray(table))
    found = pulled(attention, score_mod=score, q_offset=None)(arrays, offsets())
    near(found, pulled(looped, table=table, q_offset=None)(arrays, offsets()))


@pytest.mark.parametrize(
    "axes",
    [
        (0, 0, 0, None),
        (0, None, None, None),
        (None, 1, None, None),
        (None, None, None, 0),
        (2, 0, 0, 0),
    ],
    ids=str,
)
def test_under_vmap(wide: None, axes: tuple[int | None, ...]) -> None:
    """The offsets are mapped, or all mapped entries share them."""
    arrays = [
        draw(shape, seed=n)[0] if axis is None else jnp.stack(draw(shape, shape, seed=n), axis)
        for n, (shape, axis) in enumerate(zip((Q, KV, KV), axes, strict=False))
    ]
    shifted = [LENGTHS, LENGTHS[::-1]]
    every = [offsets(lengths) for lengths in shifted]
    at = every[0] if axes[3] is None else jax.tree.map(lambda *x: jnp.stack(x), *every)
    found = jax.vmap(
        lambda *x: pulled(attention, is_causal=True)(x[:3], x[3]), in_axes=(*axes[:3], axes[3])
    )
    got = jax.jit(found)(*arrays, at)
    for entry in range(2):
        own = [
            a if axis is None else jnp.take(a, entry, axis)
            for a, axis in zip(arrays, axes, strict=False)
        ]
        of = pulled(looped, is_causal=True)(own, every[0 if axes[3] is None else entry])
        near(jax.tree.map(lambda x, n=entry: x[n], got), of)


def test_gradients_of_what_vmap_shares(wide: None) -> None:
    """The mapped entries share keys, values and sinks."""
    q, k, v, sinks = draw((2, *Q), KV, KV, SINKS)

    def of(function: Any) -> Any:
        def total(k: Any, v: Any, sinks: Any) -> Any:
            each = [function(one, k, v, sinks=sinks, **offsets()) for one in q]
            return jnp.sin(2 * jnp.stack(each)).sum()

        return jax.grad(total, QKV)(k, v, sinks)

    def mapped(k: Any, v: Any, sinks: Any) -> Any:
        one = jax.vmap(lambda q: attention(q, k, v, sinks=sinks, **offsets()))
        return jnp.sin(2 * one(q)).sum()

    near(jax.jit(jax.grad(mapped, QKV))(k, v, sinks), of(looped))


def test_the_residual_and_other_dtypes() -> None:
    arrays = draw(Q, KV, KV, dtype="float16")
    exact = looped(*(a.astype("float32") for a in arrays), **offsets(), return_lse=True)
    for more in ({}, {"residual_dtype": "float32"}, {"dtype": "bfloat16"}):
        out, residual = attention(*arrays, **offsets(), return_residual=True, **more)
        assert out.dtype == more.get("dtype", "float16")
        assert np.abs(out.astype("float32") - exact[0]).max() < 0.05
        finite = np.isfinite(exact[1].T)
        assert (np.isfinite(residual) == finite).all()
        assert np.abs(residual - exact[1].T)[finite].max() < 0.05


@pytest.mark.parametrize("kind", ["int64", "uint32", "uint8", "int8"])
def test_offsets_of_any_integers(wide: None, kind: str) -> None:
    """Offsets that int32 cannot hold lie outside the rows, and are clamped to them."""
    arrays = draw(Q, KV, KV)
    expected = attention(*arrays, **offsets())
    given = {name: at.astype(kind) for name, at in offsets().items()}
    assert np.array_equal(attention(*arrays, **given), expected)
    if kind == "int64":
        far = {name: jnp.asarray([-(2**40), 3, 2**40]) for name in _NAMES}
        near_by = {"cu_seqlens_q": jnp.asarray([0, 3, Q[0]], "int32")}
        near_by |= {"cu_seqlens_kv": jnp.asarray([0, 3, KV[0]], "int32")}
        assert np.array_equal(attention(*arrays, **far), attention(*arrays, **near_by))


@pytest.mark.parametrize("seed", range(6))
def test_what_int32_does_not_hold_is_the_nearest_that_it_does(wide: None, seed: int) -> None:
    """Offsets are clamped to the range of int32, not truncated to their last 32 bits."""
    arrays, random = draw(Q, KV, KV), np.random.default_rng(seed)
    far = {name: random.integers(-(2**62), 2**62, 4) for name in _NAMES}
    near_by = {name: np.clip(at, -(2**31), 2**31 - 1).astype("int32") for name, at in far.items()}
    mine, expected = (
        attention(*arrays, return_lse=True, **{name: jnp.asarray(at) for name, at in given.items()})
        for given in (far, near_by)
    )
    near(mine, expected)


def test_rows_behind_the_last_sequence_give_and_get_nothing(wide: None) -> None:
    arrays = draw(Q, KV, KV)
    ends = [int(at[-1]) for at in offsets().values()]
    spoilt = [a.at[end:].set(np.nan) for a, end in zip(arrays, (*ends, ends[1]), strict=True)]
    found = pulled(attention)(spoilt, offsets())
    near(found, pulled(attention)(arrays, offsets()))
    (_, (out, lse)), grads = found
    assert not out[ends[0] :].any()
    assert (lse[:, ends[0] :] == -np.inf).all()
    assert not any(grad[end:].any() for grad, end in zip(grads, (*ends, ends[1]), strict=True))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (np.ones(6), _TYPE, "got dtype float"),
        (np.ones(6, bool), _TYPE, "got dtype bool; expected int"),
        ("offsets", _TYPE, "expected an array"),
        (3, _VALUE, r"got shape \(\); expected arrays of one axis"),
        (np.ones((6, 1), int), _VALUE, r"got shape \(6, 1\); expected arrays of one axis"),
        (np.ones(0, int), _VALUE, r"got shape \(0,\); expected arrays of one axis"),
        (None, _VALUE, "got None beside cu_seqlens"),
    ],
    ids=str,
)
def test_what_is_no_offsets(name: str, value: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=f"{name}: .*{says}"):
        attention(*draw(Q, KV, KV, dtype="float32"), **{**offsets(), name: value})


def test_offsets_of_another_length() -> None:
    at = {**offsets(), "cu_seqlens_kv": jnp.zeros(4, "int32")}
    with pytest.raises(_VALUE, match=r"cu_seqlens_kv: got shape \(4,\); expected \(6,\)"):
        attention(*draw(Q, KV, KV, dtype="float32"), **at)


@pytest.mark.parametrize(
    ("argument", "value", "feature"),
    [
        ("bias", np.zeros((1, 1), np.float32), "bias"),
        ("mask", np.ones((1, 1), bool), "mask"),
        ("block_mask", cuflash.BlockMask(np.ones((1, 1), bool), (64, 64)), "block_mask"),
        ("query_seq_lengths", np.ones(1, int), "used_lengths"),
        ("key_value_seq_lengths", np.ones(1, int), "used_lengths"),
    ],
)
def test_what_is_refused_beside_offsets(argument: str, value: Any, feature: str) -> None:
    with pytest.raises(_UNSUPPORTED, match=f"packed_lengths with {feature}: "):
        attention(*draw(Q, KV, KV, dtype="float32"), **offsets(), **{argument: value})


def test_arrays_with_a_batch_are_refused() -> None:
    arrays = draw((1, *Q), (1, *KV), (1, *KV), dtype="float32")
    with pytest.raises(_VALUE, match=r"query: got 4 axes; expected \(total, heads, head_dim\)"):
        attention(*arrays, **offsets())
    slopes = {"alibi_slopes": np.ones((1, 4), np.float32)}
    with pytest.raises(_VALUE, match=r"alibi_slopes: got shape \(1, 4\); expected \(4,\)"):
        attention(*(a[0] for a in arrays), **offsets(), **slopes)


def test_the_device_is_given_arrays_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of a call with the layout "shd"."""
    device = pytest.importorskip("cuflash.jax.device")
    planned: list[Any] = []

    def plan(operation: str, specs: Any, options: Any, chosen: Any) -> Any:
        planned.append((dict(specs), options.layout))
        return SimpleNamespace(launcher=None)

    from cuflash.jax import call as calls
    from cuflash.jax.call import Call
    from cuflash.options import Options

    monkeypatch.setattr(calls, "plan_call", plan)
    monkeypatch.setattr(calls, "choose_device", lambda device, options: device)

    call = Call("forward", Options(layout="bshd")).taking(("q", "k", "v", *_NAMES))
    shapes = {"q": (1, *Q), "k": (1, *KV), "v": (1, *KV)} | dict.fromkeys(_NAMES, (6,))
    kinds = [np.int32 if name in _NAMES else np.float16 for name in shapes]
    arrays = [jax.ShapeDtypeStruct(s, kind) for s, kind in zip(shapes.values(), kinds, strict=True)]
    monkeypatch.setattr(device, "_devices", lambda: [0])
    device.prepare_device(call, arrays)
    ((specs, layout),) = planned
    assert layout == "shd"
    assert [specs[name].shape for name in ("q", "k", "v")] == [Q, KV, KV]
