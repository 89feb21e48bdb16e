"""Problems with few queries on many keys, or few heads: the query rows do not fill a device."""

from __future__ import annotations

from dataclasses import replace

from .case import Case, square

__all__ = ["batches", "decode", "decode_float8", "drafts", "few", "pages"]

#: Batch, keys, heads of q and of k, and head_dim of a step of decoding: one query a sequence.
_DECODED = (
    (1, 131072, 32, 8, 128),
    (64, 8192, 32, 8, 128),
    (16, 32768, 64, 8, 128),
    (1, 4096, 64, 8, 128),
    (1, 1024, 64, 8, 128),
    (8, 2048, 32, 32, 128),
    (128, 4096, 16, 1, 128),
    (4, 16384, 32, 8, 64),
    (32, 1000, 32, 4, 256),
    (8, 8192, 16, 2, 256),
)
#: Batch, keys, heads of q and of k, and head_dim of a step of decoding with paged caches.
_PAGED = (
    (64, 8192, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (16, 8192, 64, 8, 64),
    (8, 8192, 16, 2, 256),
)
#: Batch, queries, keys, heads and head_dim: the words of a prompt that attend to an image, and a
#: chunk of a long prompt.
_CROSSED = ((16, 77, 4096, 8, 64), (16, 77, 4096, 8, 128), (4, 1024, 8192, 16, 128))


def decode() -> list[Case]:
    """A step of decoding over full caches, timed in turns with ``attention`` on the same arrays."""
    return _decoded(_DECODED)


def decode_float8() -> list[Case]:
    """A step of decoding over float8 caches, timed in turns with 16-bit caches."""
    return [replace(case, float8=True) for case in decode()]


def pages() -> list[Case]:
    """A step of decoding over paged caches, timed in turns with caches in one piece."""
    return [replace(case, pages=(64, 16)) for case in _decoded(_PAGED)]


def batches() -> list[Case]:
    """A step of decoding with 1 to 40 sequences: no size may be much slower than its neighbours."""
    return _decoded(tuple((batch, 8192, 32, 8, 128) for batch in range(1, 41)))


def drafts() -> list[Case]:
    """A step of decoding, and one that checks eight drafted tokens, over the same caches."""
    one = _decoded(((1, 32768, 32, 8, 128), (8, 32768, 32, 8, 128)))
    return [replace(case, seqlen_q=n, causal=n > 1) for case in one for n in (1, 8)]


def _decoded(sizes: tuple[tuple[int, int, int, int, int], ...]) -> list[Case]:
    return [
        Case(
            *("forward", "bfloat16", batch, heads_q, heads_kv, dim, dim, 1, keys, False, "fa2"),
            kvcache=True,
            rotated=True,
        )
        for batch, keys, heads_q, heads_kv, dim in sizes
    ]


def few() -> list[Case]:
    """Problems with fewer queries than keys, and one long head under a causal mask."""
    crossed = [
        Case("forward", "bfloat16", batch, heads, heads, dim, dim, queries, keys, False, "fa3")
        for batch, queries, keys, heads, dim in _CROSSED
    ]
    alone = square("forward", "bfloat16", 1, 1, 128, 16384, True, "fa3")
    return [replace(case, rotated=True) for case in (*crossed, alone)]
