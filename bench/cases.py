"""The problems that are timed; tests use the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from . import feature_cases as of
from . import few_queries
from .case import HIDDEN, TOKENS, Case, Window, mask_text, square

__all__ = ["CASES", "Case", "Window", "mask_text", "select"]


def _fa1() -> list[Case]:
    """FlashAttention-1: enough heads to fill the chip (a thread block per head), and fewer."""
    return [
        square(op, "float16", batch, heads, dim, seqlen, causal, "fa1")
        for (batch, heads, seqlen), dim, causal, op in product(
            ((16, 16, 2048), (8, 16, 4096), (1, 16, 4096)),
            (64, 128),
            (False, True),
            ("forward", "backward"),
        )
    ]


#: By pass and width: tiles that were slower than the plan's, or that the plan never chooses.
_FA1_TILES = {
    ("forward", 64): ((64, 448), (64, 256), (64, 128), (32, 448), (128, 256)),
    ("forward", 128): ((128, 192), (64, 192), (64, 128), (128, 128)),
    ("backward", 64): ((64, 128), (64, 64), (32, 128)),
    ("backward", 128): ((64, 96), (64, 64), (32, 96)),
}


def _fa1_tiles() -> list[Case]:
    """FlashAttention-1 with the tiles of the table above."""
    return [
        replace(square(op, "float16", 16, 16, dim, 2048, False, "fa1"), blocks=blocks)
        for (op, dim), tiles in _FA1_TILES.items()
        for blocks in tiles
    ]


PASSES = ("forward", "backward")
MASKS = (False, True)


def _grid(dtype: str, algorithm: str = "fa2", passes: tuple[str, ...] = PASSES) -> list[Case]:
    """Cases of one generation over sequence lengths, widths and masks."""
    return [
        square(op, dtype, TOKENS // seqlen, HIDDEN // dim, dim, seqlen, causal, algorithm)
        for dim, causal, op, seqlen in product(
            (64, 128, 256), MASKS, passes, (512, 2048, 8192, 16384)
        )
    ]


#: Heads of q and of k, head_dim and head_dim_v: widths that the grid lacks, and grouped heads.
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


#: Problems of known models: batch, queries, keys, heads of q and of k, head_dim, causal.
_MODELS = (
    (64, 197, 197, 12, 12, 64, False),  # ViT-B
    (32, 512, 512, 12, 12, 64, False),  # BERT
    (8, 1024, 1024, 12, 12, 64, True),  # GPT-2
    (16, 1500, 1500, 20, 20, 64, False),  # Whisper, and its cross attention
    (16, 448, 1500, 20, 20, 64, False),
    (2, 4096, 4096, 20, 20, 64, False),  # Stable Diffusion, and its cross attention
    (2, 4096, 77, 20, 20, 64, False),
    (4, 4096, 4096, 32, 8, 128, True),  # Llama 3 8B
    (2, 8192, 8192, 16, 8, 256, True),  # Gemma 2
    (256, 256, 256, 4, 4, 32, False),  # rows of an alignment of sequences
)


#: Shapes outside the grid, as in ``_MODELS``: few queries on many keys, few heads, odd lengths.
_OFF_GRID = (
    (16, 77, 4096, 8, 8, 64, False),
    (16, 77, 4096, 8, 8, 128, False),
    (7, 1111, 1111, 16, 16, 64, False),
    (32, 1024, 1024, 12, 12, 64, True),
    (4, 1024, 8192, 16, 16, 128, False),
    (1, 16384, 16384, 1, 1, 128, True),
    (1, 8192, 8192, 32, 32, 192, True),
    (2, 8192, 8192, 64, 8, 128, True),
)


def _listed(op: str, shapes: tuple[tuple[int, int, int, int, int, int, bool], ...]) -> list[Case]:
    return [
        Case(op, "bfloat16", batch, heads_q, heads_kv, d, d, queries, keys, causal, "fa3")
        for batch, queries, keys, heads_q, heads_kv, d, causal in shapes
    ]


def _wide(dtype: str) -> list[Case]:
    """Cases of a type that the 16-bit tensor cores do not compute."""
    return [
        square(op, dtype, 1, 16, dim, 4096, False, "fa2") for dim, op in product((64, 128), PASSES)
    ]


def _deterministic() -> list[Case]:
    """The backward pass with and without ``deterministic``, to show what the option costs."""
    return [
        replace(
            square("backward", "bfloat16", TOKENS // seqlen, HIDDEN // dim, dim, seqlen, c, "fa2"),
            deterministic=deterministic,
        )
        for dim, c, seqlen, deterministic in product((64, 128), MASKS, (2048, 8192), (False, True))
    ]


#: The most query rows, over all heads, in a comparison of generations: the older one is slow.
MOST_ROWS = 2**20


def _generations() -> list[Case]:
    """FlashAttention-1 and 2 on the same problems, from few long heads to many short ones."""
    return [
        replace(square(op, "float16", batch, heads, dim, seqlen, False, "fa2"), beside=("fa1",))
        for dim, op, (batch, heads), seqlen in product(
            (64, 128), PASSES, ((1, 8), (4, 16), (16, 16)), (512, 2048, 8192, 16384)
        )
        if batch * heads * seqlen <= MOST_ROWS
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
    "models": lambda: _listed("forward", _MODELS),
    "models-backward": lambda: _listed("backward", _MODELS),
    "off-grid": lambda: _listed("forward", _OFF_GRID),
    "off-grid-backward": lambda: _listed("backward", _OFF_GRID),
    "windows": lambda: of.windows("forward"),
    "windows-backward": lambda: of.windows("backward"),
    "sinks": lambda: of.sinks("forward"),
    "sinks-backward": lambda: of.sinks("backward"),
    "softcap": lambda: of.softcap("forward"),
    "softcap-backward": lambda: of.softcap("backward"),
    "alibi": lambda: of.alibi("forward"),
    "alibi-backward": lambda: of.alibi("backward"),
    "bias": lambda: of.bias("forward"),
    "bias-backward": lambda: of.bias("backward"),
    "mask": lambda: of.mask("forward"),
    "mask-backward": lambda: of.mask("backward"),
    "dropout": lambda: of.dropout("forward"),
    "dropout-backward": lambda: of.dropout("backward"),
    "block-mask": lambda: of.block_mask("forward"),
    "block-mask-backward": lambda: of.block_mask("backward"),
    "score-mod": lambda: of.score_mod("forward"),
    "score-mod-backward": lambda: of.score_mod("backward"),
    "packed": lambda: of.packed("forward"),
    "packed-backward": lambda: of.packed("backward"),
    "decode": few_queries.decode,
    "decode-float8": few_queries.decode_float8,
    "batches": few_queries.batches,
    "drafts": few_queries.drafts,
    "pages": few_queries.pages,
    "few": few_queries.few,
    "features-elsewhere": lambda: of.features_elsewhere("forward"),
    "features-elsewhere-backward": lambda: of.features_elsewhere("backward"),
}


def select(names: str) -> list[Case]:
    """The cases of the sets in a comma-separated list, each once."""
    unknown = [name for name in names.split(",") if name not in CASES]
    if unknown:
        raise SystemExit(f"--cases: no set {unknown[0]!r}; there are {', '.join(CASES)}")
    return list(dict.fromkeys(case for name in names.split(",") for case in CASES[name]()))
