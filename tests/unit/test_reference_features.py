"""Features of the oracle against loops and finite differences, and in special cases."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import ArgumentTypeError, ArgumentValueError, reference
from tests.kit import limits
from tests.unit.test_philox import draw_of
from tests.unit.test_reference import assert_near, draw

_DROPOUTS: tuple[dict[str, Any], ...] = (
    {"dropout_p": None, "dropout_seed": None},
    {"dropout_p": 0.3, "dropout_seed": 2**40 + 5},
    {"dropout_p": 0.5, "dropout_seed": np.array([7, 8, 9, 10], np.uint32)},
)
_SIDES = st.one_of(st.none(), st.integers(0, 6))


@st.composite
def problems(draw_: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Sizes and options: with or without windows, arrays of features and dead rows."""
    group, heads_kv = draw_(st.sampled_from(((1, 1), (2, 2), (3, 1))))
    lengths = draw_(st.integers(1, 5)), draw_(st.integers(1, 6))
    sizes = (draw_(st.integers(1, 2)), group * heads_kv, heads_kv, *lengths, 2, 3)
    options: dict[str, Any] = {
        "causal": draw_(st.booleans()),
        "window_size": draw_(st.one_of(st.none(), st.tuples(_SIDES, _SIDES))),
        "q_offset": draw_(st.one_of(st.none(), st.integers(-8, 8))),
        "softcap": draw_(st.sampled_from((None, 1.5))),
        "alibi_slopes": None,
        "bias": None,
        "mask": None,
        "sinks": None,
        **draw_(st.sampled_from(_DROPOUTS)),
    }
    random = np.random.default_rng(draw_(st.integers(0, 2**16)))
    shape = draw_(st.sampled_from((None, sizes[1:2], sizes[:2])))
    if shape is not None:
        options["alibi_slopes"] = 0.5 * random.standard_normal(shape)
    for name in ("bias", "mask"):
        if draw_(st.booleans()):
            whole = (*sizes[:2], *lengths)
            shape = [draw_(st.sampled_from((1, size))) for size in whole]
            numbers = random.standard_normal(shape[draw_(st.integers(0, 4)) :])
            options[name] = numbers if name == "bias" else np.asarray(numbers < 0.5)
    if draw_(st.booleans()):
        options["sinks"] = 2 * random.standard_normal(sizes[1])
    return sizes, options


