"""Head groups of a few heads, which the plan chooses only for large problems."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from cuflash import calls
from cuflash.planning import backward_head_group, fa2, fa3

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.runners import ApiRunner
from .common import skip_without


@pytest.fixture
def _of_three() -> Iterator[None]:
    calls.forget()
    with (
        mock.patch.object(fa2, "head_group_of", return_value=3),
        mock.patch.object(backward_head_group, "head_group_of", return_value=3),
        mock.patch.object(backward_head_group, "taking_turns", return_value=3),
        mock.patch.object(fa3, "even_head_group", return_value=3),
    ):
        yield
    calls.forget()


@pytest.mark.usefixtures("_of_three")
@pytest.mark.parametrize(
    ("algorithm", "dtype", "causal", "ordered"),
    [
        ("fa2", "float32", True, False),
        ("fa3", "float16", True, False),
        ("fa3", "float16", True, True),
        ("fa3", "float16", False, True),
    ],
)
def test_the_last_head_group_is_narrower(
    algorithm: str, dtype: str, causal: bool, ordered: bool
) -> None:
    """Eight query heads and four kv heads."""
    skip_without(algorithm)
    case = Case(2, 4, 2, 300, 400, dtype=dtype, causal=causal, seed=1)
    runner = ApiRunner("cuda", algorithm, options=(("deterministic", ordered),))
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    out, lse = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    truth = judge(case, x)
    for which, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        compare(truth, which, got).check()
