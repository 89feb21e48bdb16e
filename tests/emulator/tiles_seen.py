"""The tiles that a pass must visit."""

from __future__ import annotations

import numpy as np

from ..kit.case import Case

__all__ = ["rows_of_tiles", "tiles_seen", "visit_one_tile"]


def tiles_seen(case: Case, tile: tuple[int, int], pairs: np.ndarray | None = None) -> np.ndarray:
    """Whether a q tile and a kv tile have a pair that is not hidden, by bounds or by ``pairs``."""
    padded = [-(-n // t) * t for n, t in zip((case.seqlen_q, case.seqlen_kv), tile, strict=True)]
    sees = np.zeros(padded, bool)
    sees[: case.seqlen_q, : case.seqlen_kv] = case.sees() if pairs is None else pairs
    parts = sees.reshape(padded[0] // tile[0], tile[0], padded[1] // tile[1], tile[1])
    return parts.any(axis=(1, 3))


def visit_one_tile(case: Case, seen: np.ndarray, block_q: int) -> None:
    """Mark the nearest kv tile for q tiles that see none: FlashAttention-3 visits it."""
    behind = case.visible_range()[0][::block_q] == case.seqlen_kv
    dead = ~seen.any(axis=1)
    seen[dead & behind, -1] = True
    seen[dead & ~behind, 0] = True


def rows_of_tiles(length: int, tile: int) -> np.ndarray:
    """The number of valid rows of each tile."""
    return np.minimum(tile, length - np.arange(0, length, tile))
