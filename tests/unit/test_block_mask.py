"""``block_mask``: arguments that are taken, refusals before anything runs, and results."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import BlockMask, dispatch, reference
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _call(lengths: tuple[int, int] = (150, 200), **more: Any) -> dict[str, Any]:
    """A call with two entries, four query heads and two kv heads."""
    random = np.random.default_rng(list(lengths))
    q = random.standard_normal((2, lengths[0], 4, 8))
    k, v = random.standard_normal((2, 2, lengths[1], 2, 8))
    return {"q": q, "k": k, "v": v, "backend": "numpy", **more}


def _refused(mask: Any, error: Any, match: str) -> None:
    """Check that both passes and the vjp refuse the mask before anything is computed."""
    call, ran = _call(block_mask=mask), []  # type: ignore[var-annotated]
    lse = np.zeros((2, 4, 150))
    with dispatch.observe(ran.append):
        for function in (cuflash.attention, cuflash.attention_vjp):
            with pytest.raises(error, match=match):
                function(**call)
        with pytest.raises(error, match=match):
            cuflash.attention_backward(call["q"], out=call["q"], lse=lse, **call)
    assert not ran


@pytest.mark.parametrize("block", [64, "64", (64,), (64.0, 64), (True, 64), (64, 64, 64), None])
def test_a_block_is_two_integers(block: Any) -> None:
    with pytest.raises(_TYPE, match=r"^block: got .*; expected .bq, bkv., two positive multiples"):
        BlockMask(np.ones((1, 1), bool), block)


@pytest.mark.parametrize("block", [(0, 64), (64, -64), (64, 96), (32, 64), (64, 2**31)])
def test_its_sizes_are_multiples_of_64(block: Any) -> None:
    with pytest.raises(_VALUE, match=r"^block: got"):
        BlockMask(np.ones((1, 1), bool), block)


@pytest.mark.parametrize("mask", [np.ones((3, 4), bool), (3, 4), True, "bool"], ids=str)
def test_what_is_no_block_mask_is_refused(mask: Any) -> None:
    _refused(mask, _TYPE, r"^block_mask: got .*; expected a cuflash\.BlockMask, or None$")


@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.int64, "S1", object], ids=str)
def test_blocks_are_booleans_or_bytes(dtype: Any) -> None:
    _refused(BlockMask(np.zeros((3, 4), dtype), (64, 64)), _TYPE, "^block_mask: got")


@pytest.mark.parametrize(
    "shape", [(4, 3), (3, 5), (150, 200), (2, 3, 4), (3, 1, 3, 4), (1, 2, 4, 3, 4), (0, 4)], ids=str
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    expected = r"expected \(2, 4, 3, 4\) \(batch, heads_q, q_blocks, kv_blocks"
    _refused(BlockMask(np.ones(shape, bool), (64, 64)), _VALUE, f"^block_mask: .*{expected}")


def test_it_has_no_gradient() -> None:
    call = _call(block_mask=BlockMask(np.ones((3, 4), bool), (64, 64)))
    with pytest.raises(_VALUE, match=r"^wrt: got"):
        cuflash.attention_vjp(**call, wrt=("q", "block_mask"))


@st.composite
def _masks(draw: Any, lengths: tuple[int, int]) -> BlockMask:
    block = (draw(st.sampled_from([64, 128, 192])), draw(st.sampled_from([64, 128])))
    counts = [-(-n // b) for n, b in zip(lengths, block, strict=True)]
    shape = [draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4])), *counts]
    if draw(st.booleans()):
        shape[2 + draw(st.integers(0, 1))] = 1
    random = np.random.default_rng(draw(st.integers(0, 99)))
    blocks = random.random(shape) < draw(st.sampled_from([0.2, 0.7]))
    if shape[0] == 1:
        blocks = blocks[0]
    as_bytes = blocks * random.integers(1, 256, blocks.shape).astype(np.uint8)
    return BlockMask(as_bytes if draw(st.booleans()) else blocks, block)


@settings(max_examples=40)
@given(data=st.data())
def test_it_computes_what_the_reference_does(data: Any) -> None:
    """Calls may also have another feature, for example dropout. Rows may see no key."""
    lengths = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    mask = data.draw(_masks(lengths))
    more: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (40, 90)}]
    more += [{"mask": np.random.default_rng(3).random(lengths) < 0.7}]
    more += [{"dropout_p": 0.3, "dropout_seed": 7}, {"softcap": 2.0}]
    beside = data.draw(st.sampled_from(more))
    call = _call(lengths, block_mask=mask, **beside)
    chosen = {"algorithm": data.draw(st.sampled_from(["fa1", "fa2"]))}
    chosen |= data.draw(st.sampled_from([{}, {"blocks": (32, 48)}]))
    (out, lse), pullback = cuflash.attention_vjp(**call, return_lse=True, **_forward(chosen))
    del call["backend"]
    expected = reference.attention(**call)
    np.testing.assert_allclose(out, expected[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-10, atol=1e-12)
    grads = reference.attention_backward(out, **call)
    for got, true in zip(pullback(out), grads, strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-9, atol=1e-11)


def _forward(chosen: dict[str, Any]) -> dict[str, Any]:
    return {**chosen, "backward_blocks": chosen.get("blocks")}


def test_a_mask_pickles_with_the_pullback() -> None:
    call = _call(block_mask=BlockMask(np.eye(3, 4, dtype=bool), (64, 64)))
    out, pullback = cuflash.attention_vjp(**call)
    again = pickle.loads(pickle.dumps(pullback))
    for one, other in zip(pullback(out), again(out), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=str)
def test_lists_of_blocks(heads: tuple[int, ...]) -> None:
    """The lists are in SciPy's CSR format, with one head after another."""
    random = np.random.default_rng(5)
    dense = random.random((*heads, 6, 9)) < 0.3
    counts = dense.sum(axis=-1).reshape(-1)
    ends = np.cumsum(counts).reshape(*heads, 6)
    starts = np.concatenate(
        [(ends[..., 0] - counts.reshape(ends.shape)[..., 0])[..., None], ends], -1
    )
    columns = np.nonzero(dense.reshape(-1, 9))[1]
    for kind in (np.int32, np.int64):
        mask = BlockMask.from_csr(starts.astype(kind), columns.astype(kind), 9, (64, 128))
        np.testing.assert_array_equal(mask.blocks, dense)
        assert mask.block == (64, 128)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"indptr": np.zeros(3)}, _TYPE, "^indptr: got dtype float64; expected integers"),
        ({"indices": np.zeros(2, bool)}, _TYPE, "^indices: got dtype bool; expected integers"),
        ({"indptr": [0, 1, 2]}, _TYPE, "^indptr: got"),
        ({"indptr": np.zeros((1, 1, 1, 3), int)}, _VALUE, "^indptr: got shape"),
        ({"indices": np.zeros((1, 2), int)}, _VALUE, "^indices: got shape"),
        ({"kv_blocks": 2.0}, _TYPE, "^kv_blocks: got 2.0; expected an integer"),
        ({"kv_blocks": -1}, _VALUE, "^kv_blocks: got -1"),
        ({"block": (64, 65)}, _VALUE, "^block: got"),
    ],
)
def test_lists_that_are_none(changed: dict[str, Any], error: Any, match: str) -> None:
    lists: dict[str, Any] = {"indptr": np.array([0, 1, 2]), "indices": np.array([0, 1])}
    with pytest.raises(error, match=match):
        BlockMask.from_csr(**{**lists, "kv_blocks": 2, **changed})


