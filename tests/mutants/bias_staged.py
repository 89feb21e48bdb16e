"""Planted bugs in a bias that the copy engine brings to FlashAttention-3, for the emulator."""

from __future__ import annotations

from .bias import AGAINST, NEIGHBOURS, emulated
from .bug import row

__all__ = ["BUGS"]

_STAGED = "cuda_src/features/bias_staged.cuh"
_PANELS = "cuda_src/tile/pair_panels.cuh"

_FA3 = "fa3-sm_90-float16-d64-dv64-causal-bias-1hqk-filled"
_FA3_ONE = "fa3-sm_90-bfloat16-d64-dv64-full-bias-11qk-inf-filled-ordered"
_FA3_KEYS = "fa3-sm_90-bfloat16-d128-dv128-causal-bias-b11k:float32-filled-192x80"

BUGS = (
    emulated(
        "tiles of a bias for all heads are those of the head",
        _STAGED,
        "bias.own_heads == 1 ? 0 : head",
        "head",
        row(_FA3_ONE, AGAINST),
    ),
    emulated(
        "tiles of neighbouring entries are their own",
        _STAGED,
        "batch / bias.entries % bias.own_entries",
        "batch % bias.own_entries",
        f"{NEIGHBOURS}[2-1-{_FA3}]",
    ),
    emulated(
        "a bias for all queries has rows",
        _PANELS,
        "Config::operand_rows == Config::block_q ? q_begin : 0",
        "q_begin",
        row(_FA3_KEYS, AGAINST),
    ),
    emulated(
        "all panels have the keys of the first",
        _PANELS,
        "column + i * Panels::panel_columns",
        "column",
        row(_FA3, AGAINST),
    ),
    emulated(
        "lanes name the rows of another matrix",
        _PANELS,
        "(thread / 16 ^ thread % 8)",
        "(thread / 8 % 2 ^ thread % 8)",
        row(_FA3, AGAINST),
    ),
    emulated(
        "the second and the third of four matrices are exchanged",
        _PANELS,
        "words[dj / 8 % 2 * 2 + di / 8]",
        "words[dj / 8 % 2 + di / 8 * 2]",
        row(_FA3, AGAINST),
    ),
    emulated(
        "keys of the second panel are read in the first",
        _PANELS,
        "    if (transposed) data += lane.column / panel_columns * panel_bytes;\n",
        "",
        row(_FA3, AGAINST),
    ),
    emulated(
        "the swizzle of an odd query is that of the one before",
        _PANELS,
        "(first ^ di % 2 * 16 ^ dj * sizeof(T))",
        "(first ^ dj * sizeof(T))",
        row(_FA3, AGAINST),
    ),
    emulated(
        "a stage is free when one warp has read it",
        _PANELS,
        "(&storage.operand_empty[stage]), reading_warps)",
        "(&storage.operand_empty[stage]), 1)",
        row(_FA3, AGAINST),
    ),
)
