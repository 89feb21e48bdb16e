"""Values for every argument of the public functions, for tests of repeated calls.

The tests find a function's arguments by ``inspect``. An argument without a recipe
here fails the tests.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash
from cuflash.tensors import QKV

from ..emulator.host_cupy import HostCupy
from .call_arrays import (
    ALIGNED,
    BACKWARDS,
    BIASES,
    BLOCK_MASKS,
    EIGHT_ON,
    ELSEWHERE,
    FUNCTIONS,
    LENGTHS,
    MASKS,
    MATRICES,
    ODD,
    OFFSETS,
    ROWS,
    SEEDS,
    SHAPE,
    SINKS,
    SLOPES,
    TURNED,
    TWO_APART,
    VECTORS,
    WIDE,
    Make,
    array,
)

__all__ = ["MATTERS_NOT", "PASSES", "RECIPES", "arguments_of", "beside", "made"]

#: The functions of both passes.
PASSES: dict[str, Callable[..., Any]] = {
    "forward": cuflash.attention,
    "backward": cuflash.attention_backward,
}


def _several(*makes: Make) -> Make:
    return lambda host: tuple(make(host) for make in makes)


def _bytes(size: int, start: int = 0) -> Make:
    return lambda host: host.array(np.zeros(size, np.uint8))[start:]


#: Values of every argument. An argument has the first one unless a test changes it. Functions
#: make arrays.
RECIPES: dict[str, list[Any]] = {
    **{name: [*MATRICES, *ELSEWHERE] for name in "qkv"},
    # Some values equal another one but have another type; they may be refused.
    "causal": [True, False, 1, np.True_],
    "scale": [None, 0.25, 0.5, 1, True, np.float32(0.5), "1"],
    "window_size": [None, (3, None), (3, 2), [3, 2], (3.0, 2), (True, 2), (0, 0), (None, -1)],
    "softcap": [None, 20.0, 0, 3, True, np.float32(20), "20", -1.0, float("nan")],
    "score_mod": [None, *FUNCTIONS],
    "alibi_slopes": [None, *SLOPES],
    "bias": [None, *BIASES],
    "mask": [None, *MASKS],
    "block_mask": [None, *BLOCK_MASKS],
    "sinks": [None, *SINKS],
    "dropout_p": [None, 0.25, 0, 0.1, True, np.float32(0.25), "0.25", -0.1, 1, 0.99999, math.nan],
    "dropout_seed": [None, 3, 2**32, 2**64, -1, 3.0, True, np.int64(3), "3", *SEEDS],
    **{name: [None, *LENGTHS] for name in ("seqused_q", "seqused_kv")},
    **{name: [None, *OFFSETS] for name in ("cu_seqlens_q", "cu_seqlens_kv")},
    "wrt": [
        *(QKV, ("q",), ("v", "k"), ["v", "k"], ("q", "q"), ("q", "sinks"), ("alibi_slopes",)),
        *(("bias", "k"), ("q", "mask"), ("q", "seqused_q"), "q", ()),
    ],
    "resume": [
        None,
        _several(array(SHAPE, np.float32), array(ROWS, np.float32)),
        _several(array(SHAPE), array(ROWS, np.float32)),
        _several(array(SHAPE, np.float32), array(ROWS[1:], np.float32)),
        _several(array(SHAPE, np.float32)),
    ],
    "q_offset": [None, 3, 0, -2, 3.0, False, np.int64(3)],
    "layout": [None, "bhsd", "bshd", "hsd"],
    "return_lse": [False, True, 0, 1],
    "out_dtype": [None, "float16", np.float32, "float64"],
    "backend": ["auto", "cuda", "numpy"],
    "algorithm": ["auto", "fa1", "fa2", "fa3"],
    "blocks": [None, (64, 64), (32, 64), (64, 32), (64.0, 64), (32, True)],
    "kv_chunk": [None, 0, 64, 128, 96, -64, 64.0, True, np.int64(64), "64"],
    "workspace": [None, _bytes(1 << 22), _bytes(1 << 22, 256), _bytes(1 << 22, 16), _bytes(256)],
    "deterministic": [False, True, 0, 1.0],
    "residual_dtype": [None, "float16", np.float32, "float64"],
    "backward_blocks": [None, (64, 64), (32, 64), (64.0, 64), (32, True)],
    "lse_out": [None, *VECTORS],
    "dlse": [None, *VECTORS],
    "lse": VECTORS,
    "dout": [*MATRICES, WIDE],
    "grads": [
        None,
        _several(array(), array(), array()),
        _several(ALIGNED, EIGHT_ON, array()),
        _several(ODD, array(), TWO_APART),
        _several(TURNED, BACKWARDS, BACKWARDS),
    ],
}
#: Values of ``out``: a destination of the forward pass, and an input of the backward pass.
_OUT = {
    "forward": [None, *MATRICES, WIDE],
    "backward": [*MATRICES, WIDE],
}
#: For an argument that is not None: the other arguments that a call needs with it.
BESIDE: dict[str, dict[str, Any]] = {
    "dropout_p": {"dropout_seed": 3},
    "dropout_seed": {"dropout_p": 0.25},
    "cu_seqlens_q": {"cu_seqlens_kv": array((3,), np.int32)},
    "cu_seqlens_kv": {"cu_seqlens_q": array((3,), np.int32)},
}
#: Arrays of a call that packs sequences.
_PACKED: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v"), array(SHAPE[1:])),
    "layout": "shd",
}
_PACKED_SAVED = {
    **dict.fromkeys(("out", "dout"), array(SHAPE[1:])),
    "lse": array(ROWS[1:], np.float32),
}
#: Arguments with two values that make the same call, and the reason.
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
    "kv_chunk": "0 is what short sequences have; NumPy's 64 is 64",
}


def beside(operation: str, name: str, value: Any) -> dict[str, Any]:
    """The other arguments that a call needs with this value of an argument.

    For offsets of packed sequences, the result also has packed arrays for the pass ``operation``,
    unless that is empty.
    """
    if (operation, name) == ("backward", "dout"):
        return {"out": WIDE}
    if value is None:
        return {}
    packed = bool(operation) and name.startswith("cu_seqlens")
    arrays = _PACKED | (_PACKED_SAVED if operation == "backward" else {}) if packed else {}
    return arrays | BESIDE.get(name, {})


def arguments_of(operation: str) -> dict[str, list[Any]]:
    """Values of every argument of a pass.

    Raises
    ------
    KeyError
        If an argument has no recipe.
    """
    own = {**RECIPES, "out": _OUT[operation]}
    return {name: own[name] for name in inspect.signature(PASSES[operation]).parameters}


def made(host: HostCupy, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with every function replaced by the array that it makes."""
    return {
        name: value(host) if callable(value) and not isinstance(value, type) else value
        for name, value in arguments.items()
    }
