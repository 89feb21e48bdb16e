"""Calls that are prepared once and then only launched, with a requested tile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from .cases import Case
from .inputs import Inputs, array_module

__all__ = ["Prepared", "call_of", "launch_of", "poisoned"]

Prepared = tuple[Callable[[], Sequence[Any]], Any]  # the call, and its plan


def call_of(case: Case, tile: Any, inputs: Inputs) -> Prepared:
    """A prepared call of a case with this tile; with None it has the plan's tile.

    This is the only function that forces a tile: it plans the pass with the tile, outside the cache
    of plans.
    """
    import cuflash
    from cuflash import pipeline
    from cuflash.planning.plan import plan

    module = importlib.import_module(f"cuflash.planning.{case.algorithm}")
    make = getattr(module, f"{case.algorithm}_plan")

    def planned(problem: Any, limits: Any, **options: Any) -> Any:
        if tile is None or problem.operation != case.op:
            return plan(problem, limits, **options)
        return make(problem, limits, None, (), tile)

    decide = pipeline._decide.__wrapped__
    operation: Any = case.op
    with mock.patch.multiple(pipeline, plan=planned, _decide=decide):
        prepared = cuflash.prepare(
            inputs.q,
            inputs.k,
            inputs.v,
            operation=operation,
            causal=case.causal,
            **case.keywords,
            **_features(case, inputs),
        )
    return launch_of(case, prepared, inputs), prepared.plan


def launch_of(case: Case, prepared: Any, inputs: Inputs) -> Callable[[], Sequence[Any]]:
    """A function without arguments that runs the prepared pass; it returns output or gradients.

    The results and the workspace hold NaN until the function is called.
    """
    features = inputs.features(case)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, **features}
    of_features = [f"d{name}" for name in case.gradients]
    results = ["out"] if case.op == "forward" else ["dq", "dk", "dv", *of_features]
    if case.op == "backward":
        arrays["out"], arrays["lse"] = _forward(case, inputs)
    xp = array_module(inputs.q)
    for name in (*results, "lse"):
        if name not in arrays:
            spec = prepared.tensors[name]
            dtype = spec.dtype if name == "lse" else inputs.q.dtype
            arrays[name] = poisoned(xp, spec.shape, dtype)
    pointers = {n: arrays[n].data.ptr for n in prepared.tensors if n in arrays}
    workspace = poisoned(xp, (prepared.workspace_bytes,), "uint8")

    def call() -> Sequence[Any]:
        prepared.run(pointers, workspace=workspace.data.ptr)
        return [arrays[name] for name in results]

    return call


def _forward(case: Case, inputs: Inputs) -> tuple[Any, Any]:
    import cuflash

    asked: dict[str, Any] = {"causal": case.causal, **inputs.features(case)}
    if case.window_size is not None:
        asked["window_size"] = case.window_size
    if case.softcap is not None:
        asked["softcap"] = case.softcap
    found: tuple[Any, Any] = cuflash.attention(
        inputs.q, inputs.k, inputs.v, return_lse=True, **asked
    )
    return found


def _features(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The arrays of features, and the requested gradients besides those of q, k and v."""
    features = inputs.features(case)
    if not case.gradients:
        return features
    return {**features, "wrt": ("q", "k", "v", *case.gradients)}


def poisoned(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array with all bits set, which is NaN in every floating-point type."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return xp.full(size, 0xFF, "uint8").view(dtype).reshape(shape)
