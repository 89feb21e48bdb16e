"""FlashAttention-3's gradients of wide heads, whose scores are queries x keys, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.across import across_alone
from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASES = {
    "full": Case(1, 2, 2, 150, 200, 192, 192, "bfloat16", seed=1),
    "whole tiles": Case(1, 2, 1, 192, 288, 192, 192, "float16", seed=2),
    "narrow": Case(2, 2, 1, 130, 97, 136, 160, "bfloat16", seed=3),
    "one query": Case(2, 2, 2, 1, 150, 192, 168, "float16", seed=4),
    "one key": Case(1, 2, 1, 100, 1, 192, 192, "bfloat16", seed=5),
    "causal": Case(1, 4, 2, 256, 256, 192, 192, "bfloat16", True, seed=6),
    "unseen keys": Case(2, 2, 1, 200, 700, 192, 192, "float16", True, q_offset=100, seed=7),
    "dead queries": Case(1, 2, 2, 256, 200, 192, 192, "bfloat16", True, q_offset=-90, seed=8),
    "no query lives": Case(1, 1, 1, 140, 200, 192, 192, "float16", True, q_offset=-300, seed=9),
    "large scores": Case(1, 2, 1, 70, 333, 192, 192, "float16", values="x8", seed=10),
    "outliers": Case(1, 2, 2, 70, 333, 192, 192, "bfloat16", True, values="outliers", seed=11),
    # so many heads that blocks clear sums for others
    "many heads": Case(5, 8, 4, 100, 300, 192, 192, "bfloat16", True, q_offset=0, seed=12),
}
_GIVEN = ("q", "k", "v", "dout", "dlse")


def _gradients(
    case: Case, x: dict[str, np.ndarray], num_sms: int = 1, deterministic: bool = False
) -> list[np.ndarray]:
    """The gradients dq, dk and dv."""
    runner = EmulatedRunner("90", "fa3", num_sms=num_sms, deterministic=deterministic)
    with across_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        made = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    return [*made]


def _check(case: Case, deterministic: bool = False) -> None:
    x = arrays(case, *_GIVEN)
    truth = judge(case, x)
    made = _gradients(case, x, deterministic=deterministic)
    for which, got in zip(("dq", "dk", "dv"), made, strict=True):
        compare(truth, which, got).check()


@pytest.mark.parametrize("name", _CASES)
def test_against_float64(name: str) -> None:
    _check(_CASES[name])


@pytest.mark.parametrize("name", ["causal", "whole tiles"])
def test_ordered_sums_against_float64(name: str) -> None:
    _check(_CASES[name], deterministic=True)


def test_tile_is_the_one_of_queries_and_keys() -> None:
    with across_alone():
        assert EmulatedRunner("90", "fa3").tiles(_CASES["full"], "backward") == (64, 96)


@settings(max_examples=12)
@given(
    heads=st.sampled_from(((1, 1), (2, 1), (2, 2))),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 400)),
    widths=st.sampled_from(((192, 192), (136, 192), (192, 8), (160, 144))),
    dtype=st.sampled_from(("float16", "bfloat16")),
    offset=st.one_of(st.none(), st.integers(-260, 420)),  # none: a full mask
    seed=st.integers(0, 1000),
)
def test_drawn_problems(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
    dtype: str,
    offset: int | None,
    seed: int,
) -> None:
    causal = offset is not None
    _check(Case(1, *heads, *lengths, *widths, dtype, causal, q_offset=offset, seed=seed))


@pytest.mark.parametrize("place", [0.1, 0.6])  # of keys that are seen
def test_what_is_not_finite_comes_out_of_what_sees_it(place: float) -> None:
    case = Case(1, 2, 2, 240, 200, 192, 192, "float16", causal=True, q_offset=-20, seed=1)
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 128)
        x = one.x
        with across_alone():
            out, lse = runner.forward(case, x["q"], x["k"], x["v"])
            given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
            dq, dk, dv = runner.backward(case, *given)
        one.check({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


@pytest.mark.parametrize("name", ["q", "dout", "k", "v"])
def test_dead_queries_leave_no_trace(name: str) -> None:
    """Whatever dead rows, or a key that others see, hold: their dq is 0, and dk and dv stay."""
    case = Case(1, 2, 2, 250, 300, 192, 192, "bfloat16", causal=True, q_offset=-80, seed=2)
    x = arrays(case, *_GIVEN)
    sound = _gradients(case, x)
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    with across_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        rows = slice(80) if name in ("q", "dout") else slice(3, 4)
        x[name][:, rows] = np.nan
        dq, dk, dv = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    assert not dq[:, :80].any()
    if name in ("q", "dout"):
        assert (dq == sound[0]).all()
        assert (dk == sound[1]).all()
        assert (dv == sound[2]).all()
