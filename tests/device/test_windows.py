"""Windows and sinks at sizes that fill a device: races, and long sequences without a reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.checks import census, identities, require
from ..kit.problem import windows
from ..kit.runners import ApiRunner
from .common import Gradients, Hog, Problem, jitter, skip_without

#: Windows ("left:right"), whether the mask is also causal, and the dtype of the sinks.
_WINDOWS = (
    ("100:0", False, ""),
    ("511:130", False, "float32"),
    ("700:", True, ""),
    ("300:", False, "bfloat16"),
    ("", True, "float32"),
)
_HEAD_DIMS = (64, 128, 192, 256)


def _busy(head_dim: int, window: str, causal: bool, sinks: str) -> Case:
    """Ragged lengths, grouped heads, many tiles both ways, dead rows at either end."""
    case = Case(3, 12, 3, 1700, 1333, head_dim, head_dim, "bfloat16", causal=causal, seed=1)
    return replace(case, q_offset=-150, window=window, sinks=sinks)


_BUSY = [(d, *window) for d, window in product(_HEAD_DIMS, _WINDOWS)]


@pytest.mark.parametrize(("head_dim", "window", "causal", "sinks"), _BUSY)
def test_forward_bits_are_the_same_beside_copies(
    cp: Any, hog: Hog, head_dim: int, window: str, causal: bool, sinks: str
) -> None:
    skip_without("fa3")
    problem = Problem(cp, _busy(head_dim, window, causal, sinks))
    first, again = problem.first(), problem.destinations()
    wrong = cp.zeros((), np.int64)
    for _ in range(50):
        hog.copy()
        problem.poison(again)
        problem.launch(again)
        wrong += problem.differ(again, first)
    assert int(wrong) == 0


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("head_dim", "window", "causal", "sinks"), _BUSY)
def test_gradients_are_the_same_beside_copies(
    cp: Any, hog: Hog, head_dim: int, window: str, causal: bool, sinks: str, ordered: bool
) -> None:
    """dk, dv and dsinks have the same bits; so has dq if it is summed in order."""
    skip_without("fa3")
    gradients = Gradients(cp, _busy(head_dim, window, causal, sinks), ordered)
    first, again = gradients.first(), gradients.destinations()
    wrong = cp.zeros((), np.int64)
    for _ in range(25):
        hog.copy()
        gradients.poison(again)
        gradients.launch(again)
        wrong += gradients.differ(again, first)
    gradients.check("dq", gradients.last("dq", again[0]))
    assert int(wrong) == 0


@pytest.mark.parametrize(("window", "causal", "sinks"), _WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_are_the_same_with_jitter(
    cp: Any, head_dim: int, window: str, causal: bool, sinks: str
) -> None:
    skip_without("fa3")
    case = _busy(head_dim, window, causal, sinks)
    for passes in (Problem(cp, case), Gradients(cp, case, ordered=True)):
        first, late = passes.first(), passes.destinations()
        wrong = cp.zeros((), np.int64)
        with jitter():
            for _ in range(3):
                passes.poison(late)
                passes.launch(late)
                wrong += passes.differ(late, first)
        assert int(wrong) == 0


@pytest.mark.parametrize("sinks", ["", "float32"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("algorithm", ["fa2", "auto"])
def test_long_sequences(algorithm: str, dims: tuple[int, int], sinks: str) -> None:
    """Drawn windows of thousands of keys: the number of visible keys, and sums of gradients."""
    runner = ApiRunner("cuda", algorithm)

    @settings(max_examples=10)
    @given(data=st.data())
    def run(data: Any) -> None:
        lengths = [data.draw(st.integers(3000, 9000)) for _ in range(2)]
        window = data.draw(windows((64, 80, 128), *lengths))
        offset = data.draw(st.one_of(st.none(), st.integers(-lengths[0], lengths[1])))
        case = Case(1, 4, 2, *lengths, *dims, "bfloat16", window=window, q_offset=offset)
        case = replace(case, causal=data.draw(st.booleans()), sinks=sinks)
        require(case, [census(runner, case), *identities(runner, case)])

    run()
