"""``mask`` on the tiled NumPy code: against its formula, and against whole matrices."""

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
from cuflash.options import check_options
from cuflash.tiled_numpy import threads

from .wrt_case import GivenCall, calls, masks, pair_sizes

_OWN = {"algorithm", "backend"}


@contextlib.contextmanager
def _divided(parts: int, count: int, together: int | None = None) -> Iterator[None]:
    """Within the block, plans divide the queries into ``parts`` and use ``count`` threads.

    A step takes ``together`` heads; None: the plan's own number.
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
def _problems(draw: Any) -> tuple[GivenCall, dict[str, Any]]:
    """A call in float64 with a mask, and the library's own keywords."""
    call = draw(calls(mask=True))
    keywords = {n: v for n, v in call.keywords.items() if n not in _OWN}
    keywords["softcap"] = draw(st.sampled_from([None, None, 0.3, 2.0]))
    blocks = draw(st.sampled_from([None, (1, 1), (2, 3), (4, 2)]))
    own = {"backend": "numpy", "algorithm": call.keywords["algorithm"], "blocks": blocks}
    return GivenCall(call.wide, keywords), own


def _results(call: GivenCall, own: dict[str, Any], seed: int = 1) -> tuple[np.ndarray, ...]:
    """Out, lse and all gradients."""
    given_ = {**call.inputs, **call.keywords, **own}
    out, lse = cuflash.attention(**given_, return_lse=True)
    dout, dlse = _gradients_of(out, lse, seed)
    saved = {"dout": dout, "dlse": dlse, "out": out, "lse": lse}
    return (out, lse, *cuflash.attention_backward(**saved, **given_, wrt=call.wrt))


