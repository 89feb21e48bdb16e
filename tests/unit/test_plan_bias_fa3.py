"""A bias in plans of FlashAttention-3: with and without the copy engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.head_groups import whole_entries
from cuflash.planning.plan import plan
from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles.common import ceil_div
from cuflash.planning.tiles.fa3 import Fa3ForwardTile
from cuflash.planning.tiles.operand_tiles import NO_OPERAND

from ..architectures import LIMITS
from .bias_case import FORMS, KEYS, ROWS, kernel_of, problem_of, shape_of


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fa3_brings_what_differs_from_key_to_key_to_shared_memory(
    operation: Any, form: tuple[bool, bool], dtype: str
) -> None:
    """The backward pass does so only if the bias differs along queries too, and there is room."""
    wrt = ("q", "k", "v") if operation == "backward" else ()
    problem = problem_of(shape_of(1, 4, form), dtype, operation=operation, wrt=wrt)
    chosen = plan(problem, LIMITS["90"], algorithm="fa3")
    rows, keys = form
    launch, tile = kernel_of(chosen, operation), chosen.tile
    constants, boxes = dict(launch.config.constants), dict(launch.boxes)
    staged = keys and (operation == "forward" or (rows and dtype == "float16"))
    (feature,) = launch.config.features
    assert feature.device.struct == ("StagedBiasParams" if staged else "BiasParams")
    assert ("bias" in boxes) == staged
    stages = constants["operand_stages"]
    assert (stages > 0) == staged
    if not staged:
        plain = plan(replace(problem, uses=()), LIMITS["90"], algorithm="fa3").tile
        assert tile.footprint == plain.footprint
        return
    assert boxes["bias"] == constants["operand_rows"] == (tile.block_q if rows else 8)
    itemsize = constants["operand_bytes"]
    assert itemsize == DTYPES[dtype].itemsize
    panels = ceil_div(tile.block_kv * itemsize, 128)
    without = replace(tile, operand=NO_OPERAND).footprint.shared_bytes
    room = stages * panels * boxes["bias"] * 128 + 1024
    assert tile.footprint.shared_bytes == launch.config.shared_bytes == without + room
    assert launch.config.shared_bytes <= LIMITS["90"].shared_per_block


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("width", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_fa3_has_room_for_a_bias_in_heads_of_any_width(
    operation: Any, width: Any, dtype: str
) -> None:
    wide = {"head_dim": width[0], "head_dim_v": width[1], "wrt": (), "operation": operation}
    problem = problem_of(shape_of(3, 4, (True, True)), dtype, **wide)
    chosen = plan(problem, LIMITS["90"])
    assert chosen.algorithm == "fa3"
    assert chosen.launches[-1].config.shared_bytes <= LIMITS["90"].shared_per_block


@pytest.mark.parametrize("seqlen", [1024, 1025])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiles_of_pairs_are_whole_panels_that_come_ahead(seqlen: int, dtype: str) -> None:
    """There are two stages at least, except for float32 in the widest heads.

    Short sequences with float16 in narrow heads have three, for tiles of 256 queries.
    """
    for width in (32, 64, 96, 128, 160, 192, 256):
        wide = {"head_dim": width, "head_dim_v": width, "operation": "forward", "wrt": ()}
        problem = problem_of((1, 4, 512, seqlen), dtype, seqlen_kv=seqlen, **wide)
        tile = plan(problem, LIMITS["90"], algorithm="fa3").tile
        assert isinstance(tile, Fa3ForwardTile)
        short = width <= 64 and dtype == "float16" and seqlen == 1024
        assert (tile.operand.stages == 3) == (tile.block_q == 256) == short
        assert tile.operand.stages >= (1 if (width, dtype) == (256, "float32") else 2)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_entries_that_share_pairs_come_together(algorithm: Any, mask: str) -> None:
    """The head group of the forward pass is then a multiple of the number of entries."""
    every = {"operation": "forward", "wrt": (), "mask": mask, "batch": 5, "heads_q": 8}
    shapes = {(1, 8, ROWS, KEYS): 1, (1, 1, ROWS, KEYS): 1, (5, 8, ROWS, KEYS): 0}
    shapes |= {(1, 8, 1, KEYS): 0, (1, 8, ROWS, 1): 0}
    for shape, inside in shapes.items():
        chosen = plan(problem_of(shape, **every), LIMITS["90"], algorithm=algorithm)
        launch = kernel_of(chosen, "forward")
        assert dict(launch.config.constants)["entries_inside"] == inside
        group = dict(launch.arguments)["head_group"]
        assert not inside or (group > 0 and group % 5 == 0)
        rounded = [whole_entries(chosen.problem, heads) for heads in (1, 5, 6, 40)]
        assert rounded == ([5, 5, 10, 40] if inside else [1, 5, 6, 40])
    plain = replace(problem_of((1, 8, ROWS, KEYS), **every), uses=())
    slopes = {"alibi_slopes": Operand("alibi_slopes", "float32", (5, 8))}
    for other in (plain, with_features(plain, {}, slopes)):
        launch = kernel_of(plan(other, LIMITS["90"], algorithm=algorithm), "forward")
        assert dict(launch.config.constants)["entries_inside"] == 0


def test_what_the_copy_engine_cannot_read_is_left_to_fa2_or_to_registers() -> None:
    """The forward pass is left to fa2, and the backward pass reads the bias into registers.

    A bias that does not differ from key to key needs no copy engine.
    """
    forward: dict[str, Any] = {"operation": "forward", "wrt": ()}
    problem = problem_of(shape_of(1, 4, (True, True)), mappable=False, **forward)
    chosen = plan(problem, LIMITS["90"])
    assert chosen.algorithm == "fa2"
    says = "at positive multiples of 16 bytes: pad the last axis in memory to a multiple of 8 el"
    assert any(name == "fa3" and says in why for name, why in chosen.rejected)
    with pytest.raises(cuflash.UnsupportedError, match=says):
        plan(problem, LIMITS["90"], algorithm="fa3")
    for form in ((True, False), (False, False)):
        problem = problem_of(shape_of(1, 4, form), mappable=False, **forward)
        assert plan(problem, LIMITS["90"]).algorithm == "fa3"
    backward = plan(problem_of(shape_of(1, 4, (True, True)), mappable=False), LIMITS["90"])
    assert backward.algorithm == "fa3"
    main = kernel_of(backward, "backward")
    assert "bias" not in dict(main.boxes)
    assert main.config.features[0].device.struct == "BiasParams"
