"""The launches of FlashAttention-3's backward pass, and the workspace between them."""

from __future__ import annotations

import pytest

from .test_plan_fa1 import check_workspace
from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients


@pytest.mark.parametrize("width", [64, 96, 128, 160, 256])
def test_the_workspace_is_that_of_the_steps(width: int) -> None:
    wanted = of_gradients(width=width, seqlen_q=777)
    chosen = planned(wanted)
    padded = 896  # 7 times 128
    rows = wanted.batch * wanted.heads_q * padded
    of_kernel = {64: 64, 96: 128, 128: 128, 160: 192, 256: 256}[width]
    sizes = {b.name: b.nbytes for b in chosen.workspace}
    assert sizes == {
        "row_lse": 4 * rows,
        "delta": 4 * rows,
        "dq_accumulator": 4 * of_kernel * rows,
        "turns": 0,
    }
    assert [dict(x.arguments)["padded_rows"] for x in chosen.launches] == 3 * [padded]
    check_workspace(chosen)


def test_the_workspace_is_linear_in_the_queries() -> None:
    for width in (64, 128, 192, 256):
        sizes = [
            planned(of_gradients(width=width, seqlen_q=n, seqlen_kv=7 * n)).workspace_bytes
            for n in (4096, 8192, 16384)
        ]
        assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]
        assert sizes[0] == 8 * 4096 * 4 * (2 + width)  # heads, rows, bytes, lse and delta and dq


def test_the_steps_know_the_layout_of_the_sums() -> None:
    """Columns and fragments of dq are the main kernel's; delta has the columns of v."""
    for d, dv, width, of_v in (
        (64, 64, 64, 64),
        (96, 40, 128, 64),
        (72, 128, 128, 128),
        (192, 128, 192, 128),
        (40, 256, 256, 256),
    ):
        statistics, main, convert = planned(of_gradients(head_dim=d, head_dim_v=dv)).launches
        assert [x.config.head_dim for x in (statistics, main, convert)] == 3 * [width]
        assert statistics.config.head_dim_v == of_v
        rows = [dict(x.config.constants)["fragment_rows"] for x in (statistics, main, convert)]
        assert rows == [16, 16, 16]
        assert dict(statistics.config.constants)["turns"] == 0
        assert [x.config.mask for x in (statistics, convert)] == ["full", "full"]
        assert [x.config.architecture for x in (statistics, convert)] == ["sm_90", "sm_90"]


def test_grids_cover_every_row_and_every_key() -> None:
    for batch, heads, sq, skv in (
        (1, (1, 1), 1, 1),
        (3, (8, 2), 777, 1234),
        (2, (6, 6), 129, 128),
        (11, (12, 6), 50, 129),
        (11, (12, 6), 50, 257),
        (64, (32, 32), 50, 999),
    ):
        for width, keys in ((64, 128), (128, 128), (256, 64)):
            of = {"batch": batch, "heads_q": heads[0], "heads_kv": heads[1], "width": width}
            chosen = planned(of_gradients(**of, seqlen_q=sq, seqlen_kv=skv))
            rows = batch * heads[0] * -(-sq // 128)
            tiles = batch * heads[1] * -(-skv // keys)
            assert [x.grid for x in chosen.launches] == [rows, tiles, rows]


def test_maps_bring_a_tile_of_queries_and_a_tile_of_keys() -> None:
    for width, rows, keys in ((64, 128, 128), (96, 64, 128), (128, 64, 128), (192, 64, 64)):
        statistics, main, convert = planned(of_gradients(width=width)).launches
        assert main.boxes == (("q", rows), ("k", keys), ("v", keys), ("dout", rows))
        assert statistics.boxes == convert.boxes == ()