def by_loops(inputs: dict[str, np.ndarray], options: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """The definition, one number at a time."""
    q, k, v = (inputs[name] for name in "qkv")
    (b, sq, hq, d), (sk, hk) = q.shape, k.shape[1:3]
    offset = sk - sq if options["q_offset"] is None else options["q_offset"]
    left, right = options["window_size"] or (None, None)
    slopes = np.zeros(hq) if options["alibi_slopes"] is None else options["alibi_slopes"]
    bias = np.zeros(()) if options["bias"] is None else options["bias"]
    mask = np.ones((), bool) if options["mask"] is None else options["mask"]
    out, lse = np.zeros((b, sq, hq, v.shape[3])), np.full((b, hq, sq), -np.inf)
    for n, h, i in itertools.product(range(b), range(hq), range(sq)):
        weights = {}
        for j in range(sk):
            late = (options["causal"] and j > i + offset) or (
                right is not None and j > i + offset + right
            )
            early = left is not None and j < i + offset - left
            if not late and not early and _at(mask, (n, h, i, j)):
                score = q[n, i, h] @ k[n, j, h // (hq // hk)] / np.sqrt(d)
                if options["softcap"]:
                    score = options["softcap"] * np.tanh(score / options["softcap"])
                slope = slopes[h] if slopes.ndim == 1 else slopes[n, h]
                score += _at(bias, (n, h, i, j)) - slope * abs(i + offset - j)
                weights[j] = np.exp(score)
        total = sum(weights.values())
        if options["sinks"] is not None:
            total += np.exp(options["sinks"][h])
        if total:
            lse[n, h, i] = np.log(total)
        for j, weight in weights.items():
            share = _share(options["dropout_p"], options["dropout_seed"], n * hq + h, i, j)
            out[n, i, h] += share * weight / total * v[n, j, h // (hq // hk)]
    return out, lse


def _share(p: float | None, seed: Any, head: int, i: int, j: int) -> float:
    """Dropout's factor of one weight."""
    if p is None:
        return 1
    words = [seed % 2**32, seed // 2**32, 0, 0] if isinstance(seed, int) else [*map(int, seed)]
    kept = round(2**14 * (1 - p))
    drawn = draw_of((words[0] ^ words[3], words[1], words[2]), head, i, j)
    return 2**14 / kept if drawn < kept else 0


def _at(array: np.ndarray, place: tuple[int, ...]) -> Any:
    """The element of a pair, (batch, head, query, key), in an array that broadcasts."""
    whole = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return whole[tuple(at % n for at, n in zip(place, whole.shape, strict=True))]


@settings(max_examples=100)
@given(problems())
def test_forward_is_the_definition(problem: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    sizes, options = problem
    inputs, _ = draw(sizes)
    for got, expected in zip(
        reference.attention(**inputs, **options), by_loops(inputs, options), strict=True
    ):
        assert_near(got, expected)


@settings(max_examples=50)
@given(problems())
def test_gradients_are_finite_differences(problem: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    sizes, options = problem
    inputs, gradients = draw(sizes, 1)
    for name in ("alibi_slopes", "bias", "sinks"):  # in the order of their gradients
        value = options.pop(name)
        inputs |= {} if value is None else {name: value}

    def loss(**moved: np.ndarray) -> float:
        out, lse = reference.attention(**{**inputs, **moved}, **options)
        live = np.isfinite(lse)
        by_lse = np.sum(lse[live] * gradients["dlse"][live])
        return float(np.sum(out * gradients["dout"]) + by_lse)

    grads = reference.attention_backward(
        gradients["dout"], **inputs, dlse=gradients["dlse"], **options
    )
    step = limits.DIFFERENCE_STEP
    generator = np.random.default_rng(2)
    for (name, value), grad in zip(inputs.items(), grads, strict=True):
        assert grad.shape == value.shape
        along = generator.standard_normal(value.shape)
        ahead, behind = (
            loss(**{name: np.asarray(value + sign * step * along)}) for sign in (1, -1)
        )
        found, expected = (ahead - behind) / (2 * step), np.sum(grad * along)
        size = np.linalg.norm(along) * max(1, np.linalg.norm(grad))
        assert abs(found - expected) <= limits.DIFFERENCE_LIMIT * size, name


def _both(inputs: dict[str, np.ndarray], dout: np.ndarray, **options: Any) -> list[np.ndarray]:
    """Out, lse, dq, dk and dv."""
    grads = reference.attention_backward(dout, **inputs, **options)
    return [*reference.attention(**inputs, **options), *grads[:3]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"window_size": (None, 0)}, {"causal": True}),
        ({"window_size": (2, 3), "causal": True}, {"window_size": (2, 0)}),
        ({"window_size": (9, 9)}, {}),
        ({"window_size": (None, None)}, {}),
        ({"alibi_slopes": np.zeros(4)}, {}),
        ({"alibi_slopes": np.zeros((2, 4)), "causal": True}, {"causal": True}),
        ({"alibi_slopes": np.full((2, 4), 0.5)}, {"alibi_slopes": np.full(4, 0.5)}),
        ({"bias": np.zeros(())}, {}),
        ({"bias": np.full((2, 1, 7, 1), 0.5)}, {"bias": np.full((7, 6), 0.5)}),
        ({"bias": np.triu(np.full((7, 6), -np.inf), 0)}, {"causal": True}),
        ({"mask": np.ones((), bool)}, {}),
        ({"mask": np.ones((2, 1, 7, 1), bool), "causal": True}, {"causal": True}),
        ({"mask": np.tril(np.ones((7, 6), bool), -1)}, {"causal": True}),
        ({"mask": np.eye(7, 6, dtype=bool)}, {"bias": np.where(np.eye(7, 6), 0, -np.inf)}),
        ({"sinks": np.full(4, -np.inf)}, {}),
        ({"sinks": np.full(4, -np.inf), "window_size": (1, 1)}, {"window_size": (1, 1)}),
    ],
)
def test_these_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    inputs, gradients = draw((2, 4, 2, 7, 6, 3, 2))
    pairs = zip(
        _both(inputs, gradients["dout"], **one),
        _both(inputs, gradients["dout"], **other),
        strict=True,
    )
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_dead_row_is_its_sink() -> None:
    inputs, gradients = draw((2, 2, 1, 5, 4, 3, 2))
    sinks = np.array([0.5, -3.0])
    options: dict[str, Any] = {"causal": True, "q_offset": -3, "sinks": sinks}
    out, lse = reference.attention(**inputs, **options)
    assert not out[:, :3].any()
    assert np.array_equal(lse[:, :, :3], np.broadcast_to(sinks[None, :, None], (2, 2, 3)))
    dout, dlse = gradients["dout"], gradients["dlse"]
    expected = reference.attention_backward(dout, **inputs, dlse=dlse, **options)
    dout = dout.copy()
    dout[:, :3] = np.inf  # the output is 0 there, so it must not reach delta
    got = reference.attention_backward(dout, **inputs, dlse=dlse, **options)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    options["q_offset"] = -9  # all rows are dead: only dlse reaches the sinks
    *none, dsinks = reference.attention_backward(dout, **inputs, dlse=dlse, **options)
    assert not any(grad.any() for grad in none)
    assert_near(dsinks, dlse.sum(axis=(0, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sink_that_is_not_finite_comes_out_of_its_head_alone(bad: float) -> None:
    inputs, _ = draw((1, 2, 1, 3, 4, 3, 2))
    out, lse = reference.attention(**inputs, sinks=np.array([0.0, bad]))
    assert np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(out[:, :, 0]).all()
    assert np.isfinite(lse[:, 0]).all()


def test_slopes_are_one_for_each_query_head_of_each_entry_or_of_all() -> None:
    inputs, gradients = draw((3, 4, 2, 3, 4, 3, 2))
    for wrong in (np.zeros(2), np.zeros((2, 4)), np.zeros((4, 1)), np.float64(0), np.zeros(3)):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^alibi_slopes: got "):
            reference.attention(**inputs, alibi_slopes=wrong)
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^alibi_slopes: got "):
            reference.attention_backward(gradients["dout"], **inputs, alibi_slopes=wrong)
    q = inputs["q"][0, :, 0]  # without these axes there are one head and one entry
    for right in (np.zeros(1), np.zeros((1, 1))):
        reference.attention(q, q, q, alibi_slopes=right)


def test_a_slope_counts_keys_in_either_direction() -> None:
    """All products are 0: so weights are powers of two, and lse is the log of their sum."""
    q, k, v = np.zeros((1, 1, 1, 2)), np.zeros((1, 4, 1, 2)), np.eye(4)[None, :, None]
    halved = np.array([np.log(2)])
    for q_offset, away in ((1, [1, 0, 1, 2]), (-2, [2, 3, 4, 5]), (5, [5, 4, 3, 2])):
        out, lse = reference.attention(q, k, v, alibi_slopes=halved, q_offset=q_offset)
        weights = 2.0 ** -np.array(away)
        assert_near(out.ravel(), weights / weights.sum())
        assert_near(lse.ravel(), np.log([weights.sum()]))
        dlse = np.ones((1, 1, 1))
        given_ = {"dlse": dlse, "alibi_slopes": halved, "q_offset": q_offset}
        *_, dslopes = reference.attention_backward(np.zeros_like(out), q, k, v, **given_)
        assert_near(dslopes, -np.array([weights @ away / weights.sum()]))


def test_sinks_are_one_for_each_query_head() -> None:
    inputs, gradients = draw((1, 4, 2, 3, 4, 3, 2))
    for wrong in (np.zeros(2), np.zeros((4, 1)), np.float64(0)):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^sinks: got "):
            reference.attention(**inputs, sinks=wrong)
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^sinks: got "):
            reference.attention_backward(gradients["dout"], **inputs, sinks=wrong)
    q, one = inputs["q"][0, :, 0], np.zeros(1)  # without an axis of heads there is one head
    reference.attention(q, q, q, sinks=one)
