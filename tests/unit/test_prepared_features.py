"""Arrays of features where a pass is planned from shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.features.use import Operand

Q, KV = (2, 5, 4, 8), (2, 7, 2, 8)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("sinks", "dtype"),
    [((4,), "float16"), ("float32", "float32"), (np.float16, "float16"), ([4], "float16")],
    ids=str,
)
def test_sinks_are_planned_from_a_shape_or_a_dtype(operation: Any, sinks: Any, dtype: str) -> None:
    """No device is needed: ``explain`` makes the plan."""
    explained = cuflash.explain(
        Q, KV, KV, operation=operation, dtype="float16", sinks=sinks, backend="numpy"
    )
    (use,) = explained.problem.uses
    assert (use.feature, use.compiled) == ("sinks", (("sinks_dtype", dtype),))
    assert use.operands == (Operand("sinks", dtype, (4,)),)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("slopes", "shape"),
    [((4,), (4,)), ((2, 4), (2, 4)), ("float32", (2, 4)), (np.zeros(4, np.float32), (4,))],
    ids=str,
)
def test_slopes_are_planned_from_a_shape_or_a_dtype(
    operation: Any, slopes: Any, shape: Any
) -> None:
    """Slopes are float32 for both half types; if only a dtype is given, they have all axes."""
    explained = cuflash.explain(
        Q, KV, KV, operation=operation, dtype="float16", alibi_slopes=slopes, backend="numpy"
    )
    (use,) = explained.problem.uses
    assert use.feature == "alibi"
    assert use.operands == (Operand("alibi_slopes", "float32", shape),)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("bias", "dtype", "shape"),
    [
        ((7,), "float16", (7,)),
        ([4, 1, 1], "float16", (4, 1, 1)),
        ((2, 4, 5, 7), "float16", (2, 4, 5, 7)),
        ("float32", "float32", (2, 4, 5, 7)),
        (((5, 1), "float32"), "float32", (5, 1)),
        (np.float16, "float16", (2, 4, 5, 7)),
        (np.zeros((1, 5, 1), np.float32), "float32", (1, 5, 1)),
    ],
    ids=str,
)
def test_a_bias_is_planned_from_a_shape_or_a_dtype(
    operation: Any, bias: Any, dtype: str, shape: Any
) -> None:
    """If only a shape is given, the bias has the dtype of q; if only a dtype, it has all axes."""
    explained = cuflash.explain(
        Q, KV, KV, operation=operation, dtype="float16", bias=bias, backend="numpy"
    )
    (use,) = explained.problem.uses
    assert use.feature == "bias"
    (operand,) = use.operands
    assert (operand.name, operand.dtype, operand.shape) == ("bias", dtype, shape)
    assert f"bias {'x'.join(map(str, shape))}" in str(explained)


@pytest.mark.parametrize(
    ("bias", "error", "says"),
    [
        ((8,), VALUE, "bias: got shape (8,)"),
        ((2, 1, 1), VALUE, "bias: got shape (2, 1, 1)"),
        ((1, 2, 4, 5, 7), VALUE, "bias: got shape (1, 2, 4, 5, 7)"),
        ("float64", TYPE, "bias: got dtype float64"),
        ("bfloat16", TYPE, "bias: got dtype bfloat16"),
        (4, TYPE, "bias: got builtins.int"),
    ],
    ids=str,
)
def test_other_biases_are_refused(bias: Any, error: Any, says: str) -> None:
    with pytest.raises(error) as caught:
        cuflash.explain(Q, KV, KV, dtype="float16", bias=bias, backend="numpy")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("slopes", "error", "says"),
    [
        ((3,), VALUE, "alibi_slopes: got shape (3,)"),
        ((1, 4), VALUE, "alibi_slopes: got shape (1, 4)"),
        ("float16", TYPE, "alibi_slopes: got dtype float16"),
        (4, TYPE, "alibi_slopes: got builtins.int"),
    ],
    ids=str,
)
def test_other_slopes_are_refused(slopes: Any, error: Any, says: str) -> None:
    with pytest.raises(error) as caught:
        cuflash.explain(Q, KV, KV, dtype="float16", alibi_slopes=slopes, backend="numpy")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("sinks", "error", "says"),
    [
        ((3,), VALUE, "sinks: got shape (3,)"),
        ((4, 1), VALUE, "sinks: got shape (4, 1)"),
        ((-4,), VALUE, "a shape: non-negative integers"),
        ("float64", TYPE, "sinks: got dtype float64"),
        ("int32", TYPE, "sinks: got"),
        ("nothing", TYPE, "sinks: got"),
        (np.zeros(3, np.float16), VALUE, "sinks: got shape (3,)"),
        (4, TYPE, "sinks: got builtins.int"),
    ],
    ids=str,
)
def test_other_sinks_are_refused(sinks: Any, error: Any, says: str) -> None:
    with pytest.raises(error) as caught:
        cuflash.explain(Q, KV, KV, dtype="float16", sinks=sinks, backend="numpy")
    assert says in str(caught.value)
