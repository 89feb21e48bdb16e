"""Plans of FlashAttention-3: choices, refusals and reasons, without a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest

from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.planning.fa3 import OLDEST_NVRTC, fa3_plan, needs_newer_compiler
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3
from cuflash.planning.tiles.fa3_tables import BUCKETS, FORWARD, FORWARD_OF_FEW

from ..architectures import LIMITS
from .test_plan import problem

HOPPER = LIMITS["90"]
ANY = 100_000

planned = functools.partial(plan, limits=HOPPER, algorithm="fa3")


def mapped(**changes: object) -> AttentionProblem:
    """A problem that FlashAttention-3 takes; ``seqlen`` and ``width`` apply to queries and keys."""
    for name, both in (
        ("seqlen", ("seqlen_q", "seqlen_kv")),
        ("width", ("head_dim", "head_dim_v")),
    ):
        if name in changes:
            changes |= dict.fromkeys(both, changes.pop(name))
    return problem(**{"alignment": "tensor_map", **changes})


def filling(**changes: object) -> AttentionProblem:
    """Such a problem with work for every multiprocessor, so that its tile is in ``FORWARD``."""
    return mapped(**{"batch": 64, **changes})


#: By head_dim, head_dim_v and mask: the largest seqlen_kv for which a tile is taken, the tile, and
#: the numbers of stages of K and V, and of Q.
_TAKEN = {
    (64, 64, "full"): ((2048, (256, 64), 4, 2), (ANY, (192, 128), 3, 2)),
    (64, 64, "causal"): ((2048, (256, 64), 4, 2), (ANY, (192, 128), 3, 2)),
    (80, 80, "full"): ((ANY, (192, 96), 2, 2),),
    (80, 80, "causal"): ((ANY, (192, 96), 2, 2),),
    (96, 96, "full"): ((ANY, (192, 96), 2, 2),),
    (96, 96, "causal"): ((ANY, (192, 96), 2, 2),),
    (128, 128, "full"): ((1024, (128, 128), 2, 2), (ANY, (192, 80), 2, 2)),
    (128, 128, "causal"): (
        (512, (128, 64), 4, 2),
        (1024, (128, 128), 2, 2),
        (ANY, (192, 80), 2, 2),
    ),
    (192, 128, "full"): ((ANY, (128, 128), 2, 1),),
    (192, 128, "causal"): ((ANY, (128, 128), 2, 1),),
    (192, 192, "full"): ((ANY, (128, 96), 2, 1),),
    (192, 192, "causal"): ((ANY, (128, 96), 2, 1),),
    (256, 256, "full"): ((ANY, (128, 64), 2, 1),),
    (256, 256, "causal"): ((ANY, (128, 64), 2, 1),),
}


@pytest.mark.parametrize(("d", "dv", "mask"), _TAKEN)
def test_the_tile_follows_widths_and_lengths(d: int, dv: int, mask: str) -> None:
    shortest = 1
    for longest, blocks, stages, q_stages in _TAKEN[d, dv, mask]:
        for length in (shortest, longest):
            wanted = filling(head_dim=d, head_dim_v=dv, mask=mask, seqlen_q=777, seqlen_kv=length)
            tile = planned(wanted).tile
            assert (tile.block_q, tile.block_kv) == blocks, length
            assert (tile.num_stages, tile.q_stages) == (stages, q_stages)
        shortest = longest + 1


def test_warpgroups_take_no_turns_where_four_share_short_rows_under_a_mask() -> None:
    for mask, turns in (("full", True), ("causal", False)):
        tile = planned(filling(mask=mask)).tile
        assert (tile.block_q, tile.takes_turns) == (256, turns)


def test_every_row_of_the_table_is_taken() -> None:
    """Some length takes each row. A row after one that takes all its lengths would be useless."""
    served = [
        (row, mask, longest)
        for row in FORWARD
        for mask, longest in (("full", row.longest), ("causal", row.longest_causal))
        if longest
    ]
    assert {row for row, _, _ in served} == set(FORWARD)
    for row, mask, longest in served:
        widths = {"head_dim": row.widest, "head_dim_v": row.widest_v}
        wanted = filling(**widths, mask=mask, seqlen_kv=min(longest, ANY))
        assert planned(wanted).tile == fa3.tile_of_row(wanted, row)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_pair_of_widths_has_a_tile(mask: str) -> None:
    for d, dv in product(range(8, 257, 8), (8, 64, 72, 128, 136, 192, 200, 256)):
        chosen = planned(mapped(head_dim=d, head_dim_v=dv, mask=mask))
        config = chosen.launches[0].config
        assert config.head_dim == min(b for b in BUCKETS if b >= d)
        assert config.head_dim_v == min(b for b in BUCKETS if b >= dv)
        assert chosen.tile.footprint.excess(HOPPER) is None


#: The faults, and their messages.
_REFUSED = {
    "an older device": (mapped(), replace(HOPPER, compute_capability=(8, 0)), r"9\.0.* has 8\.0"),
    "a newer device": (mapped(), LIMITS["100"], r"compute capability 9\.0.* has 10\.0"),
    "float32": (mapped(storage="float32"), HOPPER, "takes float16 and bfloat16, not float32"),
    "float64": (mapped(storage="float64"), HOPPER, "takes float16 and bfloat16, not float64"),
    "strides": (mapped(alignment="vector"), HOPPER, "copy engine.* multiples of 16 bytes"),
    "unaligned": (mapped(alignment="element"), HOPPER, "copy engine.* multiples of 16 bytes"),
    "no key": (mapped(seqlen_kv=0), HOPPER, "needs at least one key"),
    "an older compiler": (
        mapped(),
        replace(HOPPER, nvrtc=(12, 8)),
        r"needs NVRTC 12\.9 or newer, this is 12\.8: "
        r"pip install -U 'cuflash\[cuda12\]', or '\.\[cuda12\]' in a checkout",
    ),
    "little shared memory": (
        mapped(),
        replace(HOPPER, shared_per_block=65536),
        "has no tile for head_dim 64/64 in 65,536 bytes",
    ),
    "too many tiles": (
        mapped(batch=2**11, heads_q=2**10, heads_kv=2**10, seqlen_q=2**20),
        HOPPER,
        "fa3 would need [0-9,]+ tiles, it can count 1,073,741,824",
    ),
}


@pytest.mark.parametrize("fault", _REFUSED)
def test_a_refusal_gives_its_reason(fault: str) -> None:
    wanted, limits, said = _REFUSED[fault]
    with pytest.raises(UnsupportedError, match=f"^fa3 .*{said.removeprefix('fa3 ')}"):
        plan(wanted, limits, algorithm="fa3")
    chosen = plan(wanted, limits)
    name, reason = chosen.rejected[0]
    with pytest.raises(UnsupportedError) as caught:
        plan(wanted, limits, algorithm="fa3")
    assert (name, reason) == ("fa3", str(caught.value))
    assert chosen.algorithm == ("fa1" if fault == "too many tiles" else "fa2")


def test_the_oldest_compiler_and_one_key_are_enough() -> None:
    assert OLDEST_NVRTC == (12, 9)
    assert plan(mapped(), replace(HOPPER, nvrtc=(12, 9))).algorithm == "fa3"
    assert plan(mapped(seqlen_kv=1), HOPPER).algorithm == "fa3"


def test_a_newer_compiler_is_asked_for_where_it_would_help() -> None:
    old = replace(HOPPER, nvrtc=(12, 8))
    said = needs_newer_compiler(mapped(), old)
    assert said is not None
    assert "needs NVRTC 12.9" in said
    assert needs_newer_compiler(mapped(), HOPPER) is None
    for changes in ({"storage": "float32"}, {"alignment": "vector"}):
        assert needs_newer_compiler(mapped(**changes), old) is None
    assert needs_newer_compiler(mapped(), replace(old, compute_capability=(10, 0))) is None


def test_auto_takes_it_first() -> None:
    chosen = plan(mapped(), HOPPER)
    assert (chosen.algorithm, chosen.rejected) == ("fa3", ())
    assert chosen.launches == planned(mapped()).launches


def _listed(wanted: AttentionProblem) -> set[tuple[int, int]]:
    every = (*FORWARD, *FORWARD_OF_FEW)
    rows = (r for r in every if r.widest >= wanted.head_dim and r.widest_v >= wanted.head_dim_v)
    return {(row.block_q, row.block_kv) for row in rows}


@pytest.mark.parametrize("width", [64, 128, 256])
def test_listed_blocks_are_taken_at_every_length(width: int) -> None:
    for length, mask in product((100, ANY), ("full", "causal")):
        wanted = mapped(width=width, seqlen=length, mask=mask)
        for blocks in _listed(wanted):
            for algorithm in ("fa3", "auto"):
                chosen = plan(wanted, HOPPER, algorithm=algorithm, blocks=blocks)
                assert (chosen.algorithm, chosen.reason) == ("fa3", "blocks as asked")
                assert (chosen.tile.block_q, chosen.tile.block_kv) == blocks


def test_other_blocks_are_refused_by_name_and_go_on_to_the_next_by_default() -> None:
    wanted = mapped(width=128)
    with pytest.raises(ArgumentValueError, match=r"blocks: got \(32, 64\)") as caught:
        planned(wanted, blocks=(32, 64))
    names = caught.value.expected.removeprefix("one of ")
    assert sorted(eval(f"[{names}]")) == sorted(_listed(wanted))  # each once
    chosen = plan(wanted, HOPPER, blocks=(32, 64))
    assert (chosen.algorithm, chosen.tile.block_q, chosen.tile.block_kv) == ("fa2", 32, 64)
    assert chosen.rejected == (("fa3", str(caught.value)),)


def test_blocks_that_nothing_has_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="multiples of 16"):
        plan(mapped(), HOPPER, blocks=(99, 99))


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_float32_output_changes_nothing_but_its_type(storage: str) -> None:
    wanted = mapped(storage=storage)
    one, other = planned(wanted), planned(replace(wanted, output="float32"))
    assert one.tile == other.tile
    (a,), (b,) = one.launches, other.launches
    assert b == replace(a, config=replace(a.config, output="float32"))


def _main(chosen: Plan) -> tuple[int, dict[str, int]]:
    (launch,) = chosen.launches
    return launch.grid, dict(launch.arguments)


def test_a_block_for_every_multiprocessor_or_every_tile() -> None:
    for batch, heads, rows in ((1, 1, 1), (1, 2, 257), (2, 4, 4096), (1, 16, 2048), (64, 32, 999)):
        for width in (64, 128, 256):
            wanted = mapped(batch=batch, heads_q=heads, heads_kv=1, seqlen_q=rows, width=width)
            chosen = planned(wanted)
            tiles = batch * heads * -(-rows // chosen.tile.block_q)
            assert _main(chosen)[0] == min(tiles, HOPPER.num_sms)
    for nothing in ({"batch": 0}, {"seqlen_q": 0}, {"heads_q": 0, "heads_kv": 0}):
        assert _main(planned(mapped(**nothing)))[0] == 0


def test_what_is_known_at_run_time_costs_no_compile() -> None:
    plain = planned(filling(seqlen=ANY)).launches[0].config
    for change in (
        {"seqlen_q": 123_457, "seqlen_kv": 99_999},
        {"batch": 70_000},
        {"heads_q": 64, "heads_kv": 8},
        {"scale": 3.0},
        {"q_offset": -7},
        {"head_dim": 40, "head_dim_v": 56},
    ):
        changed = planned(replace(filling(seqlen=ANY), **change))
        assert changed.launches[0].config == plain
    configs = {planned(filling(seqlen_kv=n)).launches[0].config for n in range(1, 5000, 100)}
    assert len(configs) == 2


def test_the_workspace_is_one_counter() -> None:
    for length in (100, ANY):
        chosen = planned(filling(seqlen=length))
        assert [(b.name, b.offset, b.nbytes) for b in chosen.workspace] == [("tile_counter", 0, 4)]
        assert chosen.workspace_bytes == 4


def test_maps_bring_a_warpgroups_queries_and_a_block_of_keys() -> None:
    for width in (64, 128, 256):
        chosen = planned(mapped(width=width))
        kv = chosen.tile.block_kv
        assert chosen.launches[0].boxes == (("q", 64), ("k", kv), ("v", kv))
        assert kv <= 256  # the most rows of a box


def test_a_given_tile_is_taken() -> None:
    every = list(fa3.candidates(mapped(), HOPPER, every=True))
    assert len(every) == len(FORWARD) + len(FORWARD_OF_FEW)
    assert [fa3_plan(mapped(), HOPPER, None, (), tile=t).tile for t in every] == every
    with pytest.raises(UnsupportedError, match="fa3 is for Hopper"):
        fa3_plan(mapped(), LIMITS["80"], None, (), tile=every[0])
