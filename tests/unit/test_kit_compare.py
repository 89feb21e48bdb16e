"""The comparison accepts rounding and rejects everything else."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.kit import data, limits, oracle
from tests.kit.case import STORAGE, VALUES, Case
from tests.kit.compare import Registry, Result, compare
from tests.kit.oracle import Truth, judge
from tests.kit.runners import ApiRunner
from tests.unit.emulation import Emulation

HALVES = ("float16", "bfloat16")
GRADIENTS = ("dq", "dk", "dv")
RESULTS = ("out", *GRADIENTS)

pytestmark = pytest.mark.skipif(not oracle.WIDE, reason="longdouble is no wider than float64")


def case_of(dtype: str, **changes: object) -> Case:
    case = Case(2, 4, 2, 130, 150, 32, 48, dtype, causal=True, layout="bhsd", seed=1)
    return replace(case, **changes)


@functools.cache
def solved(case: Case, bug: str = "") -> tuple[Truth, dict[str, np.ndarray]]:
    """The truth and the emulation's results."""
    x = data.arrays(case, "q", "k", "v", "dout", "dlse")
    runner = Emulation(bug)
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    return judge(case, x), {"out": out, "lse": lse, **dict(zip(GRADIENTS, grads, strict=True))}


def result_of(case: Case, name: str, changed: np.ndarray | None = None) -> Result:
    truth, got = solved(case)
    return compare(truth, name, got[name] if changed is None else changed, Registry())


def copy_of(case: Case, name: str) -> np.ndarray:
    return solved(case)[1][name].copy()


def rejected(result: Result, *rules: str) -> bool:
    failed = {verdict.rule for verdict in result.verdicts if not verdict.passed}
    if failed:
        with pytest.raises(AssertionError, match=f"{result.name}: rule"):
            result.check()
    return bool(failed) and (not rules or not failed.isdisjoint(rules))


