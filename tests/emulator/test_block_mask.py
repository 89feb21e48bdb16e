"""Block masks on the emulated device, through the public functions, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, reference
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Algorithm

from ..kit.arena import Arena
from ..kit.block_masks import LEFT_OUT, ROWS, Row
from .build import compiler, emulate
from .device import emulated_device, on_device
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(row: Row, x: dict[str, Any]) -> dict[str, Any]:
    """The results of both passes on the emulator, by name."""
    given: dict[str, Any] = row.given(x)
    options: dict[str, Any] = {"algorithm": row.algorithm, "backend": "cuda"}
    with host_cupy(row.architecture) as host:
        out, lse = host.call(cuflash.attention, **given, **options, return_lse=True)
        options |= {"deterministic": row.deterministic}
        saved = {"dout": x["dout"], "out": out, "lse": lse}
        grads = host.call(cuflash.attention_backward, **saved, **given, **options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


_params = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@_params
def test_against_the_reference(row: Row) -> None:
    x = row.arrays()
    row.check(_results(row, x), row.expected(x))


@pytest.mark.parametrize("row", LEFT_OUT, ids=lambda row: row.name)
def test_hidden_blocks_are_never_read(row: Row) -> None:
    """Keys that no query sees, and queries that see no key, may hold anything."""
    x = row.arrays()
    expected = row.expected(x)
    row.check(_results(row, row.spoiled(x)), expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("shown", [False, True])
def test_blocks_that_are_all_alike(algorithm: Algorithm, shown: bool) -> None:
    """If all are True, only the order of roundings changes; if all are False, results are zeros."""
    row = Row(algorithm, "float16", (128, 128))
    x = row.arrays()
    x["block_mask"] = BlockMask(np.full((1, 1, 3, 4), shown), row.block)
    found = _results(row, x)
    if shown:
        del x["block_mask"]
        out, lse = reference.attention(x["q"], x["k"], x["v"])
        grads = reference.attention_backward(x["dout"], x["q"], x["k"], x["v"])
        for got, true in zip(found.values(), (out, lse, *grads), strict=True):
            limit = 4e-3 * np.abs(true).max()
            np.testing.assert_allclose(got.astype(float), true, rtol=0, atol=limit)
        return
    assert (found.pop("lse") == -np.inf).all()
    for name, array in found.items():
        assert (array == 0).all(), name


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("shape", [(1, 1, 300, 400), (2, 1, 400), (300, 1)], ids=str)
def test_the_gradient_of_a_bias(algorithm: Algorithm, shape: tuple[int, ...]) -> None:
    """Its kernel leaves out hidden tiles."""
    bias = np.random.default_rng(8).standard_normal(shape).astype(np.float16)
    row = Row(algorithm, "float16", (128, 64), more={"bias": bias})
    x = row.arrays()
    given: dict[str, Any] = row.given(x)
    out, lse = reference.attention(**given)
    expected = reference.attention_backward(x["dout"], **given)[3]
    saved = {"dout": x["dout"], "out": out.astype(np.float16), "lse": lse.astype(np.float32)}
    options: dict[str, Any] = {"algorithm": algorithm, "backend": "cuda", "wrt": ("bias",)}
    with host_cupy("90") as host:
        (found,) = host.call(cuflash.attention_backward, **saved, **given, **options)
    limit = 4e-3 * max(1, np.abs(expected).max())
    np.testing.assert_allclose(found.astype(float), expected, rtol=0, atol=limit)


def _bits(blocks: Any, tiles: tuple[int, int], row: Row, by_keys: bool) -> np.ndarray:
    """(entry, head, row of tiles, word, 2) of a mask of pairs."""
    pairs = np.repeat(np.repeat(blocks, row.block[0], 2), row.block[1], 3)
    pairs = pairs[:, :, : row.lengths[0], : row.lengths[1]]
    found = np.array(
        [
            [
                [part.any((2, 3)), part.all((2, 3))]
                for j in range(0, row.lengths[1], tiles[1])
                for part in [pairs[:, :, i : i + tiles[0], j : j + tiles[1]]]
            ]
            for i in range(0, row.lengths[0], tiles[0])
        ]
    )  # q tile, kv tile, kind, entry, head
    found = found.transpose(3, 4, 1, 0, 2) if by_keys else found.transpose(3, 4, 0, 1, 2)
    words = -(-found.shape[3] // 32)
    whole = np.zeros((*found.shape[:3], 32 * words, 2), np.uint64)
    whole[:, :, :, : found.shape[3]] = found
    powers = (np.uint64(1) << np.arange(32, dtype=np.uint64))[:, None]
    return (whole.reshape(*found.shape[:3], words, 32, 2) * powers).sum(4).astype(np.uint32)


def _alone(config: KernelConfig) -> Any:
    """The kernel that makes the bits; other kernels do nothing."""
    return emulate(config) if config.kernel == "list_blocks" else lambda *_: None


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("block", "lengths"),
    [((64, 64), (300, 400)), ((128, 128), (500, 5000)), ((192, 320), (9000, 700))],
    ids=str,
)
def test_bits_of_tiles(operation: Any, block: tuple[int, int], lengths: tuple[int, int]) -> None:
    """The bits of tiles with a shown pair, and with all pairs shown, compared with NumPy."""
    row = Row("fa3", "float16", block, lengths, axes="1h", shown=0.6)
    blocks = row.arrays()["block_mask"].blocks
    by_keys = operation == "backward"
    x = {"q": np.zeros((1, lengths[0], 2, 64), np.float16)}
    x |= {name: np.zeros((1, lengths[1], 1, 64), np.float16) for name in "kv"}
    x |= {"out": x["q"], "dout": x["q"], "dq": x["q"], "dk": x["k"], "dv": x["v"]}
    x |= {"lse": np.zeros((1, 2, lengths[0]), np.float32), "block_mask": blocks}
    with emulated_device("90", _alone):
        qkv, given = [on_device(x[name]) for name in "qkv"], on_device(blocks)
        ready = cuflash.prepare(
            *qkv, operation=operation, algorithm="fa3", block_mask=BlockMask(given, block)
        )
        workspace = Arena(np, "nan").workspace(ready.workspace_bytes)
        pointers = {name: x[name].ctypes.data for name in set(ready.tensors) & x.keys()}
        ready.run(pointers, workspace=workspace.ctypes.data)
    tile = ready.plan.tile
    expected = _bits(blocks, (tile.block_q, tile.block_kv), row, by_keys)
    (buffer,) = (b for b in ready.plan.workspace if b.name == "block_bits")
    assert buffer.nbytes == expected.nbytes
    found = workspace[buffer.offset : buffer.offset + buffer.nbytes].view(np.uint32)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)
