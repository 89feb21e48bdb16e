"""FlashAttention-3's gradients of few queries, whose tile a block keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.few import few_alone
from .common import Gradients, Hog, gradients_on_two_streams, jitter, skip_without

#: One block for a head and several; one query and 128; keys that no query sees; dead queries.
_CASES = (
    Case(16, 8, 8, 77, 1100, 128, 128, "bfloat16", seed=1),
    Case(2, 4, 4, 128, 5000, 64, 64, "float16", seed=2),
    Case(30, 8, 8, 1, 700, 128, 64, "float16", seed=3),
    Case(8, 8, 8, 100, 900, 64, 64, "bfloat16", causal=True, q_offset=300, seed=4),
    Case(20, 8, 8, 128, 200, 96, 128, "float16", causal=True, q_offset=-50, seed=5),
)


@pytest.fixture(autouse=True)
def _alone() -> Any:
    skip_without("fa3")
    with few_alone():
        yield


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_the_same_bits_beside_copies(cp: Any, hog: Hog, case: Case) -> None:
    """dK and dV have the same bits, and so has a dQ that one block adds up. All are right."""
    gradients = Gradients(cp, case, ordered=True)
    main = gradients.prepare().plan.launches[1]
    assert main.config.kernel == "backward_few"
    first, again = gradients.first(), gradients.destinations()
    for _ in range(20):
        hog.copy()
        gradients.poison(again)
        gradients.launch(again)
        assert int(gradients.differ(again, first)) == 0
        gradients.check("dq", gradients.last("dq", again[0]))


def test_two_streams_at_once(cp: Any) -> None:
    gradients_on_two_streams(cp, [Gradients(cp, case) for case in _CASES[:2]], 1)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_with_jitter(cp: Any, case: Case) -> None:
    gradients = Gradients(cp, case)
    first, again = gradients.first(), gradients.destinations()
    with jitter(), few_alone():
        jittery = Gradients(cp, case)
        for _ in range(3):
            jittery.poison(again)
            jittery.launch(again)
            assert int(jittery.differ(again, first)) == 0
            jittery.check("dq", jittery.last("dq", again[0]))


@settings(max_examples=60)
@given(
    heads=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    lengths=st.tuples(st.integers(1, 128), st.integers(1, 1500)),
    widths=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    dtype=st.sampled_from(("float16", "bfloat16")),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_drawn_problems(
    cp: Any,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
    dtype: str,
    causal: bool,
    seed: int,
) -> None:
    of_heads = heads[0], heads[1], heads[1]
    d, dv = (8 * width for width in widths)
    case = Case(*of_heads, *lengths, d, dv, dtype, causal=causal, seed=seed)
    Gradients(cp, case).first()
