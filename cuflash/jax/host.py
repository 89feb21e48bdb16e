"""A pass inside a computation on the CPU: the tiled NumPy code over XLA's own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dispatch import run_numpy
from ..pipeline import Pipeline, pipeline_of
from .call import Call, folded

__all__ = ["HostCall", "prepare_host"]


@dataclass(frozen=True, eq=False)  # JAX hashes it
class HostCall:
    """The callback of one pass; everything is decided, and XLA's buffers lie apart."""

    call: Call
    pipeline: Pipeline
    scratch_bytes: int = 0

    def __call__(self, context: Any, results: Sequence[Any], *buffers: Any) -> None:
        """Fill the buffers of the results.

        Parameters
        ----------
        context
            Of the execution; XLA has no stream here.
        results, buffers
            Of the results and the arguments, in the order of the call.
        """
        mapped = self.call.mapped(buffers)
        inputs = self.call.named([_view(buffer, mapped) for buffer in buffers])
        made = [_view(buffer, mapped) for buffer in results]
        run_numpy(self.pipeline, inputs, dict(zip(self.call.results, made, strict=True)))


def _view(buffer: Any, mapped: int) -> Any:
    """NumPy's view of a buffer: what is written to it is in the result.

    The mapped axes of vmap are part of its batch.
    """
    array = np.asarray(buffer)
    return array.reshape(folded(array.shape, mapped))


def prepare_host(call: Call, arrays: Sequence[Any]) -> HostCall:
    """The callback of a pass over arrays like these.

    Raises
    ------
    UnsupportedError
        If the tiled NumPy code has no such algorithm.
    """
    on_host = replace(call, options=replace(call.options, backend="numpy"))
    specs = tuple(call.specs(arrays).items())
    return HostCall(on_host, pipeline_of(call.operation, specs, on_host.options, None))
