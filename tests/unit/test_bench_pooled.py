"""The ratios of several runs are combined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.cases import Case, select
from bench.pooled import pooled, summary

from .bench_rows import row


def _case(seqlen: int) -> Case:
    return replace(select("fa3")[0], seqlen_q=seqlen, seqlen_kv=seqlen)


def _rows(**more: Any) -> list[dict[str, Any]]:
    """Rows of two problems from two runs each, of a problem without a peer, and of a peer."""
    cells = ((512, 1.0), (512, 4.0), (2048, 1.0), (2048, 1.0), (8192, None))
    ours = [row(_case(seqlen), "cuflash", 1.0, ratio=ratio, **more) for seqlen, ratio in cells]
    return [*ours, row(_case(512), "torch flash", 1.0, ratio=9.0, **more)]


def test_runs_of_a_problem_have_their_geometric_mean() -> None:
    (cells,) = pooled(_rows()).values()
    assert sorted(cells.values()) == pytest.approx([1.0, 2.0])


def test_the_summary_has_the_mean_and_the_worst_of_all_and_of_each_length() -> None:
    first, *more = summary(_rows())
    assert "1.414 times the best other (geometric mean of 2), worst 1.000" in first
    assert "  seqlen_q 512: 2.000, worst 2.000" in more
    assert "  seqlen_q 2048: 1.000, worst 1.000" in more
    assert not any("8192" in line for line in more)


@pytest.mark.parametrize(
    "more",
    [{"protocol": "rested"}, {"dtype": "float64"}, {"options": {"algorithm": "fa1"}}],
    ids=str,
)
def test_what_is_not_alike_is_apart(more: dict[str, Any]) -> None:
    assert len(pooled([*_rows(), *_rows(**more)])) == 2
