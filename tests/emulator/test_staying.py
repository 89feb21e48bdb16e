"""FlashAttention-3's gradients where a block goes through several kv tiles, on the CPU."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from cuflash.planning import fa3

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.parts import parts_forced
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: Tiles of one, two and four steps; keys that no query sees, and dead queries; groups of heads.
_CASES = {
    "full": Case(2, 3, 3, 197, 300, 32, 32, "bfloat16", seed=1),
    "one step": Case(3, 2, 2, 77, 150, 24, 32, "float16", seed=2),
    "groups": Case(1, 4, 2, 200, 140, 32, 16, "bfloat16", seed=3),
    "unseen keys": Case(2, 2, 2, 150, 400, 32, 32, "float16", True, q_offset=-40, seed=4),
    "causal": Case(2, 2, 2, 400, 300, 32, 32, "bfloat16", True, seed=5),
}


def _gradients(case: Case, x: dict[str, np.ndarray], num_sms: int) -> tuple[np.ndarray, ...]:
    runner = EmulatedRunner("90", "fa3", num_sms=num_sms)
    with parts_forced(1):
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        return runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])


@pytest.mark.parametrize("num_sms", [1, 4])
@pytest.mark.parametrize("name", _CASES)
def test_against_float64(name: str, num_sms: int) -> None:
    """dK and dV also have the same bits as with one block for every tile."""
    case = _CASES[name]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    grads = _gradients(case, x, num_sms)
    truth = judge(case, x)
    for which, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, which, got).check()
    with mock.patch.object(fa3, "_stays", return_value=False):
        apart = _gradients(case, x, num_sms)
    for got, expected in zip(grads[1:], apart[1:], strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", _CASES)
def test_blocks_stay_in_all_of_them(name: str) -> None:
    with parts_forced(1):
        configs = EmulatedRunner("90", "fa3", num_sms=1).configs(_CASES[name])
    stays = [dict(c.constants)["stays"] for c in configs if c.entry == "cuflash_fa3_backward"]
    assert stays == [1]
