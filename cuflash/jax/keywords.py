"""Checks the keywords that networks pass to an attention function.

Flax calls its ``attention_fn`` with the keywords that the function has parameters
for, and drops the others. So a keyword that changes the answer must be a parameter,
even if every value but one is refused.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..block_mask import split_block_mask
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.dropout import check_probability
from ..options import check_dtype, check_flag
from ..planning.problem import DTypeName
from ..score_mod import with_arrays

__all__ = ["KNOWN", "as_number", "check_cast", "check_returns", "checked"]

#: The requirement of a keyword that is compiled in.
KNOWN = "a number that is known while JAX traces"
_SCALE = f"{KNOWN}: multiply query by a traced one, and give scale=1"

_REMEDIES = {
    "module": "weights are never formed, so none can be sown: sow_weights=False",
    "qk_attn_weights_einsum": "the products are computed as they are, not quantized",
    "attn_weights_value_einsum": "the products are computed as they are, not quantized",
}

_DROPOUT = ("dropout_rate", "dropout_rng", "broadcast_dropout", "deterministic")
_OF_THE_PASS = (
    "is_causal",
    "local_window_size",
    "softcap",
    "score_mod",
    "scale",
    "q_offset",
    "algorithm",
    "deterministic_gradients",
    "residual_dtype",
)


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the pass; the others do not change the answer, or are refused.

    Parameters
    ----------
    given
        Every argument by name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword.
    """
    _check_none(**{name: given[name] for name in _REMEDIES})
    _check_implementation(given["implementation"])
    _check_precision(given["precision"], given["force_fp32_for_softmax"])
    found = {name: given[name] for name in _OF_THE_PASS}
    found["block_mask"], _ = split_block_mask(given["block_mask"])
    found["dropout_rate"] = _check_dropout(*(given[name] for name in _DROPOUT))
    found["scale"] = as_number("scale", given["scale"], _SCALE)
    found["score_mod"] = with_arrays(given["score_mod"])[0]
    found["softcap"] = as_number("softcap", given["softcap"], KNOWN)
    found["local_window_size"] = _check_window(given["local_window_size"])
    return found


def _check_none(**given: Any) -> None:
    """Refuse keywords that would change the answer and are not supported.

    Raises
    ------
    ArgumentValueError
        Naming the keyword, and what to do.
    """
    for name, value in given.items():
        if value is not None:
            raise ArgumentValueError(name, _shown(value), f"None: {_REMEDIES[name]}")


def _check_implementation(value: Any) -> None:
    """Refuse JAX's implementations.

    Raises
    ------
    ArgumentValueError
        If it is anything but None and "cuflash".
    """
    if value is not None and not (isinstance(value, str) and value == "cuflash"):
        raise ArgumentValueError("implementation", _shown(value), "None or 'cuflash'")


def _check_dropout(rate: Any, rng: Any, broadcast: Any, deterministic: Any) -> float:
    """Return the fraction of the weights that is dropped: 0 with ``deterministic``.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword.
    """
    check_flag("broadcast_dropout", broadcast)
    without = check_flag("deterministic", deterministic)
    given = as_number("dropout_rate", rate, KNOWN)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ArgumentTypeError("dropout_rate", _shown(given), "a number")
    rate = float(given)
    if not (math.isfinite(rate) and 0 <= rate <= 1):
        raise ArgumentValueError("dropout_rate", repr(rate), "0 to 1")
    if rng is not None and not hasattr(rng, "dtype"):
        raise ArgumentTypeError("dropout_rng", _shown(rng), "a key of jax.random, or None")
    if without or rate == 0:
        return 0.0
    if rng is None:
        got = f"None with dropout_rate {rate:g} and deterministic=False"
        raise ArgumentValueError("dropout_rng", got, "a key of jax.random")
    return check_probability("dropout_rate", rate)


def _check_precision(precision: Any, force_fp32_for_softmax: Any) -> None:
    """Accept every setting of :class:`jax.lax.Precision`: the pass is precise enough for all.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If a keyword is no such setting.
    """
    check_flag("force_fp32_for_softmax", force_fp32_for_softmax)
    both = precision if isinstance(precision, tuple) and len(precision) == 2 else (precision,)
    for one in both:
        try:
            known = one is None or isinstance(jax.lax.Precision(one), jax.lax.Precision)
        except (TypeError, ValueError):
            known = False
        if not known:
            expected = "None, one or two settings of jax.lax.Precision"
            raise ArgumentValueError("precision", _shown(precision), expected)


def _check_window(value: Any) -> tuple[int, int] | None:
    """Return the sides of ``local_window_size``: one number means both; they may be negative.

    Raises
    ------
    ArgumentTypeError
        If it is no integer and no pair of them.
    """
    expected = "an integer or a pair (left, right), known while JAX traces; None for no window"
    sides = list(value) if isinstance(value, (tuple, list)) else [value, value]
    sides = [as_number("local_window_size", side, expected) for side in sides]
    if value is None:
        return None
    whole = all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in sides)
    if len(sides) != 2 or not whole:
        raise ArgumentTypeError("local_window_size", _shown(value), expected)
    return int(sides[0]), int(sides[1])


def check_cast(dtype: Any) -> DTypeName | None:
    """Return the dtype to compute in and to return; None for that of the arrays.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is no storage type, or one that JAX is not set up for.
    """
    checked = check_dtype("dtype", dtype)
    if checked == "float64" and not jax.config.jax_enable_x64:
        raise ArgumentValueError("dtype", "float64", "float64 only with jax_enable_x64")
    return checked


def check_returns(lse: Any, residual: Any) -> tuple[bool, bool]:
    """Return whether to return the log-sum-exp, and whether to return JAX's residual.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If one is no flag, or both are set.
    """
    flags = check_flag("return_lse", lse), check_flag("return_residual", residual)
    if all(flags):
        raise ArgumentValueError("return_residual", "True beside return_lse=True", "one of the two")
    return flags


def as_number(name: str, value: Any, expected: str) -> Any:
    """Return the number in an array without axes; any other value unchanged.

    Raises
    ------
    ArgumentTypeError
        If the array is being traced or cannot be read.
    """
    if isinstance(value, jax.core.Tracer):
        raise ArgumentTypeError(name, "an array that JAX is tracing", expected)
    if not isinstance(value, (np.generic, np.ndarray, jax.Array)) or value.shape != ():
        return value
    try:
        return value.item()
    except RuntimeError as error:  # deleted, or in another process
        raise ArgumentTypeError(
            name, f"an array that cannot be read ({error})", expected
        ) from error


def _shown(value: Any) -> str:
    """Return a short description of a value for an error."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (str, int, float, complex, tuple)):
        return repr(value)[:100]
    return f"{type(value).__module__}.{type(value).__qualname__}"
