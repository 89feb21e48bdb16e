"""``alibi_slopes``: the checks of the argument, and the tiled NumPy code against the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch, reference
from cuflash.planning.problem import MAX_SEQLEN

from .wrt_case import DTYPES, GivenCall, calls

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _shapes(call: GivenCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of slopes: one for each head, and one for each head of each batch entry."""
    layout, shape = call.keywords["layout"], call.inputs["q"].shape
    batch, heads = (shape[layout.index(axis)] if axis in layout else 1 for axis in "bh")
    return (heads,), (batch, heads)


def _compute(call: GivenCall) -> str:
    return "float64" if call.inputs["q"].dtype == np.float64 else "float32"


def _refused(call: GivenCall, slopes: Any, error: Any, match: str, **keywords: Any) -> Any:
    """The error, which the call raises before anything is computed."""
    ran: list[Any] = []
    with dispatch.observe(ran.append), pytest.raises(error, match=match) as caught:
        cuflash.attention(**call.inputs, **{**call.keywords, **keywords}, alibi_slopes=slopes)
    assert not ran
    return caught.value


@settings(max_examples=100)
@given(call=calls(alibi=False), data=st.data())
def test_slopes_of_another_shape_or_dtype_are_refused(call: GivenCall, data: Any) -> None:
    allowed = _shapes(call)
    batch, heads = allowed[1]
    odd = [(heads + 1,), (batch + 1, heads), (heads, batch), (), (batch, 1, heads), (0,), (batch,)]
    shape = data.draw(st.sampled_from([*allowed, *odd]))
    kind = data.draw(st.sampled_from([*DTYPES]))
    slopes = np.zeros(shape, DTYPES[kind])
    if shape not in allowed:
        error = _refused(call, slopes, _VALUE, r"^alibi_slopes: got shape")
        assert "batch may be left out" in error.expected
    elif kind != _compute(call):
        error = _refused(call, slopes, _TYPE, r"^alibi_slopes: got")
        assert error.expected == _compute(call)
    else:
        cuflash.attention(**call.inputs, **call.keywords, alibi_slopes=slopes)


@pytest.mark.parametrize("slopes", [0.5, [0.5, 0.5], "float32", (2,), True], ids=str)
def test_what_is_no_array_is_no_slopes(slopes: Any) -> None:
    q = np.ones((1, 3, 2, 4), np.float32)
    with pytest.raises(_TYPE, match=r"^alibi_slopes: got"):
        cuflash.attention(q, q, q, alibi_slopes=slopes, backend="numpy")


def test_a_destination_over_the_slopes_is_refused() -> None:
    q, memory = np.ones((1, 3, 2, 4), np.float32), np.zeros(24, np.float32)
    with pytest.raises(_VALUE, match="out: got memory that alibi_slopes uses"):
        cuflash.attention(
            q, q, q, alibi_slopes=memory[:2], out=memory.reshape(q.shape), backend="numpy"
        )


@settings(max_examples=60)
@given(
    call=calls(alibi=False),
    q_offset=st.sampled_from([MAX_SEQLEN, MAX_SEQLEN + 1, 2**40]),
    sign=st.sampled_from([1, -1]),
)
def test_positions_out_of_range_are_refused(call: GivenCall, q_offset: int, sign: int) -> None:
    """With slopes, positions out of range are refused under any mask; without slopes, never."""
    given_ = {**call.keywords, "q_offset": sign * q_offset}
    slopes = np.full(_shapes(call)[1], 2.0**-8, _compute(call))
    cuflash.attention(**call.inputs, **given_)
    if q_offset <= MAX_SEQLEN:
        cuflash.attention(**call.inputs, **given_, alibi_slopes=slopes)
        return
    match = rf"^q_offset: got {sign * q_offset} with alibi_slopes"
    _refused(call, slopes, _VALUE, match, q_offset=sign * q_offset)


@settings(max_examples=100)
@given(
    call=calls(alibi=False),
    softcap=st.sampled_from([None, 2.0**-61, 2.0**-60, 2.0**60, 2.0**61]),
    scale=st.sampled_from([2.0**-61, 2.0**-60, 1.0, 2.0**60, 2.0**61]),
)
def test_units_out_of_range_are_refused(
    call: GivenCall, softcap: float | None, scale: float
) -> None:
    """The unit of the scores is the cap, or without a cap the scale. float64 takes any unit."""
    quotient = scale / (softcap or scale)
    slopes = np.zeros(_shapes(call)[0], _compute(call))
    given_ = {"softcap": softcap, "scale": scale}
    if not 2.0**-100 <= quotient <= 2.0**100 and _compute(call) == "float32":
        _refused(call, slopes, _VALUE, "^softcap: got .* with scale", **given_)
    elif 2.0**-60 <= (softcap or scale) <= 2.0**60 or _compute(call) == "float64":
        with np.errstate(over="ignore"):
            cuflash.attention(**call.inputs, **{**call.keywords, **given_}, alibi_slopes=slopes)
    else:
        name = "softcap" if softcap else "scale"
        _refused(call, slopes, _VALUE, f"^{name}: got .* with alibi_slopes", **given_)


