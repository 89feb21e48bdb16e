"""A pass inside a computation on the CPU: the tiled NumPy code over XLA's buffers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..caches.attend import attend_into
from ..dispatch import run_numpy
from ..pipeline import CallPlan, plan_call
from .cached import FEATURES, CachedCall
from .call import Call

__all__ = ["CachedHostCall", "HostCall", "prepare_host"]


@dataclass(frozen=True, eq=False)  # JAX hashes it
class HostCall:
    """The callback of one planned pass; XLA's buffers do not overlap."""

    call: Call
    planned: CallPlan
    scratch_bytes: int = 0

    def __call__(self, context: Any, results: Sequence[Any], *buffers: Any) -> None:
        """Fill the buffers of the results.

        Parameters
        ----------
        context
            Context of the execution; XLA has no stream on the CPU.
        results, buffers
            Buffers of the results and of the arguments, in the order of the call.
        """
        mapped = self.call.mapped(buffers)
        given = self.call.named(buffers)
        made = dict(zip(self.call.results, results, strict=True))
        views = functools.partial(_views, self.call, mapped)
        run_numpy(self.planned, views(given), views(made))


def _views(call: Call, mapped: int, buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Return NumPy views of buffers, with the mapped axes of vmap merged into the batch."""
    arrays = {name: np.asarray(buffer) for name, buffer in buffers.items()}
    return {name: a.reshape(call.shape_of(name, a.shape, mapped)) for name, a in arrays.items()}


@dataclass(frozen=True, eq=False)
class CachedHostCall:
    """The callback of a call with caches: lengths are read and checked as it runs."""

    call: CachedCall
    scratch_bytes: int = 0

    def __call__(self, context: Any, results: Sequence[Any], *buffers: Any) -> None:
        """Fill the buffers of the results; the caches' buffers already hold the given caches."""
        made = dict(zip(self.call.results, map(np.asarray, results), strict=True))
        beside = {"out": made.pop("out"), "lse_out": made.pop("lse")}
        given = self.call.named(map(np.asarray, buffers)) | made
        beside |= {name: given.pop(name) for name in FEATURES if name in given}
        every = {**given, **self.call.numbers}
        attend_into(every, beside, self.call.interleaved, self.call.options)


def prepare_host(call: Call | CachedCall, arrays: Sequence[Any]) -> HostCall | CachedHostCall:
    """Return the callback of a pass over such arrays.

    Raises
    ------
    UnsupportedError
        If the tiled NumPy code has no such algorithm.
    """
    if isinstance(call, CachedCall):
        call.check_host(arrays)
        return CachedHostCall(call)
    call = call.over(arrays)
    on_host = replace(call, options=replace(call.options, backend="numpy"))
    specs = tuple(call.specs(arrays).items())
    return HostCall(on_host, plan_call(call.operation, specs, on_host.described, None))
