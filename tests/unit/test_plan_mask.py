"""Plans with a boolean mask: the kernels' numbers, and the bits that are made of the mask."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa3 import Fa3ForwardTile

from ..architectures import LIMITS
from .bias_case import BATCH, FORMS, HEADS, KEYS, ROWS, kernel_of, kernels_of, shape_of

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")

_WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
#: A batch with which the tiles of the table give every multiprocessor work.
_FILLING = {"batch": 100}
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
    """The parameters of each feature of a kernel."""
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
    """No number depends on the scale, and ``mask_storage`` is the storage type of the call."""
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
    assert not use.operands[0].staged
    assert (use.packed is not None) == keys
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
    """They read a mask at any address; tile and kernels are those of a call without a mask."""
    problem = _problem(shape_of(3, 4, form), operation=operation, unmappable=("mask",))
    for dtype in ("float16", "float32", "float64"):
        of = replace(problem, storage=dtype, output=dtype)
        chosen = plan(of, LIMITS["90"], algorithm=algorithm)
        plain = plan(replace(of, uses=()), LIMITS["90"], algorithm=algorithm)
        assert _structs(kernel_of(chosen, operation)) == {"mask": "MaskParams"}
        assert kernels_of(chosen) == kernels_of(plain)
        assert chosen.tile == plain.tile
        assert chosen.workspace == plain.workspace


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("width", _WIDTHS, ids=str)
def test_fa3_reads_bits_of_what_differs_from_key_to_key(
    operation: Any, form: tuple[bool, bool], width: Any, deterministic: bool
) -> None:
    """The mask may have any address. Ordered sums count all tiles, so they have no lists."""
    if operation == "forward" and deterministic:
        return
    wide = {"head_dim": width[0], "head_dim_v": width[1], "operation": operation}
    more = {"deterministic": deterministic, "unmappable": ("mask",)}
    chosen = plan(_problem(shape_of(3, 4, form), **wide, **more), LIMITS["90"], algorithm="fa3")
    blocks = (chosen.tile.block_q, chosen.tile.block_kv) if operation == "backward" else None
    plain = plan(replace(chosen.problem, uses=()), LIMITS["90"], algorithm="fa3", blocks=blocks)
    rows, keys = form
    launch, backward = kernel_of(chosen, operation), operation == "backward"
    assert _structs(launch) == {"mask": "PackedMaskParams" if keys else "MaskParams"}
    assert "mask" not in dict(launch.boxes)
    assert kernels_of(chosen) == ["summarise_mask"] * keys + kernels_of(plain)
    constants = dict(launch.config.constants)
    assert constants["packed"] == keys
    assert constants["one_row"] == (keys and not rows)
    assert constants["listed"] == (keys and not deterministic and (rows or not backward))
    assert constants["skips_keys"] == (backward and keys and not rows and not deterministic)
    made = {buffer.name for buffer in chosen.workspace} - {b.name for b in plain.workspace}
    expected = ["pair_bits"] * keys + ["tile_bits"] * (keys and not deterministic)
    assert sorted(made) == expected


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(1, 4, 500, 700), (3, 1, 500, 700), (3, 4, 1, 700)], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_workspace_holds_the_bits(operation: Any, shape: tuple[int, ...], width: int) -> None:
    """Tile bits take 8 bytes for 32 tiles of a row of tiles.

    Pair bits take 8 bytes for each lane of a warp and each 16 lines of a tile.
    """
    wide = {"head_dim": width, "head_dim_v": width, "operation": operation}
    chosen = plan(_problem(shape, **wide), LIMITS["90"], algorithm="fa3")
    tile, backward = chosen.tile, operation == "backward"
    q_tiles = 1 if shape[2] == 1 else ceil_div(ROWS, tile.block_q)
    kv_tiles = ceil_div(KEYS, tile.block_kv)
    rows, along = (kv_tiles, q_tiles) if backward else (q_tiles, kv_tiles)
    lines = tile.block_kv if backward else 16 if shape[2] == 1 else tile.block_q
    arrays = shape[0] * shape[1]
    sizes = {buffer.name: buffer.nbytes for buffer in chosen.workspace}
    words = arrays * rows * ceil_div(along, 32)
    assert sizes["tile_bits"] == 8 * words
    assert sizes["pair_bits"] == arrays * rows * (lines // 16) * along * 32 * 8
    summary = kernel_of(chosen, "summarise_mask")
    assert summary.grid == 4 * words
    assert dict(summary.arguments) == {"mask_heads": shape[1]}
    constants = dict(summary.config.constants)
    blocks = (constants["block_q"], constants["block_kv"])
    assert blocks == (tile.block_q, tile.block_kv)
    assert constants["rows_of_keys"] == backward
    assert constants["one_row"] == (shape[2] == 1)
    assert summary.config.shared_bytes >= 2 * tile.block_q * (tile.block_kv // 16) * 2


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_bits_that_cannot_be_counted_are_left_to_fa2(operation: Any) -> None:
    """At most 2^32 words are counted: 2^12 entries and heads, 256 groups of lines, 128 tiles, 32
    lanes."""
    lengths = (4096, 8192) if operation == "forward" else (8192, 4096)
    same = {"heads_q": 512, "heads_kv": 512, "head_dim": 256, "head_dim_v": 256}
    same |= dict(zip(("seqlen_q", "seqlen_kv"), lengths, strict=True))
    for entries, algorithm in ((8, "fa3"), (9, "fa2")):
        problem = _problem((entries, 512, *lengths), batch=entries, operation=operation, **same)
        chosen = plan(problem, LIMITS["90"])
        sizes = {buffer.name: buffer.nbytes for buffer in chosen.workspace}
        assert chosen.algorithm == algorithm
        assert sizes.get("pair_bits", 0) == (8 * 2**32 if algorithm == "fa3" else 0)


@pytest.mark.parametrize("seqlen", [128, 1024, 1025, 65536])
def test_tiles_that_a_mask_may_hide_are_square_at_128(seqlen: int) -> None:
    """This holds for any length. Other tiles are those of calls without a mask: at other widths,
    and if the mask does not vary along both queries and keys."""
    for form, width in product(FORMS, (64, 96, 128, 192, 256)):
        wide = {"head_dim": width, "head_dim_v": width, "seqlen_kv": seqlen, **_FILLING}
        shape = tuple(seqlen if size == KEYS else size for size in shape_of(1, 4, form))
        problem = _problem(shape, **wide)
        tile = plan(problem, LIMITS["90"], algorithm="fa3").tile
        plain = plan(replace(problem, uses=()), LIMITS["90"], algorithm="fa3").tile
        if width == 128 and all(form):
            assert isinstance(tile, Fa3ForwardTile)
            assert (tile.block_q, tile.block_kv, tile.num_stages, tile.q_stages) == (128, 128, 2, 2)
        else:
            assert tile == plain


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("of_bias", FORMS, ids=str)
@pytest.mark.parametrize("of_mask", FORMS, ids=str)
def test_beside_a_bias(
    operation: Any, of_bias: tuple[bool, bool], of_mask: tuple[bool, bool]
) -> None:
    """The bias is loaded tile by tile, as without a mask, whatever the address of the mask."""
    more = {"more": _bias(of_bias), "operation": operation, "unmappable": ("mask",), **_FILLING}
    problem = _problem(shape_of(1, 4, of_mask), **more)
    chosen = plan(problem, LIMITS["90"], algorithm="fa3")
    staged = of_bias[1] and (operation == "forward" or of_bias[0])
    assert _structs(kernel_of(chosen, operation)) == {
        "bias": "StagedBiasParams" if staged else "BiasParams",
        "mask": "PackedMaskParams" if of_mask[1] else "MaskParams",
    }
    uses = tuple(use for use in problem.uses if use.feature == "bias")
    alone = kernel_of(plan(replace(problem, uses=uses), LIMITS["90"], algorithm="fa3"), operation)
    assert kernel_of(chosen, operation).boxes == alone.boxes
    elsewhere = replace(problem, uses=tuple(map(_unmappable, problem.uses)))
    needs_maps = operation == "forward" and of_bias[1]
    assert plan(elsewhere, LIMITS["90"]).algorithm == ("fa2" if needs_maps else "fa3")


def _unmappable(use: Any) -> Any:
    return replace(use, operands=tuple(replace(one, mappable=False) for one in use.operands))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_entries_come_together_as_a_bias_has_it(algorithm: Any, mask: str) -> None:
    """Only a bias that entries share puts them into one head group; a mask has too few bits."""
    every = {"mask": mask, "batch": 5, "heads_q": 8}
    bias = [{}, *({"bias": Operand("bias", "float16", (b, 8, ROWS, KEYS))} for b in (5, 1))]
    for shape, more in product([(1, 8, ROWS, KEYS), (5, 1, ROWS, KEYS), (1, 8, 1, KEYS)], bias):
        chosen = plan(_problem(shape, more=more, **every), LIMITS["90"], algorithm=algorithm)
        launch = kernel_of(chosen, "forward")
        inside = bool(more) and more["bias"].shape[0] == 1
        assert dict(launch.config.constants)["entries_inside"] == inside
        group = dict(launch.arguments)["head_group"]
        assert not inside or (group > 0 and group % 5 == 0)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_gradient_of_a_bias_has_the_mask_in_every_step(algorithm: Any) -> None:
    """The mask may differ between entries and is read directly, so that no term is kept."""
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
    """The mask comes before sinks; so hidden pairs stay hidden, whatever other features do."""
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
