"""Bias: a number of every pair, added to its score.

``z = scale q k^T + bias`` before the softmax, after a softcap. The array
broadcasts against (batch, heads_q, seqlen_q, seqlen_kv), and what it is
broadcast over is never repeated in memory. Minus infinity hides a pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .added import INVERSE_UNIT, inverse_unit
from .device import MAIN_KERNELS, TENSOR_MAP, DevicePart, with_map
from .feature import ArrayRule, Axis, Feature, Request
from .host import Given, HostPart, ScorePlace
from .use import Use

__all__ = ["BIAS", "part_of"]

_NAME = "bias"
_AXES: tuple[Axis, ...] = ("batch", "heads_q", "seqlen_q", "seqlen_kv")
_STRIDES = ("batch_stride", "head_stride", "row_stride", "column_stride")
_DEVICE = DevicePart(
    kernels=MAIN_KERNELS,
    struct="BiasParams",
    block=np.dtype(
        [
            (_NAME, np.uint64),
            *((f"{_NAME}_{stride}", np.int64) for stride in _STRIDES),
            ("entries", np.int32),
            ("own_entries", np.int32),
            *INVERSE_UNIT,
        ],
        align=True,
    ),
    seams=(("Score", "BiasTerm<{bias_dtype}, {bias_storage}, {bias_of_rows}, {bias_of_keys}>"),),
    header="features/bias.cuh",
)


#: Of FlashAttention-3 where it brings a bias to shared memory, which differs from key to key.
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


def part_of(array: Any, place: ScorePlace, entries: int = 1) -> Any:
    """The part of an array that broadcasts which a tile needs.

    (batch, head of the keys, key, head of the group, query), each its size or
    1; a view unless so many neighbouring ``entries`` of the batch share one of
    the array's.
    """
    whole = array.reshape((1,) * (len(_AXES) - array.ndim) + array.shape)
    _, of_keys, _, group, _ = place.head.shape
    split = (1, 1)
    if whole.shape[1] > 1:
        first = place.head.flat[0]
        whole = whole[:, first : first + of_keys * group]
        split = (of_keys, group)
    own = place.batch.ravel() // entries % whole.shape[0]
    if whole.shape[0] > 1:
        in_order = np.array_equal(own, np.arange(own[0], own[0] + own.size))
        whole = whole[own[0] : own[-1] + 1] if in_order else whole[own]
    for axis, index in ((2, place.i.ravel()), (3, place.j.ravel())):
        if whole.shape[axis] > 1:
            whole = whole[(slice(None),) * axis + (slice(index[0], index[-1] + 1),)]
    batch, _, rows, keys = whole.shape
    return whole.reshape(batch, *split, rows, keys).transpose(0, 1, 4, 2, 3)


def _add(scores: Any, place: ScorePlace, given: Given) -> None:
    scores += part_of(given[_NAME], place, given["entries"]).astype(scores.dtype)


def _use(request: Request) -> Use | None:
    bias = request.operands.get(_NAME)
    if bias is None:
        return None
    problem = request.problem
    own, heads, rows, keys = bias.pairs
    bias = replace(bias, staged=keys > 1)
    entries = 1 if bias.entries is None else bias.entries[0]
    return Use(
        "bias",
        _DEVICE,
        staged=_STAGED if bias.staged else None,
        compiled=(
            ("bias_dtype", bias.dtype),
            ("bias_storage", problem.storage),
            ("bias_of_rows", int(rows > 1)),
            ("bias_of_keys", int(keys > 1)),
        ),
        numbers=(
            ("entries", entries),
            ("own_entries", max(1, own)),
            ("own_heads", heads),
            *inverse_unit(request, _NAME),
        ),
        operands=(bias,),
        host=HostPart(_add),
        shown="bias " + "x".join(map(str, bias.shape)),
    )


BIAS = Feature(
    "bias",
    _use,
    _DEVICE,
    arrays={_NAME: ArrayRule(_AXES, ("storage", "float32"), differentiable=True, broadcast=True)},
)
