"""The tiled NumPy backend where there is nothing to see, or something not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cuflash import tiled_numpy
from cuflash.planning.plan import plan

from .tiled_case import (
    ALGORITHMS,
    LIMITS,
    WANTED,
    check,
    definition,
    destinations,
    draw,
    problem,
    solve,
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    "zeros",
    ["seqlen_q", "seqlen_kv", "seqlen_q seqlen_kv", "batch", "heads_q", "heads_q heads_kv"],
)
def test_lengths_of_zero(zeros: str, mask: str, algorithm: str) -> None:
    p = problem(**dict.fromkeys(zeros.split(), 0), mask=mask)
    given = draw(p)
    got = solve(p, given, algorithm=algorithm)
    assert np.all(got.out == 0)
    assert np.all(got.lse == -np.inf)
    assert np.all(got.dq == 0)
    assert np.all(got.dk == 0)
    assert np.all(got.dv == 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dead_rows_are_zero_whatever_they_hold(algorithm: str) -> None:
    p = problem(mask="causal", q_offset=-6, heads_q=4)
    given = draw(p)
    wanted = definition(p, given)
    given["q"][:, :6] = np.nan
    given["dout"][:, :6] = np.inf
    given["dlse"][:, :, :6] = np.nan
    got = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    check(got, wanted, 1e-13)
    assert np.all(got.out[:, :6] == 0)
    assert np.all(got.dq[:, :6] == 0)
    assert np.all(got.lse[:, :, :6] == -np.inf)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dead_rows_are_zero_beside_rows_that_see_nan(algorithm: str) -> None:
    p = problem(mask="causal", q_offset=-6)
    given = draw(p)
    for name in "kv":
        given[name][:, 1] = np.nan  # seen from query 7 on; rows 4 and 5 of its block are dead
    got = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    assert np.all(np.isnan(got.out[:, 7:]))
    assert np.all(got.out[:, :6] == 0)
    assert np.all(got.dq[:, :6] == 0)
    assert np.all(got.lse[:, :, :6] == -np.inf)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dead_rows_give_no_gradient_to_keys_of_minus_infinity(algorithm: str) -> None:
    p = problem(seqlen_kv=3)
    given = draw(p)
    given["q"][..., 0] = 1
    given["k"][0, :, :, 0] = -np.inf  # every row of this batch entry is dead
    given["v"][0] = np.inf
    got = solve(p, given, algorithm=algorithm)
    for array in (got.out, got.dq, got.dk, got.dv):
        assert np.all(array[0] == 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_whose_scores_are_all_minus_infinity_are_dead(algorithm: str) -> None:
    p = problem()
    given = draw(p)
    given["q"][:, 3] = 0
    given["q"][:, 3, :, 0] = -np.inf
    given["k"][..., 0] = 1 + np.abs(given["k"][..., 0])
    got = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    assert np.all(got.out[:, 3] == 0)
    assert np.all(got.lse[:, :, 3] == -np.inf)
    assert np.all(got.dq[:, 3] == 0)
    rest = {n: np.delete(given[n], 3, axis=2 if n == "dlse" else 1) for n in ("q", "dout", "dlse")}
    wanted = definition(replace(p, seqlen_q=18), given | rest)
    np.testing.assert_allclose(got.dk, wanted.dk, atol=1e-12)
    np.testing.assert_allclose(got.dv, wanted.dv, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_of_minus_infinity_hide_their_keys(algorithm: str) -> None:
    p = problem(storage="float32")
    given = draw(p)
    given["q"][..., 0] = 1
    given["k"][..., 0] = 0
    given["k"][:, :9, :, 0] = -np.inf  # all keys of the first blocks
    into = destinations(p)
    chosen = plan(p, LIMITS, algorithm=algorithm, blocks=(4, 4))
    tiled_numpy.forward(chosen, *(given[n] for n in "qkv"), into["out"], into["lse"])
    seen = {n: given[n][:, 9:] for n in "kv"}
    wanted = definition(replace(p, seqlen_kv=14), given | seen)
    np.testing.assert_allclose(into["out"], wanted.out, atol=1e-6)
    np.testing.assert_allclose(into["lse"], wanted.lse, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("key", [0, 9, 22])
def test_a_nan_or_infinite_score_makes_its_row_nan(key: int, bad: float, algorithm: str) -> None:
    p = problem(mask="causal")
    given = draw(p)
    given["q"][..., 0] = 1  # the score of every query with that key will be bad
    wanted = definition(p, given)
    given["k"][0, key, 1, 0] = bad
    got = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    block_start = key // 4 * 4
    sees = np.arange(19) + 4 >= key
    assert np.all(np.isnan(got.out[0, sees, 1]))
    assert np.all(np.isnan(got.lse[0, 1, sees]))
    far = np.arange(19) // 4 * 4 + 3 + 4 < block_start  # their tiles do not reach the block
    np.testing.assert_allclose(got.out[0, far, 1], wanted.out[0, far, 1], atol=1e-13)
    for other in ((0, slice(None), 0), (1, slice(None), slice(None))):
        np.testing.assert_allclose(got.out[other], wanted.out[other], atol=1e-13)
        np.testing.assert_allclose(got.dk[other], wanted.dk[other], atol=1e-13)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_wholly_hidden_tiles_do_not_matter(algorithm: str) -> None:
    p = problem(mask="causal", seqlen_q=16, seqlen_kv=24, q_offset=0)
    given = draw(p)
    clean = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    for name in "kv":
        given[name][:, 16:] = np.nan  # no query sees these
    got = solve(p, given, algorithm=algorithm, blocks=(4, 4))
    for name in WANTED:
        np.testing.assert_array_equal(getattr(got, name), getattr(clean, name), err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_optional_arrays(algorithm: str) -> None:
    p = problem()
    given = draw(p)
    given["dlse"][...] = 0
    wanted = solve(p, given, algorithm=algorithm)
    out = np.empty_like(wanted.out)
    chosen = plan(p, LIMITS, algorithm=algorithm)
    tiled_numpy.forward(chosen, given["q"], given["k"], given["v"], out, None)
    np.testing.assert_array_equal(out, wanted.out)
    dq, dk, dv = (np.empty_like(given[n]) for n in "qkv")
    tiled_numpy.backward(
        plan(replace(p, operation="backward"), LIMITS, algorithm=algorithm),
        given["dout"],
        given["q"],
        given["k"],
        given["v"],
        out,
        wanted.lse,
        None,
        dq,
        dk,
        dv,
    )
    for name, array in (("dq", dq), ("dk", dk), ("dv", dv)):
        np.testing.assert_array_equal(array, getattr(wanted, name))
