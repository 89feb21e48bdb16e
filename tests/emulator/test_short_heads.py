"""FlashAttention-3's gradients of short heads, whose queries a block keeps, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.nonfinite import SPOILED, spoiled
from ..kit.oracle import judge
from ..kit.short import short_alone
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
    "unseen keys": Case(2, 1, 1, 200, 700, 64, 32, "bfloat16", True, q_offset=100, seed=8),
    "dead queries": Case(1, 2, 2, 256, 200, 64, 64, "float16", True, q_offset=-90, seed=9),
    "no query lives": Case(1, 1, 1, 140, 200, 64, 64, "float16", True, q_offset=-300, seed=10),
}
_GIVEN = ("q", "k", "v", "dout", "dlse")


def _gradients(case: Case, x: dict[str, np.ndarray], **options: object) -> list[np.ndarray]:
    """Dq, dk and dv."""
    runner = EmulatedRunner("90", "fa3", num_sms=1, **options)  # type: ignore[arg-type]
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
