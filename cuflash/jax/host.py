"""A pass inside a computation on the CPU: the tiled NumPy code over XLA's own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dispatch import run
from ..pipeline import DESTINATIONS, pipeline_of
from .call import Call, folded

__all__ = ["HostCall", "prepare_host"]

#: Names that destinations have as arguments, by those of the results.
_ARGUMENTS = {result: argument for argument, result in DESTINATIONS.items()}


def _fold(array: Any, mapped: int) -> Any:
    """The array with the mapped axes made part of the batch; a view of it."""
    return array.reshape(folded(array.shape, mapped))


@dataclass(frozen=True)
class HostCall:
    """The callback of one pass."""

    call: Call
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
        # NumPy's views of the buffers: nothing is copied, and what is written is in the result.
        # Axes of vmap become part of the batch.
        mapped = self.call.mapped(buffers)
        arrays = [_fold(np.asarray(buffer), mapped) for buffer in buffers]
        destinations = {
            _ARGUMENTS[name]: _fold(np.asarray(buffer), mapped)
            for name, buffer in zip(self.call.results, results, strict=True)
        }
        inputs = self.call.named(arrays)
        run(self.call.operation, inputs, destinations, self.call.options)


def prepare_host(call: Call, arrays: Sequence[Any]) -> HostCall:
    """The callback of a pass over arrays like these.

    Raises
    ------
    UnsupportedError
        If the tiled NumPy code has no such algorithm.
    """
    on_host = replace(call, options=replace(call.options, backend="numpy"))
    pipeline_of(call.operation, tuple(call.specs(arrays).items()), on_host.options, None)
    return HostCall(on_host)
