"""Plans with a bias: the numbers that kernels get, and the kernels of its gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import cuflash
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import DTYPES
from cuflash.planning.tiles.bias import bias_tiles
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS, ceil_div, key_step

from ..architectures import LIMITS
from .bias_case import (
    BATCH,
    FORMS,
    HEADS,
    KEYS,
    ROWS,
    bytes_of,
    kernel_of,
    kernels_of,
    problem_of,
    shape_of,
)


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
@pytest.mark.parametrize(("softcap", "unit"), [(0.0, 0.125), (8.0, 8.0)])
def test_the_numbers_and_the_types_of_the_kernels(
    shape: Any, entries: Any, own: int, heads: int, softcap: float, unit: float
) -> None:
    problem = problem_of(shape, "float32", softcap, entries)
    use = next(use for use in problem.uses if use.feature == "bias")
    assert dict(use.numbers) == {
        "entries": 1 if entries is None else entries[0],
        "own_entries": own,
        "own_heads": heads,
        "inverse_unit": 1 / unit,
        "inverse_unit_single": 1 / unit,
    }
    rows, keys = shape[-2:-1] == (500,), shape[-1:] == (700,)
    assert dict(use.compiled) == {
        "bias_dtype": "float32",
        "bias_storage": "float16",
        "bias_of_rows": rows,
        "bias_of_keys": keys,
    }
    assert use.operands[0].staged == keys
    assert use.shown == "bias " + "x".join(map(str, shape))


def test_a_batch_without_entries_divides_by_one() -> None:
    problem = problem_of((0, 4, 500, 700), batch=0)
    assert dict(problem.uses[0].numbers)["own_entries"] == 1


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("batch", "heads"), [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_the_launches_of_the_gradient(
    algorithm: Any, form: tuple[bool, bool], batch: int, heads: int
) -> None:
    """There is a block for each tile of the gradient, or for each part of each head of the call."""
    rows, keys = form
    dtype = "float32" if heads == 1 else "float16"
    chosen = plan(
        problem_of(shape_of(batch, heads, form), dtype), LIMITS["90"], algorithm=algorithm
    )
    launch = kernel_of(chosen, "bias_gradient")
    constants = dict(launch.config.constants)
    assert (constants["by_rows"], constants["by_keys"]) == (rows or not keys, keys)
    blocks = ceil_div(ROWS, constants["block_q"]) if rows or not keys else 1
    blocks *= ceil_div(KEYS, constants["block_kv"]) if keys else 1
    assert launch.grid == blocks * (batch * heads if rows and keys else BATCH * HEADS)
    assert launch.config.threads == 32 * constants["warps"] * constants["walkers"]
    assert constants["keeps_terms"] == (rows and keys)
    assert (launch.config.storage, launch.config.output) == ("float16", dtype)
    arguments = dict(launch.arguments)
    assert arguments.pop("padded_rows") == (512 if algorithm != "fa1" else ROWS)
    assert arguments == {"bias_batch": batch, "bias_heads": heads}
    names, main = kernels_of(chosen), "backward"
    assert names.index("bias_gradient") > names.index(main)
    if rows and keys:
        assert "reduce_bias" not in names
        assert "bias_parts" not in bytes_of(chosen)
        return
    length = KEYS if keys else ROWS
    assert bytes_of(chosen)["bias_parts"] == BATCH * HEADS * length * 4
    reduced = kernel_of(chosen, "reduce_bias")
    assert names[-2:] == ["bias_gradient", "reduce_bias"]
    config, single = reduced.config, not (rows or keys)
    assert dict(config.constants)["single"] == single
    assert (config.storage, config.output) == (dtype, dtype)
    assert (config.mask, config.features, config.head_dim, config.head_dim_v) == ("full", (), 0, 0)
    of_head = 1 if single else ceil_div(length, config.threads)
    assert reduced.grid == batch * heads * of_head
    expected = {"length": length, "bias_batch": batch, "bias_heads": heads}
    assert dict(reduced.arguments) == expected
    assert config.shared_bytes == 8 * config.threads


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_parts_are_in_the_precision_of_the_softmax(algorithm: Any) -> None:
    problem = problem_of((1, 1, 1, KEYS), "float32", storage="float64")
    chosen = plan(problem, LIMITS["90"], algorithm=algorithm)
    assert bytes_of(chosen)["bias_parts"] == BATCH * HEADS * KEYS * 8
    assert kernel_of(chosen, "bias_gradient").config.output == "float32"
    reduced = kernel_of(chosen, "reduce_bias").config
    assert (reduced.storage, reduced.compute) == ("float32", "float64")


@pytest.mark.parametrize(("entries", "batch"), [((1, 3), 1), ((3, 1), 3), (None, 1)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_entries_that_share_one_of_the_gradient(
    form: tuple[bool, bool], entries: Any, batch: int
) -> None:
    """The number of entries that share one is the caller's, or follows from the bias' shape."""
    chosen = plan(problem_of(shape_of(1, 4, form), entries=entries), LIMITS["90"])
    tiles = kernel_of(chosen, "bias_gradient")
    assert dict(tiles.arguments)["bias_batch"] == batch
    constants = dict(tiles.config.constants)
    if form == (True, True):
        blocks = ceil_div(ROWS, constants["block_q"]) * ceil_div(KEYS, constants["block_kv"])
        assert tiles.grid == batch * HEADS * blocks
    else:
        reduced = kernel_of(chosen, "reduce_bias")
        of_head = 1
        if any(form):
            of_head = ceil_div(KEYS if form[1] else ROWS, reduced.config.threads)
        assert (dict(reduced.arguments)["bias_batch"], reduced.grid) == (
            batch,
            batch * HEADS * of_head,
        )


@pytest.mark.parametrize(
    ("entries", "own", "kept"),
    [
        ((1, 3), 6, 0),
        ((2, 3), 3, 0),
        ((3, 3), 2, 1),
        ((6, 3), 1, 1),
        ((1, 3), 1, 1),
        ((4, 1), 6, 1),
    ],
)
def test_terms_are_kept_where_entries_that_are_summed_share_one(
    entries: Any, own: int, kept: int
) -> None:
    problem = problem_of((own, 4, ROWS, KEYS), entries=entries, batch=6)
    config = kernel_of(plan(problem, LIMITS["90"]), "bias_gradient").config
    assert dict(config.constants)["keeps_terms"] == kept


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_gradient_that_is_not_wanted_costs_nothing(algorithm: Any) -> None:
    problem = problem_of((1, 1, 1, KEYS), wrt=("q", "k", "v"))
    chosen = plan(problem, LIMITS["90"], algorithm=algorithm)
    assert not {"bias_gradient", "reduce_bias"} & {*kernels_of(chosen)}
    assert "bias_parts" not in bytes_of(chosen)
    problem = problem_of((1, 1, 1, KEYS), operation="forward", wrt=())
    forward = plan(problem, LIMITS["90"], algorithm=algorithm)
    assert "bias_gradient" not in kernels_of(forward)


def test_what_else_there_is_enters_its_kernel_and_has_room_beside_it() -> None:
    """Caps, slopes and sinks enter the kernel; every feature's sums have their own buffer."""
    more = {
        "alibi_slopes": Operand("alibi_slopes", "float32", (HEADS,)),
        "sinks": Operand("sinks", "float16", (HEADS,)),
    }
    wrt = ("q", "k", "v", "alibi_slopes", "bias", "sinks")
    problem = problem_of(
        shape_of(1, 4, (False, True)), softcap=8.0, more=more, wrt=wrt, mask="causal"
    )
    chosen = plan(problem, LIMITS["90"], algorithm="fa2")
    config = kernel_of(chosen, "bias_gradient").config
    assert [feature.name for feature in config.features] == ["softcap", "alibi", "bias", "sinks"]
    assert config.mask == "causal"
    bias = next(one for one in config.features if one.name == "bias")
    assert bias.device.struct == "BiasParams"
    last = ["slope_gradient", "bias_gradient", "reduce_bias", "sink_gradient"]
    assert kernels_of(chosen)[-4:] == last
    assert {"pair_sums", "bias_parts", "delta"} <= bytes_of(chosen).keys()
    assert dict(kernel_of(chosen, "sink_gradient").arguments) == {"padded_rows": 512}


