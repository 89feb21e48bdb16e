"""The launches of FlashAttention-3's backward pass, and the workspace between them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cuflash.planning.plan import Plan

from .test_plan_fa1 import check_workspace
from .test_plan_fa3 import HOPPER, planned
from .test_plan_fa3_backward import main_of, of_gradients
from .test_row_order import ROUNDS

pytestmark = pytest.mark.usefixtures("whole_groups")

#: The tested widths at which blocks of the main kernel round the rows of dq.
INSIDE = 96, 128


@pytest.mark.parametrize("width", [64, 96, 128, 160, 256])
def test_the_workspace_is_that_of_the_steps(width: int) -> None:
    wanted = of_gradients(width=width, seqlen_q=777)
    chosen = planned(wanted)
    padded = 896  # 7 times 128
    rows = wanted.batch * wanted.heads_q * padded
    of_kernel = {64: 64, 96: 96, 128: 128, 160: 192, 256: 256}[width]
    inside = width in INSIDE
    blocks = rows // 128
    sizes = {b.name: b.nbytes for b in chosen.workspace}
    assert sizes == {
        "row_lse": 4 * rows,
        "delta": 4 * rows,
        "dq_accumulator": 4 * of_kernel * rows,
        "turns": 8 * blocks,
    }
    launches = 2 if inside else 3
    assert [dict(x.arguments)["padded_rows"] for x in chosen.launches] == launches * [padded]
    check_workspace(chosen)


def test_the_workspace_is_linear_in_the_queries() -> None:
    for width in (64, 192, 256):
        sizes = [
            planned(of_gradients(width=width, seqlen_q=n, seqlen_kv=7 * n)).workspace_bytes
            for n in (4096, 8192, 16384)
        ]
        assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
        rows = 8 * 4096
        assert sizes[0] == rows * 4 * (2 + width) + rows // 128 * 8  # lse, delta, dq; counters


def test_counters_add_less_to_it_than_lse() -> None:
    """There are two for each block of 128 rows: enough for two of every head of keys."""
    for n, width in product((128, 1000, 4096, 65536), (64, 128, 256)):
        wanted = of_gradients(width=width, batch=20, seqlen_q=n, seqlen_kv=7 * n)
        chosen = planned(wanted)
        blocks = chosen.launches[0].grid
        sizes = {b.name: b.nbytes for b in chosen.workspace}
        rows = wanted.batch * wanted.heads_q * -(-n // 128) * 128
        assert sizes["row_lse"] == sizes["delta"] == sizes["dq_accumulator"] // width == 4 * rows
        counters = 2 * wanted.batch * wanted.heads_kv
        assert 4 * counters <= sizes["turns"] == 8 * blocks <= sizes["row_lse"] // 64


def test_the_steps_know_the_layout_of_the_sums() -> None:
    """The steps have the main kernel's columns and fragments of dq; delta has the columns of v."""
    for d, dv, width, of_v in (
        (64, 64, 64, 64),
        (96, 40, 96, 64),
        (72, 128, 128, 128),
        (192, 128, 192, 128),
        (40, 256, 256, 256),
    ):
        chosen = planned(of_gradients(head_dim=d, head_dim_v=dv))
        inside = max(d, dv) in INSIDE
        launches, main = chosen.launches, main_of(chosen)
        assert len(launches) == (2 if inside else 3)
        statistics, steps = launches[0], [x for x in launches if x is not main]
        assert [x.config.head_dim for x in launches] == len(launches) * [width]
        assert statistics.config.head_dim_v == of_v
        rows = [dict(x.config.constants)["fragment_rows"] for x in launches]
        assert rows == len(launches) * [16]
        assert dict(statistics.config.constants)["turns"] == 2
        assert {x.config.mask for x in steps} == {"full"}
        assert {x.config.architecture for x in launches} == {"sm_90a"}  # one set of options


