"""Values for every argument of the public functions: what tests of repeated calls draw from.

A function's arguments are found by ``inspect``; one that has no recipe here
fails the tests.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

import cuflash
from cuflash import ScoreMod
from cuflash.tensors import QKV

from ..emulator.host_cupy import HostCupy

__all__ = ["BESIDE", "MATTERS_NOT", "PASSES", "RECIPES", "SHAPE", "WIDE", "arguments_of", "made"]

#: As many rows as heads, so that two layouts are of the same shape.
SHAPE = (2, 8, 8, 64)
_ROWS = (2, 8, 8)
#: Both passes.
PASSES: dict[str, Callable[..., Any]] = {
    "forward": cuflash.attention,
    "backward": cuflash.attention_backward,
}

#: An array, made anew: a shape and dtype, and what is taken of it.
Make = Callable[[HostCupy], Any]


def _array(shape: Any = SHAPE, dtype: Any = np.float16, device: int = 0) -> Make:
    return lambda host: host.array(np.zeros(shape, dtype), device)


def _part(view: Callable[[Any], Any], shape: Any, dtype: Any = np.float16) -> Make:
    return lambda host: view(host.array(np.zeros(shape, dtype)))


_ALIGNED = _part(lambda a: a[..., :64], (2, 8, 8, 128))
_EIGHT_ON = _part(lambda a: a[4:].reshape(SHAPE), (2 * 8 * 8 * 64 + 4,))
_TWO_APART = _part(lambda a: a[..., ::2], (2, 8, 8, 128))
_ODD = _part(lambda a: a[1:].view(np.float16).reshape(SHAPE), (2 * 2 * 8 * 8 * 64 + 1,), np.uint8)
_BACKWARDS = _part(lambda a: a[:, ::-1], SHAPE)
_TURNED = _part(lambda a: a.transpose(0, 2, 1, 3), SHAPE)
_MATRICES = [_array(), _ALIGNED, _EIGHT_ON, _TWO_APART, _ODD, _BACKWARDS, _TURNED]
_ELSEWHERE = [_array(dtype=bfloat16), _array(device=1), _array((2, 5, 8, 64))]
_VECTORS = [
    _array(_ROWS, np.float32),
    _part(lambda a: a[..., ::2], (2, 8, 16), np.float32),
    _part(lambda a: a.transpose(0, 2, 1), _ROWS, np.float32),
    _part(lambda a: a[1:].view(np.float32).reshape(_ROWS), (4 * 2 * 8 * 8 + 1,), np.uint8),
]
WIDE = _array(dtype=np.float32)


#: Of as many heads as the calls have: sinks, and where their gradient goes.
_SINKS = [
    _array((8,), np.float32),
    _array((8,)),
    _part(lambda a: a[::2], (16,), np.float32),
    _part(lambda a: a[1:], (9,)),
    _part(lambda a: a[1:].view(np.float32), (4 * 8 + 1,), np.uint8),
    _array((8,), np.float64),
    _array((4,), np.float32),
    _array((8,), np.float32, device=1),
]


#: Of every head, or of every batch entry and head.
_SLOPES = [
    _array((8,), np.float32),
    _array((2, 8), np.float32),
    _part(lambda a: a[::2], (16,), np.float32),
    _part(lambda a: a.transpose(1, 0), (8, 2), np.float32),
    _part(lambda a: a[1:].view(np.float32).reshape(2, 8), (4 * 16 + 1,), np.uint8),
    _array((8,)),
    _array((1, 8), np.float32),
    _array((2, 8), np.float32, device=1),
]


#: Broadcasts against two entries, eight heads, eight queries and eight keys.
_BIASES = [
    _array((8, 8)),
    _array((8, 1, 8), np.float32),
    _array((2, 1, 8, 1)),
    _array((1, 1, 1, 1)),
    _array((2, 8, 8, 8), np.float32),
    _part(lambda a: a[:, ::2], (8, 16)),
    _part(lambda a: a.transpose(1, 0), (8, 8)),
    _part(lambda a: a[:, ::-1], (8, 8, 8)),
    _part(lambda a: a[4:].reshape(8, 8), (8 * 8 + 4,)),
    _part(lambda a: a[1:].view(np.float16).reshape(8, 8), (2 * 8 * 8 + 1,), np.uint8),
    _array((8, 8), np.float64),
    _array((4, 8, 8)),
    _array((8, 8), device=1),
]


#: Likewise; of bytes that are 0, which hides every pair.
_MASKS = [
    _array((8, 8), bool),
    _array((8, 1, 8), bool),
    _array((2, 1, 8, 1), bool),
    _array((1, 1, 1, 1), bool),
    _array((2, 8, 8, 8), bool),
    _part(lambda a: a[:, ::2], (8, 16), bool),
    _part(lambda a: a[:, :8], (8, 16), bool),
    _part(lambda a: a.transpose(1, 0), (8, 8), bool),
    _part(lambda a: a[:, ::-1], (8, 8, 8), bool),
    _part(lambda a: a[1:].reshape(8, 8), (8 * 8 + 1,), bool),
    _part(lambda a: a.view(bool), (8, 8), np.uint8),
    _array((8, 8), np.uint8),
    _array((4, 8, 8), bool),
    _array((8, 8), bool, device=1),
]


def _blocks(shape: Any, block: tuple[int, int], dtype: Any = bool, device: int = 0) -> Make:
    return lambda host: cuflash.BlockMask(host.array(np.zeros(shape, dtype), device), block)


#: All eight queries and keys are in one block.
_BLOCK_MASKS = [
    _blocks((1, 1), (64, 64)),
    _blocks((1, 1), (128, 64)),
    _blocks((8, 1, 1), (64, 64)),
    _blocks((2, 1, 1, 1), (64, 128)),
    _blocks((2, 8, 1, 1), (64, 64), np.uint8),
    lambda host: cuflash.BlockMask(host.array(np.zeros((2, 16, 1, 1), bool))[:, ::2], (64, 64)),
    _blocks((2, 1), (64, 64)),
    _blocks((1, 1), (64, 64), np.int8),
    _blocks((1, 1), (64, 64), device=1),
    _array((1, 1), bool),
]


#: The key, or the key and an offset.
_SEEDS = [
    _array((2,), np.uint32),
    _array((4,), np.uint32),
    _part(lambda a: a[::2], (8,), np.uint32),
    _part(lambda a: a[::-1], (2,), np.uint32),
    _part(lambda a: a[1:].view(np.uint32), (4 * 2 + 1,), np.uint8),
    _array((3,), np.uint32),
    _array((1, 2), np.uint32),
    _array((2,), np.int32),
    _array((1,), np.uint64),
    _array((2,), np.uint32, device=1),
]


#: Of two entries.
_LENGTHS = [
    _array((2,), np.int32),
    _part(lambda a: a[::2], (4,), np.int32),
    _part(lambda a: a[1:].view(np.int32), (4 * 2 + 1,), np.uint8),
    _array((3,), np.int32),
    _array((2,), np.int64),
    _array((2,), np.int32, device=1),
]


def _reading(table: Make, text: str = "return s + p.table(head, i - j + 7);") -> Make:
    return lambda host: ScoreMod(text, table=table(host))


#: With a number, and with an array, of which some are refused.
_FUNCTIONS = [
    ScoreMod("return p.most * tanh(s / p.most);", most=20.0),
    ScoreMod("return p.most * tanh(s / p.most);", most=3.0),
    ScoreMod("return p.most * tanh(s / p.most);", most=3),
    ScoreMod("return -s;"),
    _reading(_array((8, 15), np.float32)),
    _reading(_array((8, 15), np.int32)),
    _reading(_array((8, 30), np.float32)),
    _reading(_part(lambda a: a[:, ::2], (8, 30), np.float32)),
    _reading(_part(lambda a: a.transpose(1, 0), (15, 8), np.float32)),
    _reading(_part(lambda a: a[1:].view(np.float32).reshape(8, 15), (4 * 120 + 1,), np.uint8)),
    _reading(_array((15,), np.float32), "return s + p.table(i - j + 7);"),
    _reading(_array((8, 15), np.complex64)),
    _reading(_array((8, 0), np.float32)),
    _reading(_array((1, 1, 1, 8, 15), np.float32)),
    _reading(_array((8, 15), np.float32, device=1)),
    "return -s;",
]


def _several(*makes: Make) -> Make:
    return lambda host: tuple(make(host) for make in makes)


def _bytes(size: int, start: int = 0) -> Make:
    return lambda host: host.array(np.zeros(size, np.uint8))[start:]


#: Values of every argument, the first the one that a call has of itself. Functions make arrays.
RECIPES: dict[str, list[Any]] = {
    **{name: [*_MATRICES, *_ELSEWHERE] for name in "qkv"},
    # Also what is equal to another value and of another type, which may be refused.
    "causal": [True, False, 1, np.True_],
    "scale": [None, 0.25, 0.5, 1, True, np.float32(0.5), "1"],
    "window_size": [None, (3, None), (3, 2), [3, 2], (3.0, 2), (True, 2), (0, 0), (None, -1)],
    "softcap": [None, 20.0, 0, 3, True, np.float32(20), "20", -1.0, float("nan")],
    "score_mod": [None, *_FUNCTIONS],
    "alibi_slopes": [None, *_SLOPES],
    "bias": [None, *_BIASES],
    "mask": [None, *_MASKS],
    "block_mask": [None, *_BLOCK_MASKS],
    "sinks": [None, *_SINKS],
    "dropout_p": [None, 0.25, 0, 0.1, True, np.float32(0.25), "0.25", -0.1, 1, 0.99999, math.nan],
    "dropout_seed": [None, 3, 2**32, 2**64, -1, 3.0, True, np.int64(3), "3", *_SEEDS],
    **{name: [None, *_LENGTHS] for name in ("seqused_q", "seqused_kv")},
    "wrt": [
        *(QKV, ("q",), ("v", "k"), ["v", "k"], ("q", "q"), ("q", "sinks"), ("alibi_slopes",)),
        *(("bias", "k"), ("q", "mask"), ("q", "seqused_q"), "q", ()),
    ],
    "q_offset": [None, 3, 0, -2, 3.0, False, np.int64(3)],
    "layout": [None, "bhsd", "bshd", "hsd"],
    "return_lse": [False, True, 0, 1],
    "out_dtype": [None, "float16", np.float32, "float64"],
    "backend": ["auto", "cuda", "numpy"],
    "algorithm": ["auto", "fa1", "fa2", "fa3"],
    "blocks": [None, (64, 64), (32, 64), (64, 32), (64.0, 64), (32, True)],
    "workspace": [None, _bytes(1 << 22), _bytes(1 << 22, 256), _bytes(1 << 22, 16), _bytes(256)],
    "deterministic": [False, True, 0, 1.0],
    "residual_dtype": [None, "float16", np.float32, "float64"],
    "backward_blocks": [None, (64, 64), (32, 64), (64.0, 64), (32, True)],
    "lse_out": [None, *_VECTORS],
    "dlse": [None, *_VECTORS],
    "lse": _VECTORS,
    "dout": [*_MATRICES, WIDE],
    "grads": [
        None,
        _several(_array(), _array(), _array()),
        _several(_ALIGNED, _EIGHT_ON, _array()),
        _several(_ODD, _array(), _TWO_APART),
        _several(_TURNED, _BACKWARDS, _BACKWARDS),
    ],
}
#: As in the forward pass a destination, and an input in the other.
_OUT = {
    "forward": [None, *_MATRICES, WIDE],
    "backward": [*_MATRICES, WIDE],
}
#: What is given beside an argument, for its values to be taken; not beside None.
BESIDE: dict[str, dict[str, Any]] = {
    "dropout_p": {"dropout_seed": 3},
    "dropout_seed": {"dropout_p": 0.25},
}
#: Values that do the same as the one that a call has of itself, and why.
MATTERS_NOT = {
    "window_size": "a list is what a tuple is; causal bounds the right side",
    "wrt": "a list is what a tuple is",
    "causal": "NumPy's True is True",
    "softcap": "0 is no cap; NumPy's 20 is 20",
    "score_mod": "kernels read copies of arrays that are not contiguous",
    "dropout_p": "0 is no dropout; NumPy's quarter is a quarter",
    "scale": "1/sqrt(head_dim) is one of its values only where it is None",
    "layout": "'bshd' is what four axes mean",
    "q_offset": "0 is seqlen_kv - seqlen_q of as many queries as keys",
    "out_dtype": "'float16' is the dtype of q",
    "backend": "arrays in CUDA memory are computed there",
    "algorithm": "'auto' is one of them",
    "blocks": "the plan's own tile may be one of them",
}


def arguments_of(operation: str) -> dict[str, list[Any]]:
    """Values of every argument of a pass.

    Raises
    ------
    KeyError
        If one has no recipe.
    """
    own = {**RECIPES, "out": _OUT[operation]}
    return {name: own[name] for name in inspect.signature(PASSES[operation]).parameters}


def made(host: HostCupy, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, arrays made."""
    return {
        name: value(host) if callable(value) and not isinstance(value, type) else value
        for name, value in arguments.items()
    }