_DTYPES_OF = [*product(DTYPES, HEAD_DIM_BUCKETS)]


@pytest.mark.parametrize("architecture", LIMITS)
@pytest.mark.parametrize("form", [(True, True), (False, True), (True, False)], ids=str)
def test_every_head_has_a_tile_that_fits(architecture: str, form: tuple[bool, bool]) -> None:
    """Shared memory holds rows of two arrays; a single warp computes the sum of a row or a key."""
    limits = LIMITS[architecture]
    for dtype, width in _DTYPES_OF:
        if (architecture, dtype) == ("75", "bfloat16"):
            continue
        for dims in ((width, width), (16, width), (width, 16)):
            kinds = {"storage": dtype, "head_dim": dims[0], "head_dim_v": dims[1]}
            problem = problem_of(shape_of(1, 1, form), dtype, **kinds)
            tile = next(bias_tiles(problem, limits, *form))
            row, itemsize = tile.row, DTYPES[dtype].itemsize
            shared = row.slots * (row.block_q + row.block_kv) * width * itemsize
            assert tile.footprint.shared_bytes == shared <= limits.shared_per_block
            assert row.walkers == 1
            together = 32 * row.warps * row.blocks_per_sm
            assert tile.footprint.threads == 32 * row.warps
            assert tile.footprint.registers * together <= limits.registers_per_block
            grid_rows, grid_columns = tile.grid
            assert grid_rows * grid_columns == row.warps
            assert form[0] or grid_rows == 1
            assert form[1] or grid_columns == 1
            assert row.block_q % (grid_rows * tile.arithmetic.fragment_rows) == 0
            assert row.block_kv % (grid_columns * key_step(dtype)) == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 300])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_few_blocks_have_walkers_for_their_steps(batch: int, dtype: str) -> None:
    """Each walker has a step at least, and there is room for the sums of all but the first."""
    short: dict[str, Any] = {"batch": batch, "seqlen_q": 96, "seqlen_kv": 96, "storage": dtype}
    problem = problem_of((1, HEADS, 96, 96), dtype, head_dim_v=16, head_dim=16, **short)
    config = kernel_of(plan(problem, LIMITS["90"], algorithm="fa2"), "bias_gradient").config
    constants = dict(config.constants)
    walkers = constants["walkers"]
    assert walkers == {1: 1, 2: 2, 3: 2, 4: 4, 5: 4}.get(batch, 6)
    sums = constants["block_q"] * constants["block_kv"] * 4 * (walkers - 1)
    slot = (constants["block_q"] + constants["block_kv"]) * 16 * DTYPES[dtype].itemsize
    assert config.shared_bytes == max(sums, walkers * constants["slots"] * slot)
    many = problem_of((batch, HEADS, 96, 96), dtype, head_dim_v=16, head_dim=16, **short)
    of_many = kernel_of(plan(many, LIMITS["90"], algorithm="fa2"), "bias_gradient").config
    assert dict(of_many.constants)["walkers"] == 1


