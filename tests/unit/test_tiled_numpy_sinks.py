"""Sinks in the tiled NumPy backend: each row has one more logit, without a value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import tiled_numpy
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.tiled_numpy import fa2
from cuflash.tiled_numpy.blocks import Blocks

from .sinks_case import TOLERANCES, arrays_of, bits, check_all, solve
from .tiled_case import (
    ALGORITHMS,
    GIVEN,
    LIMITS,
    WANTED,
    definition,
    destinations,
    dtype_of,
    problem,
    visible,
)


@st.composite
def problems(draw_: st.DrawFn) -> AttentionProblem:
    seqlen_q, seqlen_kv = draw_(st.integers(1, 40)), draw_(st.integers(0, 40))
    heads_kv = draw_(st.integers(1, 2))
    last = draw_(st.integers(-seqlen_q, seqlen_kv + 1))
    return problem(
        storage=draw_(st.sampled_from(sorted(TOLERANCES))),
        batch=draw_(st.integers(1, 2)),
        heads_kv=heads_kv,
        heads_q=heads_kv * draw_(st.integers(1, 3)),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_v=draw_(st.sampled_from((8, 3))),
        mask=draw_(st.sampled_from(("full", "causal", "left", "band"))),
        q_offset=last,
        q_first=last - draw_(st.integers(0, 20)),
    )


choices = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(ALGORITHMS),
        "blocks": st.none() | st.tuples(st.integers(1, 24), st.integers(1, 24)),
    }
)


@settings(max_examples=300)
@given(problems(), choices, st.integers(0, 3), st.sampled_from((0.1, 2.0, 30.0)), st.booleans())
def test_a_sink_is_a_logit_more(
    p: AttentionProblem, choice: Any, seed: int, spread: float, narrow: bool
) -> None:
    dtype = dtype_of(p, "q") if narrow else None
    arrays = arrays_of(p, seed, spread, dtype)
    wanted = definition(p, arrays)
    check_all(solve(p, arrays, **choice), wanted, TOLERANCES[p.storage])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_a_sink_is_a_key_of_its_own_with_a_value_of_zero(mask: Any, algorithm: str) -> None:
    """Results are those of a call without sinks and with a key whose score is 0 in every row."""
    p = problem(seqlen_q=12, seqlen_kv=20, mask=mask, q_offset=-3, q_first=-7)
    arrays = arrays_of(p, spread=0.0)
    with_key = {**arrays, **{n: np.pad(arrays[n], ((0, 0), (0, 1), (0, 0), (0, 0))) for n in "kv"}}
    seen = np.broadcast_to(visible(p), (12, 20))
    longer = replace(p, seqlen_kv=21, mask="full")
    del with_key["sinks"]
    wanted = definition(longer, with_key, np.pad(seen, ((0, 0), (0, 1)), constant_values=True))
    got = solve(p, arrays, algorithm=algorithm, blocks=(5, 6))
    for name in ("out", "lse", "dq"):
        np.testing.assert_allclose(got[name], getattr(wanted, name), atol=1e-13)
    for name in ("dk", "dv"):
        np.testing.assert_allclose(got[name], getattr(wanted, name)[:, :20], atol=1e-13)


@pytest.mark.parametrize("way", ["_block", "_small_block", "few_rows_block"])
@pytest.mark.parametrize("common", [0.0, 60.0])
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_every_way_through_a_block(
    heads_kv: int, common: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If keys have a common part, the sink is still compared with the whole score."""
    monkeypatch.setattr(fa2, "FEW_ROWS", 10**9 if way == "few_rows_block" else 0)
    monkeypatch.setattr(fa2, "_ROWS_TO_MEASURE", 1 if way == "_small_block" else 10**9)
    p = problem(heads_q=4, heads_kv=heads_kv, mask="causal", q_offset=-2)
    arrays = arrays_of(p)
    arrays["q"][..., 1] = np.abs(arrays["q"][..., 1])
    arrays["k"][..., 1] += common
    arrays["sinks"] += np.float64(0.3 * common)
    check_all(solve(p, arrays, blocks=(4, 5)), definition(p, arrays), 1e-12)


