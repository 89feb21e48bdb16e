"""All pairs of features in the table of features, and a call with each pair.

A feature without values here fails the tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash
from cuflash import ScoreMod
from cuflash.features.refused import REFUSED, Refusal
from cuflash.features.table import FEATURES

from .wrt_case import DTYPES, GivenCall

__all__ = ["OPERATIONS", "PAIRS", "VALUES", "call_of", "in_float64", "refusal_of", "run"]

#: With this many keys, every row of a mask begins where the copy engine can read it.
_BATCH, _HEADS, _QUERIES, _KEYS = 2, 4, 9, 16
#: The arguments of a call that uses the feature.
VALUES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 1)},
    "used_lengths": {
        "seqused_q": np.array([_QUERIES, 5], np.int32),
        "seqused_kv": np.array([11, _KEYS], np.int32),
    },
    "packed_lengths": {
        "cu_seqlens_q": np.array([0, 4, 4, 7], np.int32),
        "cu_seqlens_kv": np.array([0, 5, 9, 14], np.int32),
    },
    "softcap": {"softcap": 1.5},
    "score_mod": {
        "score_mod": ScoreMod(
            "return p.most * tanh(s / p.most) + p.table(head, i + offset - j + 9);",
            numpy=lambda s, batch, head, i, j, offset, p: (
                p.most * np.tanh(s / p.most) + p.table(head, i + offset - j + 9)
            ),
            most=1.5,
            table=np.cos(np.arange(_HEADS * 26, dtype=np.float32)).reshape(_HEADS, 26),
        )
    },
    "alibi": {
        "alibi_slopes": np.linspace(-0.2, 0.5, _BATCH * _HEADS, dtype=np.float32).reshape(
            -1, _HEADS
        )
    },
    "bias": {
        "bias": np.cos(np.arange(_HEADS * _QUERIES * _KEYS, dtype=np.float32)).reshape(
            _HEADS, _QUERIES, _KEYS
        )
    },
    "mask": {
        "mask": np.cos(np.arange(_HEADS * _QUERIES * _KEYS)).reshape(_HEADS, _QUERIES, _KEYS) > -0.5
    },
    "block_mask": {
        "block_mask": cuflash.BlockMask(
            np.array([1, 0, 1, 1], bool).reshape(_HEADS, 1, 1), (64, 64)
        )
    },
    "sinks": {"sinks": np.linspace(-1, 2, _HEADS).astype(np.float32)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": np.array([1, 2, 3, 4], np.uint32)},
}
PAIRS = [*itertools.combinations_with_replacement(FEATURES, 2)]
OPERATIONS = ["forward", "backward"]


def call_of(
    names: tuple[str, ...], dtype: str = "float32", head_dim: int = 8, **more: Any
) -> GivenCall:
    """A call that uses these features; ``more`` are further keywords."""
    rng = np.random.default_rng(3)
    q, kv = (_BATCH, _QUERIES, _HEADS, head_dim), (_BATCH, _KEYS, 2, head_dim)
    inputs: dict[str, Any] = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype])
        for name, shape in {"q": q, "k": kv, "v": kv}.items()
    }
    keywords: dict[str, Any] = dict(more)
    for name in names:
        for argument, value in VALUES[name].items():
            (inputs if argument in FEATURES[name].arrays else keywords)[argument] = value
    if "packed_lengths" in names:
        return GivenCall(_without_batch(inputs), keywords | {"layout": "shd"})
    return GivenCall(inputs, keywords)


def _without_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a packed call: the first batch entry of each array, and one entry's lengths."""
    found = dict(inputs)
    for name in ("q", "k", "v", "alibi_slopes"):
        if name in found:
            found[name] = found[name][0]
    return found | {name: found[name][:1] for name in VALUES["used_lengths"] if name in found}


def in_float64(call: GivenCall) -> GivenCall:
    """The call in double precision on the NumPy backend, which chooses algorithm and blocks."""
    chosen = {"algorithm", "blocks", "backend"}
    keywords = {name: v for name, v in call.keywords.items() if name not in chosen}
    return GivenCall(call.wide, {**keywords, "backend": "numpy"})


def refusal_of(names: tuple[str, ...]) -> Refusal | None:
    """The refusal of a call with these features, algorithm, backend, pass and dtype, or None."""
    return next((r for r in REFUSED if {r.first, r.second} <= set(names)), None)


def _placed(value: Any, place: Callable[[Any], Any]) -> Any:
    """The argument with its arrays moved by ``place``."""
    if isinstance(value, cuflash.BlockMask):
        return cuflash.BlockMask(place(value.blocks), value.block)
    if isinstance(value, ScoreMod):
        score, arrays = value.parts
        return ScoreMod.of(score, tuple(map(place, arrays)))
    return place(value) if isinstance(value, np.ndarray) else value


def run(
    call: GivenCall,
    operation: str,
    place: Callable[[Any], Any] = lambda array: array,
    called: Callable[..., Any] = lambda function, **given: function(**given),
) -> tuple[Any, ...]:
    """The results of a pass: out and lse, or the gradients for all names in ``call.wrt``.

    ``place`` moves an array to where the call is computed. ``called`` calls a function of the
    library.
    """
    inputs = {name: _placed(array, place) for name, array in call.inputs.items()}
    keywords = {name: _placed(value, place) for name, value in call.keywords.items()}
    given = {**inputs, **keywords}
    out, lse = called(cuflash.attention, **given, return_lse=True)
    if operation == "forward":
        return out, lse
    dtype, statistics = call.inputs["q"].dtype, str(lse.dtype)
    dout = np.cos(np.arange(out.size).reshape(out.shape)).astype(dtype)
    dlse = np.sin(np.arange(lse.size).reshape(lse.shape)).astype(statistics)
    saved = {"dout": place(dout), "dlse": place(dlse), "out": out, "lse": lse}
    results: tuple[Any, ...] = called(cuflash.attention_backward, **saved, **given, wrt=call.wrt)
    return results
