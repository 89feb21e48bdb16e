"""The kernels to compile ahead include every kernel of future calls. No GPU needed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash import calls_to_come
from cuflash.calls_to_come import Calls
from cuflash.compile_ahead import kernels_of
from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.features.packed_lengths import NAMES as OFFSETS
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem
from cuflash.telling import telling_lengths
from cuflash.tensors import differentiable

from ..architectures import LIMITS

HALF = Calls(head_dims=((128, 128),), dtypes=("float16",))
#: Kinds of calls, by widths, dtype, mask and features. Plans have different tiles for them.
KINDS = (
    HALF,
    replace(HALF, deterministic=True),
    replace(HALF, unaligned=True),
    replace(HALF, masks=("left", "band")),
    replace(HALF, head_dims=((64, 64),), masks=("left", "band")),
    replace(HALF, masks=("full", "causal", "band"), sinks=("query", "float32", None)),
    replace(HALF, masks=("full", "causal"), alibi=(False, True), sinks=("float32", None)),
    replace(HALF, masks=("band",), bias=("qk", "k:float32", None)),
    replace(HALF, masks=("full",), bias=("q", "1:float32"), sinks=("query",), softcap=(True,)),
    replace(HALF, masks=("causal",), dtypes=("float32",), bias=("qk", "1"), deterministic=True),
    replace(HALF, masks=("full", "band"), mask_array=("qk", "k", None), sinks=("query", None)),
    replace(HALF, masks=("causal",), mask_array=("q", "1", "qk"), bias=("qk:float32", "k", None)),
    replace(HALF, dtypes=("float32",), mask_array=("qk",), alibi=(False, True), softcap=(True,)),
    replace(HALF, packed=(False, True), alibi=(False, True), sinks=("float32", None)),
    replace(HALF, packed=(True,), masks=("causal", "band"), deterministic=True),
    replace(HALF, packed=(True,), dtypes=("float32",), head_dims=((256, 256),)),
    replace(HALF, head_dims=((64, 64),)),
    replace(HALF, head_dims=((192, 128),)),
    replace(HALF, dtypes=("float32",), head_dims=((256, 256),)),
    replace(HALF, dtypes=("float64",), head_dims=((64, 64),), deterministic=True),
)

#: The most elements of a bias or mask that differs by entry or head; a larger one is shared.
#: FlashAttention-3 may be unable to count the bits of a larger mask, and no device can hold both.
MOST_PAIRS = 2**34


def _any_problem(calls: Calls, rng: random.Random) -> AttentionProblem:
    """A random problem of these calls, with any batch, heads, group and lengths."""
    keys, queries = (int(2 ** rng.uniform(0, 17)) for _ in range(2))
    queries = rng.choice((keys, queries, 1))
    # With one key, a bias or a mask cannot differ along the keys.
    if {*calls.bias, *calls.mask_array} != {None}:
        keys = max(2, keys)
    heads, group = int(2 ** rng.uniform(0, 5)), rng.choice((1, 1, 2, 3, 8, 32))
    mask, storage = rng.choice(calls.masks), calls.dtypes[0]
    problem = AttentionProblem(
        operation=rng.choice(calls.operations),
        batch=int(2 ** rng.uniform(0, 5)),
        heads_q=heads * group,
        heads_kv=heads,
        seqlen_q=queries,
        seqlen_kv=keys,
        head_dim=calls.head_dims[0][0],
        head_dim_v=calls.head_dims[0][1],
        storage=storage,
        output=storage,
        mask=mask,
        scale=0.1,
        q_offset=keys - queries if mask in ("causal", "band") else 0,
        # The window starts low enough that the last query sees a key.
        q_first=rng.randint(-queries, keys - queries) if mask in ("left", "band") else 0,
        alignment="element" if calls.unaligned else "tensor_map",
        deterministic=calls.deterministic,
    )
    if rng.choice(calls.packed):
        problem = replace(problem, batch=1, sequences=rng.choice((2, 3, 40, 1000)))
    operands = _any_operands(problem, calls, rng)
    if problem.operation == "backward":
        without = {"alibi_slopes"} if problem.sequences else set()
        named = [name for name in operands if name in {*differentiable()} - without]
        wanted = [name for name in named if name == "sinks" or rng.choice((False, True))]
        problem = replace(problem, wrt=("q", "k", "v", *wanted))
    keywords = {"softcap": 2.0} if rng.choice(calls.softcap) else {}
    return with_features(problem, keywords, operands)


def _any_operands(
    problem: AttentionProblem, calls: Calls, rng: random.Random
) -> dict[str, Operand]:
    """Random choices of the offsets, slopes, bias, mask and sinks that these calls may have."""
    operands, heads = {}, problem.heads_q
    if problem.sequences:
        shape = (problem.sequences,)
        operands |= {name: Operand(name, "int32", shape) for name in OFFSETS}
    if rng.choice(calls.alibi):
        of_entries = (heads,) if problem.sequences else (problem.batch, heads)
        shape = rng.choice(((heads,), of_entries))
        operands["alibi_slopes"] = Operand("alibi_slopes", problem.compute, shape)
    bias = rng.choice(calls.bias)
    if bias is not None:
        axes, _, dtype = bias.partition(":")
        shape = _any_shape(problem, axes, rng)
        operands["bias"] = Operand("bias", dtype or problem.storage, shape)
    mask = rng.choice(calls.mask_array)
    if mask is not None:
        operands["mask"] = Operand("mask", "bool", _any_shape(problem, mask, rng))
    sinks = rng.choice(calls.sinks)
    if sinks is not None:
        dtype = problem.storage if sinks == "query" else sinks
        operands["sinks"] = Operand("sinks", dtype, (heads,))
    return operands


def _any_shape(problem: AttentionProblem, axes: str, rng: random.Random) -> tuple[int, ...]:
    """A random shape that differs along ``axes`` ("q", "k"), and perhaps by entry and head."""
    lengths = {"q": problem.seqlen_q, "k": problem.seqlen_kv}
    pairs = [size if axis in axes else 1 for axis, size in lengths.items()]
    shape = (rng.choice((1, problem.batch)), rng.choice((1, problem.heads_q)), *pairs)
    return shape if math.prod(shape) <= MOST_PAIRS else (1, 1, *pairs)


#: An architecture and the number of a kind of calls.
_KINDS_OF_DEVICES = [
    f"{sm}-{kind}" for sm in ("75", "80", "90", "120") for kind in range(len(KINDS))
]


@pytest.mark.in_turns(by="kind", days=16)
@pytest.mark.parametrize("kind", _KINDS_OF_DEVICES)
def test_whatever_the_lengths_and_heads_the_kernels_are_there(kind: str) -> None:
    architecture, number = kind.split("-")
    limits, calls, rng = LIMITS[architecture], KINDS[int(number)], random.Random(kind)
    listed = set(kernels_of(calls, limits))
    for _ in range(300):
        problem = _any_problem(calls, rng)
        for launch in plan(problem, limits).launches:
            assert launch.config in listed, (problem, launch.config)


@pytest.mark.parametrize("mask", ["left", "band"])
def test_windows_of_any_width_have_their_kernels_at_lengths_that_are_given(mask: Any) -> None:
    calls = replace(HALF, head_dims=((64, 64),), masks=(mask,), seqlens=((8192, 8192),))
    listed, kinds = set(kernels_of(calls, LIMITS["90"])), set()
    some = replace(_any_problem(calls, random.Random(7)), batch=2, heads_q=32, heads_kv=32)
    some = replace(some, seqlen_q=8192, seqlen_kv=8192, q_offset=0)
    for window in (1, 64, 128, 512, 1023, 1024, 1280, 1281, 8000):
        first = 8192 - window - (8191 if mask == "band" else 0)
        for operation in ("forward", "backward"):
            problem = replace(some, operation=operation, q_first=first)
            needed = {launch.config for launch in plan(problem, LIMITS["90"]).launches}
            assert needed <= listed, window
            kinds |= needed
    assert kinds <= listed
    assert len([kernel for kernel in kinds if kernel.kernel == "backward"]) == 2
    assert len([kernel for kernel in kinds if kernel.kernel == "forward"]) == 2


@pytest.mark.parametrize("queries", [2, 5, 9, 16])
@pytest.mark.parametrize("sinks", [None, "float32"])
def test_few_queries_of_any_groups_have_their_kernels_at_lengths_that_are_given(
    queries: int, sinks: str | None
) -> None:
    """A block has rows of one head, 16 rows of several heads, or 32."""
    lengths = {"seqlen_q": queries, "seqlen_kv": 8192}
    calls = replace(HALF, operations=("forward",), masks=("full",), sinks=(sinks,))
    listed = set(kernels_of(replace(calls, seqlens=((queries, 8192),)), LIMITS["90"]))
    some, kinds = _any_problem(HALF, random.Random(7)), set()
    some = replace(some, operation="forward", mask="full", q_offset=0, uses=(), **lengths)
    for batch, group in product((1, 4, 32), (1, 2, 3, 4, 7, 8, 16, 37, 40, 64, 128)):
        problem = replace(some, batch=batch, heads_q=2 * group, heads_kv=2)
        operand = Operand("sinks", "float32", (2 * group,))
        chosen = plan(with_features(problem, {}, {"sinks": operand} if sinks else {}), LIMITS["90"])
        assert {launch.config for launch in chosen.launches} <= listed, (batch, group)
        kinds.add((chosen.tile.heads > 0, chosen.tile.rows))  # type: ignore[union-attr]
    assert kinds == {(False, 16), (True, 32), (True, 16)}


def test_sinks_of_a_dtype_that_no_call_takes_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="sinks: got float64 for float16; expected"):
        kernels_of(replace(HALF, sinks=("float64",)), LIMITS["90"])


def test_a_bias_of_a_dtype_that_no_call_takes_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="bias: got float64 for float16; expected"):
        kernels_of(replace(HALF, bias=("qk:float64",)), LIMITS["90"])


def test_one_query_of_many_heads_on_many_keys_has_its_kernels_too() -> None:
    """The problem needs the most counters, and a kernel that hardly any other problem needs."""
    some = _any_problem(HALF, random.Random(7))
    problem = replace(some, operation="backward", mask="full", q_offset=0, batch=22)
    problem = replace(problem, heads_q=52, heads_kv=52, seqlen_q=6, seqlen_kv=69985)
    needed = {launch.config for launch in plan(problem, LIMITS["90"]).launches}
    assert needed <= set(kernels_of(HALF, LIMITS["90"]))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("lengths", [(18, 10709), (512, 512), (8192, 8192)], ids=str)
def test_whether_blocks_share_keys_depends_on_heads_that_nobody_gave(
    lengths: tuple[int, int], mask: str
) -> None:
    some = _any_problem(HALF, random.Random(7))
    calls = replace(HALF, operations=("backward",), masks=(mask,), seqlens=(lengths,))
    listed = set(kernels_of(calls, LIMITS["90"]))
    asked = {"operation": "backward", "mask": mask, "q_offset": lengths[1] - lengths[0]}
    asked |= {"seqlen_q": lengths[0], "seqlen_kv": lengths[1]}
    kinds = set()
    some_heads = ((1, 1, 1), (1, 2, 1), (1, 64, 2), (1, 64, 1), (90, 64, 2), (9, 7, 7), (1, 9, 9))
    for batch, heads_q, heads_kv in some_heads:
        heads = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv}
        chosen = plan(replace(some, **asked, **heads), LIMITS["90"])
        constants = dict(chosen.launches[1].config.constants)
        kinds.add(tuple(constants.get(name, 0) for name in ("parted", "cut", "cut_last")))
        assert {launch.config for launch in chosen.launches} <= listed, heads
    few = lengths[0] <= 128  # then blocks keep the queries, or steps are cut
    expected = {(0, 0, 0), (1, 1, 0), *[(1, 0, 0)] * (not few)}  # whole, cut, and in parts
    if mask == "full":
        expected |= {(1, 1, 1)}  # the last tiles are cut
    assert kinds == expected


def test_a_half_empty_last_tile_has_its_kernels() -> None:
    calls = replace(HALF, operations=("backward",), head_dims=((64, 64),))
    listed = set(kernels_of(calls, LIMITS["90"]))
    some = replace(_any_problem(calls, random.Random(7)), operation="backward", q_offset=0)
    some = replace(some, batch=16, heads_q=20, heads_kv=20, head_dim=64, head_dim_v=64)
    for mask, lengths in product(("full", "causal"), ((448, 1500), (1030, 1030))):
        problem = replace(some, mask=mask, seqlen_q=lengths[0], seqlen_kv=lengths[1])
        needed = {launch.config for launch in plan(problem, LIMITS["90"]).launches}
        assert any(dict(kernel.constants).get("half_last") for kernel in needed)
        assert needed <= listed


def test_packed_sequences_come_with_nothing_that_is_refused_beside_them() -> None:
    calls = replace(HALF, packed=(True,), bias=("qk", None), mask_array=("k", None))
    calls = replace(calls, block_mask=(None, (64, 64)), used_lengths=(False, True))
    for problem in calls_to_come.problems_of(replace(calls, seqlens=((512, 512),))):
        assert problem.features == ("packed_lengths",)


def test_each_kernel_is_listed_once_and_no_more_than_some_call_needs() -> None:
    listed = kernels_of(HALF, LIMITS["90"])
    assert len(set(listed)) == len(listed)
    assert {kernel.generation for kernel in listed} == {"fa2", "fa3", "steps"}
    assert {kernel.kernel for kernel in listed if kernel.generation == "fa2"} == {"forward_few"}
    calls = replace(HALF, operations=("forward",), masks=("full",), seqlens=((4096, 4096),))
    plain = replace(_any_problem(calls, random.Random(7)), batch=1, seqlen_q=4096, seqlen_kv=4096)
    needed = {
        launch.config
        for heads, group in product(range(1, 300), (1, 8))
        for launch in plan(
            replace(plain, heads_q=heads * group, heads_kv=heads), LIMITS["90"]
        ).launches
    }
    assert set(kernels_of(calls, LIMITS["90"])) == needed
    named = sorted((kernel.generation, kernel.kernel, kernel.mask) for kernel in needed)
    assert named == [("fa3", "forward", "full")] * 4 + [("steps", "merge", "full")]


def test_both_sides_of_every_length_of_the_tables_are_asked_for() -> None:
    keys = {length for _, length in telling_lengths()}
    assert {512, 513, 1023, 1024, 1535, 1536, 2048, 2049} <= keys
    assert all((1, length) in telling_lengths() for length in keys)


@pytest.mark.parametrize(("head_dim", "unaligned"), [(128, True), (65, False), (65, True)])
def test_rows_of_any_address_are_copied_by_elements(head_dim: int, unaligned: bool) -> None:
    calls = replace(HALF, head_dims=((head_dim, head_dim),), unaligned=unaligned)
    main = [k for k in kernels_of(calls, LIMITS["90"]) if k.generation != "steps"]
    assert {k.copies for k in main} == {"element"}
    assert {k.generation for k in main} == {"fa2"}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_named_algorithm_is_taken(algorithm: Any) -> None:
    listed = kernels_of(replace(HALF, algorithm=algorithm), LIMITS["90"])
    assert {kernel.generation for kernel in listed} == {algorithm, "steps"}


def test_what_no_device_or_call_can_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        kernels_of(replace(HALF, dtypes=("float16", "float32"), algorithm="fa3"), LIMITS["90"])
    with pytest.raises(ArgumentValueError, match=r"head_dim: got 257; expected 1 to 256"):
        kernels_of(replace(HALF, head_dims=((64, 257),)), LIMITS["90"])
    with pytest.raises(ArgumentValueError, match=r"seqlen: got 0; expected 1 to"):
        kernels_of(replace(HALF, seqlens=((0, 5),)), LIMITS["90"])
