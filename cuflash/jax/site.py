"""The call of a pass in one XLA computation: the target of the call, and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError
from .device import prepare_device
from .host import prepare_host
from .native import TARGET, is_ready
from .passes import Pass

__all__ = ["TARGETS", "Site"]

#: Names under which XLA calls a Python callback, as for jax.experimental.buffer_callback.
TARGETS = {
    "cpu": "xla_buffer_python_cpu_callback",
    "cuda": "xla_buffer_python_gpu_callback_cmd_buffer",
}
#: Platforms on which XLA may call the handler of launch tables instead.
_NATIVE = {"cuda"}
_PREPARE: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "cpu": prepare_host,
    "cuda": prepare_device,
}

_Pass = TypeVar("_Pass", bound=Pass)


class Site(Generic[_Pass]):
    """A pass in one computation: XLA calls it with a context, the arguments, and the results.

    :func:`jax.experimental.buffer_callback` does the same for a function, but it
    adds the function to the computation that is being lowered. If arrays are
    divided over devices, XLA asks for the computation on one device's shards only
    after that lowering; the call must then name a callback that was added before.

    Attributes
    ----------
    call
        The pass.
    platform
        "cpu" or "cuda".
    is_native
        Whether XLA calls the handler of launch tables, and not this object.
    index
        Its number among the callbacks of the computation, if XLA calls this object.
    """

    def __init__(self, call: _Pass, platform: str) -> None:
        self.call = call
        self.platform = platform
        self.is_native = platform in _NATIVE and is_ready(platform)
        self.index = 0
        self._prepared: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(self, context: Any, *buffers: Any) -> tuple[()]:
        """Fill the buffers of the results, which are last."""
        split = len(self.call.names)
        operands, results = buffers[:split], buffers[split:]
        if len(self._prepared) == 1:  # no need to look at shapes
            prepared = next(iter(self._prepared.values()))
        else:
            prepared = self._prepared[tuple(tuple(buffer.shape) for buffer in operands)]
        prepared(context, results, *operands)
        return ()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a compiled computation with {self.call.function} cannot be serialised: its kernels "
            "are in this process; serialise what it is made from, and compile it where it runs"
        )

    def prepare(self, arrays: Sequence[Any]) -> Any:
        """Return the callback for arrays of these shapes."""
        shapes = tuple(tuple(array.shape) for array in arrays)
        if shapes not in self._prepared:
            self._prepared[shapes] = _PREPARE[self.platform](self.call, arrays)
        return self._prepared[shapes]

    def compute(self, *arrays: Any) -> list[Any]:
        """Add the call to a computation, on whole arrays or on the shards of one device.

        The workspace of a pass is one more result, which nothing reads: XLA plans
        its memory like that of other results, and the callback allocates nothing.
        """
        wanted = [
            jax.ShapeDtypeStruct(shape, jnp.dtype(kind))
            for shape, kind in self.call.results_of(arrays)
        ]
        prepared = self.prepare(arrays)
        scratch_bytes = prepared.scratch_bytes
        scratch = [jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8)] if scratch_bytes else []
        target = TARGET if self.is_native else TARGETS[self.platform]
        aliases = dict(self.call.aliases)
        run = jax.ffi.ffi_call(target, [*wanted, *scratch], input_output_aliases=aliases)
        results: list[Any]
        if self.is_native:
            results = run(*arrays, table=np.uint64(prepared.registered(arrays)))
        else:
            results = run(*arrays, index=np.uint64(self.index))
        return results[: len(wanted)]
