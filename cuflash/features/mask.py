"""Boolean masks: a pair takes part where the mask is True.

The array broadcasts against (batch, heads_q, seqlen_q, seqlen_kv) and is never repeated in memory.
It hides pairs after all changes of scores, in addition to a causal mask or a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import MAIN_KERNELS, DevicePart
from .feature import ArrayRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .pairs import AXES, block_of, numbers_of, part_of
from .use import Use

__all__ = ["MASK"]

_NAME = "mask"
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="MaskParams",
    block=np.dtype(block_of(_NAME), align=True),
    seams=(("Score", "MaskTerm<{mask_storage}, {mask_of_rows}, {mask_of_keys}>"),),
    header="features/mask.cuh",
)

#: For FlashAttention-3 and a mask that differs from key to key: bits in the workspace.
_PACKED = DevicePart(
    kernels=frozenset({("fa3", "forward"), ("fa3", "backward")}),
    struct="PackedMaskParams",
    block=np.dtype(
        [
            *((name, np.uint64) for name in ("tile_bits", "pair_bits")),
            *((name, np.int32) for name in ("entries", "own_entries", "own_heads")),
        ],
        align=True,
    ),
    seams=(("Score", "PackedMaskTerm<{mask_storage}>"),),
    header="features/mask_packed.cuh",
)


def _hide(scores: Any, place: ScorePlace, given: Given) -> None:
    np.copyto(scores, -np.inf, where=~part_of(given[_NAME], place, given["entries"]))


def _use(request: Request) -> Use | None:
    mask = request.operands.get(_NAME)
    if mask is None:
        return None
    _, _, rows, keys = mask.pairs
    return Use(
        "mask",
        _DEVICE,
        packed=_PACKED if keys > 1 else None,
        compiled=(
            ("mask_storage", request.problem.storage),
            ("mask_of_rows", int(rows > 1)),
            ("mask_of_keys", int(keys > 1)),
        ),
        numbers=numbers_of(mask),
        operands=(mask,),
        host=HostPart(_hide),
        shown="mask " + "x".join(map(str, mask.shape)),
    )


MASK = Feature(
    "mask",
    _use,
    _DEVICE,
    arrays={_NAME: ArrayRule(AXES, ("bool",), broadcast=True)},
)