@pytest.mark.parametrize(
    ("indptr", "indices", "match"),
    [
        ([0, 3, 1], [0, 1, 0], "^indptr: got a row"),
        ([0, 1, 4], [0, 1, 0], "^indptr: got a row .* 0 to 3"),
        ([-1, 1, 2], [0, 1], "^indptr: got a row"),
        ([0, 1, 2], [0, 2], "^indices: got a column out of range; expected 0 to 1"),
        ([0, 1, 2], [0, -1], "^indices: got a column out of range"),
    ],
)
def test_lists_that_leave_their_arrays(indptr: Any, indices: Any, match: str) -> None:
    with pytest.raises(_VALUE, match=match):
        BlockMask.from_csr(np.array(indptr), np.array(indices), 2)


def test_a_row_has_its_own_part_of_the_columns() -> None:
    """Lists may begin anywhere, have gaps between them, and be shared by heads."""
    indices = np.array([0, 1, 2, 3, 3, 0])
    for indptr, rows in (
        ([2, 3, 4], [[2], [3]]),
        ([[0, 1, 2], [3, 4, 6]], [[[0], [1]], [[3], [3, 0]]]),
        ([[0, 1, 2], [0, 1, 2]], [[[0], [1]], [[0], [1]]]),
        ([3, 5, 5, 6], [[3, 3], [], [0]]),
    ):
        blocks = BlockMask.from_csr(np.array(indptr), indices, 4).blocks
        flat: Any = rows if blocks.ndim == 2 else [row for head in rows for row in head]
        expected = [[column in row for column in range(4)] for row in flat]
        np.testing.assert_array_equal(blocks.reshape(-1, 4), expected)


_TILES = [
    (64, (128, 128), (128, 128), (128, 128)),
    (64, (256, 64), (128, 64), (128, 128)),
    (64, (64, 64), (128, 64), (128, 128)),
    (96, (128, 128), (128, 128), (64, 128)),
    (128, (128, 128), (128, 128), (64, 128)),
    (128, (64, 64), (128, 64), (64, 128)),
    (192, (128, 128), (128, 64), (64, 64)),
    (256, (128, 256), (128, 64), (64, 64)),
]


@pytest.mark.parametrize(("width", "block", "forward", "backward"), _TILES, ids=str)
def test_tiles_divide_the_blocks_where_they_can(
    width: int, block: tuple[int, int], forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """FlashAttention-3 makes bits of tiles before a pass, and no bits of pairs."""
    for operation, expected in (("forward", forward), ("backward", backward)):
        problem = AttentionProblem(
            *(operation, 1, 8, 8, 8192, 8192, width, width),  # type: ignore[arg-type]
            *("bfloat16", "bfloat16", "full", 0.1, 0, "tensor_map"),
            block=block,
        )
        shape = (1, 1, problem.q_blocks, problem.kv_blocks)
        operands = {"block_mask": Operand("block_mask", "bool", shape)}
        chosen = plan(with_features(problem, {"block_mask": block}, operands), LIMITS["90"])
        assert (chosen.algorithm, (chosen.tile.block_q, chosen.tile.block_kv)) == ("fa3", expected)
        names = [launch.config.kernel for launch in chosen.launches]
        assert names[0] == "list_blocks"
        buffers = {buffer.name: buffer.nbytes for buffer in chosen.workspace}
        assert "pair_bits" not in buffers
        tiles = [-(-8192 // n) for n in expected]
        rows, along = tiles if operation == "forward" else tiles[::-1]
        assert buffers["block_bits"] == 8 * rows * -(-along // 32)
