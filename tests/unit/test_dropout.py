"""Dropout on the tiled NumPy code: against its formula, and against whole matrices."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch, reference
from cuflash.options import check_options

from .test_mask import _divided, _gradients_of, _near, _results, _same
from .wrt_case import GivenCall, calls, pair_sizes

_OWN = {"algorithm", "backend"}


@st.composite
def _problems(draw: Any) -> tuple[GivenCall, dict[str, Any]]:
    """A call in float64 that drops weights, and keywords that only the library takes."""
    call = draw(calls(dropout=True))
    keywords = {n: v for n, v in call.keywords.items() if n not in _OWN}
    keywords["softcap"] = draw(st.sampled_from([None, None, 0.3, 2.0]))
    blocks = draw(st.sampled_from([None, (1, 1), (2, 3), (4, 2)]))
    own = {"backend": "numpy", "algorithm": call.keywords["algorithm"], "blocks": blocks}
    return GivenCall(call.wide, keywords), own


def _of(call: GivenCall, name: str) -> Any:
    """The value of an argument, which is a keyword or an array."""
    return call.keywords.get(name, call.inputs.get(name))


def _mask(call: GivenCall) -> np.ndarray:
    """The pairs that are kept."""
    p, seed = (_of(call, f"dropout_{name}") for name in ("p", "seed"))
    return cuflash.dropout_mask(pair_sizes(call), dropout_p=p, dropout_seed=seed)


@settings(max_examples=200)
@given(problem=_problems(), data=st.data())
def test_both_passes_against_the_formula(problem: Any, data: Any) -> None:
    """Calls have any shape, strides, lengths, bounds of the keys and other features."""
    call, own = problem
    divided = data.draw(st.sampled_from([None, (1, 1, 1), (3, 2, None), (2, 3, 2), (9, 1, 3)]))
    with _divided(*divided) if divided else contextlib.nullcontext():
        got = _results(call, own)
    out, lse = reference.attention(**call.inputs, **call.keywords)
    dout, dlse = _gradients_of(out, lse, 1)
    exact = reference.attention_backward(dout, **call.inputs, dlse=dlse, **call.keywords)
    _near(got, (out, lse, *exact))


def _whole(x: dict[str, np.ndarray], left: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, ...]:
    """Compute out, lse and gradients with whole matrices of (batch, head, query, key)."""
    group = x["q"].shape[2] // x["k"].shape[2]
    q, dout = (x[name].swapaxes(1, 2) for name in ("q", "dout"))
    k, v = (np.repeat(x[name].swapaxes(1, 2), group, axis=1) for name in "kv")
    scale = 1 / np.sqrt(q.shape[3])
    weights = np.exp(np.where(seen, q @ k.swapaxes(2, 3) * scale, -np.inf))
    total = weights.sum(axis=3, keepdims=True)
    p = weights / total
    out = (p * left) @ v
    delta = (dout * out).sum(axis=3, keepdims=True)
    dp = left * (dout @ v.swapaxes(2, 3))
    ds = p * (dp - delta + x["dlse"][..., None]) * scale
    of_keys = (
        array.reshape(array.shape[0], -1, group, *array.shape[2:]).sum(axis=2)
        for array in (ds.swapaxes(2, 3) @ q, (p * left).swapaxes(2, 3) @ dout)
    )
    out, *grads = (array.swapaxes(1, 2) for array in (out, ds @ k, *of_keys))
    return (out, np.log(total)[..., 0], *grads)


@settings(max_examples=100)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.integers(1, 40)),
    group=st.integers(1, 3),
    causal=st.booleans(),
    p=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    seed=st.one_of(st.integers(0, 99), st.just(np.array([1, 2, 3, 4], np.uint32))),
    data=st.data(),
)
def test_both_passes_against_whole_matrices(
    sizes: Any, group: int, causal: bool, p: float, seed: Any, data: Any
) -> None:
    """The expected values take only the kept pairs from the library."""
    batch, heads_kv, rows, keys = sizes
    heads, random = heads_kv * group, np.random.default_rng(data.draw(st.integers(0, 99)))
    q, kv = (batch, rows, heads, 3), (batch, keys, heads_kv, 3)
    x = {n: random.standard_normal(s) for n, s in {"q": q, "k": kv, "v": kv, "dout": q}.items()}
    x["dlse"] = random.standard_normal((batch, heads, rows))
    call = {"q": x["q"], "k": x["k"], "v": x["v"], "dropout_p": p, "dropout_seed": seed}
    call |= {"backend": "numpy", "blocks": data.draw(st.sampled_from([None, (2, 3), (5, 20)]))}
    call |= {"causal": causal, "q_offset": keys if causal else None}  # every query sees all keys
    out, lse = cuflash.attention(**call, return_lse=True)
    saved = {"dout": x["dout"], "out": out, "lse": lse, "dlse": x["dlse"]}
    grads = cuflash.attention_backward(**saved, **call)
    shape = (batch, heads, rows, keys)
    kept = cuflash.dropout_mask(shape, dropout_p=p, dropout_seed=seed)
    left = kept * (2**14 / round(2**14 * (1 - p)))
    _near((out, lse, *grads), _whole(x, left, np.ones(shape, bool)))


@settings(max_examples=60)
@given(problem=_problems())
def test_the_log_sum_exp_is_that_of_all_weights(problem: Any) -> None:
    call, own = problem
    keywords = {n: v for n, v in call.keywords.items() if not n.startswith("dropout")}
    inputs = {n: v for n, v in call.inputs.items() if not n.startswith("dropout")}
    _, lse = cuflash.attention(**inputs, **keywords, **own, return_lse=True)
    _, dropped = cuflash.attention(**call.inputs, **call.keywords, **own, return_lse=True)
    np.testing.assert_array_equal(lse, dropped)


@settings(max_examples=60)
@given(problem=_problems())
def test_of_a_part_that_no_draw_is_below_everything_is_kept(problem: Any) -> None:
    call, own = problem
    keywords = {n: v for n, v in call.keywords.items() if not n.startswith("dropout")}
    inputs = {n: v for n, v in call.inputs.items() if not n.startswith("dropout")}
    kept = {**call.keywords, "dropout_p": 2.0**-16}
    _same(_results(GivenCall(call.inputs, kept), own), _results(GivenCall(inputs, keywords), own))


@settings(max_examples=40)
@given(problem=_problems())
def test_threads_change_no_bit_and_parts_no_number(problem: Any) -> None:
    with _divided(3, 1):
        alone = _results(*problem)
    with _divided(3, 4):
        _same(_results(*problem), alone)
    with _divided(1, 1, 1):
        _near(_results(*problem), alone)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("entries", [(0, 3), (1, 2), (2, 3), (1, 1)])
@pytest.mark.parametrize("heads", [(0, 3), (1, 3), (2, 3), (1, 2)])
def test_a_part_of_a_call_draws_as_the_whole(algorithm: Any, entries: Any, heads: Any) -> None:
    """The part has some entries and some kv heads; its seed holds its position in the whole."""
    random = np.random.default_rng(3)
    x = {"q": random.standard_normal((3, 20, 6, 4)), "k": random.standard_normal((3, 30, 3, 4))}
    x["v"] = random.standard_normal(x["k"].shape)
    parts = {"q": slice(2 * heads[0], 2 * heads[1]), **dict.fromkeys("kv", slice(*heads))}
    some = {name: array[slice(*entries), :, parts[name]] for name, array in x.items()}
    for seed in (5, np.array([1, 2, 3, 4], np.uint32)):
        call: dict[str, Any] = {"dropout_p": 0.3, "backend": "numpy", "algorithm": algorithm}
        out, lse = cuflash.attention(**x, **call, dropout_seed=seed, return_lse=True)
        words = [seed, 0, 0, 0] if isinstance(seed, int) else [*seed]
        by_word = {"dropout_seed": np.array([*words, entries[0], 2 * heads[0]], np.uint32)}
        options = replace(check_options(**call), draws=(3, 6))
        found = dispatch.run("forward", {**some, **by_word}, {}, options)
        own = out[slice(*entries), :, parts["q"]], lse[slice(*entries), parts["q"]]
        _near((found["out"], found["lse"]), own)
        saved = {"dout": own[0], "out": own[0], "lse": own[1]}
        grads = dispatch.run("backward", {**saved, **some, **by_word}, {}, options)
        whole = cuflash.attention_backward(out, **x, out=out, lse=lse, **call, dropout_seed=seed)
        expected = (whole[i][slice(*entries), :, parts[n]] for i, n in enumerate("qkv"))
        _near(tuple(grads.values()), tuple(expected))


@settings(max_examples=40)
@given(call=calls(dropout=True))
def test_halves_and_singles_drop_what_doubles_drop(call: GivenCall) -> None:
    exact = cuflash.attention(**call.wide, **call.keywords)
    out = cuflash.attention(**call.inputs, **call.keywords).astype(np.float64)
    name = call.inputs["q"].dtype.name
    rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[name]
    size = 2**14 / round(2**14 * (1 - call.keywords["dropout_p"]))
    np.testing.assert_allclose(out, exact, rtol=rtol, atol=4 * rtol * size)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_pullback_drops_the_same(algorithm: Any) -> None:
    """The gradients agree with finite differences of the sum of ``out * dout``."""
    random = np.random.default_rng(1)
    q, k, v, dout = (random.standard_normal((30, 4)) for _ in range(4))
    own: dict[str, Any] = {"backend": "numpy", "algorithm": algorithm, "causal": True}
    for seed in (11, np.array([3, 4], np.uint32), np.array([3, 4, 5, 6], np.uint32)):
        own |= {"dropout_p": 0.3, "dropout_seed": seed}
        _, pullback = cuflash.attention_vjp(q, k, v, **own)
        for i, gradient in enumerate(pullback(dout)):
            step = random.standard_normal(q.shape)
            sums = []
            for h in (1e-6, -1e-6):
                moved = [q, k, v]
                moved[i] = moved[i] + h * step
                sums.append((cuflash.attention(*moved, **own) * dout).sum())
            slope = (sums[0] - sums[1]) / 2e-6
            np.testing.assert_allclose((gradient * step).sum(), slope, rtol=1e-6, atol=1e-7)


def test_many_heads_and_long_rows_are_drawn_tile_by_tile() -> None:
    """The planner chooses the tiles of calls with many keys, with many rows and with many heads."""
    random = np.random.default_rng(2)
    for rows, keys, heads in ((1, 5000, 3), (300, 700, 5), (2, 40, 70)):
        q = random.standard_normal((2, rows, heads, 8))
        k, v = (random.standard_normal((2, keys, heads, 8)) for _ in range(2))
        options: dict[str, Any] = {"dropout_p": 0.2, "dropout_seed": 4}
        out = cuflash.attention(q, k, v, backend="numpy", **options)
        np.testing.assert_allclose(out, reference.attention(q, k, v, **options)[0], atol=1e-12)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_dropped_weight_is_zero_even_where_it_is_not_a_number(algorithm: Any) -> None:
    random = np.random.default_rng(4)
    q, k, v, dout = (random.standard_normal((9, 4)) for _ in range(4))
    q[2] = np.nan
    own: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3}
    out, lse = reference.attention(q, k, v, **own)
    expected = reference.attention_backward(dout, q, k, v, **own)
    numpy: dict[str, Any] = {**own, "backend": "numpy", "algorithm": algorithm}
    got = cuflash.attention_backward(dout, q, k, v, out, lse, **numpy)
    for one, other in zip(
        (cuflash.attention(q, k, v, **numpy), *got), (out, *expected), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-12)
    kept = cuflash.dropout_mask((1, 1, 9, 9), **own)[0, 0, 2]
    assert not kept.all()
    np.testing.assert_array_equal(np.isnan(got[2]).any(axis=1), kept)
