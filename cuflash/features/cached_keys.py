"""Caches: the positions of an entry's keys in memory, for attention over caches.

The keys are in pages that a table names (Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention", 2023), in another entry of the
caches, or after unused rows. The function ``attention`` does not have these arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays.spec import TensorSpec
from .device import DevicePart
from .feature import ArrayRule, Feature, Request
from .kv_chunks import MERGE
from .packed_queries import NAME as QUERY_OFFSETS
from .use import Use

__all__ = ["CACHED_KEYS", "NAMES", "pages_of", "shape_of_entries"]

#: Arrays of a call with caches: the table of pages or entries, and the padding on the left.
NAMES = "page_table", "cache_leftpad"

_DEVICE = DevicePart(
    kernels=frozenset((("fa2", "forward"), ("fa3", "forward"), MERGE)),
    struct="CachedKeysParams",
    block=np.dtype(
        [
            *((name, np.uint64) for name in NAMES),
            *((name, np.int32) for name in ("table_pages", "page_size", "page_shift", "pages")),
        ],
        align=True,
    ),
    seams=(("Lengths", "CachedLengths<{before}>"), ("Keys", "KeysInPages")),
    header="features/cached_keys.cuh",
)


def _use(request: Request) -> Use | None:
    operands = tuple(request.operands[name] for name in NAMES if name in request.operands)
    problem = request.problem
    if not operands and not problem.most_queries:
        return None
    pages, page_size = problem.pages if any(problem.pages) else (problem.batch, problem.seqlen_kv)
    table_pages = problem.seqlen_kv // max(1, page_size)
    is_power = page_size & (page_size - 1) == 0
    shift = 31 if table_pages <= 1 else page_size.bit_length() - 1 if is_power else -1
    sizes = ("table_pages", table_pages), ("page_size", page_size)
    numbers = (*sizes, ("page_shift", shift), ("pages", pages))
    return Use(
        *("cached_keys", _DEVICE),
        numbers=numbers,
        operands=operands,
        shown=f"pages of {page_size:,}" if table_pages > 1 else "entries of caches",
    )


def pages_of(specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Return the number of pages or entries of caches, and their rows; (0, 0) if q has as many."""
    if "page_table" not in specs and QUERY_OFFSETS not in specs:
        return 0, 0
    pages, rows, *_ = specs["k"].shape
    return pages, rows


def shape_of_entries(name: str, specs: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    """Return the shape of q, k or v with the pages of an entry of the batch joined."""
    shape = specs[name].shape
    if name == "q" or pages_of(specs) == (0, 0):
        return shape
    batch, pages = specs["page_table"].shape if "page_table" in specs else (shape[0], 1)
    return (1 if QUERY_OFFSETS in specs else batch, pages * shape[1], *shape[2:])


CACHED_KEYS = Feature(
    "cached_keys",
    _use,
    _DEVICE,
    arrays={
        "page_table": ArrayRule((), ("int32",), most_axes=2),
        "cache_leftpad": ArrayRule(("batch",), ("int32",)),
    },
)
