"""One problem of every feature, for compute-sanitizer: both passes, with all gradients.

Lengths end inside tiles, entries and heads differ, and some rows see no key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["SANITIZED_FEATURES", "one_feature"]

#: Entries, query heads, heads of keys, queries, keys, head_dim.
_BATCH, _HEADS, _HEADS_OF_KEYS, _ROWS, _KEYS, _WIDTH = 3, 4, 2, 150, 240, 64
#: Queries and keys of packed sequences, and rows after the last one.
_PACKED = ((0, 0), (70, 150), (1, 0), (0, 9), (66, 40))
_BEHIND = 13, 31


class _Arrays:
    """The arrays of the problems on the device, drawn from one seed."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._random = np.random.default_rng(4)

    def normal(self, *shape: int, dtype: Any = np.float16) -> Any:
        return self._cupy.asarray(self._random.standard_normal(shape).astype(dtype))

    def slopes(self) -> Any:
        return self.normal(_HEADS, dtype=np.float32)

    def bits(self, *shape: int) -> Any:
        return self._cupy.asarray(self._random.random(shape) < 0.5)

    def lengths(self, *numbers: int) -> Any:
        return self._cupy.asarray(np.array(numbers, np.int32))

    def used(self) -> dict[str, Any]:
        return {"seqused_q": self.lengths(150, 0, 71), "seqused_kv": self.lengths(9, 240, 131)}

    def packed(self) -> dict[str, Any]:
        of_q, of_kv = np.cumsum([(0, 0), *_PACKED], axis=0).T
        offsets = {"cu_seqlens_q": self.lengths(*of_q), "cu_seqlens_kv": self.lengths(*of_kv)}
        return {"layout": "shd", **offsets}

    def matrices(self, *, packed: bool) -> tuple[Any, Any, Any]:
        leading: tuple[tuple[int, ...], tuple[int, ...]] = (_BATCH, _ROWS), (_BATCH, _KEYS)
        if packed:
            ends = np.sum(_PACKED, axis=0) + _BEHIND
            leading = (int(ends[0]),), (int(ends[1]),)
        of_queries, of_keys = leading
        q = self.normal(*of_queries, _HEADS, _WIDTH)
        k, v = (self.normal(*of_keys, _HEADS_OF_KEYS, _WIDTH) for _ in range(2))
        return q, k, v


def _block_mask(of: _Arrays) -> dict[str, Any]:
    import cuflash

    return {"block_mask": cuflash.BlockMask(of.bits(1, _HEADS, 2, 2), block=(128, 128))}


def _score_mod(of: _Arrays) -> dict[str, Any]:
    import cuflash

    return {"score_mod": cuflash.ScoreMod("return s + cos(i + offset - j);")}


#: The keywords of a call, by its name.
SANITIZED_FEATURES: dict[str, Callable[[_Arrays], dict[str, Any]]] = {
    "window": lambda of: {"window_size": (40, 20)},
    "softcap": lambda of: {"softcap": 3.0},
    "alibi": lambda of: {"causal": True, "alibi_slopes": of.slopes()},
    "bias": lambda of: {"bias": of.normal(1, _HEADS, _ROWS, _KEYS)},
    "mask": lambda of: {"mask": of.bits(_BATCH, 1, _ROWS, _KEYS)},
    "block_mask": _block_mask,
    "sinks": lambda of: {"causal": True, "sinks": of.normal(_HEADS)},
    "dropout": lambda of: {"dropout_p": 0.3, "dropout_seed": 5},
    "score_mod": _score_mod,
    "used_lengths": lambda of: {"causal": True, **of.used()},
    "used_lengths_bias": lambda of: {"bias": of.normal(_BATCH, _HEADS, _ROWS, _KEYS), **of.used()},
    "packed_lengths": lambda of: {"causal": True, "sinks": of.normal(_HEADS), **of.packed()},
    "packed_lengths_window": lambda of: {
        "window_size": (30, 30),
        "alibi_slopes": of.slopes(),
        **of.packed(),
    },
}


def one_feature(cupy: Any, algorithm: str, name: str) -> None:
    """Run the problem of a feature and read every result back."""
    import cuflash

    arrays = _Arrays(cupy)
    options = SANITIZED_FEATURES[name](arrays) | {"algorithm": algorithm}
    packed = "layout" in options
    q, k, v = arrays.matrices(packed=packed)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    given = [one for one in ("alibi_slopes", "bias", "sinks") if one in options]
    if packed and "alibi_slopes" in given:
        given.remove("alibi_slopes")  # the one gradient that packed sequences refuse
    results = [out, lse]
    for deterministic in sorted({False, algorithm != "fa1"}):
        results += cuflash.attention_backward(
            *(out, q, k, v, out, lse),
            wrt=("q", "k", "v", *given),
            deterministic=deterministic,
            **options,
        )
    cupy.cuda.Device().synchronize()
    for array in results:
        array.get()
