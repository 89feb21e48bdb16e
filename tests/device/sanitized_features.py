"""One problem of every feature, for compute-sanitizer: both passes, with all gradients.

Lengths are such that tiles end in the middle, entries and heads differ, and some
rows see nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["every_feature"]

#: Entries, query heads, heads of keys, queries, keys, head_dim.
_SIZES = 3, 4, 2, 150, 240, 64
#: Queries and keys of packed sequences, and rows behind the last one.
_PACKED = ((0, 0), (70, 150), (1, 0), (0, 9), (66, 40))
_BEHIND = 13, 31


def every_feature(cupy: Any, algorithm: str) -> int:
    """Run all of them and read every result back; how many there were."""
    import cuflash

    count = 0
    for options, packed in _calls(cupy, cuflash):
        q, k, v = _matrices(cupy, packed)
        options |= {"algorithm": algorithm}
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        named = [n for n in ("alibi_slopes", "bias", "sinks") if n in options and not packed]
        results = [out, lse]
        for deterministic in sorted({False, algorithm != "fa1"}):
            results += cuflash.attention_backward(
                *(out, q, k, v, out, lse),
                wrt=("q", "k", "v", *named),
                deterministic=deterministic,
                **options,
            )
        cupy.cuda.Device().synchronize()
        for array in results:
            array.get()
        count += 1
    return count


def _calls(cupy: Any, cuflash: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Keywords of a call, and whether its rows are packed."""
    batch, heads, _, rows, keys, _ = _SIZES
    random = np.random.default_rng(4)

    def normal(*shape: int, dtype: Any = np.float16) -> Any:
        return cupy.asarray(random.standard_normal(shape).astype(dtype))

    def bits(*shape: int) -> Any:
        return cupy.asarray(random.random(shape) < 0.5)

    def lengths(*numbers: int) -> Any:
        return cupy.asarray(np.array(numbers, np.int32))

    offsets = np.cumsum([(0, 0), *_PACKED], axis=0)
    packed = {
        "layout": "shd",
        **{f"cu_seqlens_{of}": lengths(*at) for of, at in zip(("q", "kv"), offsets.T, strict=True)},
    }
    used = {"seqused_q": lengths(150, 0, 71), "seqused_kv": lengths(9, 240, 131)}
    made: list[Callable[[], dict[str, Any]]] = [
        lambda: {"window_size": (40, 20)},
        lambda: {"softcap": 3.0},
        lambda: {"causal": True, "alibi_slopes": normal(heads, dtype=np.float32)},
        lambda: {"bias": normal(1, heads, rows, keys)},
        lambda: {"mask": bits(batch, 1, rows, keys)},
        lambda: {"block_mask": cuflash.BlockMask(bits(1, heads, 2, 2), block=(128, 128))},
        lambda: {"causal": True, "sinks": normal(heads)},
        lambda: {"dropout_p": 0.3, "dropout_seed": 5},
        lambda: {"score_mod": cuflash.ScoreMod("return s + cos(i + offset - j);")},
        lambda: {"causal": True, **used},
        lambda: {"bias": normal(batch, heads, rows, keys), **used},
    ]
    for make in made:
        yield make(), False
    yield {"causal": True, "sinks": normal(heads), **packed}, True
    yield {"window_size": (30, 30), "alibi_slopes": normal(heads, dtype=np.float32), **packed}, True


def _matrices(cupy: Any, packed: bool) -> tuple[Any, Any, Any]:
    batch, heads, of_keys, rows, keys, width = _SIZES
    leading: tuple[tuple[int, ...], tuple[int, ...]] = (batch, rows), (batch, keys)
    if packed:
        ends = np.sum(_PACKED, axis=0) + _BEHIND
        leading = (int(ends[0]),), (int(ends[1]),)
    random = np.random.default_rng(5)
    shapes = (*leading[0], heads), (*leading[1], of_keys), (*leading[1], of_keys)
    q, k, v = (
        cupy.asarray(random.standard_normal((*shape, width)).astype(np.float16)) for shape in shapes
    )
    return q, k, v
