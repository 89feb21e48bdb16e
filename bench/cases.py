"""The problems that are timed; tests use the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from .case import Case, Window, mask_text
from .masks import KINDS

__all__ = ["CASES", "Case", "Window", "mask_text", "select"]


def _square(
    op: str, dtype: str, batch: int, heads: int, dim: int, seqlen: int, causal: bool, name: str
) -> Case:
    return Case(op, dtype, batch, heads, heads, dim, dim, seqlen, seqlen, causal, name)


def _fa1() -> list[Case]:
    """FlashAttention-1 where its one block a head fills the chip, and where it does not."""
    return [
        _square(op, "float16", batch, heads, dim, seqlen, causal, "fa1")
        for (batch, heads, seqlen), dim, causal, op in product(
            ((16, 16, 2048), (8, 16, 4096), (1, 16, 4096)),
            (64, 128),
            (False, True),
            ("forward", "backward"),
        )
    ]


#: Tiles that lost to the ones the plan takes, or that its rule does not reach, by pass and width.
_FA1_TILES = {
    ("forward", 64): ((64, 448), (64, 256), (64, 128), (32, 448), (128, 256)),
    ("forward", 128): ((128, 192), (64, 192), (64, 128), (128, 128)),
    ("backward", 64): ((64, 128), (64, 64), (32, 128)),
    ("backward", 128): ((64, 96), (64, 64), (32, 96)),
}


def _fa1_tiles() -> list[Case]:
    """The tile of the plan beside others."""
    return [
        replace(_square(op, "float16", 16, 16, dim, 2048, False, "fa1"), blocks=blocks)
        for (op, dim), tiles in _FA1_TILES.items()
        for blocks in tiles
    ]


#: The grid of the FlashAttention papers: as many tokens and as wide a layer in every case.
TOKENS, HIDDEN = 16384, 2048
PASSES = ("forward", "backward")
MASKS = (False, True)


def _grid(dtype: str, algorithm: str = "fa2", passes: tuple[str, ...] = PASSES) -> list[Case]:
    """A generation over sequence lengths, widths and masks."""
    return [
        _square(op, dtype, TOKENS // seqlen, HIDDEN // dim, dim, seqlen, causal, algorithm)
        for dim, causal, op, seqlen in product(
            (64, 128, 256), MASKS, passes, (512, 2048, 8192, 16384)
        )
    ]


#: Heads of q and of k, and widths: others than those of the grid, and heads that share keys.
_SHAPES = (
    (32, 32, 80, 80),
    (16, 16, 96, 96),
    (16, 16, 192, 192),
    (16, 16, 192, 128),
    (32, 8, 128, 128),
    (64, 8, 128, 128),
    (32, 1, 128, 128),
)


def _shapes(op: str) -> list[Case]:
    return [
        Case(op, "bfloat16", 2, heads_q, heads_kv, d, dv, 8192, 8192, True, "fa3")
        for heads_q, heads_kv, d, dv in _SHAPES
    ]


def _wide(dtype: str) -> list[Case]:
    """The types that no tensor core of the 16-bit kind computes."""
    return [
        _square(op, dtype, 1, 16, dim, 4096, False, "fa2") for dim, op in product((64, 128), PASSES)
    ]


def _deterministic() -> list[Case]:
    """What the same bits in every run cost: the backward pass with and without."""
    return [
        replace(
            _square("backward", "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, c, "fa2"),
            deterministic=deterministic,
        )
        for dim, c, seqlen, deterministic in product((64, 128), MASKS, (2048, 8192), (False, True))
    ]


#: Most rows of queries, over all heads, of a case of two generations: the older one is slow.
MOST_ROWS = 2**20


def _generations() -> list[Case]:
    """FlashAttention-1 and 2 of the same problem, from few long heads to many short ones."""
    return [
        replace(_square(op, "float16", batch, heads, dim, seqlen, False, "fa2"), beside=("fa1",))
        for dim, op, (batch, heads), seqlen in product(
            (64, 128), PASSES, ((1, 8), (4, 16), (16, 16)), (512, 2048, 8192, 16384)
        )
        if batch * heads * seqlen <= MOST_ROWS
    ]


#: Windows, and the batch, seqlen, heads and head_dim that each of them is timed at.
_WINDOWS: tuple[tuple[Window, int, int, int, int], ...] = (
    ((1023, 0), 2, 8192, 16, 128),
    ((1023, 0), 1, 32768, 16, 128),
    ((127, 0), 2, 8192, 32, 64),
    ((512, 512), 2, 8192, 32, 64),
    ((4095, 0), 1, 16384, 16, 128),
)


def _windows(op: str) -> list[Case]:
    """Windows of one side and of both; backward also what the widest is compared with besides."""
    windows = [
        replace(_square(op, "bfloat16", batch, h, d, seqlen, False, "fa3"), window_size=window)
        for window, batch, seqlen, h, d in _WINDOWS
    ]
    if op == "forward":
        return windows
    return [*windows, _square(op, "bfloat16", 1, 16, 128, 16384, True, "fa3")]


def _sinks(op: str) -> list[Case]:
    """Sinks with a causal mask alone, and with a narrow window."""
    plain = Case(op, "bfloat16", 2, 32, 8, 64, 64, 8192, 8192, True, "fa3", sinks=True)
    return [plain, replace(plain, causal=False, window_size=(127, 0))]


def _softcap(op: str) -> list[Case]:
    """At head_dim 128 with and without a causal mask, and at 64.

    The cap is of the size of the scores, so that an answer without it is told from one with it.
    No kernel is quicker or slower for its size.
    """
    squares = [(16, 128, True), (16, 128, False), (32, 64, True)]
    return [
        replace(_square(op, "bfloat16", 2, heads, dim, 8192, causal, "fa3"), softcap=1.0)
        for heads, dim, causal in squares
    ]


def _alibi(op: str) -> list[Case]:
    """At head_dim 64 and 128, with the causal mask that slopes come with."""
    return [
        replace(_square(op, "bfloat16", 2, heads, dim, 8192, True, "fa3"), alibi=True)
        for heads, dim in ((32, 64), (16, 128))
    ]


#: Batch, heads, head_dim and seqlen that a bias is timed at; the last one is triangle attention
#: over 256 rows of 256 residues.
_BIASES = ((4, 32, 64, 2048), (2, 32, 64, 4096), (2, 16, 128, 4096), (256, 4, 32, 256))


def _bias(op: str) -> list[Case]:
    """A bias that all batch entries share; backward without its gradient, and with it."""
    cases = [
        replace(_square(op, "bfloat16", batch, heads, dim, seqlen, False, "fa3"), bias=True)
        for batch, heads, dim, seqlen in _BIASES
    ]
    if op == "forward":
        return cases
    return [replace(case, dbias=dbias) for case in cases for dbias in (False, True)]


def _mask(op: str) -> list[Case]:
    """Every kind of boolean mask at head_dim 64 and 128; entries and heads share what they can."""
    return [
        replace(_square(op, "bfloat16", 2, heads, dim, 8192, False, "fa3"), mask=kind)
        for heads, dim in ((32, 64), (16, 128))
        for kind in KINDS
    ]


def _dropout(op: str) -> list[Case]:
    """At head_dim 64 and 128, of 2 to 8 thousand tokens, with and without a causal mask."""
    lengths = {False: (2048, 4096, 8192), True: (2048, 8192)}
    return [
        replace(
            _square(op, "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, causal, "fa3"),
            dropout_p=0.1,
        )
        for dim, causal in product((64, 128), MASKS)
        for seqlen in lengths[causal]
    ]


def _block_mask(op: str) -> list[Case]:
    """A quarter of the blocks at head_dim 64 and 128, which all entries and heads share."""
    return [
        replace(_square(op, "bfloat16", 2, heads, dim, 8192, False, "fa3"), block_mask=True)
        for heads, dim in ((32, 64), (16, 128))
    ]


def _score_mod(op: str) -> list[Case]:
    """A soft cap in the caller's words at head_dim 64 and 128."""
    return [
        replace(
            _square(op, "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, False, "fa3"),
            score_mod=True,
        )
        for dim, seqlen in product((64, 128), (4096, 8192))
    ]


#: Generations, heads and widths that have none of the sets of a feature above.
_ELSEWHERE = (("fa2", 32, 64), ("fa2", 16, 128), ("fa3", 16, 96), ("fa3", 16, 192), ("fa3", 8, 256))


def _features_elsewhere(op: str) -> list[Case]:
    """What changes scores, in FlashAttention-2 and at the other widths of FlashAttention-3."""
    asked: tuple[dict[str, Any], ...] = (
        {"softcap": 1.0},
        {"alibi": True, "causal": True},
        {"bias": True},
    )
    return [
        replace(_square(op, "bfloat16", 2, heads, dim, 4096, False, name), **more)
        for name, heads, dim in _ELSEWHERE
        for more in asked
    ]


#: Sets of cases by name.
CASES: dict[str, Callable[[], list[Case]]] = {
    "fa1": _fa1,
    "fa1-tiles": _fa1_tiles,
    "fa2": lambda: _grid("bfloat16"),
    "fa2-float16": lambda: _grid("float16"),
    "fa2-single": lambda: _wide("float32"),
    "fa2-double": lambda: _wide("float64"),
    "fa2-deterministic": _deterministic,
    "generations": _generations,
    "fa3": lambda: _grid("bfloat16", "fa3", ("forward",)),
    "fa3-float16": lambda: _grid("float16", "fa3", ("forward",)),
    "fa3-shapes": lambda: _shapes("forward"),
    "fa3-backward": lambda: _grid("bfloat16", "fa3", ("backward",)),
    "fa3-backward-shapes": lambda: _shapes("backward"),
    "windows": lambda: _windows("forward"),
    "windows-backward": lambda: _windows("backward"),
    "sinks": lambda: _sinks("forward"),
    "sinks-backward": lambda: _sinks("backward"),
    "softcap": lambda: _softcap("forward"),
    "softcap-backward": lambda: _softcap("backward"),
    "alibi": lambda: _alibi("forward"),
    "alibi-backward": lambda: _alibi("backward"),
    "bias": lambda: _bias("forward"),
    "bias-backward": lambda: _bias("backward"),
    "mask": lambda: _mask("forward"),
    "mask-backward": lambda: _mask("backward"),
    "dropout": lambda: _dropout("forward"),
    "dropout-backward": lambda: _dropout("backward"),
    "block-mask": lambda: _block_mask("forward"),
    "block-mask-backward": lambda: _block_mask("backward"),
    "score-mod": lambda: _score_mod("forward"),
    "score-mod-backward": lambda: _score_mod("backward"),
    "features-elsewhere": lambda: _features_elsewhere("forward"),
    "features-elsewhere-backward": lambda: _features_elsewhere("backward"),
}


def select(names: str) -> list[Case]:
    """The cases of the sets in a comma-separated list, each once."""
    unknown = [name for name in names.split(",") if name not in CASES]
    if unknown:
        raise SystemExit(f"--cases: no set {unknown[0]!r}; there are {', '.join(CASES)}")
    return list(dict.fromkeys(case for name in names.split(",") for case in CASES[name]()))
