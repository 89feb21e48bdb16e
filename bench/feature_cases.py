"""The problems at which features are timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from .case import HIDDEN, TOKENS, Case, Window, square
from .lengths import lengths_of
from .masks import KINDS

__all__ = [
    "alibi",
    "bias",
    "block_mask",
    "dropout",
    "features_elsewhere",
    "mask",
    "packed",
    "score_mod",
    "sinks",
    "softcap",
    "windows",
]

MASKS = (False, True)


#: Windows, and the batch, seqlen, heads and head_dim of each timing.
_WINDOWS: tuple[tuple[Window, int, int, int, int], ...] = (
    ((1023, 0), 2, 8192, 16, 128),
    ((1023, 0), 1, 32768, 16, 128),
    ((127, 0), 2, 8192, 32, 64),
    ((512, 512), 2, 8192, 32, 64),
    ((4095, 0), 1, 16384, 16, 128),
)


def windows(op: str) -> list[Case]:
    """Windows on one side and on both; for the backward pass, also a causal case without one."""
    windows = [
        replace(square(op, "bfloat16", batch, h, d, seqlen, False, "fa3"), window_size=window)
        for window, batch, seqlen, h, d in _WINDOWS
    ]
    if op == "forward":
        return windows
    return [*windows, square(op, "bfloat16", 1, 16, 128, 16384, True, "fa3")]


def sinks(op: str) -> list[Case]:
    """Sinks with a causal mask, and with a narrow window."""
    plain = Case(op, "bfloat16", 2, 32, 8, 64, 64, 8192, 8192, True, "fa3", sinks=True)
    return [plain, replace(plain, causal=False, window_size=(127, 0))]


def softcap(op: str) -> list[Case]:
    """Soft caps at head_dim 128 with and without a causal mask, and at 64.

    The cap has the size of the scores, so that a check finds an output in which the cap is missing.
    The speed of a kernel does not depend on the cap.
    """
    squares = [(16, 128, True), (16, 128, False), (32, 64, True)]
    return [
        replace(square(op, "bfloat16", 2, heads, dim, 8192, causal, "fa3"), softcap=1.0)
        for heads, dim, causal in squares
    ]


def alibi(op: str) -> list[Case]:
    """ALiBi at head_dim 64 and 128, with the causal mask that slopes usually have."""
    return [
        replace(square(op, "bfloat16", 2, heads, dim, 8192, True, "fa3"), alibi=True)
        for heads, dim in ((32, 64), (16, 128))
    ]


#: Batch, heads, head_dim and seqlen of the timings of a bias; the last is triangle attention over
#: 256 rows of 256 residues.
_BIASES = ((4, 32, 64, 2048), (2, 32, 64, 4096), (2, 16, 128, 4096), (256, 4, 32, 256))


def bias(op: str) -> list[Case]:
    """A bias that all batch entries share; backward with and without its gradient."""
    cases = [
        replace(square(op, "bfloat16", batch, heads, dim, seqlen, False, "fa3"), bias=True)
        for batch, heads, dim, seqlen in _BIASES
    ]
    if op == "forward":
        return cases
    return [replace(case, dbias=dbias) for case in cases for dbias in (False, True)]


def mask(op: str) -> list[Case]:
    """Every kind of boolean mask at head_dim 64 and 128."""
    return [
        replace(square(op, "bfloat16", 2, heads, dim, 8192, False, "fa3"), mask=kind)
        for heads, dim in ((32, 64), (16, 128))
        for kind in KINDS
    ]


def dropout(op: str) -> list[Case]:
    """Dropout at head_dim 64 and 128, 2 to 8 thousand tokens, with and without a causal mask."""
    lengths = {False: (2048, 4096, 8192), True: (2048, 8192)}
    return [
        replace(
            square(op, "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, causal, "fa3"),
            dropout_p=0.1,
        )
        for dim, causal in product((64, 128), MASKS)
        for seqlen in lengths[causal]
    ]


def block_mask(op: str) -> list[Case]:
    """A block mask that shows a quarter of the blocks, for all heads, at head_dim 64 and 128."""
    return [
        replace(square(op, "bfloat16", 2, heads, dim, 8192, False, "fa3"), block_mask=True)
        for heads, dim in ((32, 64), (16, 128))
    ]


def score_mod(op: str) -> list[Case]:
    """A soft cap that the caller writes as a score modification, at head_dim 64 and 128."""
    return [
        replace(
            square(op, "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, False, "fa3"),
            score_mod=True,
        )
        for dim, seqlen in product((64, 128), (4096, 8192))
    ]


#: The kind of lengths, heads and head_dim: random cuts, equal lengths, and a mix of 512 sequences.
_PACKED = (
    ("cut-16", 16, 128),
    ("cut-64", 32, 64),
    ("equal-8", 16, 128),
    ("equal-16", 32, 64),
    ("zipf", 16, 128),
)


def packed(op: str) -> list[Case]:
    """Sequences packed in one row of tokens, each with a causal mask."""
    return [
        replace(
            square(op, "bfloat16", 1, heads, dim, sum(lengths_of(kind)), True, "fa3"),
            lengths=kind,
        )
        for kind, heads, dim in _PACKED
    ]


#: Generations, heads and widths that the feature sets above lack.
_ELSEWHERE = (("fa2", 32, 64), ("fa2", 16, 128), ("fa3", 16, 96), ("fa3", 16, 192), ("fa3", 8, 256))


def features_elsewhere(op: str) -> list[Case]:
    """Features that change scores, in FlashAttention-2 and at other widths of FlashAttention-3."""
    asked: tuple[dict[str, Any], ...] = (
        {"softcap": 1.0},
        {"alibi": True, "causal": True},
        {"bias": True},
    )
    return [
        replace(square(op, "bfloat16", 2, heads, dim, 4096, False, name), **more)
        for name, heads, dim in _ELSEWHERE
        for more in asked
    ]
