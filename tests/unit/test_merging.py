"""Merging of parts of attention: which parts count, results, refusals and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash

_INF, _NAN = np.inf, np.nan
_LIBRARIES = pytest.mark.parametrize("library", ["numpy", "jax.numpy"])


def _merge(library: str, outs: Any, lses: Any, kind: Any = np.float32) -> tuple[Any, Any]:
    """Merge parts of one row and two columns, layout "sd"."""
    xp = pytest.importorskip(library)
    given_ = [xp.asarray(np.array([out], kind)) for out in outs]
    numbers = [xp.asarray(np.array([lse], np.float32)) for lse in lses]
    out, lse = cuflash.merge(given_, numbers, layout="sd")
    return np.asarray(out)[0].tolist(), float(lse[0])


@_LIBRARIES
def test_a_row_that_saw_nothing_anywhere(library: str) -> None:
    assert _merge(library, [(_NAN, 3), (_INF, -_INF)], [-_INF, -_INF]) == ([0, 0], -_INF)
    assert _merge(library, [(_NAN, 3)], [-_INF]) == ([0, 0], -_INF)


@_LIBRARIES
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_part_that_saw_nothing_does_not_count(library: str, at: int) -> None:
    """Its contents and position do not matter: the result has the same bits as without it."""
    outs, lses = [(0.1, -7.3), (2.4, 9.1)], [0.3, -0.7]
    expected = _merge(library, outs, lses)
    outs.insert(at, (_NAN, _INF))
    lses.insert(at, -_INF)
    assert _merge(library, outs, lses) == expected


@_LIBRARIES
def test_one_part_is_itself(library: str) -> None:
    for lse in (3.7, -500.0, 3e38, 0.0):
        assert _merge(library, [(0.1, -0.0)], [lse]) == _merge("numpy", [(0.1, -0.0)], [lse])
        (first, second), found = _merge(library, [(0.1, -0.0)], [lse])
        assert (first, found) == (float(np.float32(0.1)), float(np.float32(lse)))
        assert np.signbit(second)


@_LIBRARIES
def test_what_is_not_finite_of_a_part_that_counts_is_passed_on(library: str) -> None:
    out, lse = _merge(library, [(_INF, 1), (2, _NAN)], [0.0, 0.0])
    assert out[0] == _INF
    assert np.isnan(out[1])
    assert lse == pytest.approx(np.log(2))
    out, lse = _merge(library, [(1, 1), (2, 2)], [0.0, _INF])
    assert np.isnan(out).all()
    assert lse == _INF
    for lses in ([_NAN, 0.0], [-_INF, _NAN], [_NAN, _INF]):
        out, lse = _merge(library, [(1, 1), (2, 2)], lses)
        assert np.isnan([*out, lse]).all()


@_LIBRARIES
@pytest.mark.parametrize("lse", [3000.0, -3000.0, 0.0])
def test_weights_have_the_sum_1_however_large_lse_is(library: str, lse: float) -> None:
    """``exp(lse_i - lse)`` with a rounded ``lse`` would be off by half an ulp of ``lse``."""
    out, _ = _merge(library, [(1, 1), (1, 3)], [lse, lse])
    assert out == [1, 2]


@_LIBRARIES
def test_a_sum_is_rounded_once(library: str) -> None:
    """The small terms are lost if float16 adds them one by one, but not if it adds their sum."""
    small = np.float16(3.4e-4)
    outs = [(1, 1), (small, 1), (small, 1)]
    out, _ = _merge(library, outs, [0.0] * 3, np.float16)
    assert out == [np.float16((1 + 2 * float(small)) / 3), 1]
    third = np.float16(1 / 3)
    assert third + np.float16(float(small) / 3) == third != out[0]


@given(st.permutations(range(4)), st.integers(0, 2**31))
def test_parts_are_summed_in_their_order(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    outs, lses = rng.standard_normal((4, 9, 2)), rng.standard_normal((4, 9))
    found, lse = cuflash.merge([outs[i] for i in order], [lses[i] for i in order], layout="sd")
    largest = lses.max(0)
    exps = [np.exp(lses[i] - largest) for i in order]
    total = ((exps[0] + exps[1]) + exps[2]) + exps[3]
    parts = [(e / total)[:, None] * outs[i] for e, i in zip(exps, order, strict=True)]
    np.testing.assert_array_equal(found, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    np.testing.assert_array_equal(lse, np.log(total) + largest)


def test_numpy_warns_of_nothing_and_raises_nothing() -> None:
    with np.errstate(all="raise"):
        _merge("numpy", [(_NAN, 1), (1, 2), (3, 4)], [-_INF, 0.0, -200.0])
        _merge("numpy", [(_NAN, 1), (1, 2)], [-_INF, _INF])


def _jax_case() -> tuple[Any, Any, Any]:
    """Two parts in float32; row 0 is dead in one of them and row 1 in both."""
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((2, 2, 3, 1, 4)).astype(np.float32)
    lses = rng.standard_normal((2, 2, 1, 3)).astype(np.float32)
    lses[0, :, :, 0] = lses[:, :, :, 1] = -_INF
    outs[0, :, 0] = outs[:, :, 1] = _NAN
    return jnp, outs, lses


def test_jax_compiles_it_and_has_the_results_of_numpy() -> None:
    jnp, outs, lses = _jax_case()
    import jax

    out, lse = jax.jit(cuflash.merge)([*map(jnp.asarray, outs)], [*map(jnp.asarray, lses)])
    expected, expected_lse = cuflash.merge([*outs], [*lses])
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=1e-7)


def test_jax_differentiates_both_results_by_both_arguments() -> None:
    """Gradients equal those derived by hand: a dead part adds nothing, not even its NaN."""
    jnp, outs, lses = _jax_case()
    import jax

    rng = np.random.default_rng(1)
    dout = rng.standard_normal(outs[0].shape).astype(np.float32)
    dlse = rng.standard_normal(lses[0].shape).astype(np.float32)
    _, pullback = jax.vjp(cuflash.merge, [*map(jnp.asarray, outs)], [*map(jnp.asarray, lses)])
    of_outs, of_lses = pullback((jnp.asarray(dout), jnp.asarray(dlse)))
    out, lse = cuflash.merge([*outs], [*lses])
    for i, (part, logs) in enumerate(zip(outs, lses, strict=True)):
        with np.errstate(invalid="ignore"):
            weight = np.where(np.isneginf(logs), 0, np.exp(logs - lse))
        column = weight.swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(of_outs[i], column * dout, rtol=1e-5, atol=1e-6)
        shift = (dout * np.where(np.isnan(part), 0, part - out)).sum(-1).swapaxes(1, 2)
        np.testing.assert_allclose(of_lses[i], weight * (shift + dlse), rtol=1e-5, atol=1e-6)


_OUT, _LSE = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 4, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: cuflash.merge([], []), ValueError, "outs: got no arrays; expected one or more"),
        (lambda: cuflash.merge(_OUT, [_LSE]), TypeError, "outs: .*a sequence of arrays"),
        (lambda: cuflash.merge([_OUT], _LSE), TypeError, "lses: .*a sequence of arrays"),
        (lambda: cuflash.merge("ab", [_LSE]), TypeError, "outs: got .*str; expected a seq"),
        (lambda: cuflash.merge([_OUT], [_LSE] * 2), ValueError, "lses: got 2 arrays; expected 1"),
        (lambda: cuflash.merge([[1]], [_LSE]), TypeError, r"outs\[0\]: .*an array of NumPy"),
        (lambda: cuflash.merge([_OUT], [3.0]), TypeError, r"lses\[0\]: got 3.0; .*of NumPy"),
        (lambda: cuflash.merge([_OUT > 0], [_LSE]), TypeError, r"outs\[0\]: got dtype bool"),
        (lambda: cuflash.merge([_OUT.astype(">f4")], [_LSE]), TypeError, r"outs\[0\]: got dtype"),
        (
            lambda: cuflash.merge([_OUT, _OUT.astype(np.float16)], [_LSE] * 2),
            TypeError,
            r"outs\[1\]: got dtype float16; expected float32, as outs\[0\]",
        ),
        (
            lambda: cuflash.merge([_OUT, _OUT[:1]], [_LSE] * 2),
            ValueError,
            r"outs\[1\]: got shape \(1, 3, 4, 5\); expected \(2, 3, 4, 5\), as outs\[0\]",
        ),
        (
            lambda: cuflash.merge([_OUT] * 2, [_LSE, _LSE.astype(np.float64)]),
            TypeError,
            r"lses\[1\]: got dtype float64; expected float32",
        ),
        (
            lambda: cuflash.merge([_OUT.astype(np.float64)], [_LSE]),
            TypeError,
            r"lses\[0\]: got dtype float32; expected float64, to go with outs of float64",
        ),
        (
            lambda: cuflash.merge([_OUT], [_LSE.swapaxes(1, 2)]),
            ValueError,
            r"lses\[0\]: got shape \(2, 3, 4\); expected \(2, 4, 3\)",
        ),
        (lambda: cuflash.merge([_OUT[0]], [_LSE[0]]), ValueError, r"outs\[0\]: .*4 axes, .*'bshd'"),
        (lambda: cuflash.merge([_OUT], [_LSE], layout="bsd"), ValueError, "layout: got 'bsd'"),
        (lambda: cuflash.merge([_OUT], [_LSE], layout=None), TypeError, "layout: got None"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(cuflash.CuflashError, match=says) as caught:
        call()
    assert isinstance(caught.value, error)


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_libraries_are_not_mixed(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    given_ = {"outs": [_OUT, _OUT], "lses": [_LSE, _LSE]}
    given_[name][1] = jnp.asarray(given_[name][1])
    with pytest.raises(cuflash.ArgumentTypeError, match=rf"^{name}\[1\]: .*array of numpy, as"):
        cuflash.merge(**given_)


def test_arrays_without_rows_or_columns() -> None:
    out, lse = cuflash.merge([_OUT[:, :0]] * 2, [_LSE[:, :, :0]] * 2)
    assert (out.shape, lse.shape) == ((2, 0, 4, 5), (2, 4, 0))
    out, lse = cuflash.merge([_OUT[..., :0]] * 2, [_LSE] * 2)
    assert out.shape == (2, 3, 4, 0)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
