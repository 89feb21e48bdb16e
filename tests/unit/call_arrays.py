"""Arrays for tests of repeated calls, with many shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import cuflash
from cuflash import ScoreMod

from ..emulator.host_cupy import HostCupy

__all__ = [
    "ALIGNED",
    "BACKWARDS",
    "BIASES",
    "BLOCK_MASKS",
    "EIGHT_ON",
    "ELSEWHERE",
    "FUNCTIONS",
    "LENGTHS",
    "MASKS",
    "MATRICES",
    "ODD",
    "OFFSETS",
    "ROWS",
    "SEEDS",
    "SHAPE",
    "SINKS",
    "SLOPES",
    "TURNED",
    "TWO_APART",
    "VECTORS",
    "WIDE",
    "Make",
    "array",
]

#: With as many rows as heads, the layouts "bshd" and "bhsd" have the same shape.
SHAPE = (2, 8, 8, 64)
ROWS = (2, 8, 8)
#: A function that takes a stand-in of CuPy and makes an array, or an argument that holds arrays.
Make = Callable[[HostCupy], Any]


def array(shape: Any = SHAPE, dtype: Any = np.float16, device: int = 0) -> Make:
    return lambda host: host.array(np.zeros(shape, dtype), device)


def part(view: Callable[[Any], Any], shape: Any, dtype: Any = np.float16) -> Make:
    return lambda host: view(host.array(np.zeros(shape, dtype)))


ALIGNED = part(lambda a: a[..., :64], (2, 8, 8, 128))
EIGHT_ON = part(lambda a: a[4:].reshape(SHAPE), (2 * 8 * 8 * 64 + 4,))
TWO_APART = part(lambda a: a[..., ::2], (2, 8, 8, 128))
ODD = part(lambda a: a[1:].view(np.float16).reshape(SHAPE), (2 * 2 * 8 * 8 * 64 + 1,), np.uint8)
BACKWARDS = part(lambda a: a[:, ::-1], SHAPE)
TURNED = part(lambda a: a.transpose(0, 2, 1, 3), SHAPE)
MATRICES = [array(), ALIGNED, EIGHT_ON, TWO_APART, ODD, BACKWARDS, TURNED]
ELSEWHERE = [array(dtype=bfloat16), array(device=1), array((2, 5, 8, 64))]
VECTORS = [
    array(ROWS, np.float32),
    part(lambda a: a[..., ::2], (2, 8, 16), np.float32),
    part(lambda a: a.transpose(0, 2, 1), ROWS, np.float32),
    part(lambda a: a[1:].view(np.float32).reshape(ROWS), (4 * 2 * 8 * 8 + 1,), np.uint8),
]
WIDE = array(dtype=np.float32)


#: Sinks for the eight heads of the calls, and arrays that do not fit the calls.
SINKS = [
    array((8,), np.float32),
    array((8,)),
    part(lambda a: a[::2], (16,), np.float32),
    part(lambda a: a[1:], (9,)),
    part(lambda a: a[1:].view(np.float32), (4 * 8 + 1,), np.uint8),
    array((8,), np.float64),
    array((4,), np.float32),
    array((8,), np.float32, device=1),
]


#: Slopes for every head, or for every batch entry and head, and arrays that do not fit.
SLOPES = [
    array((8,), np.float32),
    array((2, 8), np.float32),
    part(lambda a: a[::2], (16,), np.float32),
    part(lambda a: a.transpose(1, 0), (8, 2), np.float32),
    part(lambda a: a[1:].view(np.float32).reshape(2, 8), (4 * 16 + 1,), np.uint8),
    array((8,)),
    array((1, 8), np.float32),
    array((2, 8), np.float32, device=1),
]


#: Biases that broadcast to two entries, eight heads, eight queries and eight keys, and arrays
#: that do not fit.
BIASES = [
    array((8, 8)),
    array((8, 1, 8), np.float32),
    array((2, 1, 8, 1)),
    array((1, 1, 1, 1)),
    array((2, 8, 8, 8), np.float32),
    part(lambda a: a[:, ::2], (8, 16)),
    part(lambda a: a.transpose(1, 0), (8, 8)),
    part(lambda a: a[:, ::-1], (8, 8, 8)),
    part(lambda a: a[4:].reshape(8, 8), (8 * 8 + 4,)),
    part(lambda a: a[1:].view(np.float16).reshape(8, 8), (2 * 8 * 8 + 1,), np.uint8),
    array((8, 8), np.float64),
    array((4, 8, 8)),
    array((8, 8), device=1),
]


#: Masks for two entries, eight heads, eight queries and eight keys, and arrays that do not fit. All
#: bytes are 0, which hides every pair.
MASKS = [
    array((8, 8), bool),
    array((8, 1, 8), bool),
    array((2, 1, 8, 1), bool),
    array((1, 1, 1, 1), bool),
    array((2, 8, 8, 8), bool),
    part(lambda a: a[:, ::2], (8, 16), bool),
    part(lambda a: a[:, :8], (8, 16), bool),
    part(lambda a: a.transpose(1, 0), (8, 8), bool),
    part(lambda a: a[:, ::-1], (8, 8, 8), bool),
    part(lambda a: a[1:].reshape(8, 8), (8 * 8 + 1,), bool),
    part(lambda a: a.view(bool), (8, 8), np.uint8),
    array((8, 8), np.uint8),
    array((4, 8, 8), bool),
    array((8, 8), bool, device=1),
]


def _blocks(shape: Any, block: tuple[int, int], dtype: Any = bool, device: int = 0) -> Make:
    return lambda host: cuflash.BlockMask(host.array(np.zeros(shape, dtype), device), block)


#: Block masks, and arguments that do not fit. All eight queries and all eight keys lie in one
#: block.
BLOCK_MASKS = [
    _blocks((1, 1), (64, 64)),
    _blocks((1, 1), (128, 64)),
    _blocks((8, 1, 1), (64, 64)),
    _blocks((2, 1, 1, 1), (64, 128)),
    _blocks((2, 8, 1, 1), (64, 64), np.uint8),
    lambda host: cuflash.BlockMask(host.array(np.zeros((2, 16, 1, 1), bool))[:, ::2], (64, 64)),
    _blocks((2, 1), (64, 64)),
    _blocks((1, 1), (64, 64), np.int8),
    _blocks((1, 1), (64, 64), device=1),
    array((1, 1), bool),
]


#: Seeds of dropout: a key of two numbers, or a key and an offset; and arrays that do not fit.
SEEDS = [
    array((2,), np.uint32),
    array((4,), np.uint32),
    part(lambda a: a[::2], (8,), np.uint32),
    part(lambda a: a[::-1], (2,), np.uint32),
    part(lambda a: a[1:].view(np.uint32), (4 * 2 + 1,), np.uint8),
    array((3,), np.uint32),
    array((1, 2), np.uint32),
    array((2,), np.int32),
    array((1,), np.uint64),
    array((2,), np.uint32, device=1),
]


#: Used lengths of two batch entries, and arrays that do not fit.
LENGTHS = [
    array((2,), np.int32),
    part(lambda a: a[::2], (4,), np.int32),
    part(lambda a: a[1:].view(np.int32), (4 * 2 + 1,), np.uint8),
    array((3,), np.int32),
    array((2,), np.int64),
    array((2,), np.int32, device=1),
]


#: Offsets of two packed sequences, and arrays that do not fit.
OFFSETS = [
    array((3,), np.int32),
    part(lambda a: a[::2], (6,), np.int32),
    part(lambda a: a[1:].view(np.int32), (4 * 3 + 1,), np.uint8),
    array((4,), np.int32),
    array((3,), np.int64),
    array((3,), np.int32, device=1),
]


def _reading(table: Make, text: str = "return s + p.table(head, i - j + 7);") -> Make:
    return lambda host: ScoreMod(text, table=table(host))


#: Score functions with a number or with an array; some are refused.
FUNCTIONS = [
    ScoreMod("return p.most * tanh(s / p.most);", most=20.0),
    ScoreMod("return p.most * tanh(s / p.most);", most=3.0),
    ScoreMod("return p.most * tanh(s / p.most);", most=3),
    ScoreMod("return -s;"),
    _reading(array((8, 15), np.float32)),
    _reading(array((8, 15), np.int32)),
    _reading(array((8, 30), np.float32)),
    _reading(part(lambda a: a[:, ::2], (8, 30), np.float32)),
    _reading(part(lambda a: a.transpose(1, 0), (15, 8), np.float32)),
    _reading(part(lambda a: a[1:].view(np.float32).reshape(8, 15), (4 * 120 + 1,), np.uint8)),
    _reading(array((15,), np.float32), "return s + p.table(i - j + 7);"),
    _reading(array((8, 15), np.complex64)),
    _reading(array((8, 0), np.float32)),
    _reading(array((1, 1, 1, 8, 15), np.float32)),
    _reading(array((8, 15), np.float32, device=1)),
    "return -s;",
]
