"""Split keys: several blocks process the keys of a q tile. A plan adds this to a problem.

It is no argument of a call: ``kv_chunk`` is an option of the plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..planning.problem import AttentionProblem
from .device import DevicePart
from .use import Use

__all__ = ["MERGE", "NAME", "with_chunks"]

NAME = "kv_chunks"
#: The kernel that merges the results of the blocks.
MERGE = ("steps", "merge")

_DEVICE = DevicePart(
    kernels=frozenset((("fa2", "forward"), ("fa3", "forward"), MERGE)),
    struct="KvChunksParams",
    block=np.dtype(
        [
            *((name, np.uint64) for name in ("out_parts", "reference_parts", "sum_parts")),
            ("chunk", np.int32),
            ("chunks", np.int32),
        ],
        align=True,
    ),
    seams=(("Chunks", "KvChunks"),),
    header="features/kv_chunks.cuh",
)


def with_chunks(problem: AttentionProblem, chunk: int) -> AttentionProblem:
    """Return the problem with the keys of every q tile split into chunks."""
    numbers = (("chunk", chunk), ("chunks", -(-problem.seqlen_kv // chunk)))
    use = Use(NAME, _DEVICE, numbers=numbers, shown=f"chunks of {chunk:,} keys")
    return replace(problem, uses=(*problem.uses, use))