SIZES = [
    {},
    {"causal": False, "seqlen_q": 70, "seqlen_kv": 200},
    {"q_offset": -20},
    {"seqlen_q": 1},
    {"seqlen_kv": 1, "q_offset": 3},
    {"seqlen_q": 3, "seqlen_kv": 3, "head_dim": 1, "head_dim_v": 1},
    {"scale": 1 / 32, "heads_kv": 4},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", STORAGE)
def test_a_correct_result_passes(dtype: str, sizes: dict[str, object]) -> None:
    for name in (*RESULTS, "lse"):
        result_of(case_of(dtype, **sizes), name).check()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_every_family_of_values_passes(dtype: str, values: str) -> None:
    for name in (*RESULTS, "lse"):
        result_of(case_of(dtype, values=values), name).check()


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_kv"])
def test_nothing_passes(empty: str) -> None:
    for name in (*RESULTS, "lse"):
        result_of(case_of("bfloat16", **{empty: 0}), name).check()


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", STORAGE)
def test_gross_errors_are_rejected(dtype: str, name: str) -> None:
    case = case_of(dtype)
    assert result_of(case, name).passed
    assert rejected(result_of(case, name, np.zeros_like(copy_of(case, name))))
    swapped = copy_of(case, name)
    swapped[:, :, [60, 61]] = swapped[:, :, [61, 60]]
    assert rejected(result_of(case, name, swapped), "row", "plain")
    heads = copy_of(case, name)[:, ::-1]
    assert rejected(result_of(case, name, heads), "row", "plain")
    assert rejected(result_of(case, name, -copy_of(case, name)), "row", "plain")
    for bad in (np.nan, np.inf, -np.inf):
        one = copy_of(case, name)
        one[1, 1, 77, 5] = bad
        result = result_of(case, name, one)
        assert rejected(result, "nonfinite")
        assert result.worst.index == (1, 1, 77)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", STORAGE)
def test_one_bad_row_is_rejected_and_named(dtype: str, name: str) -> None:
    case = case_of(dtype)
    bad = copy_of(case, name).astype(np.float64)
    bad[1, 0, 100] *= 1.05
    result = result_of(case, name, bad.astype(case.storage))
    assert rejected(result, "row", "plain")
    assert result.worst.index == (1, 0, 100)
    with pytest.raises(AssertionError) as caught:
        result.check()
    for part in (f"{name}: rule", "(1, 0, 100)", "got", "expected", case.repro):
        assert part in str(caught.value)


@pytest.mark.parametrize("part", [slice(None), slice(-32, None)])
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", STORAGE)
def test_two_percent_is_rejected(dtype: str, name: str, part: slice) -> None:
    """All rows are off, or only the last rows, where masks and rescaling go wrong."""
    case = case_of(dtype)
    off = copy_of(case, name).astype(np.float64)
    off[:, :, part] *= 1.02
    assert rejected(result_of(case, name, off.astype(case.storage)))


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", STORAGE)
def test_one_percent_of_everything_is_rejected(dtype: str, name: str) -> None:
    """For gradients in bfloat16, only the rule for bias rejects it: one row may err so."""
    case = case_of(dtype)
    off = (1.01 * copy_of(case, name).astype(np.float64)).astype(case.storage)
    result = result_of(case, name, off)
    assert rejected(result, "bias" if dtype in HALVES else "plain")
    if dtype == "bfloat16" and name != "out":
        assert not rejected(result, "row")


def test_a_wrong_shape_or_dtype_is_rejected() -> None:
    case = case_of("float16")
    out = copy_of(case, "out")
    for wrong in (out[:, :, :0], out[:, :, :-1], out[..., None], out.swapaxes(1, 2), out[:0]):
        assert rejected(result_of(case, "out", wrong), "shape")
    assert rejected(result_of(case, "out", out.astype(np.float64)), "shape")
    assert rejected(result_of(case, "dq", copy_of(case, "dq").astype(np.float32)), "shape")
    assert result_of(case, "out", out.astype(np.float32)).passed  # out_dtype
    lse = copy_of(case, "lse")
    assert rejected(result_of(case, "lse", lse.astype(np.float16)), "shape")
    assert rejected(result_of(case, "lse", lse[..., :-1]), "shape")
    empty = case_of("float16", seqlen_kv=0)
    assert rejected(result_of(empty, "dk", np.zeros((2, 2, 1, 32), np.float16)), "shape")


@pytest.mark.parametrize("dtype", STORAGE)
def test_what_cannot_err_must_be_zero(dtype: str) -> None:
    case = case_of(dtype, q_offset=-20)  # 20 dead queries, 40 keys that no query sees
    for name, row in (("out", 19), ("dq", 0), ("dk", 149), ("dv", 110)):
        touched = copy_of(case, name)
        assert not touched[:, :, row].any()
        touched[0, 1, row, 3] = 1e-6
        result = result_of(case, name, touched)
        assert rejected(result, "zero")
        assert result.worst.index == (0, 1, row)


@pytest.mark.parametrize("dtype", STORAGE)
def test_lse_is_judged_apart(dtype: str) -> None:
    case = case_of(dtype, q_offset=-20)
    lse = copy_of(case, "lse")
    assert result_of(case, "lse").passed
    limit = limits.LSE_RELATIVE * (1 if dtype != "float64" else 2.0**-29)
    for wrong in (lse * (1 + 10 * limit), lse / np.log(2), np.where(lse < 0, 0, lse)):
        assert rejected(result_of(case, "lse", wrong.astype(lse.dtype)))
    moved = lse.copy()
    moved[1, 2, 40] += 100 * limit
    result = result_of(case, "lse", moved)
    assert rejected(result, "lse")
    assert result.worst.index == (1, 2, 40)
    for bad in (-1e30, np.nan, np.inf, 0):  # in a dead row
        dead = lse.copy()
        dead[0, 0, 3] = bad
        assert rejected(result_of(case, "lse", dead), "nonfinite")


def test_float32_is_not_tf32() -> None:
    """Operands are rounded to 11 bits, or the output errs by 2^-19, as from a coarse exp.

    Rounded operands err by four orders of magnitude more than plain NumPy, the output by one.
    """
    case = case_of("float32")
    x = data.arrays(case)
    rounded = {
        name: ((array.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)
        for name, array in x.items()
    }
    out, lse = Emulation().forward(case, rounded["q"], rounded["k"], x["v"])
    assert rejected(result_of(case, "out", out), "plain")
    grads = Emulation().backward(case, x["dout"], *(rounded[n] for n in "qk"), x["v"], out, lse)
    truth = judge(case, x)
    for name, grad in zip(GRADIENTS, grads, strict=True):
        assert rejected(compare(truth, name, grad, Registry()), "plain")
    noise = np.random.default_rng(0).standard_normal(out.shape) * 2.0**-19
    off = (copy_of(case, "out") * (1 + noise)).astype(np.float32)
    assert rejected(result_of(case, "out", off), "plain")


def test_an_overflow_is_right_where_the_truth_overflows() -> None:
    case = case_of("float16")
    truth, got = solved(case)
    results = {name: array.copy() for name, array in truth.results.items()}
    results["out"][0, 0, 9, 2] = 1e6
    beyond = replace(truth, results=results)
    out = got["out"].copy()
    assert not compare(beyond, "out", out, Registry()).passed
    out[0, 0, 9, 2] = np.inf
    assert compare(beyond, "out", out, Registry()).passed
    out[0, 0, 9, 2] = -np.inf
    assert not compare(beyond, "out", out, Registry()).passed


def test_flushed_rows_pass_whose_squares_underflow() -> None:
    """A sink with all the weight leaves an output of 1e-131, which correctly rounds to 0."""
    case = case_of("bfloat16")
    truth, _ = solved(case)
    results = {"out": truth.results["out"] * 1e-131}
    model = {"out": truth.model["out"] * 1e-131}
    small = replace(truth, results=results, model=model)
    for flushed in (0, 2.0**-126 * np.sign(results["out"])):
        got = np.broadcast_to(flushed, results["out"].shape).astype(case.storage)
        assert compare(small, "out", got, Registry()).check().passed
    assert rejected(compare(small, "out", got * 2**13, Registry()), "row")


def test_nan_where_the_truth_has_nan() -> None:
    case = case_of("bfloat16")
    x = data.arrays(case)
    x["q"][1, 2, 50, 0] = np.nan
    out, lse = Emulation().forward(case, x["q"], x["k"], x["v"])
    truth = judge(case, {name: x[name] for name in "qkv"})
    assert compare(truth, "out", out, Registry()).check().passed
    assert np.isnan(out[1, 2, 50]).all()
    compare(truth, "lse", lse, Registry()).check()
    out[1, 2, 50] = 0
    assert rejected(compare(truth, "out", out, Registry()), "nonfinite")


def test_the_model_needs_each_of_its_terms() -> None:
    """In these cases, a model of errors without one of its terms rejects correct results."""
    errors_of_delta = case_of("bfloat16", values="outliers", head_dim=8, head_dim_v=16, batch=1)
    products_that_cancel = case_of("float16", values="x30")
    one_key = case_of("float32", values="x8", seqlen_q=300, seqlen_kv=1, causal=False)
    same_rows = replace(
        one_key, seqlen_q=40, seqlen_kv=150, head_dim=8, head_dim_v=8, seed=2, values="equal"
    )
    same_rows = replace(same_rows, heads_q=1, heads_kv=1, batch=1, scale=0.106)
    for case in (errors_of_delta, products_that_cancel, one_key, same_rows):
        for name in (*RESULTS, "lse"):
            result_of(case, name).check()


def test_keys_of_one_query_share_its_error() -> None:
    """Each block has one key. The sum of 117 weights errs, and thus the gradients of all values."""
    case = Case(1, 2, 2, 1, 117, 40, 40, "float32", causal=True, layout="shd", values="small")
    case = replace(case, seed=1)
    x = data.arrays(case)
    runner = ApiRunner("numpy", "fa1", options=(("blocks", (40, 1)),))
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse)
    truth = judge(case, x)
    for name, got in zip(GRADIENTS, grads, strict=True):
        compare(truth, name, got, Registry()).check()
    wrong = grads[2] * np.float32(1 + 4e-6)
    assert rejected(compare(truth, "dv", wrong, Registry()), "plain")


def test_the_registry_keeps_the_worst() -> None:
    registry = Registry()
    truth, got = solved(case_of("float16"))
    compare(truth, "out", got["out"], registry)
    first = registry.worst["out", "float16", "row"][0].ratio
    compare(truth, "out", (1.5 * got["out"]).astype(np.float16), registry)
    worse = registry.worst["out", "float16", "row"]
    compare(truth, "out", got["out"], registry)
    assert 0 < first < limits.ROW_LIMIT["out"] < worse[0].ratio
    assert registry.worst["out", "float16", "row"] == worse
    assert any("out" in line and truth.case.repro in line for line in registry.report())
    compare(truth, "out", np.full_like(got["out"], np.nan), registry)
    assert registry.worst["out", "float16", "nonfinite"][0].ratio == np.inf
