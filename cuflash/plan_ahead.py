"""What ``prepare`` and ``explain`` share: calls planned ahead, from arrays or shapes alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from .block_mask import split_block_mask
from .caches.described import describe_caches
from .caches.planned import CACHE_ARGUMENTS, NO_ARRAYS, TAKEN, CachePlan, plan_caches
from .errors import ArgumentTypeError, ArgumentValueError, shown
from .given import ARRAYS, add_given
from .options import Options, check_options, names_of, seed_of
from .pipeline import choose_device
from .score_mod import with_arrays
from .signature import check_place
from .tensors import QKV

__all__ = ["Asked", "PlannedOperation", "check_asked", "plan_with_caches"]

PlannedOperation = Literal["forward", "backward", "kvcache", "append"]

#: Arguments of every operation.
_OF_ALL = ("operation", "dtype", "device", "backend", "compile")
#: Keywords that are passed on unchanged.
_KEYWORDS = (
    *("causal", "window_size", "softcap", "dropout_p", "scale", "q_offset", "layout", "out_dtype"),
    *("wrt", "deterministic", "algorithm", "blocks", "kv_chunk"),
)


class Asked(NamedTuple):
    """The checked keywords of a call, and what describes the arrays of a pass without caches."""

    options: Options
    arrays: dict[str, Any]


def check_asked(given: Mapping[str, Any], function: Callable[..., Any]) -> Asked:
    """Refuse an unknown operation and arguments that it does not take, and check keywords.

    Parameters
    ----------
    given
        The value of every parameter of ``function``, by name. Without a ``backend`` it is CUDA.
    function
        ``prepare`` or ``explain``.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument.
    """
    _check_taken(given, inspect.signature(function).parameters)
    block, blocks_shown = split_block_mask(given["block_mask"])
    seed, seeds = seed_of(given["dropout_seed"])
    score, of_score = with_arrays(given["score_mod"])
    checked = {"score_mod": score, "block_mask": block, "dropout_seed": seed}
    checked["backend"] = given.get("backend", "cuda")
    options = check_options(**{name: given[name] for name in _KEYWORDS}, **checked)
    arrays: dict[str, Any] = {name: given[name] for name in QKV}
    features = {**given, "block_mask": blocks_shown, "dropout_seed": seeds}
    add_given(arrays, tuple(features[name] for name in ARRAYS), of_score)
    return Asked(options, arrays)


def plan_with_caches(
    given: Mapping[str, Any], options: Options, where: int, length: int | None = None
) -> CachePlan:
    """Return the plan of an operation with caches.

    Parameters
    ----------
    given
        As for :func:`check_asked`.
    options
        The checked keywords.
    where
        The device of arrays that do not exist yet.
    length
        ``cache_seqlens`` if it is a number; ``given`` then has the dtype of an array in its place.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError
        As for the call itself; also if an array is in host memory or on another device.
    """
    names = ("q", "k", "v", "cu_seqlens_q", "alibi_slopes", "sinks", *CACHE_ARGUMENTS)
    arrays = {name: given[name] for name in names if name not in NO_ARRAYS}
    if given["operation"] == "kvcache" and given["q"] is None:
        raise ArgumentTypeError("q", "None", "an array, or its shape")
    specs, scales = describe_caches(arrays, given["dtype"], options, where)
    for name, spec in specs.items():
        check_place(name, spec, given.get("device"))
    choose_device(specs["k_cache"].device, options)
    others = scales, given["max_seqlen_q"], length
    return plan_caches(specs, given["rotary_interleaved"], options, *others)


def _check_taken(given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse an unknown operation, and arguments that the operation does not take."""
    operation = given["operation"]
    if not isinstance(operation, str) or operation not in get_args(PlannedOperation):
        expected = names_of(get_args(PlannedOperation))
        raise ArgumentValueError("operation", shown(operation), f"one of {expected}")
    taken = TAKEN.get(operation)
    refused = (
        CACHE_ARGUMENTS if taken is None else [n for n in given if n not in (*_OF_ALL, *taken)]
    )
    for name in refused:
        value, default = given[name], parameters[name].default
        plain = isinstance(value, (bool, str, tuple)) and type(value) is type(default)
        if value is not default and not (plain and value == default):
            said = f"nothing: operation={operation!r} has none"
            raise ArgumentValueError(name, shown(value), said)
