"""Attention resumed from a state, part after part, gives attention over all keys at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge

__all__ = ["cases", "part_by_part", "splits"]


@st.composite
def splits(draw: Any, keys: int) -> list[tuple[int, int]]:
    """Draw neighbouring parts of the keys, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, keys), min_size=0, max_size=4)))
    return list(zip([0, *cuts], [*cuts, keys], strict=True))


@st.composite
def cases(draw: Any, dtypes: tuple[str, ...], most: int = 40) -> tuple[Case, Any]:
    """Draw a problem, with masks and dead rows, and parts of its keys."""
    case = Case(
        draw(st.integers(1, 2)), 4, draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, most)), draw(st.integers(1, most)),
        *draw(st.sampled_from([(16, 16), (8, 24)])), draw(st.sampled_from(dtypes)),
        causal=draw(st.booleans()), seed=draw(st.integers(0, 2**20)),
    )  # fmt: skip
    offset, cap = draw(st.integers(-5, most)), draw(st.sampled_from([None, 3.0]))
    case = replace(case, q_offset=offset, softcap=cap)
    case = replace(case, layout=draw(st.sampled_from(["bshd", "bhsd"])))
    return case, draw(splits(case.seqlen_kv))


def part_by_part(
    case: Case, x: dict[str, Any], parts: Any, in_place: bool, called: Any = None, **more: Any
) -> tuple[Any, Any]:
    """The state over all keys; every call resumes from the state over the parts before."""
    called = called or (lambda function, *args, **kwargs: function(*args, **kwargs))
    along, state = case.layout.index("s"), None
    options = {**case.options, **more}
    for begin, end in parts:
        at = (slice(None),) * along + (slice(begin, end),)
        keywords: dict[str, Any] = {**options, "q_offset": case.offset - begin}
        keywords |= {"return_lse": True, "resume": state}
        if state is None:
            keywords["out_dtype"] = case.statistics
        elif in_place:
            keywords |= {"out": state[0], "lse_out": state[1]}
        made = called(cuflash.attention, x["q"], x["k"][at], x["v"][at], **keywords)
        if state is not None and in_place:
            assert made[0] is state[0]
            assert made[1] is state[1]
        state = made
    assert state is not None
    return state


@given(cases(("float16", "bfloat16", "float32", "float64")), st.booleans())
def test_any_split_of_the_keys(problem: tuple[Case, Any], in_place: bool) -> None:
    case, parts = problem
    x = arrays(case, "q", "k", "v")
    truth = judge(case, x)
    out, lse = part_by_part(case, x, parts, in_place, backend="numpy")
    assert out.dtype == lse.dtype == case.statistics
    compare(truth, "out", out).check()
    compare(truth, "lse", lse).check()
