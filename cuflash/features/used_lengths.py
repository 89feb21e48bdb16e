"""Used lengths: every batch entry uses its first queries and keys, and ignores the others.

A query beyond ``seqused_q`` sees no key and no sink: its output is 0 and its
log-sum-exp minus infinity. A key beyond ``seqused_kv`` is seen by no query and may
hold anything. Lengths are clamped to those of the arrays. Without ``q_offset`` the
last used query is at the last used key, as in FlashAttention (Dao 2023): query i of
entry b is at key ``i + seqused_kv[b] - seqused_q[b]``.
"""

from __future__ import annotations

import numpy as np

from .device import MAIN_KERNELS, DevicePart
from .feature import ArrayRule, Feature, Request
from .use import Use

__all__ = ["NAMES", "USED_LENGTHS"]

#: The arrays: lengths of queries, then lengths of keys.
NAMES = "seqused_q", "seqused_kv"

_DEVICE = DevicePart(
    kernels=MAIN_KERNELS | {("steps", name) for name in ("statistics", "sink_gradient", "merge")},
    struct="UsedLengthsParams",
    block=np.dtype(
        [*((name, np.uint64) for name in NAMES), ("bottom_right", np.int64)], align=True
    ),
    seams=(("Lengths", "UsedLengths<{before}>"),),
    header="features/used_lengths.cuh",
)


def _use(request: Request) -> Use | None:
    operands = tuple(request.operands[name] for name in NAMES if name in request.operands)
    if not operands:
        return None
    return Use(
        "used_lengths",
        _DEVICE,
        numbers=(("bottom_right", int(request.bottom_right)),),
        operands=operands,
        shown="used lengths" + " from the end" * request.bottom_right,
    )


USED_LENGTHS = Feature(
    "used_lengths",
    _use,
    _DEVICE,
    arrays={name: ArrayRule(("batch",), ("int32",)) for name in NAMES},
)
