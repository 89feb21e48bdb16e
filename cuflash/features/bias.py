"""Bias: adds a number to the score of every pair.

``z = scale q k^T + bias`` before the softmax, after a softcap. The array broadcasts against (batch,
heads_q, seqlen_q, seqlen_kv) and is never repeated in memory. Minus infinity hides a pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .added import INVERSE_UNIT, inverse_unit
from .device import MAIN_KERNELS, TENSOR_MAP, DevicePart, with_map
from .feature import ArrayRule, Feature, Request
from .host import Given, HostPart, ScorePlace
from .pairs import AXES, block_of, numbers_of, part_of
from .use import Use

__all__ = ["BIAS"]

_NAME = "bias"
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="BiasParams",
    block=np.dtype([*block_of(_NAME), *INVERSE_UNIT], align=True),
    seams=(("Score", "BiasTerm<{bias_dtype}, {bias_storage}, {bias_of_rows}, {bias_of_keys}>"),),
    header="features/bias.cuh",
)


#: For FlashAttention-3, which brings a bias that differs from key to key to shared memory.
_STAGED = DevicePart(
    kernels=frozenset({("fa3", "forward"), ("fa3", "backward")}),
    struct="StagedBiasParams",
    block=with_map(
        (f"{_NAME}_map", TENSOR_MAP),
        ("entries", np.int32),
        ("own_entries", np.int32),
        ("own_heads", np.int32),
        *INVERSE_UNIT,
    ),
    seams=(("Score", "StagedBiasTerm<{bias_dtype}, {bias_storage}, {bias_of_rows}>"),),
    header="features/bias_staged.cuh",
)


def _add(scores: Any, place: ScorePlace, given: Given) -> None:
    scores += part_of(given[_NAME], place, given["entries"]).astype(scores.dtype)


def _use(request: Request) -> Use | None:
    bias = request.operands.get(_NAME)
    if bias is None:
        return None
    _, _, rows, keys = bias.pairs
    bias = replace(bias, staged=keys > 1)
    return Use(
        "bias",
        _DEVICE,
        staged=_STAGED if bias.staged else None,
        compiled=(
            ("bias_dtype", bias.dtype),
            ("bias_storage", request.problem.storage),
            ("bias_of_rows", int(rows > 1)),
            ("bias_of_keys", int(keys > 1)),
        ),
        numbers=(*numbers_of(bias), *inverse_unit(request, _NAME)),
        operands=(bias,),
        host=HostPart(_add),
        shown="bias " + "x".join(map(str, bias.shape)),
    )


BIAS = Feature(
    "bias",
    _use,
    _DEVICE,
    arrays={_NAME: ArrayRule(AXES, ("storage", "float32"), differentiable=True, broadcast=True)},
)
