"""FlashAttention-3's gradients of short heads, whose queries a block keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.few import short_alone
from .common import Gradients, Hog, gradients_on_two_streams, jitter, skip_without

#: Several heads in a block, and one; q tiles that do not exist; keys that no query sees; dead
#: queries.
_CASES = (
    Case(64, 12, 12, 197, 197, 64, 64, "bfloat16", seed=1),
    Case(256, 4, 4, 256, 256, 32, 32, "float16", seed=2),
    Case(3, 8, 8, 140, 900, 64, 32, "float16", seed=3),
    Case(40, 8, 8, 200, 700, 64, 64, "bfloat16", causal=True, q_offset=200, seed=4),
    Case(40, 8, 8, 256, 200, 32, 64, "float16", causal=True, q_offset=-90, seed=5),
)


@pytest.fixture(autouse=True)
def _alone() -> Any:
    skip_without("fa3")
    with short_alone():
        yield


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_the_same_bits_beside_copies(cp: Any, hog: Hog, case: Case) -> None:
    """All three gradients have the same bits, and are right every time."""
    gradients = Gradients(cp, case, ordered=True)
    main = gradients.prepare().plan.launches[1]
    assert main.config.kernel == "backward_short"
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
    gradients = Gradients(cp, case, ordered=True)
    first, again = gradients.first(), gradients.destinations()
    with jitter(), short_alone():
        jittery = Gradients(cp, case, ordered=True)
        for _ in range(3):
            jittery.poison(again)
            jittery.launch(again)
            assert int(jittery.differ(again, first)) == 0


@settings(max_examples=60)
@given(
    heads=st.tuples(st.integers(1, 40), st.integers(1, 8)),
    lengths=st.tuples(st.integers(1, 256), st.integers(1, 1000)),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    dtype=st.sampled_from(("float16", "bfloat16")),
    offset=st.one_of(st.none(), st.integers(-260, 1000)),  # none: a full mask
    seed=st.integers(0, 1000),
)
def test_drawn_problems(
    cp: Any,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
    dtype: str,
    offset: int | None,
    seed: int,
) -> None:
    of_heads = heads[0], heads[1], heads[1]
    d, dv = (8 * width for width in widths)
    causal = offset is not None
    case = Case(*of_heads, *lengths, d, dv, dtype, causal, q_offset=offset, seed=seed)
    Gradients(cp, case, ordered=True).first()
