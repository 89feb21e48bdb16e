"""Features of this folder on the tiled NumPy code: alone, together, with windows and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.dispatch import call
from cuflash.features.feature import Request
from cuflash.features.table import FEATURES
from cuflash.features.use import Use
from cuflash.tensors import tensors

from .case import DTYPES, Array, TenantCall, both_passes, judge
from .parity import PARITY
from .registered import registered
from .tilt import TILT


@pytest.fixture(scope="module", autouse=True)
def _tenants() -> Iterator[None]:
    with registered(PARITY, TILT):
        yield


@st.composite
def _calls(draw: Any) -> TenantCall:
    heads_kv = draw(st.integers(1, 2))
    bound = st.none() | st.integers(0, 12)
    return TenantCall(
        batch=draw(st.integers(1, 2)),
        heads_q=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=draw(st.integers(1, 40)),
        seqlen_kv=draw(st.integers(1, 40)),
        head_dim=draw(st.sampled_from([3, 8])),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(bound, bound)),
        q_offset=draw(st.none() | st.integers(-10, 50)),
        sinks=draw(st.booleans()),
        parity=draw(st.sampled_from([None, 0, 1])),
        tilt=draw(st.none() | st.floats(-0.5, 0.5, width=32)),
        softcap=draw(st.sampled_from([None, None, 0.5, 4.0])),
        shift=draw(st.sampled_from([0.0, 4.0])),
        seed=draw(st.integers(0, 9)),
    )


def _check(one: TenantCall, **more: Any) -> dict[str, Array]:
    tolerance = DTYPES[one.dtype][1] * (20 if one.dtype == "float64" else 1)
    truth, got = judge(one), both_passes(one, backend="numpy", **more)
    assert got.keys() == truth.keys()
    for name, expected in truth.items():
        seen = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got[name]), seen, f"{name} {one}")
        size = np.abs(expected[seen]).max(initial=1)
        error = np.abs(got[name][seen] - expected[seen]).max(initial=0)
        assert error <= tolerance * size, f"{name} {error} {one} {more}"
    return got


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@settings(max_examples=60)
@given(one=_calls(), blocks=st.none() | st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_any_call_against_float64(
    algorithm: str, one: TenantCall, blocks: tuple[int, int] | None
) -> None:
    _check(one, algorithm=algorithm, blocks=blocks)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("q_offset", [None, 0, -20])
def test_many_rows(algorithm: str, q_offset: int | None) -> None:
    """With so many rows, plain calls bound their scores and take no maxima. Terms need maxima."""
    one = TenantCall(seqlen_q=300, seqlen_kv=301, causal=True, parity=1, tilt=-9.0, sinks=True)
    _check(replace(one, dtype="float64", q_offset=q_offset), algorithm=algorithm)
    _check(replace(one, dtype="float64", q_offset=q_offset).without("sinks"), algorithm=algorithm)


def test_few_queries_of_many_keys() -> None:
    one = TenantCall(seqlen_q=3, seqlen_kv=900, parity=0, tilt=0.3)
    for heads_kv in (1, 4):
        _check(replace(one, heads_kv=heads_kv))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_batches_and_heads_that_are_computed_apart(heads_kv: int) -> None:
    """Terms get the numbers of entries and heads in the call, not those within a task."""
    one = TenantCall(3, 4, heads_kv, 700, 700, tilt=0.01, parity=1)
    whole = _check(one)
    x = one.inputs()
    for entry in range(3):
        alone = {name: array[entry : entry + 1] for name, array in x.items()}
        results = call("forward", alone, {**one.keywords, "backend": "numpy"})
        np.testing.assert_allclose(results["out"], whole["out"][entry : entry + 1], rtol=1e-4)


@pytest.mark.parametrize("dead", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_rows_that_a_term_hides_may_hold_anything(algorithm: str, dead: float) -> None:
    one = TenantCall(parity=1, causal=True, q_offset=0, tilt=0.1, dead=dead)
    assert not one.visible()[0].any()
    got = _check(one, algorithm=algorithm)
    assert (got["out"][:, 0] == 0).all()
    assert (got["dq"][:, 0] == 0).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_keys_with_a_common_part(algorithm: str, sinks: bool) -> None:
    """The part that all keys share stays out of the log-sum-exp, so dq is exact with terms too."""
    one = TenantCall(seqlen_q=60, seqlen_kv=70, shift=3e3, parity=0, tilt=0.1, sinks=sinks)
    for call_of in (one, one.without("parity"), one.without("tilt")):
        truth = judge(call_of)["dq"]
        got = both_passes(call_of, backend="numpy", algorithm=algorithm)["dq"]
        assert np.abs(got - truth).max() <= 1e-6 * np.abs(truth).max()


def test_each_term_changes_the_result() -> None:
    one = TenantCall(parity=1, tilt=0.2, sinks=True, window=(20, 5), softcap=2.0)
    every = both_passes(one, backend="numpy")
    for name in ("parity", "tilt", "sinks", "window", "softcap"):
        other = both_passes(one.without(name), backend="numpy")
        for result in every.keys() & other.keys():
            assert not np.array_equal(every[result], other[result]), (name, result)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"parity": 2}, "parity: got 2"),
        ({"tilt": 1}, "tilt: got 1"),
        ({"tilt": 1.0}, "weights: got None"),
    ],
)
def test_keywords_are_checked(changed: dict[str, Any], error: str) -> None:
    x = TenantCall().inputs()
    with pytest.raises(cuflash.CuflashError, match=error):
        call("forward", x, changed)


def test_arrays_are_checked() -> None:
    x = TenantCall(tilt=1.0).inputs()
    with pytest.raises(cuflash.ArgumentValueError, match="weights: got shape"):
        call("forward", {**x, "weights": x["weights"][0]}, {"tilt": 1.0})
    with pytest.raises(cuflash.ArgumentValueError, match="tilt: got None"):
        call("forward", x, {})


def test_a_term_of_kernels_alone_is_refused() -> None:
    def of_kernels_alone(request: Request) -> Use | None:
        use = PARITY.use(request)
        return use and replace(use, host=None)

    x = TenantCall().inputs()
    with registered(replace(PARITY, use=of_kernels_alone)):
        with pytest.raises(cuflash.UnsupportedError, match="NumPy backend does not have parity"):
            call("forward", x, {"parity": 0})
        call("forward", x, {})


def test_the_table_is_as_it_was() -> None:
    """Outside of the tenant nothing knows the rows or the decisions made with them."""
    name = "a third"
    with registered(replace(PARITY, name=name, keywords={})):
        assert [*FEATURES][-1] == name
        assert "weights" in tensors()
    assert name not in FEATURES
    assert [*FEATURES][-2:] == ["parity", "tilt"]
