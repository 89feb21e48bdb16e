"""The kit's allowance for a bias' gradient in a row whose log-sum-exp errs."""

from __future__ import annotations

from dataclasses import replace

from ..kit.case import Case
from ..kit.compare import Registry, compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.runners import ApiRunner


def test_errors_of_a_log_sum_exp_are_allowed() -> None:
    """The largest score of a row is far from the others, and has a far larger error than they."""
    for seed in (223, 7391):
        case = Case(1, 1, 1, 192, 168, 128, 128, bias="1hqk", dtype="float32", seed=seed)
        case = replace(case, values="outliers", layout="sd")
        x = arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)
        runner = ApiRunner("numpy", "fa2")
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        grads = dict(zip(case.gradients, runner.backward(case, *given), strict=True))
        compare(judge(case, x), "dbias", grads["dbias"], Registry()).check()
