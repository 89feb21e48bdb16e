"""What a plan with a boolean mask tells the kernels, and what comes through the copy engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.head_groups import whole_entries
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa3 import Fa3ForwardTile
from cuflash.planning.tiles.fa3_tables import FORWARD_WITH_PAIRS
from cuflash.planning.tiles.operand_tiles import NO_OPERAND

from ..architectures import LIMITS
from .bias_case import BATCH, FORMS, HEADS, KEYS, ROWS, kernel_of, kernels_of, shape_of

_WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
_WHOLE = shape_of(1, 4, (True, True))


def _problem(
    shape: tuple[int, ...] = _WHOLE,
    entries: tuple[int, int] | None = None,
    more: dict[str, Operand] | None = None,
    unmappable: tuple[str, ...] = (),
    softcap: float = 0.0,
    **changed: Any,
) -> AttentionProblem:
    """A forward pass with a mask of this shape."""
    sizes = {"batch": BATCH, "heads_q": HEADS, "heads_kv": 2}
    lengths = {"seqlen_q": ROWS, "seqlen_kv": KEYS}
    kinds = {"storage": "float16", "mask": "full", "operation": "forward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.125, "q_offset": 0}
    every = {**sizes, **lengths, **kinds, **wide, "alignment": "tensor_map", **changed}
    plain = AttentionProblem(output=every["storage"], **every)
    arrays = {**(more or {}), "mask": Operand("mask", "bool", shape, entries)}
    problem = with_features(plain, {"softcap": softcap}, arrays, 188)
    uses = []
    for use in problem.uses:
        placed = tuple(replace(o, mappable=o.name not in unmappable) for o in use.operands)
        uses.append(replace(use, operands=placed))
    return replace(problem, uses=tuple(uses))


def _bias(form: tuple[bool, bool], dtype: str = "float16", batch: int = 1) -> dict[str, Operand]:
    return {"bias": Operand("bias", dtype, shape_of(batch, 4, form))}


def _structs(launch: Any) -> dict[str, str]:
    """What each feature of a kernel gets."""
    return {feature.name: feature.device.struct for feature in launch.config.features}


@pytest.mark.parametrize(
    ("shape", "entries", "own", "heads"),
    [
        ((3, 4, 500, 700), None, 3, 4),
        ((1, 4, 500, 1), None, 1, 4),
        ((4, 1, 700), None, 1, 4),
        ((700,), None, 1, 1),
        ((), None, 1, 1),
        ((3, 1, 1, 700), (1, 3), 3, 1),
        ((1, 4, 500, 700), (3, 1), 1, 4),
    ],
)
@pytest.mark.parametrize("storage", ["float16", "float64"])
def test_the_numbers_and_the_types_of_the_kernels(
    shape: Any, entries: Any, own: int, heads: int, storage: str
) -> None:
    """Of a mask none depends on the scale, and the dtype is that of the scores that it hides."""
    problem = _problem(shape, entries, storage=storage, scale=0.3)
    (use,) = problem.uses
    assert dict(use.numbers) == {
        "entries": 1 if entries is None else entries[0],
        "own_entries": own,
        "own_heads": heads,
    }
    rows, keys = shape[-2:-1] == (500,), shape[-1:] == (700,)
    assert dict(use.compiled) == {
        "mask_storage": storage,
        "mask_of_rows": rows,
        "mask_of_keys": keys,
    }
    assert use.operands[0].staged == keys
    assert use.shown == "mask " + "x".join(map(str, shape))
    assert use.unit is None
    assert str(problem).endswith(f"{use.shown} mask bool")


def test_a_batch_without_entries_divides_by_one() -> None:
    assert dict(_problem((0, 4, 500, 700), batch=0).uses[0].numbers)["own_entries"] == 1


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_older_generations_read_it_where_it_lies(
    algorithm: Any, operation: Any, form: tuple[bool, bool]
) -> None:
    """At any address; the tile is that of a call without a mask, and no kernel is added."""
    problem = _problem(shape_of(3, 4, form), operation=operation, unmappable=("mask",))
    for dtype in ("float16", "float32", "float64"):
        of = replace(problem, storage=dtype, output=dtype)
        chosen = plan(of, LIMITS["90"], algorithm=algorithm)
        plain = plan(replace(of, uses=()), LIMITS["90"], algorithm=algorithm)
        assert _structs(kernel_of(chosen, operation)) == {"mask": "MaskParams"}
        assert kernels_of(chosen) == kernels_of(plain)
        assert chosen.tile == plain.tile
        assert chosen.workspace == plain.workspace


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("width", _WIDTHS, ids=str)
def test_fa3_brings_what_differs_from_key_to_key_to_shared_memory(
    operation: Any, form: tuple[bool, bool], width: Any
) -> None:
    """But in the backward pass for what is the same for all queries, and in heads too wide."""
    wide = {"head_dim": width[0], "head_dim_v": width[1], "operation": operation}
    chosen = plan(_problem(shape_of(1, 4, form), **wide), LIMITS["90"], algorithm="fa3")
    plain = plan(replace(chosen.problem, uses=()), LIMITS["90"], algorithm="fa3")
    rows, keys = form
    launch, tile = kernel_of(chosen, operation), chosen.tile
    constants, boxes = dict(launch.config.constants), dict(launch.boxes)
    room = operation == "forward" or (rows and width in _WIDTHS[:3])
    staged = keys and room
    assert _structs(launch) == {"mask": "StagedMaskParams" if staged else "MaskParams"}
    assert ("mask" in boxes) == staged
    assert (constants["operand_stages"] > 0) == staged
    assert kernels_of(chosen) == ["summarise_mask"] * keys + kernels_of(plain)
    if not staged:
        assert tile == plain.tile
        return
    assert boxes["mask"] == constants["operand_rows"] == (tile.block_q if rows else 8)
    assert constants["operand_bytes"] == 1
    panels = ceil_div(tile.block_kv, 128)
    without = replace(tile, operand=NO_OPERAND).footprint.shared_bytes
    added = constants["operand_stages"] * panels * boxes["mask"] * 128 + 1024
    assert tile.footprint.shared_bytes == launch.config.shared_bytes == without + added
    assert launch.config.shared_bytes <= LIMITS["90"].shared_per_block
    if operation == "backward":  # which has room for it beside its own tile
        assert replace(tile, operand=NO_OPERAND) == plain.tile


@pytest.mark.parametrize(
    ("width", "row"),
    [
        ((32, 32), (192, 128, 3, 2)),
        ((64, 64), (192, 128, 3, 2)),
        ((96, 96), (128, 128, 2, 2)),
        ((128, 128), (128, 128, 2, 2)),
        ((192, 128), (128, 96, 2, 1)),
        ((192, 192), (128, 96, 2, 1)),
        ((256, 256), (128, 64, 2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seqlen", [128, 1024, 1025, 65536])
def test_tiles_of_bytes_are_those_of_their_rows_of_the_table(
    width: Any, row: tuple[int, ...], seqlen: int
) -> None:
    """Of any length: queries and keys of a tile, stages of K and V, and of the mask."""
    wide = {"head_dim": width[0], "head_dim_v": width[1], "seqlen_kv": seqlen}
    tile = plan(_problem((1, 4, ROWS, seqlen), **wide), LIMITS["90"], algorithm="fa3").tile
    assert isinstance(tile, Fa3ForwardTile)
    assert (tile.block_q, tile.block_kv, tile.num_stages, tile.operand.stages) == row
    assert (tile.operand.rows, tile.operand.itemsize) == (tile.block_q, 1)


def test_every_row_of_bytes_is_taken_and_fits() -> None:
    for row in (row for row in FORWARD_WITH_PAIRS if row.itemsize == 1):
        wide = {"head_dim": row.widest, "head_dim_v": row.widest_v}
        tile = plan(_problem(**wide), LIMITS["90"], algorithm="fa3").tile
        found = tile.block_q, tile.block_kv, tile.num_stages, tile.operand.stages
        assert found == (row.block_q, row.block_kv, row.num_stages, row.pair_stages)
        assert tile.footprint.excess(LIMITS["90"]) is None
        asked = plan(_problem(**wide), LIMITS["90"], blocks=(row.block_q, row.block_kv))
        assert (asked.algorithm, asked.tile) == ("fa3", tile)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("of_bias", FORMS, ids=str)
@pytest.mark.parametrize("of_mask", FORMS, ids=str)
def test_one_array_of_two_is_staged(
    operation: Any, of_bias: tuple[bool, bool], of_mask: tuple[bool, bool]
) -> None:
    """The bias where it differs from key to key, else the mask; the other is read as it lies."""
    problem = _problem(shape_of(1, 4, of_mask), more=_bias(of_bias), operation=operation)
    first = "bias" if of_bias[1] else "mask" if of_mask[1] else ""
    staged = [name for name, operand in problem.operands.items() if operand.staged]
    assert staged == [first] * bool(first)
    chosen = plan(problem, LIMITS["90"], algorithm="fa3")
    launch = kernel_of(chosen, operation)
    form = {"bias": of_bias, "mask": of_mask}.get(first, (False, False))
    comes = bool(first) and (operation == "forward" or form[0])
    expected = {"bias": "BiasParams", "mask": "MaskParams"}
    if comes:
        expected[first] = f"Staged{expected[first]}"
    assert _structs(launch) == expected
    assert [name for name, _ in launch.boxes if name in expected] == [first] * comes
    constants = dict(launch.config.constants)
    assert constants["operand_bytes"] == ({"bias": 2, "mask": 1}[first] if comes else 0)


def test_what_the_copy_engine_cannot_read_is_left_to_fa2_or_to_registers() -> None:
    """Forward and backward; one that does not differ from key to key needs no engine."""
    problem = _problem(unmappable=("mask",))
    chosen = plan(problem, LIMITS["90"])
    assert chosen.algorithm == "fa2"
    says = (
        "fa3 loads mask through the copy engine, which needs rows that begin at positive "
        "multiples of 16 bytes: pad the last axis in memory to a multiple of 16 elements"
    )
    assert ("fa3", says) in chosen.rejected
    with pytest.raises(cuflash.UnsupportedError, match=says):
        plan(problem, LIMITS["90"], algorithm="fa3")
    for form in ((True, False), (False, False)):
        problem = _problem(shape_of(1, 4, form), unmappable=("mask",))
        assert plan(problem, LIMITS["90"]).algorithm == "fa3"
    backward = plan(_problem(unmappable=("mask",), operation="backward"), LIMITS["90"])
    assert backward.algorithm == "fa3"
    main = kernel_of(backward, "backward")
    assert "mask" not in dict(main.boxes)
    assert _structs(main) == {"mask": "MaskParams"}


def test_only_the_array_that_is_staged_has_to_be_mappable() -> None:
    """Beside a bias that comes through the engine a mask may lie anywhere, not the other way."""
    bias = _bias((True, True))
    assert plan(_problem(more=bias, unmappable=("mask",)), LIMITS["90"]).algorithm == "fa3"
    assert plan(_problem(more=bias, unmappable=("bias",)), LIMITS["90"]).algorithm == "fa2"
    of_rows = _bias((True, False))
    assert plan(_problem(more=of_rows, unmappable=("bias",)), LIMITS["90"]).algorithm == "fa3"
    assert plan(_problem(more=of_rows, unmappable=("mask",)), LIMITS["90"]).algorithm == "fa2"


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_entries_that_share_pairs_come_together(algorithm: Any, mask: str) -> None:
    """In the forward pass; beside a bias that is staged, as the bias has it."""
    every = {"mask": mask, "batch": 5, "heads_q": 8}
    cases: list[tuple[tuple[int, ...], dict[str, Operand], int]] = [
        ((1, 8, ROWS, KEYS), {}, 1),
        ((1, 1, ROWS, KEYS), {}, 1),
        ((5, 8, ROWS, KEYS), {}, 0),
        ((1, 8, 1, KEYS), {}, 0),
        ((1, 8, ROWS, 1), {}, 0),
        ((1, 1, ROWS, KEYS), {"bias": Operand("bias", "float16", (5, 8, ROWS, KEYS))}, 0),
        ((5, 1, ROWS, KEYS), {"bias": Operand("bias", "float16", (1, 8, ROWS, KEYS))}, 1),
        ((1, 1, ROWS, KEYS), {"bias": Operand("bias", "float16", (5, 8, ROWS, 1))}, 1),
    ]
    for shape, more, inside in cases:
        chosen = plan(_problem(shape, more=more, **every), LIMITS["90"], algorithm=algorithm)
        launch = kernel_of(chosen, "forward")
        assert dict(launch.config.constants)["entries_inside"] == inside
        group = dict(launch.arguments)["head_group"]
        assert not inside or (group > 0 and group % 5 == 0)
        rounded = [whole_entries(chosen.problem, heads) for heads in (1, 5, 6, 40)]
        assert rounded == ([5, 5, 10, 40] if inside else [1, 5, 6, 40])


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_gradient_of_a_bias_has_the_mask_in_every_step(algorithm: Any) -> None:
    """It may differ from entry to entry, and is read where it lies: no term is kept."""
    more = _bias((True, True))
    every = {"more": more, "operation": "backward", "wrt": ("q", "k", "v", "bias")}
    chosen = plan(
        _problem(shape_of(3, 4, (True, True)), **every), LIMITS["90"], algorithm=algorithm
    )
    launch = kernel_of(chosen, "bias_gradient")
    assert _structs(launch) == {"bias": "BiasParams", "mask": "MaskParams"}
    assert dict(launch.config.constants)["keeps_terms"] == 0
    names = [feature.name for feature in kernel_of(chosen, "backward").config.features]
    assert names == ["bias", "mask"]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_it_comes_behind_all_that_changes_scores(operation: Any, softcap: float) -> None:
    """And before sinks: what hides pairs hides them whatever the others make of them."""
    more = {
        "alibi_slopes": Operand("alibi_slopes", "float32", (HEADS,)),
        "sinks": Operand("sinks", "float16", (HEADS,)),
        **_bias((True, True)),
    }
    problem = _problem(more=more, softcap=softcap, operation=operation, mask="band", q_first=-9)
    expected = ["softcap"] * bool(softcap) + ["alibi", "bias", "mask", "sinks"]
    assert [*problem.features] == ["window", *expected]
    launch = kernel_of(plan(problem, LIMITS["90"], algorithm="fa2"), operation)
    of_scores = expected if operation == "forward" else expected[:-1]
    assert [feature.name for feature in launch.config.features] == ["window", *of_scores]
