"""FlashAttention-3's gradients where a block goes through several kv tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..kit.case import Case
from .common import Gradients, Hog, gradients_on_two_streams, jitter, skip_without

#: Full and causal, with one to four steps a tile; keys that no query sees; fewer tiles than blocks.
_CASES = (
    Case(48, 4, 4, 300, 777, 32, 32, "bfloat16", seed=1),
    Case(40, 4, 4, 512, 512, 24, 32, "float16", causal=True, seed=2),
    Case(64, 8, 8, 77, 150, 32, 16, "float16", seed=3),
    Case(30, 4, 4, 200, 900, 32, 32, "bfloat16", causal=True, q_offset=-60, seed=4),
    Case(3, 4, 4, 130, 260, 32, 32, "bfloat16", seed=5),
)
REPEATS = 30


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_the_same_bits_beside_copies(cp: Any, hog: Hog, case: Case) -> None:
    """dK and dV have the same bits, and dQ is right every time."""
    gradients = Gradients(cp, case)
    main = gradients.prepare().plan.launches[1]
    assert dict(main.config.constants)["stays"]
    assert main.grid <= cp.cuda.Device().attributes["MultiProcessorCount"]
    first, again = gradients.first(), gradients.destinations()
    wrong, kept = cp.zeros((), np.int64), []
    for _ in range(REPEATS):
        hog.copy()
        gradients.poison(again)
        gradients.launch(again)
        wrong += gradients.differ(again, first)
        kept.append(gradients.last("dq", again[0]))
    assert int(wrong) == 0
    for dq in kept:
        gradients.check("dq", dq)


def test_two_streams_at_once(cp: Any) -> None:
    """Blocks of one call begin late if blocks of the other call occupy multiprocessors."""
    gradients_on_two_streams(cp, [Gradients(cp, case) for case in _CASES[:2]], 1)


@pytest.mark.parametrize("case", _CASES[1:4], ids=str)
def test_with_jitter(cp: Any, case: Case) -> None:
    gradients = Gradients(cp, case)
    first, again = gradients.first(), gradients.destinations()
    with jitter():
        jittery = Gradients(cp, case)
        for _ in range(3):
            jittery.poison(again)
            jittery.launch(again)
            assert int(jittery.differ(again, first)) == 0
            jittery.check("dq", jittery.last("dq", again[0]))
