"""FlashAttention-3's gradients whose last step has half as many queries, on the CPU."""

from __future__ import annotations

import pytest

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.parts import parts_forced
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: The last q tile has 1, 36, 63 and 64 queries; groups of heads; keys that no query sees, and dead
#: queries; blocks of rows convert sums of dQ, or another kernel does.
_CASES = {
    "one query": Case(2, 2, 2, 129, 300, 64, 64, "bfloat16", seed=1),
    "groups": Case(1, 4, 2, 292, 400, 64, 48, "float16", seed=2),
    "causal": Case(2, 2, 1, 319, 319, 40, 64, "bfloat16", True, seed=3),
    "whole half": Case(1, 2, 2, 320, 200, 64, 64, "float16", True, q_offset=0, seed=4),
    "dead queries": Case(1, 2, 2, 300, 500, 64, 64, "bfloat16", True, q_offset=-40, seed=5),
    "last queries alone": Case(1, 2, 2, 400, 300, 64, 64, "float16", True, q_offset=-384, seed=6),
}


@pytest.mark.parametrize("num_sms", [1, 4])
@pytest.mark.parametrize("name", _CASES)
def test_against_float64(name: str, num_sms: int) -> None:
    case = _CASES[name]
    runner, x = EmulatedRunner("90", "fa3", num_sms=num_sms), arrays(case, *"qkv", "dout", "dlse")
    with parts_forced(1):
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        configs = runner.configs(case)
    truth = judge(case, x)
    for which, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, which, got).check()
    halves = [dict(c.constants)["half_last"] for c in configs if c.kernel == "backward"]
    assert halves == [1]