_EMPTY = {(0,): "seqlen_kv", (1, HEADS, 0, KEYS): "seqlen_q", (0, 1, 1, 1): "batch"}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(("shape", "none"), _EMPTY.items(), ids=str)
def test_a_gradient_without_a_number_is_not_written(algorithm: Any, shape: Any, none: str) -> None:
    """The pointer of an empty gradient is null, or points past the end."""
    chosen = plan(problem_of(shape, **{none: 0}), LIMITS["90"], algorithm=algorithm)
    assert not {"bias_gradient", "reduce_bias"} & {*kernels_of(chosen)}
    assert "bias_parts" not in bytes_of(chosen)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_terms_are_kept_where_they_are_the_same_in_every_step(softcap: float) -> None:
    """With a cap, terms depend on the score; with slopes, they differ by head. Neither is kept."""
    slopes = {"alibi_slopes": Operand("alibi_slopes", "float32", (HEADS,))}
    for more in ({}, slopes, {"sinks": Operand("sinks", "float32", (HEADS,))}):
        for form in FORMS:
            problem = problem_of(shape_of(1, 1, form), "float16", softcap, more=more)
            config = kernel_of(plan(problem, LIMITS["90"], algorithm="fa2"), "bias_gradient").config
            alone = form == (True, True) and not softcap and more is not slopes
            assert dict(config.constants)["keeps_terms"] == alone


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_heads_that_do_not_fit_are_refused(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuflash.planning.argument_gradients.bias_tiles", lambda *_: iter(()))
    says = r"the gradient of bias in float16 at head_dim 64/64 needs .* than the 232,448 bytes"
    with pytest.raises(cuflash.UnsupportedError, match=says):
        plan(problem_of(shape_of(1, 1, (True, True))), LIMITS["90"], algorithm=algorithm)
    few = replace(LIMITS["90"], shared_per_block=400)
    assert not [*bias_tiles(problem_of(shape_of(1, 1, (True, True))), few, True, True)]


def test_more_blocks_than_a_launch_has_are_refused() -> None:
    """There is a block for each tile of queries and keys."""
    lengths = {"seqlen_q": 2**20, "seqlen_kv": 2**20}
    problem = problem_of((64, 64, 2**20, 2**20), batch=64, heads_q=64, heads_kv=64, **lengths)
    with pytest.raises(
        cuflash.UnsupportedError, match=r"the gradient of bias would need .* blocks"
    ):
        plan(problem, LIMITS["90"], algorithm="fa2")