@settings(max_examples=30)
@given(call=calls(sinks=False, alibi=False))
def test_their_gradient_needs_slopes(call: GivenCall) -> None:
    out, lse = cuflash.attention(**call.inputs, **call.keywords, return_lse=True)
    given_ = {**call.inputs, "out": out, "lse": lse, **call.keywords}
    with pytest.raises(_VALUE, match=r"^wrt: got .*alibi_slopes"):
        cuflash.attention_backward(out, **given_, wrt=("alibi_slopes",))


@st.composite
def _problems(draw: Any) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Inputs in float64, the formula's keywords, and the library's own."""
    call = draw(calls(alibi=False))
    inputs = call.wide
    known = {"causal", "window_size", "scale", "q_offset", "layout"}
    keywords = {n: v for n, v in call.keywords.items() if n in known}
    keywords["softcap"] = draw(st.sampled_from([None, None, 0.3, 2.0]))
    shape, seed = draw(st.sampled_from(_shapes(call))), draw(st.integers(0, 99))
    size = draw(st.sampled_from([0.0, 0.03, 0.5, 4.0]))
    inputs["alibi_slopes"] = size * np.random.default_rng(seed).standard_normal(shape)
    blocks = draw(st.sampled_from([None, (1, 1), (2, 3), (4, 2)]))
    own = {"backend": "numpy", "algorithm": call.keywords["algorithm"], "blocks": blocks}
    return inputs, keywords, own


def _names(inputs: dict[str, np.ndarray]) -> tuple[str, ...]:
    """The names of the inputs in the order of the formula's gradients."""
    return tuple(
        name for name in ("q", "k", "v", "alibi_slopes", "bias", "sinks") if name in inputs
    )


@settings(max_examples=250)
@given(problem=_problems(), seed=st.integers(0, 9))
def test_both_passes_against_the_formula(problem: Any, seed: int) -> None:
    """The calls have any lengths, masks, windows, caps and sinks, in double precision."""
    inputs, keywords, own = problem
    out, lse = cuflash.attention(**inputs, **keywords, **own, return_lse=True)
    expected = reference.attention(**inputs, **keywords)
    random = np.random.default_rng(seed)
    dout, dlse = random.standard_normal(out.shape), random.standard_normal(lse.shape)
    dlse[~np.isfinite(lse)] = 0
    given_ = {**inputs, "out": out, "lse": lse, "dlse": dlse, **keywords, **own}
    gradients = cuflash.attention_backward(dout, **given_, wrt=_names(inputs))
    expected += reference.attention_backward(dout, **inputs, dlse=dlse, **keywords)
    for got, exact in zip((out, lse, *gradients), expected, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-10)
    alone = cuflash.attention_backward(dout, **given_, wrt=("alibi_slopes",))
    alone = alone[0] if isinstance(alone, tuple) else alone
    np.testing.assert_allclose(alone, gradients[3], rtol=1e-12, atol=1e-13)


@settings(max_examples=60)
@given(problem=_problems(), seed=st.integers(0, 9))
def test_the_gradient_is_that_of_the_formula(problem: Any, seed: int) -> None:
    """It equals the reference's finite differences along a random direction."""
    inputs, keywords, own = problem
    out, pullback = cuflash.attention_vjp(**inputs, **keywords, **own, wrt=("alibi_slopes",))
    random = np.random.default_rng(seed)
    dout, slopes = random.standard_normal(out.shape), inputs["alibi_slopes"]
    got = pullback(dout)
    got = got[0] if isinstance(got, tuple) else got
    assert (got.shape, got.dtype) == (slopes.shape, slopes.dtype)
    along, step = random.standard_normal(slopes.shape), 1e-6

    def loss(moved: np.ndarray) -> float:
        found, _ = reference.attention(**{**inputs, "alibi_slopes": moved}, **keywords)
        return float((found * dout).sum())

    found = (loss(slopes + step * along) - loss(slopes - step * along)) / (2 * step)
    np.testing.assert_allclose((got * along).sum(), found, rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(call=calls(alibi=False))
def test_slopes_of_zero_are_none(call: GivenCall) -> None:
    """The results agree up to rounding: the two calls compute the same numbers in two ways."""
    inputs = call.wide
    plain = cuflash.attention(**inputs, **call.keywords)
    zeros = np.zeros(_shapes(call)[0])
    flat = cuflash.attention(**inputs, **call.keywords, alibi_slopes=zeros)
    np.testing.assert_allclose(flat, plain, rtol=1e-12, atol=1e-13)