def test_the_rounding_of_the_output_does_not_reach_dq_by_what_keys_have_in_common() -> None:
    """A single key is all common part: dq is rounded once, and delta's rounding has no effect."""
    p = problem(storage="float16", seqlen_q=400, seqlen_kv=1, q_offset=0)
    arrays = arrays_of(p, dtype=np.float32)
    got, wanted = solve(p, arrays)["dq"].astype(np.float64), definition(p, arrays).dq
    assert (np.abs(got - wanted) <= 2.0**-10 * np.abs(wanted) + 2.0**-22).all()


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_large_scores_that_all_have_and_the_sink_too(shift: float) -> None:
    """They change nothing but lse, although float32 keeps few digits of such large scores."""
    p = problem(storage="float32", scale=1.0, mask="causal", q_offset=0, seqlen_q=23)
    arrays = arrays_of(p)
    arrays["q"][..., 0], arrays["k"][..., 0] = 1, 0
    arrays["sinks"] = np.round(16 * arrays["sinks"]) / 16
    before = solve(p, arrays)
    arrays["k"][..., 0] = shift
    arrays["sinks"] += np.float32(shift)
    after = solve(p, arrays)
    for name in ("out", "dv", "dq", "dsinks"):
        if name == "dq":
            before[name][..., 0] = after[name][..., 0]  # 0, apart from rounding times the shift
        size = np.abs(before[name]).max()
        assert np.abs(after[name] - before[name]).max() <= 1e-5 * size, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["full", "band"])
def test_minus_infinity_is_no_sink(mask: Any, algorithm: str) -> None:
    p = problem(heads_q=4, mask=mask, q_offset=-6, q_first=-9)
    arrays = arrays_of(p)
    arrays["sinks"][1:3] = -np.inf
    got = solve(p, arrays, algorithm=algorithm)
    assert (got["dsinks"][1:3] == 0).all()
    plain = destinations(p)
    q, k, v, dout, dlse = (arrays[name] for name in GIVEN)
    tiled_numpy.forward(plan(p, LIMITS, algorithm=algorithm), q, k, v, plain["out"], plain["lse"])
    backward = plan(replace(p, operation="backward"), LIMITS, algorithm=algorithm)
    tiled_numpy.backward(backward, dout=dout, dlse=dlse, q=q, k=k, v=v, **plain)
    for name in ("out", "dq"):
        assert (got[name][:, :, 1:3] == plain[name][:, :, 1:3]).all(), name
    assert (got["lse"][:, 1:3] == plain["lse"][:, 1:3]).all()


