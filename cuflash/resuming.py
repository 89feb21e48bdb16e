"""Attention over more keys, merged with the ``out`` and ``lse`` over other keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from . import dispatch
from .arrays.adopt import Adopted, address, adopt
from .arrays.meaning import kind_of
from .arrays.overlap import share_memory
from .arrays.spec import Layout, TensorSpec
from .checks import CallProblem, describe
from .errors import ArgumentTypeError, ArgumentValueError
from .merging import merge
from .options import Options, check_flag, check_options
from .pipeline import choose_device
from .planning.problem import DTYPES, DTypeName
from .states import STATE, merge_states
from .tensors import argument_of

__all__ = ["resumed"]

#: Results, and the arguments that are their destinations.
_TARGETS = {"out": "out", "lse": "lse_out"}


def resumed(arrays: Mapping[str, Any], keywords: Mapping[str, Any], state: Any) -> Any:
    """Run attention, and merge its results with a state.

    Parameters
    ----------
    arrays, keywords
        As for :func:`~.dispatch.call`.
    state
        ``(out, lse)`` as the caller gave it.

    Returns
    -------
    array, or two
        As for :func:`cuflash.attention`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Before anything is launched or written.
    """
    with_lse = check_flag("return_lse", keywords["return_lse"])
    before = _adopted_state(state)
    others = ("workspace", *_TARGETS.values())
    inputs = {n: adopt(argument_of(n), a) for n, a in arrays.items() if n not in others}
    targets = {n: adopt(n, arrays[n]) for n in _TARGETS.values() if n in arrays}
    call = _checked(inputs, targets, before, keywords)
    if arrays.get("workspace") is not None:
        _check_apart(adopt("workspace", arrays["workspace"]), targets, before)
    natives = {name: array.native for name, array in inputs.items()}
    natives |= {"workspace": arrays["workspace"]} if "workspace" in arrays else {}
    wide = before["out"].spec.dtype
    now = dispatch.call("forward", natives, {**keywords, "out_dtype": wide, "return_lse": True})
    to = {n: targets[t].native if t in targets else now[n] for n, t in _TARGETS.items()}
    _merge({n: array.native for n, array in before.items()}, now, to, call.layout)
    answer = inputs["q"].answer
    found = {n: targets[t].given if t in targets else answer(to[n]) for n, t in _TARGETS.items()}
    return (found["out"], found["lse"]) if with_lse else found["out"]


def _adopted_state(state: Any) -> dict[str, Adopted]:
    if not isinstance(state, (tuple, list)):
        raise ArgumentTypeError("resume", kind_of(state), "a pair (out, lse)")
    if len(state) != 2:
        raise ArgumentValueError("resume", f"{len(state)} arrays", "a pair (out, lse)")
    return {name: adopt(f"resume[{i}]", state[i]) for i, name in enumerate(STATE)}


def _checked(
    inputs: Mapping[str, Adopted],
    targets: Mapping[str, Adopted],
    before: Mapping[str, Adopted],
    keywords: Mapping[str, Any],
) -> CallProblem:
    """Return the problem of the call, after checking the state and the destinations against it."""
    options = check_options(**{n: value for n, value in keywords.items() if n != "return_lse"})
    specs = {name: array.spec for name, array in inputs.items()}
    choose_device(specs["q"].device, options)
    options = replace(options, out_dtype=_wide(specs["q"], options))
    call = describe("forward", specs, options)
    for i, name in enumerate(STATE):
        _check_state(f"resume[{i}]", before[name].spec, call, name, specs["q"])
    specs |= {name: target.spec for name, target in targets.items()}
    describe("forward", specs, options)
    apart = {**inputs}
    for i, (name, target) in enumerate(_TARGETS.items()):
        if target not in targets or not _is_same(targets[target], before[name]):
            apart[f"resume[{i}]"] = before[name]
    dispatch.check_destinations(apart, targets)
    return call


def _check_apart(
    workspace: Adopted, targets: Mapping[str, Adopted], before: Mapping[str, Adopted]
) -> None:
    """Check that the workspace overlaps neither the state nor a destination."""
    every = {f"resume[{i}]": before[name] for i, name in enumerate(STATE)} | {**targets}
    for name, array in every.items():
        if share_memory(workspace.native, array.native):
            used = f"memory that {name} uses"
            raise ArgumentValueError("workspace", used, "memory of its own")


def _wide(q: TensorSpec, options: Options) -> DTypeName | None:
    """Return the dtype of states for these queries: the dtype of the sums."""
    known = DTYPES.get(q.dtype)
    wide: DTypeName | None = None if known is None else known.compute
    if wide is not None and options.out_dtype not in (None, wide):
        expected = f"{wide}, which a state has, or None"
        raise ArgumentValueError("out_dtype", repr(options.out_dtype), expected)
    return wide


def _check_state(name: str, spec: TensorSpec, call: CallProblem, of: str, q: TensorSpec) -> None:
    if spec.device != q.device:
        own, there = map(_place, (spec.device, q.device))
        raise ArgumentValueError(name, f"an array in {own}", f"{there}, where q is")
    if spec.dtype != call.dtypes["lse"]:
        expected = f"{call.dtypes['lse']} beside q of {q.dtype}"
        raise ArgumentTypeError(name, f"dtype {spec.dtype}", expected)
    if spec.shape != call.shapes[of]:
        raise ArgumentValueError(name, f"shape {spec.shape}", f"{call.shapes[of]}, as {of} has")


def _place(device: int | None) -> str:
    return "host memory" if device is None else f"CUDA device {device}"


def _is_same(a: Adopted, b: Adopted) -> bool:
    """Return whether two arrays are the same: then each number is read before it is written."""
    return a.spec == b.spec and address(a.native) == address(b.native)


def _merge(
    before: Mapping[str, Any], now: Mapping[str, Any], to: Mapping[str, Any], layout: Layout
) -> None:
    """Write the merged state of both sets of keys."""
    if not isinstance(now["out"], np.ndarray):
        merge_states(before, now, to, layout, dispatch.tell)
        return
    states = (before, now)
    made = merge([s["out"] for s in states], [s["lse"] for s in states], layout=layout.name)
    for name, array in zip(STATE, made, strict=True):
        np.copyto(to[name], array)