def _gradients_of(out: np.ndarray, lse: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    dout, dlse = random.standard_normal(out.shape), random.standard_normal(lse.shape)
    dlse[~np.isfinite(lse)] = 0
    return dout, dlse


def _near(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for one, exact in zip(got, expected, strict=True):
        assert one.shape == exact.shape
        np.testing.assert_allclose(one, exact, rtol=1e-9, atol=1e-10)


def _same(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    assert [a.tobytes() for a in got] == [b.tobytes() for b in expected]


@settings(max_examples=200)
@given(problem=_problems(), data=st.data())
def test_both_passes_against_the_formula(problem: Any, data: Any) -> None:
    """The calls have any shape, strides, lengths, bounds of the keys and other features."""
    call, own = problem
    divided = data.draw(st.sampled_from([None, (1, 1, 1), (3, 2, None), (2, 3, 2), (9, 1, 3)]))
    with _divided(*divided) if divided else contextlib.nullcontext():
        got = _results(call, own)
    out, lse = reference.attention(**call.inputs, **call.keywords)
    dout, dlse = _gradients_of(out, lse, 1)
    exact = reference.attention_backward(dout, **call.inputs, dlse=dlse, **call.keywords)
    _near(got, (out, lse, *exact))


def _whole(x: dict[str, np.ndarray], seen: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Out, lse and gradients by whole matrices; ``seen`` is (batch, head, query, key)."""
    group = x["q"].shape[2] // x["k"].shape[2]
    q, dout = (x[name].swapaxes(1, 2) for name in ("q", "dout"))
    k, v = (np.repeat(x[name].swapaxes(1, 2), group, axis=1) for name in "kv")
    scores = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    weights = np.exp(scores)
    total = weights.sum(axis=3, keepdims=True) + np.exp(sinks)[:, None, None]
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    out = p @ v
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    delta = (dout * out).sum(axis=3, keepdims=True)
    ds = p * (dout @ v.swapaxes(2, 3) - delta + x["dlse"][..., None]) / np.sqrt(q.shape[3])
    of_q = (out, ds @ k)
    of_keys = (
        array.reshape(array.shape[0], -1, group, *array.shape[2:]).sum(axis=2)
        for array in (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    )
    out, *grads = (array.swapaxes(1, 2) for array in (*of_q, *of_keys))
    return (out, lse, *grads)


def _inputs(sizes: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Inputs with these sizes of batch, query heads, kv heads, queries and keys."""
    batch, heads_q, heads_kv, rows, keys = sizes
    random = np.random.default_rng(seed)
    q, kv = (batch, rows, heads_q, 3), (batch, keys, heads_kv, 3)
    x = {n: random.standard_normal(s) for n, s in {"q": q, "k": kv, "v": kv, "dout": q}.items()}
    return {**x, "dlse": random.standard_normal((batch, heads_q, rows))}


@settings(max_examples=100)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)),
    group=st.integers(1, 3),
    bounds=st.sampled_from(["", "causal", "window", "offset"]),
    sunk=st.booleans(),
    data=st.data(),
)
def test_both_passes_against_whole_matrices(
    sizes: tuple[int, ...], group: int, bounds: str, sunk: bool, data: Any
) -> None:
    """The mask is alone or with bounds that hide keys; the expected results are plain NumPy."""
    batch, heads_kv, rows, keys = sizes
    heads = heads_kv * group
    x = _inputs((batch, heads, heads_kv, rows, keys), data.draw(st.integers(0, 99)))
    array = data.draw(masks(np.random.default_rng(2), (batch, heads, rows, keys)))
    i, j = np.arange(rows)[:, None] + (2 if bounds == "offset" else keys - rows), np.arange(keys)
    keywords, sees = {
        "": ({}, True),
        "causal": ({"causal": True}, j <= i),
        "window": ({"window_size": (2, 1)}, (j >= i - 2) & (j <= i + 1)),
        "offset": ({"causal": True, "q_offset": 2}, j <= i),
    }[bounds]
    sinks = np.linspace(-1, 1, heads) if sunk else np.full(heads, -np.inf)
    more = {"sinks": sinks} if sunk else {}
    call = {"q": x["q"], "k": x["k"], "v": x["v"], "mask": array, **more, "backend": "numpy"}
    call |= {**keywords, "blocks": data.draw(st.sampled_from([None, (2, 3)]))}
    out, lse = cuflash.attention(**call, return_lse=True)
    x["dlse"][~np.isfinite(lse)] = 0
    saved = {"dout": x["dout"], "out": out, "lse": lse, "dlse": x["dlse"]}
    grads = cuflash.attention_backward(**saved, **call)
    seen = np.broadcast_to(array, (batch, heads, rows, keys)) & sees
    _near((out, lse, *grads), _whole(x, seen, sinks))


@settings(max_examples=60)
@given(problem=_problems())
def test_it_hides_what_minus_infinity_does(problem: Any) -> None:
    """A mask equals minus infinity in a bias: added to the call's bias, or to a bias of zeros."""
    call, own = problem
    hidden = np.where(call.inputs["mask"], 0.0, -np.inf)
    others = {name: array for name, array in call.inputs.items() if name != "mask"}
    bias = np.asarray(others.get("bias", 0) + hidden)
    got = dict(zip(("out", "lse", *call.wrt), _results(call, own), strict=True))
    as_bias = GivenCall({**others, "bias": bias}, call.keywords)
    expected = dict(zip(("out", "lse", *as_bias.wrt), _results(as_bias, own), strict=True))
    for name in got.keys() - {"bias"}:  # the two biases may differ in shape
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(
    "keywords",
    [{"causal": True}, {"window_size": (3, 1)}, {"window_size": (2, None)}, {"q_offset": -5}],
    ids=str,
)
def test_bounds_written_as_a_mask_are_those_bounds(algorithm: Any, keywords: Any) -> None:
    keywords = {"causal": True, **keywords} if "q_offset" in keywords else keywords
    x = _inputs((2, 4, 2, 30, 41), 3)
    i, j = np.arange(30)[:, None] + keywords.get("q_offset", 11), np.arange(41)
    left, right = keywords.get("window_size", (None, None))
    seen = j <= i + (0 if "causal" in keywords else 99 if right is None else right)
    seen &= True if left is None else j >= i - left
    own = {"backend": "numpy", "algorithm": algorithm, "blocks": (8, 16)}
    qkv = {name: x[name] for name in "qkv"}
    plain = _results(GivenCall(qkv, keywords), own)
    for mask_ in (seen, seen[None], np.broadcast_to(seen, (2, 4, 30, 41))):
        _near(_results(GivenCall({**qkv, "mask": mask_}, {}), own), plain)
    both = _results(GivenCall({**qkv, "mask": seen}, keywords), own)
    _near(both, plain)


@settings(max_examples=60)
@given(problem=_problems())
def test_a_mask_of_true_hides_nothing_and_one_of_false_everything(problem: Any) -> None:
    call, own = problem
    others = {name: array for name, array in call.inputs.items() if name != "mask"}
    every = np.ones_like(call.inputs["mask"])
    shown = _results(GivenCall({**others, "mask": every}, call.keywords), own)
    _near(shown, _results(GivenCall(others, call.keywords), own))
    hidden = _results(GivenCall({**others, "mask": np.zeros_like(every)}, call.keywords), own)
    assert all((one == 0).all() for one in (hidden[0], *hidden[2:5]))
    rows = pair_sizes(call)[0], pair_sizes(call)[1], pair_sizes(call)[2]
    expected = others["sinks"][:, None] if "sinks" in others else -np.inf
    lse = hidden[1].reshape(rows)
    np.testing.assert_allclose(lse, np.broadcast_to(expected, rows), rtol=1e-12)


@settings(max_examples=60)
@given(problem=_problems(), byte=st.sampled_from([2, 3, 128, 255]))
def test_every_byte_but_zero_is_true(problem: Any, byte: int) -> None:
    """A boolean view of bytes may hold any values. Vector instructions read long rows."""
    call, own = problem
    seen = call.inputs["mask"]
    odd = np.asarray(seen.astype(np.uint8) * np.uint8(byte)).view(bool)
    assert odd.tobytes() != seen.tobytes() or not seen.any()
    _same(_results(GivenCall({**call.inputs, "mask": odd}, call.keywords), own), _results(*problem))


def test_every_byte_of_long_rows_is_true_or_false() -> None:
    x = _inputs((1, 2, 1, 70, 300), 4)
    bytes_ = np.random.default_rng(5).integers(0, 3, (70, 300)).astype(np.uint8) * np.uint8(85)
    qkv = {name: x[name] for name in "qkv"}
    for own in ({"blocks": (64, 128)}, {"blocks": None}):
        options = {"backend": "numpy", **own}
        odd = _results(GivenCall({**qkv, "mask": bytes_.view(bool)}), options)
        _same(odd, _results(GivenCall({**qkv, "mask": bytes_ != 0}), options))


@settings(max_examples=60)
@given(problem=_problems())
def test_strides_change_no_bit(problem: Any) -> None:
    """The mask's axes may be in any order, backwards, with gaps or of stride 0; it is only read."""
    call, own = problem
    seen = call.inputs["mask"]
    plain = np.array(seen, order="C")
    wide = np.zeros([2 * size for size in seen.shape], bool)
    gaps = wide[(..., *(slice(None, None, 2) for _ in seen.shape))]
    gaps[...] = seen
    turned = np.array(seen.T, order="C").T
    backwards = np.array(seen[(..., *(slice(None, None, -1) for _ in seen.shape))], order="C")
    backwards = backwards[(..., *(slice(None, None, -1) for _ in seen.shape))]
    expected = _results(GivenCall({**call.inputs, "mask": plain}, call.keywords), own)
    for view in (seen, gaps, turned, backwards):
        np.testing.assert_array_equal(view, plain)
        view.flags.writeable = False
        _same(_results(GivenCall({**call.inputs, "mask": view}, call.keywords), own), expected)


@settings(max_examples=40)
@given(problem=_problems())
def test_threads_change_no_bit_and_parts_no_number(problem: Any) -> None:
    with _divided(3, 1):
        alone = _results(*problem)
    with _divided(3, 4):
        _same(_results(*problem), alone)
    with _divided(1, 1, 1):
        _near(_results(*problem), alone)


@settings(max_examples=40)
@given(call=calls(mask=True))
def test_halves_and_singles_are_hidden_as_doubles_are(call: GivenCall) -> None:
    exact = cuflash.attention(**call.wide, **call.keywords, return_lse=True)
    out, lse = cuflash.attention(**call.inputs, **call.keywords, return_lse=True)
    name = call.inputs["q"].dtype.name
    rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[name]
    np.testing.assert_allclose(out.astype(np.float64), exact[0], rtol=rtol, atol=4 * rtol)
    assert (np.isneginf(lse) == np.isneginf(exact[1])).all()


@settings(max_examples=60)
@given(data=st.data())
def test_neighbouring_entries_share_one_of_the_mask(data: Any) -> None:
    """JAX needs this for vmap: entry e reads entry ``e // n`` modulo the mask's entries."""
    shared, own, repeats = (data.draw(st.integers(1, 3)) for _ in range(3))
    batch, rows, keys = shared * own * repeats, data.draw(st.integers(0, 7)), 5
    x = _inputs((batch, 2, 1, rows, keys), 6)
    pairs = [data.draw(st.sampled_from([1, size])) for size in (2, rows, keys)]
    array = np.random.default_rng(7).random((own, *pairs)) < 0.6
    options = replace(check_options(backend="numpy"), entries=(("mask", (shared, 1)),))
    qkv = {name: x[name] for name in "qkv"}
    with _divided(*data.draw(st.sampled_from([(1, 1, None), (2, 2, 1), (1, 3, 2)]))):
        found = dispatch.run("forward", {**qkv, "mask": array}, {}, options)
    each = array[np.arange(batch) // shared % own]
    _near((found["out"], found["lse"]), reference.attention(**qkv, mask=each))
