"""FlashAttention-3's gradients of few queries, whose tile a block keeps, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.few import few_alone
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASES = {
    "full": Case(2, 3, 3, 77, 300, 64, 64, "bfloat16", seed=1),
    "wide": Case(1, 2, 2, 128, 520, 128, 128, "float16", seed=2),
    "narrow": Case(3, 2, 2, 1, 150, 24, 40, "float16", seed=3),
    "uneven widths": Case(1, 2, 2, 65, 257, 40, 120, "bfloat16", seed=4),
    "causal": Case(2, 2, 2, 100, 300, 32, 32, "float16", True, seed=5),
    "every query lives": Case(1, 2, 2, 128, 300, 64, 64, "bfloat16", True, seed=8),
    "unseen keys": Case(2, 2, 2, 90, 700, 64, 32, "bfloat16", True, q_offset=100, seed=6),
    "dead queries": Case(1, 2, 2, 128, 200, 64, 64, "float16", True, q_offset=-40, seed=7),
}


@pytest.mark.parametrize("num_sms", [1, 5])
@pytest.mark.parametrize("name", _CASES)
def test_against_float64(name: str, num_sms: int) -> None:
    """A head has one block, or several."""
    case = _CASES[name]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    runner = EmulatedRunner("90", "fa3", num_sms=num_sms)
    with few_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        entries = [config.entry for config in runner.configs(case)]
    assert "cuflash_fa3_backward_few" in entries
    truth = judge(case, x)
    for which, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, which, got).check()


@pytest.mark.parametrize("place", [0.1, 0.6])  # of keys that are seen
def test_what_is_not_finite_comes_out_of_what_sees_it(place: float) -> None:
    case = Case(1, 2, 2, 100, 200, 64, 64, "float16", causal=True, q_offset=-20, seed=1)
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    for name, value in SPOILED:
        one = spoiled(case, name, value, place, 128)
        x = one.x
        with few_alone():
            out, lse = runner.forward(case, x["q"], x["k"], x["v"])
            given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
            dq, dk, dv = runner.backward(case, *given)
        one.check({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})


@pytest.mark.parametrize("spoiled_name", ["q", "dout", "k", "v"])
def test_dead_queries_leave_no_trace(spoiled_name: str) -> None:
    """Whatever dead rows, or a key that others see, hold: their dq is 0, and dk and dv stay."""
    case = Case(1, 2, 2, 100, 300, 64, 64, "bfloat16", causal=True, q_offset=-20, seed=2)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    with few_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        sound = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        rows = slice(20) if spoiled_name in ("q", "dout") else slice(3, 4)
        x[spoiled_name][:, rows] = np.nan
        dq, dk, dv = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    assert not dq[:, :20].any()
    if spoiled_name in ("q", "dout"):
        assert (dq == sound[0]).all()
        assert (dk == sound[1]).all()
        assert (dv == sound[2]).all()


def test_an_infinite_key_reaches_no_gradient_of_what_gives_it_no_weight() -> None:
    """Rows beyond the length hold zeros, and zero times infinity is NaN."""
    case = Case(1, 2, 2, 77, 300, 64, 64, "bfloat16", seed=3)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    x["q"][..., 0] = -1
    x["k"][:, 5, :, 0] = np.inf
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    with few_alone():
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        _, dk, dv = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    assert np.isfinite(dk.astype(np.float32)).all()
    assert np.isfinite(dv.astype(np.float32)).all()


def test_sums_in_one_order_have_the_same_bits_in_any_number_of_blocks() -> None:
    case = Case(1, 2, 2, 77, 700, 64, 64, "float16", seed=4)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    runs = []
    for num_sms in (1, 9):
        runner = EmulatedRunner("90", "fa3", num_sms=num_sms, deterministic=True)
        with few_alone():
            saved = runner.forward(case, x["q"], x["k"], x["v"])
            grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        runs.append([grad.tobytes() for grad in grads])
    assert runs[0] == runs[1]
