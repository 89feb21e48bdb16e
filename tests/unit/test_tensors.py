"""The table of tensors against the arguments and results of calls."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.arrays.adopt import adopt
from cuflash.checks import describe
from cuflash.features import cached_keys, float8, packed_queries
from cuflash.options import check_options
from cuflash.signature import signature_of
from cuflash.tensors import destinations, made_by, tensors

from .wrt_case import GivenCall, calls

PASSES: dict[Any, Any] = {"forward": cuflash.attention, "backward": cuflash.attention_backward}

#: Tensors that only calls with caches read; the functions of these passes have no such arguments.
OF_CACHES = {*cached_keys.NAMES, *float8.NAMES, packed_queries.NAME}


@pytest.mark.parametrize("operation", PASSES)
def test_what_a_pass_reads_and_where_it_writes_are_its_arguments(operation: Any) -> None:
    parameters = inspect.signature(PASSES[operation]).parameters
    for tensor in tensors().values():
        if operation in tensor.reads and tensor.name not in OF_CACHES:
            default = parameters[tensor.argument or tensor.name].default
            optional = operation in tensor.optional
            assert default is (None if optional else inspect.Parameter.empty), tensor.name
    assert tensors().keys() >= OF_CACHES
    assert OF_CACHES.isdisjoint(parameters)
    named = destinations(operation)
    assert set(named.values()) == {n for n, t in tensors().items() if t.written == operation}
    if operation == "forward":
        assert all(parameters[argument].default is None for argument in named)
    else:
        assert all(argument == tensor for argument, tensor in named.items())


@settings(max_examples=40)
@given(call=calls())
def test_shapes_and_dtypes_are_those_of_what_calls_give(call: GivenCall) -> None:
    """Both passes are described in every layout, from q, k, v and features' arrays only."""
    out, lse = cuflash.attention(**call.inputs, **call.keywords, return_lse=True)
    wrt = tuple(
        name for name in ("v", "sinks", "q", "bias", "alibi_slopes", "k") if name in call.inputs
    )
    dout = np.zeros_like(out)
    saved = {"dout": dout, "out": out, "lse": lse}
    grads = cuflash.attention_backward(**saved, **call.inputs, **call.keywords, wrt=wrt)
    made = dict(zip(made_by("backward", wrt), grads, strict=True)) | {"out": out, "lse": lse}
    specs = {name: adopt(name, array).spec for name, array in call.inputs.items()}
    options = check_options(**call.keywords, wrt=wrt)
    described = describe("forward", specs, options)
    for name, array in made.items():
        fresh = described.fresh(name, None)
        assert (fresh.shape, fresh.dtype) == (array.shape, array.dtype.name), name
    # The description of a backward pass without its arrays comes from the described forward pass.
    signature = dict(signature_of("backward", call.inputs, None, options, None))
    wanted = {**specs, **{n: adopt(n, a).spec for n, a in saved.items()}}
    wanted["dlse"] = wanted["lse"]
    assert signature.keys() == wanted.keys()
    for name, spec in wanted.items():
        assert (signature[name].shape, signature[name].dtype) == (spec.shape, spec.dtype), name
