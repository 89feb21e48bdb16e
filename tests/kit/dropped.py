"""The factors that dropout applies to the weights of a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.reference_dropout import dropped

from .case import Case

__all__ = ["left_of"]


def left_of(
    case: Case, inputs: Mapping[str, np.ndarray], b: int, h: int, dtype: Any = np.float64
) -> np.ndarray:
    """The factors of a head's weights, (seqlen_q, seqlen_kv); 1 without dropout.

    A seed among the inputs replaces the case's own.
    """
    if not case.dropout:
        return np.ones((case.seqlen_q, case.seqlen_kv), dtype)
    seed = inputs.get("dropout_seed", case.dropout_seed)
    sizes = case.seqlen_q, case.seqlen_kv
    return dropped(case.dropout_p, seed, b * case.heads_q + h, *sizes, dtype)
