"""The choice of how many blocks share a kv tile of FlashAttention-3's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.features.table import with_features
from cuflash.planning.key_parts import Parts
from cuflash.planning.parts_choice import parts_of
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3 import Fa3BackwardTile

from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")


def _grouped(batch: int, heads_q: int, heads_kv: int, **more: Any) -> AttentionProblem:
    return of_gradients(**{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, **more})


def _problem(heads: str, seqlen: int, head_dim: int, mask: str) -> AttentionProblem:
    """A problem; ``heads`` is a text "batch query heads/key heads"."""
    batch, heads_q, heads_kv = map(int, heads.replace("/", " ").split())
    lengths = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": head_dim}
    return _grouped(batch, heads_q, heads_kv, mask=mask, head_dim_v=head_dim, **lengths)


def _parts(problem: AttentionProblem) -> Parts:
    tile = planned(problem).tile
    assert isinstance(tile, Fa3BackwardTile)
    return parts_of(problem, tile, 132)


def _as_parts(parts: int | Parts) -> Parts:
    return parts if isinstance(parts, Parts) else Parts(parts)


def _cut(number: int) -> Parts:
    return Parts(number, cut=True)


# The times of these and other parts were measured, see "Steps in parts" in bench/NOTES.md. The
# times of the parts below are at most 4 % above the best.
@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "causal", "full"),
    [
        # Few tiles. The first problem has 128 for 132 multiprocessors: one nearly full round.
        ("2 32/1", 8192, 128, 8, 1),
        ("1 32/1", 8192, 128, 16, 2),
        ("2 32/1", 2048, 64, 8, 4),
        ("1 32/1", 2048, 256, 16, 4),
        ("2 16/1", 8192, 128, 8, 1),
        ("1 32/2", 2048, 128, 8, 4),
        ("1 8/1", 2048, 128, _cut(13), 8),
        # Few heads of their own, whose steps are cut.
        ("1 1/1", 16384, 128, _cut(2), 1),
        ("1 1/1", 8192, 128, _cut(4), _cut(2)),
        ("1 1/1", 8192, 64, _cut(4), _cut(2)),
        ("1 1/1", 4096, 128, _cut(6), _cut(4)),
        ("1 2/2", 8192, 128, _cut(2), 1),
        ("1 4/4", 8192, 128, 1, 1),
        ("1 6/6", 4096, 128, 1, Parts(2, True, 60)),
        ("1 1/1", 4096, 32, _cut(6), _cut(4)),
        # Enough tiles.
        ("2 32/8", 2048, 128, 1, 1),
        ("8 32/8", 512, 64, 1, 1),
        # The tiles that full rounds leave: 15.5 rounds and fewer.
        ("1 32/32", 8192, 128, 1, Parts(5, True, 68)),
        ("1 16/16", 16384, 128, 1, Parts(7, True, 68)),
        ("8 16/16", 2048, 128, 1, 1),
        ("1 16/16", 8192, 256, 1, Parts(5, True, 68)),
        ("1 16/16", 8192, 192, 1, Parts(2, True, 56)),
        ("1 9/9", 8192, 128, 1, Parts(5, True, 48)),
        ("1 5/5", 8192, 128, 1, Parts(2, True, 56)),
        ("1 9/9", 4096, 128, 1, Parts(5, True, 24)),
        ("1 5/5", 8192, 64, 1, Parts(2, True, 56)),
        ("1 10/10", 4096, 64, 1, Parts(2, True, 56)),
        ("1 20/20", 8192, 64, 1, 1),
        ("1 12/12", 8192, 64, 1, 1),
        ("1 11/11", 16384, 64, 1, 1),
        ("1 3/3", 4096, 256, 1, Parts(2, True, 60)),
        ("2 32/8", 8192, 128, 1, Parts(5, True, 100)),
        ("1 20/5", 8192, 128, 1, Parts(7, True, 56)),
        # After many rounds blocks end at any time: 31 rounds and four tiles.
        ("1 64/64", 8192, 64, 1, 1),
        ("1 64/64", 8192, 128, 1, 1),
        # No group that could have parts; the last problem has no work at all.
        ("8 8/8", 128, 64, 1, 1),
        ("0 8/1", 8192, 64, 1, 1),
    ],
)
def test_parts_where_blocks_are_few(
    heads: str, seqlen: int, head_dim: int, causal: int | Parts, full: int | Parts
) -> None:
    assert _parts(_problem(heads, seqlen, head_dim, "causal")) == _as_parts(causal)
    assert _parts(_problem(heads, seqlen, head_dim, "full")) == _as_parts(full)


@pytest.mark.parametrize("more", [{"deterministic": True}, {"softcap": 9.0}], ids=str)
def test_no_steps_are_cut_in_a_fixed_order_or_with_features(more: dict[str, Any]) -> None:
    few = _problem("1 1/1", 8192, 128, "causal")
    assert _parts(few).cut
    if "softcap" in more:
        assert _parts(with_features(few, more, {})) == Parts(1)
    else:
        assert _parts(replace(few, **more)) == Parts(1)


def test_a_group_has_divisors_only_without_cuts() -> None:
    """Seven query heads are one part or seven, where steps may not be cut."""
    for heads, seqlen, number in (("1 7/1", 2048, 7), ("1 6/2", 512, 3)):
        problem = replace(_problem(heads, seqlen, 128, "causal"), deterministic=True)
        assert _parts(problem) == Parts(number)


def test_tiles_that_no_query_sees_are_no_work() -> None:
    """The offset moves the causal mask, and so decides which tiles have work."""
    problem = _problem("1 32/1", 8192, 128, "causal")
    assert _parts(replace(problem, q_offset=-8192)) == Parts(1)
    assert _parts(replace(problem, q_offset=8192)) == _parts(replace(problem, mask="full"))
    # No query sees most tiles, and the other tiles have few steps.
    few, all_tiles = (replace(problem, q_offset=-7000), replace(problem, mask="full"))
    assert _parts(few).number > _parts(all_tiles).number


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 9000),
    st.sampled_from(("full", "causal")),
)
def test_parts_divide_the_group_and_leave_full_rounds_alone(
    batch: int, group: int, heads: int, seqlen: int, mask: str
) -> None:
    problem = _problem(f"{batch} {group * heads}/{heads}", seqlen, 128, mask)
    parts = _parts(problem)
    assert parts.cut or group % parts.number == 0
    tiles = batch * heads * -(-seqlen // 128)
    assert parts.last in (0, tiles % 132)
    if mask == "causal" or tiles % 132 == 0 or tiles >= 132 * 16:
        assert parts.last == 0
    if tiles >= 132 * 16:
        assert parts == Parts(1)


def test_the_workspace_is_linear_in_the_keys() -> None:
    """There are at most 32 parts, and one part if there are many tiles."""
    for mask in ("full", "causal"):
        for n in (128, 1024, 8192, 65536, 2**20):
            wanted = _grouped(1, 32, 1, width=128, mask=mask, seqlen_q=128, seqlen_kv=n)
            sizes = {b.name: b.nbytes for b in planned(wanted).workspace}
            parts = sizes.get("dk_parts", 0)
            assert parts <= 32 * n * 128 * 4
            assert n < 2**20 or parts == 0
