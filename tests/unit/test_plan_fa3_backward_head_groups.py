"""How many kv heads FlashAttention-3's backward pass runs together: the head group."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.planning.head_groups import head_group_of, taking_turns

from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients

pytestmark = pytest.mark.usefixtures("whole_groups")


def _head_group(**changes: Any) -> tuple[int, int]:
    """The number of kv heads in a head group, and the number of all kv heads."""
    wanted = of_gradients(**changes)
    launch = main_of(planned(wanted))
    return dict(launch.arguments)["head_group"], wanted.batch * wanted.heads_kv


def test_a_head_group_has_work_for_every_multiprocessor_or_eight_heads() -> None:
    for length, heads, width in product((100, 4096, 65536), (1, 8, 64, 4096), (64, 128)):
        head_group, every = _head_group(
            batch=1, heads_q=heads, heads_kv=heads, seqlen=length, width=width
        )
        assert 1 <= head_group <= min(every, 8)
        enough = head_group * -(-length // 128) >= HOPPER.num_sms
        assert head_group in (every, 8) or enough


@pytest.mark.parametrize(("heads", "head_group"), [(8, 8), (9, 5), (17, 6), (33, 7), (64, 8)])
def test_the_last_head_group_has_not_a_single_head(heads: int, head_group: int) -> None:
    assert _head_group(batch=1, heads_q=heads, heads_kv=heads, seqlen=512)[0] == head_group


def test_a_head_group_is_of_kv_heads_and_of_what_their_queries_take() -> None:
    wanted = of_gradients(batch=1, heads_q=64, heads_kv=16, seqlen=16384, width=128)
    of_head = 16384 * 4 * 256 * 2  # rows, query heads of a group, columns of Q and dO, bytes
    tiles = 128
    # Half of L2 does not hold a head, and two rounds of blocks are three heads. Head groups of
    # three would leave one of the 16 heads alone; head groups of two leave none.
    assert HOPPER.l2 // 2 < of_head
    assert -(-2 * HOPPER.num_sms // tiles) == 3
    assert _head_group(batch=1, heads_q=64, heads_kv=16, seqlen=16384, width=128) == (2, 16)
    assert head_group_of(wanted, HOPPER, tiles, 1) == 2


def test_kv_heads_whose_queries_leave_l2_come_in_twos() -> None:
    """Q and dO of eight query heads of 8192 rows take 33 MB; of 512 rows they fit."""
    large = {"batch": 2, "heads_q": 64, "heads_kv": 8, "width": 128}
    assert HOPPER.l2 // 2 < 8192 * 8 * 256 * 2
    assert _head_group(**large, seqlen=8192)[0] == 2
    assert _head_group(**large, seqlen=512)[0] == 8
    assert _head_group(**large | {"heads_q": 32}, seqlen=8192)[0] == 4


def test_without_a_mask_heads_come_singly() -> None:
    assert _head_group(mask="full", batch=1, heads_q=64, heads_kv=16, seqlen=16384)[0] == 1


@pytest.mark.parametrize(
    ("heads", "tiles", "head_group"),
    [
        # At most 264 tiles, two for each of 132 blocks, and at most sixteen heads.
        (64, 1, 16),
        (64, 16, 16),
        (64, 17, 13),  # 15 at most: five head groups, of which four have 13 and the last 12
        (64, 33, 8),
        (64, 66, 4),
        (64, 88, 3),
        (64, 89, 2),
        (64, 132, 2),
        (64, 133, 1),
        (64, 100_000, 1),
        # Equal head groups: the last one has as many heads as the others, or nearly.
        (17, 16, 9),  # and 8, not 16 and 1
        (33, 16, 11),
        (18, 16, 9),
        (5, 66, 3),
        (9, 33, 5),
        # No more heads than there are, but one if there are none.
        (1, 1, 1),
        (7, 16, 7),
        (16, 16, 16),
        (0, 16, 1),
        (5, 0, 5),
    ],
)
def test_heads_that_take_turns(heads: int, tiles: int, head_group: int) -> None:
    assert taking_turns(heads, tiles, 132) == head_group


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 400))
def test_head_groups_that_take_turns_are_equal_and_as_few_as_can_be(
    heads: int, tiles: int, blocks: int
) -> None:
    head_group = taking_turns(heads, tiles, blocks)
    assert 1 <= head_group <= max(1, min(16, heads))
    assert head_group == 1 or head_group * tiles <= 2 * blocks
    most = max(s for s in range(1, 17) if s == 1 or s * tiles <= 2 * blocks)
    head_groups = -(-heads // head_group)
    assert head_groups == -(-heads // most)
    # With one head less in each, the head groups would not have all heads: the last one lacks fewer
    # heads than there are head groups.
    assert head_groups * head_group - heads < max(1, head_groups)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(
    ("width", "length", "heads", "head_group"),
    [
        (64, 2048, 17, 9),
        (96, 2049, 32, 11),  # 17 tiles: 15 heads at most
        (128, 4096, 33, 7),  # 32 tiles: eight at most
        (128, 16384, 5, 2),
        (128, 40_000, 8, 1),
        (256, 2048, 33, 7),  # there are twice as many tiles of 64 keys
    ],
)
def test_ordered_sums_have_their_head_group_with_and_without_a_mask(
    mask: str, width: int, length: int, heads: int, head_group: int
) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads_q": 2 * heads, "heads_kv": heads}
    sizes |= {"seqlen_q": 100, "seqlen_kv": length, "width": width, "mask": mask}
    assert _head_group(**sizes, deterministic=True) == (head_group, heads)
    # Batch entries count like kv heads; the number of query heads makes no difference.
    sizes |= {"batch": heads, "heads_q": 1, "heads_kv": 1}
    assert _head_group(**sizes, deterministic=True) == (head_group, heads)
    free = _head_group(**sizes)[0]
    assert free == 1 if mask == "full" else free <= 8


def test_a_head_group_of_no_head_is_no_division_by_it() -> None:
    for mask in ("full", "causal"):
        assert _head_group(batch=0, mask=mask, deterministic=True) == (1, 0)
