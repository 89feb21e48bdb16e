"""FlashAttention-3's gradients of short heads, whose queries a block keeps, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.few import short_alone
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASES = {
    "full": Case(1, 2, 2, 197, 197, 64, 64, "bfloat16", seed=1),
    "four whole tiles": Case(1, 2, 2, 256, 400, 64, 64, "bfloat16", seed=2),
    "narrow": Case(2, 1, 1, 130, 300, 24, 32, "float16", seed=3),
    "uneven widths": Case(1, 2, 2, 193, 129, 40, 8, "bfloat16", seed=4),
    "one query": Case(2, 1, 1, 1, 150, 64, 32, "float16", seed=5),
    "causal": Case(1, 2, 2, 256, 256, 32, 32, "float16", True, seed=6),
    "every query lives": Case(1, 1, 1, 256, 300, 64, 64, "bfloat16", True, seed=7),
    "unseen half": Case(1, 1, 1, 128, 256, 64, 64, "bfloat16", True, q_offset=64, seed=11),
    "unseen keys": Case(2, 1, 1, 200, 700, 64, 32, "bfloat16", True, q_offset=100, seed=8),
    "dead queries": Case(1, 2, 2, 256, 200, 64, 64, "float16", True, q_offset=-90, seed=9),
    "no query lives": Case(1, 1, 1, 140, 200, 64, 64, "float16", True, q_offset=-300, seed=10),
}
_GIVEN = ("q", "k", "v", "dout", "dlse")


def _gradients(
    case: Case, x: dict[str, np.ndarray], num_sms: int = 1, deterministic: bool = False
) -> list[np.ndarray]:
    """The gradients dq, dk and dv."""
    runner = EmulatedRunner("90", "fa3", num_sms=num_sms, deterministic=deterministic)
    with short_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        made = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    return [*made]


def _check(case: Case) -> None:
    x = arrays(case, *_GIVEN)
    truth = judge(case, x)
    for which, got in zip(("dq", "dk", "dv"), _gradients(case, x), strict=True):
        compare(truth, which, got).check()


@pytest.mark.parametrize("name", _CASES)
def test_against_float64(name: str) -> None:
    _check(_CASES[name])


def test_two_kernels_run() -> None:
    with short_alone():
        kernels = EmulatedRunner("90", "fa3").kernels(_CASES["full"], "backward")
    assert kernels == ["statistics", "backward_short"]


@settings(max_examples=12)
@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    lengths=st.tuples(st.integers(1, 256), st.integers(1, 400)),
    widths=st.sampled_from(((64, 64), (64, 8), (40, 56), (32, 32), (8, 24))),
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
    of_heads = heads[0], heads[1], heads[1]
    causal = offset is not None
    case = Case(*of_heads, *lengths, *widths, dtype, causal, q_offset=offset, seed=seed)
    _check(case)


@pytest.mark.parametrize("num_sms", [1, 3])
def test_any_number_of_blocks_gives_the_same_bits(num_sms: int) -> None:
    """The options that ask for one order of sums also give these bits."""
    case = _CASES["narrow"]
    x = arrays(case, *_GIVEN)
    bits = [grad.tobytes() for grad in _gradients(case, x)]
    again = _gradients(case, x, num_sms=num_sms, deterministic=True)
    assert [grad.tobytes() for grad in again] == bits


@pytest.mark.parametrize("place", [0.1, 0.6])  # of keys that are seen
def test_what_is_not_finite_comes_out_of_what_sees_it(place: float) -> None:
    case = Case(1, 2, 2, 240, 200, 64, 64, "float16", causal=True, q_offset=-20, seed=1)
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 128)
        x = one.x
        with short_alone():
            out, lse = runner.forward(case, x["q"], x["k"], x["v"])
            given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
            dq, dk, dv = runner.backward(case, *given)
        one.check({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


@pytest.mark.parametrize("name", ["q", "dout", "k", "v"])
def test_dead_queries_leave_no_trace(name: str) -> None:
    """Whatever dead rows, or a key that others see, hold: their dq is 0, and dk and dv stay."""
    case = Case(1, 2, 2, 250, 300, 64, 64, "bfloat16", causal=True, q_offset=-80, seed=2)
    x = arrays(case, *_GIVEN)
    sound = _gradients(case, x)
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    with short_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        rows = slice(80) if name in ("q", "dout") else slice(3, 4)
        x[name][:, rows] = np.nan
        dq, dk, dv = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    assert not dq[:, :80].any()
    if name in ("q", "dout"):
        assert (dq == sound[0]).all()
        assert (dk == sound[1]).all()
        assert (dv == sound[2]).all()


@pytest.mark.parametrize("queries", [100, 197])  # some q tiles do not exist, all do
def test_an_infinite_key_reaches_no_gradient_of_what_gives_it_no_weight(queries: int) -> None:
    """Rows beyond the length hold zeros, and zero times infinity is NaN."""
    case = Case(1, 2, 2, queries, 300, 64, 64, "bfloat16", seed=3)
    x = arrays(case, *_GIVEN)
    x["q"][..., 0] = -1
    x["k"][:, 5, :, 0] = np.inf
    _, dk, dv = _gradients(case, x)
    assert np.isfinite(dk.astype(np.float32)).all()
    assert np.isfinite(dv.astype(np.float32)).all()
