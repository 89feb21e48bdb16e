"""The table of features: a row here and its file make a call take the feature's arguments.

The public functions list these arguments by hand; a test compares their signatures with the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..planning.problem import AttentionProblem
from .alibi import ALIBI
from .bias import BIAS
from .block_mask import BLOCK_MASK
from .cached_keys import CACHED_KEYS
from .dropout import DROPOUT
from .feature import Feature, Request
from .float8 import FLOAT8
from .mask import MASK
from .packed_lengths import PACKED_LENGTHS
from .packed_queries import PACKED_QUERIES
from .refused import check_refused, gradients_of
from .score_mod import SCORE_MOD
from .sinks import SINKS
from .softcap import SOFTCAP
from .use import Operand
from .used_lengths import USED_LENGTHS
from .window import WINDOW

__all__ = ["FEATURES", "every_feature", "with_features"]

#: Features by name, in the order of their parameters on the device.
FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        *(WINDOW, USED_LENGTHS, PACKED_LENGTHS, SOFTCAP, SCORE_MOD, ALIBI, BIAS),
        *(MASK, BLOCK_MASK, SINKS, DROPOUT),
    )
}


def every_feature() -> tuple[Feature, ...]:
    """All features: those in the table, and those of functions other than attention."""
    return (FLOAT8, *FEATURES.values(), CACHED_KEYS, PACKED_QUERIES)


def with_features(
    problem: AttentionProblem,
    keywords: Mapping[str, Any],
    operands: Mapping[str, Operand],
    position: int = 0,
    draws: tuple[int, int] | None = None,
    places: tuple[int, int] | None = None,
    bottom_right: bool = False,
) -> AttentionProblem:
    """The problem with what every feature adds to it.

    Parameters
    ----------
    problem
        The problem without features, but with the bounds of the keys that each query sees.
    keywords, operands
        Keywords and arrays of all features, by argument name; absent ones are left out.
    position
        The position of query 0 among the keys, whatever the mask.
    draws, places, bottom_right
        As in :class:`Request`.

    Raises
    ------
    UnsupportedError
        If two features, or a feature and the pass or dtype, do not go together.
    """
    for feature in every_feature():
        request = Request(
            problem,
            {name: keywords[name] for name in feature.keywords if name in keywords},
            {name: operands[name] for name in feature.arrays if name in operands},
            position,
            draws,
            places,
            bottom_right,
        )
        use = feature.use(request)
        if use is not None:
            problem = replace(problem, uses=(*problem.uses, use))
    wrt = problem.wrt if problem.operation == "backward" else ()
    check_refused((problem.operation, problem.storage, *problem.features, *gradients_of(wrt)))
    return problem
