"""``bias`` in the tiled NumPy code, compared with the formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import calls as repeated
from cuflash import dispatch, pipeline, reference
from cuflash.features.host import ScorePlace
from cuflash.features.pairs import part_of
from cuflash.options import check_options
from cuflash.tiled_numpy import threads

from .wrt_case import GivenCall, biases, calls, pair_sizes

_NAMES = ("q", "k", "v", "alibi_slopes", "bias", "sinks")


@contextlib.contextmanager
def _divided(parts: int, count: int, together: int | None = None) -> Iterator[None]:
    """Change every plan inside the block.

    A plan divides the queries into ``parts``, uses ``count`` threads, and takes ``together`` heads
    in a step (None: the plan's own number).
    """
    plan = pipeline._plan

    def divided(*given: Any) -> Any:
        chosen = plan(*given)
        heads = together or chosen.tile.block_heads
        tile = replace(chosen.tile, parts=parts, threads=count, block_heads=heads)
        return replace(chosen, tile=tile)

    repeated.forget()
    with (
        mock.patch.object(pipeline, "_plan", divided),
        mock.patch.object(threads, "usable_cores", return_value=64),
    ):
        yield
    repeated.forget()


@st.composite
def _problems(draw: Any) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Inputs in float64, the formula's keywords, and the library's own."""
    call = draw(calls(bias=False))
    inputs = call.wide
    known = {"causal", "window_size", "scale", "q_offset", "layout"}
    keywords = {n: v for n, v in call.keywords.items() if n in known}
    keywords["softcap"] = draw(st.sampled_from([None, None, 0.3, 2.0]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(["float64", "float64", "float32"]))
    inputs["bias"] = draw(biases(random, pair_sizes(call), dtype, hidden=draw(st.booleans())))
    blocks = draw(st.sampled_from([None, (1, 1), (2, 3), (4, 2)]))
    own = {"backend": "numpy", "algorithm": call.keywords["algorithm"], "blocks": blocks}
    return inputs, keywords, own


def _gradients(problem: Any, seed: int, wrt: tuple[str, ...], **more: Any) -> tuple[Any, ...]:
    """The library's out, lse and gradients, and the formula's results."""
    inputs, keywords, own = problem
    out, lse = cuflash.attention(**inputs, **keywords, **own, return_lse=True)
    random = np.random.default_rng(seed)
    dout, dlse = random.standard_normal(out.shape), random.standard_normal(lse.shape)
    dlse[~np.isfinite(lse)] = 0
    given_ = {**inputs, "out": out, "lse": lse, "dlse": dlse, **keywords, **own}
    found = cuflash.attention_backward(dout, **given_, wrt=wrt, **more)
    exact = reference.attention_backward(dout, **inputs, dlse=dlse, **keywords)
    named = dict(zip([name for name in _NAMES if name in inputs], exact, strict=True))
    expected = (*reference.attention(**inputs, **keywords), *(named[name] for name in wrt))
    return (out, lse, *found), expected


def _near(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for one, exact in zip(got, expected, strict=True):
        assert one.shape == exact.shape
        rtol = 1e-6 if one.dtype == np.float32 else 1e-9
        np.testing.assert_allclose(one, exact, rtol=rtol, atol=rtol / 10)


@settings(max_examples=200)
@given(problem=_problems(), data=st.data())
def test_both_passes_against_the_formula(problem: Any, data: Any) -> None:
    """The bias has any shape and strides, calls have other features, and wrt has any order."""
    inputs = problem[0]
    wrt = tuple(data.draw(st.permutations([name for name in _NAMES if name in inputs])))
    if data.draw(st.booleans()):
        wrt = ("bias",)
    seed = data.draw(st.integers(0, 9))
    divided = data.draw(st.sampled_from([None, (1, 1, 1), (3, 2, None), (2, 3, 2), (9, 1, 3)]))
    with _divided(*divided) if divided else contextlib.nullcontext():
        got, expected = _gradients(problem, seed, wrt)
    _near(got, expected)
    dbias, bias = got[2 + wrt.index("bias")], inputs["bias"]
    assert (dbias.shape, dbias.dtype) == (bias.shape, bias.dtype)


@settings(max_examples=80)
@given(problem=_problems(), data=st.data())
def test_gradients_are_written_where_the_caller_says(problem: Any, data: Any) -> None:
    """A destination may have any strides, and no memory outside it is written."""
    shape, dtype = problem[0]["bias"].shape, problem[0]["bias"].dtype
    order = data.draw(st.permutations(range(len(shape))))
    step = [data.draw(st.sampled_from([1, 2, -1, -3])) for _ in shape]
    wide = [shape[axis] * abs(step[axis]) for axis in order]
    memory = np.full(wide, 7, dtype)
    views = memory.transpose(np.argsort(order)) if order else memory
    target = views[(..., *(slice(None, None, s) for s in step))]
    assert target.shape == shape
    got, expected = _gradients(problem, 1, ("bias",), grads=(target,))
    assert got[2] is target
    _near(got, expected)
    target[...] = 7
    assert (memory == 7).all()


@settings(max_examples=40)
@given(problem=_problems(), seed=st.integers(0, 9))
def test_the_gradient_is_that_of_the_formula(problem: Any, seed: int) -> None:
    """It equals the reference's finite differences along a random direction."""
    inputs, keywords, own = problem
    out, pullback = cuflash.attention_vjp(**inputs, **keywords, **own, wrt=("bias",))
    random = np.random.default_rng(seed)
    dout, bias = random.standard_normal(out.shape), inputs["bias"].astype(np.float64)
    (got,) = pullback(dout)
    along, step = random.standard_normal(bias.shape), 1e-6

    def loss(moved: np.ndarray) -> float:
        found, _ = reference.attention(**{**inputs, "bias": np.asarray(moved)}, **keywords)
        return float((found * dout).sum())

    found = (loss(bias + step * along) - loss(bias - step * along)) / (2 * step)
    np.testing.assert_allclose((got * along).sum(), found, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(call=calls(bias=False), data=st.data())
def test_halves_and_singles_have_the_bias_that_they_are_given(call: GivenCall, data: Any) -> None:
    """A bias in the dtype of q or in float32 is added in the precision of the softmax."""
    storage = call.inputs["q"].dtype
    dtype = data.draw(st.sampled_from([storage.name, "float32"]))
    bias = data.draw(biases(np.random.default_rng(3), pair_sizes(call), dtype))
    wide = call.wide
    exact = cuflash.attention(**wide, bias=bias.astype(np.float64), **call.keywords)
    got = cuflash.attention(**call.inputs, bias=bias, **call.keywords)
    rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[storage.name]
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=rtol, atol=4 * rtol)


def test_a_bias_of_float32_is_not_rounded_to_halves() -> None:
    """With float16 queries, a float32 bias can be 1e6 or 1e6 + 1, which float16 cannot hold."""
    q, v = np.zeros((1, 1, 1, 4), np.float16), np.ones((1, 2, 1, 4), np.float16)
    v[:, 1] = -1
    bias = np.array([1e6 + 1, 1e6], np.float32)
    out = cuflash.attention(q, np.zeros_like(v), v, bias=bias, backend="numpy")
    np.testing.assert_allclose(out, np.tanh(0.5), atol=1e-3)


@settings(max_examples=60)
@given(call=calls(bias=False), data=st.data())
def test_what_is_the_same_for_all_keys_is_no_bias(call: GivenCall, data: Any) -> None:
    """A bias that is equal for all keys of a query leaves the output as it is, up to rounding.

    The bias is added to lse. With sinks the test uses a bias of 0.
    """
    inputs = call.wide
    batch, heads, rows, _ = pair_sizes(call)
    bias = np.random.default_rng(1).standard_normal((batch, heads, rows, 1))
    if "sinks" in inputs or data.draw(st.booleans()):
        bias[...] = 0
    plain = cuflash.attention(**inputs, **call.keywords, return_lse=True)
    got = cuflash.attention(**inputs, **call.keywords, bias=bias, return_lse=True)
    np.testing.assert_allclose(got[0], plain[0], rtol=1e-11, atol=1e-12)
    added = bias.reshape(plain[1].shape)
    np.testing.assert_allclose(got[1], plain[1] + added, rtol=1e-11, atol=1e-12)


@settings(max_examples=40)
@given(problem=_problems())
def test_threads_change_no_bit_and_parts_no_number(problem: Any) -> None:
    every = tuple(name for name in _NAMES if name in problem[0])
    with _divided(3, 1):
        alone, _ = _gradients(problem, 2, every)
    with _divided(3, 4):
        several, _ = _gradients(problem, 2, every)
    assert [a.tobytes() for a in alone] == [b.tobytes() for b in several]
    with _divided(1, 1, 1):
        whole, _ = _gradients(problem, 2, every)
    _near(whole, alone)


@settings(max_examples=60)
@given(data=st.data())
def test_neighbouring_entries_share_one_of_the_bias_and_of_its_gradient(data: Any) -> None:
    """Entry ``e`` reads entry ``e // shared`` of the bias, modulo the number of its entries.

    JAX needs this for axes of vmap.
    """
    number = st.integers(1, 3)
    shared, own, repeats = (data.draw(number) for _ in range(3))
    batch = shared * own * repeats
    summed = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    rows, keys = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 7))
    pairs = tuple(data.draw(st.sampled_from([1, size])) for size in (2, rows, keys))
    divided = data.draw(st.sampled_from([(1, 1, None), (2, 2, 1), (1, 3, 2)]))
    _check_sharing((shared, own, repeats, summed), (rows, keys), pairs, divided)


def test_entries_that_share_a_gradient_are_in_no_step_with_others() -> None:
    """A step takes two heads, and three entries share a gradient."""
    _check_sharing((3, 2, 1, 3), (5, 4), (2, 5, 4), (1, 3, 2))


def _check_sharing(
    entries: tuple[int, int, int, int],
    lengths: tuple[int, int],
    pairs: tuple[int, ...],
    divided: Any,
) -> None:
    (shared, own, repeats, summed), (rows, keys), heads = entries, lengths, 2
    batch = shared * own * repeats
    random = np.random.default_rng(1)
    sizes = {"q": (rows, heads), "k": (keys, 1), "v": (keys, 1), "dout": (rows, heads)}
    x = {name: random.standard_normal((batch, *size, 4)) for name, size in sizes.items()}
    bias = random.standard_normal((own, *pairs))
    each = bias[np.arange(batch) // shared % own]
    options = replace(check_options(backend="numpy"), entries=(("bias", (shared, summed)),))
    qkv = {name: x[name] for name in "qkv"}
    with _divided(*divided):
        found = dispatch.run("forward", {**qkv, "bias": bias}, {}, options)
        given_ = {**x, "out": found["out"], "lse": found["lse"], "bias": bias}
        options = replace(options, wrt=("bias", "q"))
        grads = dispatch.run("backward", given_, {}, options)
    _near((found["out"], found["lse"]), reference.attention(**qkv, bias=each))
    dq, _, _, dbias = reference.attention_backward(**x, bias=each)
    dbias = dbias.reshape(batch // summed, summed, *pairs).sum(axis=1)
    assert grads["dbias"].shape == dbias.shape
    _near((grads["dbias"], grads["dq"]), (dbias, dq))


def _place(batch: slice, heads: slice, rows: slice, keys: slice) -> ScorePlace:
    """The position of a step in slices of entries, kv heads, queries and keys.

    Each kv head has two query heads.
    """
    b, h, i, j = (np.arange(9)[part] for part in (batch, heads, rows, keys))
    head = (2 * h[:, None] + np.arange(2))[None, :, None, :, None]
    return ScorePlace(b[:, None, None, None, None], head, i, j[:, None, None])


@pytest.mark.parametrize("shape", [(4, 6, 9, 9), (1, 6, 1, 9), (4, 1, 9, 1), (9,), (9, 1), ()])
def test_a_tile_takes_its_part_and_repeats_nothing(shape: Any) -> None:
    """The tile's view of the bias has the axes [batch, kv head, key, head of the group, query]."""
    place = _place(slice(1, 3), slice(1, 3), slice(2, 5), slice(4, 8))
    bias = np.random.default_rng(0).standard_normal(shape)
    part = part_of(bias, place)
    whole = np.broadcast_to(bias, (4, 6, 9, 9))[1:3, 2:6, 2:5, 4:8]
    expected = whole.reshape(2, 2, 2, 3, 4).transpose(0, 1, 4, 2, 3)
    np.testing.assert_array_equal(np.broadcast_to(part, expected.shape), expected)
    assert np.shares_memory(part, bias)
    assert part.size <= bias.size
