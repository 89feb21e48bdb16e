"""The common part of keys: subtracted where possible, and never with a loss of accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from cuflash import tiled_numpy
from cuflash.planning.plan import plan
from cuflash.tiled_numpy.common_part import common_part

from .tiled_case import ALGORITHMS, GIVEN, LIMITS, check, definition, draw, problem, solve


@given(
    nps.arrays(
        np.float32, (1, 2, 7, 3), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
    ),
    st.booleans(),
)
def test_no_key_grows_by_losing_it(keys: np.ndarray, positive: bool) -> None:
    keys = np.abs(keys) if positive else keys
    with np.errstate(all="ignore"):
        part = common_part(keys)
        if part is None:
            return
        less = keys - part
    assert np.isfinite(part).all()
    finite = np.isfinite(keys)
    assert (np.abs(less[finite]) <= np.abs(keys[finite])).all()


def test_only_keys_that_are_seen_count() -> None:
    keys = np.full((1, 1, 20, 2), 5.0)
    keys[:, :, 15:] = np.nan
    part = common_part(keys[:, :, :15])
    assert part is not None
    assert (part == 5).all()
    assert common_part(keys[:, :, :16]) is None
    assert common_part(keys[:, :, :0]) is None


@pytest.mark.parametrize("sign", [-1, 1])
def test_each_head_and_component_has_its_own(sign: int) -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, 3, 500, 4))
    keys[1, 2, :, 3] += sign * 100
    part = common_part(keys)
    assert part is not None
    assert np.flatnonzero(part).tolist() == [part.size - 1]
    assert abs(part[1, 2, 0, 3] - sign * 100) < 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("common", [0.0, 40.0])
def test_gradients_of_some_keys_from_the_statistics_of_all(common: float, algorithm: str) -> None:
    """Ring attention does this; P = exp(S - lse) of some keys does not add up to 1."""
    p = problem(seqlen_q=40, seqlen_kv=60, mask="full")
    x = draw(p)
    x["k"] += common
    x["q"] *= 0.1
    wanted, whole = definition(p, x), solve(p, x, algorithm=algorithm)
    check(whole, wanted, 1e-10)
    half = replace(p, operation="backward", seqlen_kv=30)
    chosen = plan(half, LIMITS, algorithm=algorithm, blocks=(16, 16))
    total = np.zeros_like(x["q"])
    for keys in (slice(0, 30), slice(30, 60)):
        k, v = x["k"][:, keys], x["v"][:, keys]
        dq, dk, dv = np.empty_like(x["q"]), np.empty_like(k), np.empty_like(v)
        given_to = (x["dout"], x["q"], k, v, whole.out, whole.lse, x["dlse"])
        tiled_numpy.backward(chosen, *given_to, dq, dk, dv)
        total += dq
        np.testing.assert_allclose(dk, wanted.dk[:, keys], atol=1e-10)
        np.testing.assert_allclose(dv, wanted.dv[:, keys], atol=1e-10)
    np.testing.assert_allclose(total, wanted.dq, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_query_that_is_not_finite_is_alone(bad: float, algorithm: str) -> None:
    p = problem(seqlen_q=30)
    x = draw(p)
    x["k"] += 50
    wanted = definition(p, x)
    x["q"][0, 7, 1, 2] = bad
    got = solve(p, x, algorithm=algorithm, blocks=(8, 8))
    dead = bad == -np.inf  # every score is minus infinity
    expected = got.out[0, 7, 1] == 0 if dead else np.isnan(got.out[0, 7, 1])
    assert expected.all()
    rest = np.delete(np.arange(30), 7)
    np.testing.assert_allclose(got.out[:, rest], wanted.out[:, rest], atol=1e-10)


@settings(max_examples=20)
@given(st.integers(0, 2**16), st.sampled_from(ALGORITHMS), st.sampled_from([3.0, 300.0, 3e4]))
def test_a_common_component_does_not_matter(seed: int, algorithm: str, common: float) -> None:
    """Results and gradients are those without it, to the precision of the inputs."""
    p = problem(storage="float32", seqlen_q=40, seqlen_kv=70, mask="causal", q_offset=30)
    x = draw(p, seed)
    x["dlse"][...] = 0
    x["k"] = np.round(x["k"] * 64) / 64  # so that adding the component is exact
    without = solve(p, x, algorithm=algorithm, blocks=(16, 24))
    x["k"][..., 0] += np.float32(common)
    got = solve(p, x, algorithm=algorithm, blocks=(16, 24))
    exact = definition(p, {name: x[name].astype(np.float64) for name in GIVEN})
    for name in ("out", "dq", "dk", "dv"):
        true = getattr(exact, name)
        size = np.linalg.norm(true)
        before = np.linalg.norm(getattr(without, name) - true) / size
        assert np.linalg.norm(getattr(got, name) - true) / size < max(2e-6, 4 * before), name