#: Batch, heads of queries and of keys, lengths.
_SIZES = (
    (1, (1, 1), 1, 1),
    (3, (8, 2), 777, 1234),
    (2, (6, 6), 129, 128),
    (11, (12, 6), 50, 129),
    (11, (12, 6), 50, 257),
    (64, (32, 32), 50, 999),
)


def _sized(batch: int, heads: tuple[int, int], sq: int, skv: int, **more: Any) -> Plan:
    of = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1], **more}
    return planned(of_gradients(**of, seqlen_q=sq, seqlen_kv=skv))


def test_grids_cover_every_row_and_every_key() -> None:
    for batch, heads, sq, skv in _SIZES:
        for width, keys in ((64, 128), (160, 96), (256, 64)):
            chosen = _sized(batch, heads, sq, skv, width=width)
            rows = batch * heads[0] * -(-sq // 128)
            tiles = batch * heads[1] * -(-skv // keys)
            assert [x.grid for x in chosen.launches] == [rows, tiles, rows]


@pytest.mark.parametrize("width", [64, 128, 256])
def test_no_batch_entry_is_no_block(width: int) -> None:
    for deterministic in (False, True):
        chosen = planned(of_gradients(width=width, batch=0, deterministic=deterministic))
        assert {x.grid for x in chosen.launches} == {0}
        assert chosen.workspace_bytes == 0


@pytest.mark.parametrize(("width", "keys"), [(64, 128), (96, 128), (128, 128), (256, 64)])
def test_sums_of_the_first_heads_are_cleared_before_and_of_others_inside(
    width: int, keys: int
) -> None:
    """The heads that are cleared before are whole head groups.

    They have at least ``ROUNDS`` tiles per multiprocessor more than one head group.
    """
    later = 0
    for batch, heads, sq, skv in _SIZES:
        chosen = _sized(batch, heads, sq, skv, width=width)
        main, before, group = main_of(chosen), chosen.launches[0], heads[0] // heads[1]
        arguments, every = dict(main.arguments), batch * heads[1]
        tiles = -(-skv // keys)
        ahead, rest = divmod(arguments["ahead"], tiles)
        assert rest == 0
        assert dict(before.arguments)["cleared"] == ahead * group
        assert before.grid == batch * heads[0] * -(-sq // 128)
        assert ahead == every or ahead % arguments["head_group"] == 0
        of_head_group = tiles * arguments["head_group"]
        assert ahead == every or ahead * tiles >= of_head_group + ROUNDS * HOPPER.num_sms
        if width in INSIDE:  # also a block of rows for every eight tiles
            assert every * tiles + -(-every * tiles // 8) <= main.grid
        else:
            assert (main.grid, "convert_lag" in arguments) == (every * tiles, False)
        later += ahead < every
    assert 0 < later < len(_SIZES)  # some sizes clear later heads inside, and some do not


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_output_of_the_forward_pass_changes_nothing_but_its_type(width: int) -> None:
    """Only the kernel before the main kernel reads the output."""
    for batch, heads, sq, skv in _SIZES:
        plain = _sized(batch, heads, sq, skv, width=width)
        other = _sized(batch, heads, sq, skv, width=width, output="float32")
        assert other.workspace == plain.workspace
        for one, wide in zip(plain.launches, other.launches, strict=True):
            assert (wide.grid, wide.arguments) == (one.grid, one.arguments)
        assert other.launches[0].config.output == "float32"


def test_maps_bring_a_tile_of_queries_and_a_tile_of_keys() -> None:
    for d, dv, rows, keys in (
        (64, 64, 128, 128),
        (96, 96, 64, 128),
        (128, 128, 64, 128),
        (192, 128, 64, 128),
        (192, 192, 64, 96),
        (128, 192, 64, 64),
    ):
        chosen = planned(of_gradients(head_dim=d, head_dim_v=dv))
        main = main_of(chosen)
        assert main.boxes == (("q", rows), ("k", keys), ("v", keys), ("dout", rows))
        assert {x.boxes for x in chosen.launches if x is not main} == {()}