@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_without_a_number_makes_its_head_nan(sink: float) -> None:
    p = problem(heads_q=4, mask="causal", q_offset=-3)
    arrays = arrays_of(p)
    arrays["sinks"][2] = sink
    got = solve(p, arrays)
    assert np.isnan(got["out"][:, 3:, 2]).all()
    assert np.isnan(got["lse"][:, 2]).all()
    assert np.isfinite(np.delete(got["out"], 2, axis=2)).all()
    assert np.isfinite(np.delete(got["lse"], 2, axis=1)).all()
    assert np.isnan(got["dsinks"][2])
    assert np.isfinite(np.delete(got["dsinks"], 2)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("common", [0.0, 30.0])
def test_dead_rows_are_the_sink_and_nothing_of_them_is_read(
    common: float, bad: float, algorithm: str
) -> None:
    p = problem(heads_q=4, seqlen_q=20, seqlen_kv=9, mask="band", q_offset=-4, q_first=-7)
    dead = [0, 1, 2, 3, *range(16, 20)]
    assert (~visible(p).any(axis=1)).nonzero()[0].tolist() == dead
    arrays = arrays_of(p)
    arrays["k"][..., 0] += common
    before = solve(p, arrays, algorithm=algorithm, blocks=(6, 4))
    assert (before["out"][:, dead] == 0).all()
    assert (before["dq"][:, dead] == 0).all()
    assert (before["lse"][:, :, dead] == arrays["sinks"][:, None]).all()
    for name in ("q", "dout"):
        arrays[name][:, dead] = bad
    assert bits(solve(p, arrays, algorithm=algorithm, blocks=(6, 4))) == bits(before)
    spoilt = {name: array.copy() for name, array in before.items()}
    spoilt["out"][:, dead] = bad  # another backend may have written this
    q, k, v, dout, dlse = (arrays[name] for name in GIVEN)
    backward = plan(replace(p, operation="backward"), LIMITS, algorithm=algorithm, blocks=(6, 4))
    inputs = {"q": q, "k": k, "v": v, "sinks": arrays["sinks"], "dout": dout, "dlse": dlse}
    tiled_numpy.backward(backward, **inputs, **spoilt)
    for name in ("dq", "dk", "dv", "dsinks"):
        assert spoilt[name].tobytes() == before[name].tobytes(), name


def test_a_dead_row_gives_its_dlse_to_the_sink() -> None:
    p = problem(mask="causal", q_offset=-19)  # nothing is seen at all
    arrays = arrays_of(p)
    got = solve(p, arrays)
    np.testing.assert_allclose(got["dsinks"], arrays["dlse"].sum(axis=(0, 2)), rtol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_band_that_ends_before_it_begins_has_no_tile(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all rows are dead, whatever the arrays hold."""

    def visited(*_: Any) -> None:
        raise AssertionError("a tile was visited")

    monkeypatch.setattr(Blocks, "apply_mask", visited)
    p = problem(mask="band", q_first=3, q_offset=1)
    arrays = arrays_of(p)
    arrays["q"][...] = arrays["dout"][...] = np.nan
    got = solve(p, arrays, algorithm=algorithm, blocks=(8, 8))
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert (got["lse"] == arrays["sinks"][:, None]).all()
    np.testing.assert_allclose(got["dsinks"], arrays["dlse"].sum(axis=(0, 2)), rtol=1e-12)


def test_no_rows_give_nothing_to_the_sink() -> None:
    p = problem(seqlen_q=0)
    got = solve(p, arrays_of(p))
    assert (got["dsinks"] == 0).all()
    assert all((got[name] == 0).all() for name in ("dk", "dv"))


def test_sinks_of_any_stride() -> None:
    p = problem(heads_q=4)
    arrays = arrays_of(p)
    wanted = bits(solve(p, arrays))
    arrays["sinks"] = np.repeat(arrays["sinks"], 3)[::-3][::-1]
    arrays["sinks"] = np.ascontiguousarray(arrays["sinks"][::-1])[::-1]
    assert bits(solve(p, arrays)) == wanted


def test_the_backward_pass_may_be_given_the_lse_of_more_keys() -> None:
    """Then weights add up to less than 1, both with a sink and without one."""
    p = problem(seqlen_kv=30, mask="full")
    arrays = arrays_of(p)
    arrays["k"][..., 0] += 40
    whole = definition(p, arrays)
    made = solve(p, arrays)
    half = replace(p, operation="backward", seqlen_kv=15)
    total = {name: np.zeros_like(made[name]) for name in ("dq", "dk", "dv")}
    for keys in (slice(0, 15), slice(15, 30)):
        part = {"dq": np.empty_like(made["dq"])}
        part |= {n: np.empty_like(made[n][:, keys]) for n in ("dk", "dv")}
        q, k, v, dout, dlse = (arrays[name] for name in GIVEN)
        inputs = {"q": q, "k": k[:, keys], "v": v[:, keys], "sinks": arrays["sinks"]}
        given_to = {"dout": dout, "dlse": dlse, "out": made["out"], "lse": made["lse"]}
        tiled_numpy.backward(plan(half, LIMITS), **inputs, **given_to, **part)
        total["dq"] += part["dq"]
        total["dk"][:, keys], total["dv"][:, keys] = part["dk"], part["dv"]
    for name, got in total.items():
        np.testing.assert_allclose(got, getattr(whole, name), atol=1e-10)
    assert set(WANTED) <= set(made)
