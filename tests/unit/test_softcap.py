"""``softcap`` as an argument, and on the tiled NumPy code: against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch, reference
from cuflash.features.softcap import SOFTCAP
from cuflash.features.table import with_features
from cuflash.options import check_options
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from .wrt_case import GivenCall, calls

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


@settings(max_examples=150)
@given(value=st.one_of(st.floats(), st.integers(), st.sampled_from([True, "1", 1j, [1.0], np.pi])))
def test_a_cap_is_a_finite_number_or_refused(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        with pytest.raises(_TYPE, match=r"^softcap: got"):
            check_options(softcap=value)
    elif 0 <= value <= np.finfo(np.float64).max:
        got = check_options(softcap=value).keyword("softcap")
        assert type(got) is float
        assert got == float(value)
    else:
        with pytest.raises(_VALUE, match=r"^softcap: got"):
            check_options(softcap=value)


@settings(max_examples=60)
@given(
    call=calls(alibi=False, bias=False),
    cap=st.sampled_from([2.0**-101, 2.0**-99, 2.0**101, 2.0**99, 2.0**950]),
    scale=st.sampled_from([None, 2.0**-60, 2.0**60]),
)
def test_caps_out_of_range_are_refused(call: GivenCall, cap: float, scale: float | None) -> None:
    """The cap, and the scale divided by it, must be in range; that is checked first."""
    exponent = 900 if call.inputs["q"].dtype == np.float64 else 100
    inner = (scale or call.inputs["q"].shape[-1] ** -0.5) / cap
    keywords = {**call.keywords, "softcap": cap, "scale": scale}
    if all(2.0**-exponent <= number <= 2.0**exponent for number in (cap, inner)):
        cuflash.attention(**call.inputs, **keywords)
        return
    ran: list[Any] = []
    with dispatch.observe(ran.append), pytest.raises(_VALUE, match=r"^softcap: got .* with scale"):
        cuflash.attention(**call.inputs, **keywords)
    assert not ran


@settings(max_examples=40)
@given(call=calls(), none=st.sampled_from([None, 0, 0.0, np.float32(0)]))
def test_zero_is_no_cap(call: GivenCall, none: Any) -> None:
    plain = cuflash.attention(**call.inputs, **call.keywords)
    assert (
        plain.tobytes()
        == cuflash.attention(**call.inputs, **{**call.keywords, "softcap": none}).tobytes()
    )


@settings(max_examples=120)
@given(call=calls(), cap=st.sampled_from([0.3, 2.0, 40.0]))
def test_both_passes_against_the_formula(call: GivenCall, cap: float) -> None:
    """Any lengths, masks and windows, in double precision."""
    inputs = call.wide
    known = {"causal", "window_size", "scale", "q_offset", "layout"}
    keywords = {n: v for n, v in call.keywords.items() if n in known} | {"softcap": cap}
    own = {**keywords, "backend": "numpy"}
    out, lse = cuflash.attention(**inputs, **own, return_lse=True)
    expected = reference.attention(**inputs, **keywords)
    dout = np.cos(np.arange(out.size)).reshape(out.shape)
    own["wrt"] = call.wrt
    gradients = cuflash.attention_backward(dout, **inputs, out=out, lse=lse, **own)
    expected += reference.attention_backward(dout, **inputs, **keywords)
    for got, exact in zip((out, lse, *gradients), expected, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_scores_are_whole_where_keys_have_a_common_part(algorithm: str) -> None:
    """A common part changes capped scores, unlike a softmax, so it must not be subtracted."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 300, 2, 8)) for _ in range(4))
    k = k + 5.0
    own = {"softcap": 4.0, "algorithm": algorithm, "backend": "numpy"}
    out, pullback = cuflash.attention_vjp(q, k, v, **own)
    np.testing.assert_allclose(out, reference.attention(q, k, v, softcap=4.0)[0], atol=1e-11)
    exact = reference.attention_backward(dout, q, k, v, softcap=4.0)
    for got, expected in zip(pullback(dout), exact, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-11)


def _problem(**changed: Any) -> AttentionProblem:
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 512, "seqlen_kv": 512}
    kinds = {"storage": "float16", "output": "float16", "mask": "full", "operation": "backward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.1, "q_offset": 0}
    more = {"alignment": "tensor_map"}
    return AttentionProblem(**{**sizes, **kinds, **wide, **more, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_the_size_of_the_cap_is_no_part_of_a_kernel(algorithm: Any) -> None:
    plans = [
        plan(with_features(_problem(), {"softcap": cap}, {}), LIMITS["90"], algorithm=algorithm)
        for cap in (2.0, 30.0)
    ]
    first, second = ([launch.config for launch in one.launches] for one in plans)
    assert first == second
    assert [str(one.problem).rpartition("full ")[2] for one in plans] == ["softcap 2", "softcap 30"]
    numbers = [dict(one.problem.uses[0].numbers) for one in plans]
    assert numbers == [
        {"inner": inner, "cap": cap, "inner_single": inner}
        for inner, cap in ((0.05, 2.0), (0.1 / 30, 30.0))
    ]
    for one, cap in zip(plans, (2.0, 30.0), strict=True):
        assert one.problem.unit == cap
        assert one.problem.factor == pytest.approx(cap * np.log2(np.e))
    named = [[feature.name for feature in config.features] for config in first]
    assert ["softcap"] in named
    assert SOFTCAP.arrays == {}
