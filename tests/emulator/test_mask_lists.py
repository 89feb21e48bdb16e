"""The bits of the tiles and pairs that a mask shows, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.arena import Arena
from ..kit.case import Case
from ..kit.data import arrays, strided
from ..kit.strides import Strides
from .build import compiler
from .device import emulated_device, on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_LINES = {"forward": "q", "backward": "k"}
#: Strides of masks: rows at any address, and gaps between keys.
_ODD = [Strides(gaps=(0, 0, 5, 0), offset=3), Strides(gaps=(0, 0, 0, 1))]


def _bits(mask: np.ndarray, tile: tuple[int, int], lines: str) -> np.ndarray:
    """Bits of tiles with a shown pair, and with all: (entry, head, line of tiles, word, 2)."""
    block_q, block_kv = tile
    q_tiles = [mask[:, :, i : i + block_q] for i in range(0, mask.shape[2], block_q)]
    tiles = [
        [rows[..., j : j + block_kv] for j in range(0, mask.shape[3], block_kv)] for rows in q_tiles
    ]
    found = np.array(
        [[(t.any((2, 3)), t.all((2, 3))) for t in row] for row in tiles]
    )  # q tile, kv tile, kind, entry, head
    found = found.transpose(3, 4, 0, 1, 2) if lines == "q" else found.transpose(3, 4, 1, 0, 2)
    words = -(-found.shape[3] // 32)
    whole = np.zeros((*found.shape[:3], 32 * words, 2), np.uint64)
    whole[:, :, :, : found.shape[3]] = found
    powers = (np.uint64(1) << np.arange(32, dtype=np.uint64))[:, None]
    return (whole.reshape(*found.shape[:3], words, 32, 2) * powers).sum(4).astype(np.uint32)


def _pairs(mask: np.ndarray, tile: tuple[int, int], lines: str) -> np.ndarray:
    """Bits of the shown pairs of each lane's two lines: (entry, head, 16 lines, tile, lane, 2).

    Lane l has lines l / 4 and l / 4 + 8, and along them elements 2 (l % 4) and 2 (l % 4) + 1 of
    every eight.
    """
    missing = [-n % t for n, t in zip(mask.shape[2:], tile, strict=True)]
    padded = np.pad(mask, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))
    along = tile[1]
    if lines == "k":
        padded, along = padded.swapaxes(2, 3), tile[0]
    entries, heads, count, length = padded.shape
    parts = padded.reshape(entries, heads, count // 16, 2, 8, length // along, along // 8, 4, 2)
    parts = parts.transpose(0, 1, 2, 5, 4, 7, 3, 6, 8)  # 16 lines, tile, lane (two axes), line
    bits = parts.reshape(entries, heads, count // 16, length // along, 32, 2, along // 4)
    powers = np.uint64(1) << np.arange(along // 4, dtype=np.uint64)
    return (bits * powers).sum(6).astype(np.uint32)


def _check(case: Case, operation: Any, mask: np.ndarray) -> None:
    """Compare the bits that a pass leaves in its workspace with those of the mask."""
    x = arrays(case, "q", "k", "v", "dout")
    x |= {"out": x["dout"], "lse": np.zeros(case.shape("lse"), np.float32), "mask": mask}
    made = ("out", "lse") if operation == "forward" else ("dq", "dk", "dv")
    x |= {name: np.empty(case.shape(name), case.dtype_of(name)) for name in made}
    with emulated_device("90"):
        qkv, given = [on_device(x[name]) for name in "qkv"], on_device(mask)
        ready = cuflash.prepare(*qkv, operation=operation, algorithm="fa3", mask=given)
        workspace = Arena(np, "nan").workspace(ready.workspace_bytes)
        pointers = {name: x[name].ctypes.data for name in set(ready.tensors) & x.keys()}
        ready.run(pointers, workspace=workspace.ctypes.data)
    tile, one_row = ready.plan.tile, mask.shape[2] == 1
    of_queries = 1 if one_row else tile.block_q
    whole = np.repeat(mask, 16 if operation == "forward" else tile.block_q, 2) if one_row else mask
    own = (16 if one_row and operation == "forward" else tile.block_q, tile.block_kv)
    made_bits = {
        "tile_bits": _bits(mask, (of_queries, tile.block_kv), _LINES[operation]),
        "pair_bits": _pairs(whole, own, _LINES[operation]),
    }
    for name, expected in made_bits.items():
        (buffer,) = (buffer for buffer in ready.plan.workspace if buffer.name == name)
        assert buffer.nbytes == expected.nbytes
        found = workspace[buffer.offset : buffer.offset + buffer.nbytes].view(np.uint32)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, name)


def _mask(lengths: tuple[int, int]) -> np.ndarray:
    """A mask of two heads in squares of 64 x 64 pairs: shown, hidden, or with a few shown pairs."""
    generator = np.random.default_rng(list(lengths))
    squares = generator.choice(3, (1, 2, 70, 70), p=(0.3, 0.5, 0.2))
    kinds = np.repeat(np.repeat(squares, 64, 2), 64, 3)[:, :, : lengths[0], : lengths[1]]
    return np.where(kinds == 2, generator.random(kinds.shape) < 0.001, kinds == 1)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("lengths", [(300, 400), (130, 4240), (4230, 128), (64, 144)])
def test_bits_of_tiles(operation: str, lengths: tuple[int, int]) -> None:
    case = Case(1, 2, 1, *lengths, dtype="float16", mask="1hqk", seed=3)
    _check(case, operation, _mask(lengths))


@pytest.mark.parametrize("strides", _ODD, ids=["odd rows", "keys apart"])
def test_bits_of_a_mask_that_lies_anyhow(strides: Strides) -> None:
    case = Case(1, 2, 1, 300, 401, 256, 256, dtype="float16", mask="1hqk", seed=3)
    _check(case, "backward", strided(_mask((300, 401)), strides))


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_bits_of_a_row_that_all_queries_have(operation: str) -> None:
    case = Case(3, 2, 1, 200, 5008, dtype="float16", mask="b11k", seed=3)
    mask = np.random.default_rng(1).random((3, 1, 1, 5008)) < 0.003
    mask[1, ..., 700:3000] = True
    _check(case, operation, mask)
