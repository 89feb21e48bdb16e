"""FlashAttention-3's gradients whose last step has half as many queries."""

from __future__ import annotations

from typing import Any

import pytest

from ..kit.case import Case
from ..kit.parts import parts_forced
from .common import Gradients, jitter, skip_without

#: The last q tile has 64, 44, 1 and 33 queries; groups of heads; keys that no query sees.
_CASES = {
    "cross attention": Case(16, 20, 20, 448, 1500, 64, 64, "bfloat16", seed=1),
    "groups": Case(8, 8, 2, 300, 300, 64, 40, "float16", True, seed=2),
    "one query": Case(3, 4, 4, 1025, 1025, 64, 64, "bfloat16", True, seed=3),
    "dead queries": Case(9, 4, 2, 289, 700, 48, 64, "float16", True, q_offset=-40, seed=4),
}


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


@pytest.mark.parametrize("name", _CASES)
def test_dk_and_dv_have_the_same_bits_again_and_with_jitter(cp: Any, name: str) -> None:
    with parts_forced(1):
        gradients = Gradients(cp, _CASES[name])
        constants = dict(gradients.prepare().plan.launches[1].config.constants)
        assert constants["half_last"] == 1
        first, again = gradients.first(), gradients.destinations()
        for _ in range(5):
            gradients.poison(again)
            gradients.launch(again)
            assert int(gradients.differ(again, first)) == 0
        with jitter():
            gradients.poison(again)
            gradients.launch(again)
            assert int(gradients.differ(again, first)) == 0
            gradients.check("dq", gradients.last("dq", again[0]))
