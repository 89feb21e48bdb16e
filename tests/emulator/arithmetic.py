"""Arithmetic for the stand-in of CuPy, as the demo's network needs it, and graphs."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from .host_cupy import HostCupy

__all__ = ["array_module"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__add__": operator.add,
    "__mul__": operator.mul,
    "mean": np.mean,
    "argmax": np.argmax,
}


def array_module(host: HostCupy, stream: int) -> Any:
    """A stand-in for the array module. Its arrays can compute, and its stream captures graphs."""
    kind = host.runtime.ndarray
    lifted = _Lifted(host)
    for name, function in _FUNCTIONS.items():
        setattr(kind, name, lifted.new(function))
    kind.__iadd__ = lifted.written(np.add)
    kind.__ipow__ = lifted.written(np.power)
    kind.fill = lambda array, value: array.__setitem__(..., value)
    get, put = kind.__getitem__, kind.__setitem__
    at, into = lifted.new(operator.getitem), lifted.placed
    kind.__getitem__ = lambda a, key: (at if isinstance(key, kind) else get)(a, key)
    kind.__setitem__ = lambda a, key, x: (into if isinstance(key, kind) else put)(a, key, x)
    rows = lifted.new(lambda x, w: x[:, :, 0] @ w)
    maximum = lifted.written(np.maximum)
    module: Any = ModuleType("arithmetic of cupy")
    vars(module).update(
        zeros=host.cupy.zeros,
        asarray=host.cupy.asarray,
        split=_split,
        maximum=lambda x, least, out: maximum(x, least),
        ReductionKernel=lambda *_: lambda x, w, axis: rows(x, w),
        cuda=SimpleNamespace(
            get_current_stream=lambda: _Stream(host, stream),
            MemoryPool=lambda: SimpleNamespace(malloc=[]),
            using_allocator=lambda pool: _allocating(host, pool),
        ),
    )
    return module


class _Lifted:
    """NumPy's functions as kernels, which run at once or are captured."""

    def __init__(self, host: HostCupy) -> None:
        self._runtime = host.runtime
        self._kind = host.runtime.ndarray

    def new(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            hosts, arrays = self._hosts(given), self._arrays(given)
            with np.errstate(all="ignore"):  # a capture takes only the shape from this
                shaped = function(*hosts, **options)
            made = self._kind(shaped.shape, shaped.dtype)
            to = made._host

            def run() -> None:
                to[...] = function(*hosts, **options)

            self._runtime.element_kernel([made], arrays, run)
            return made

        return call

    def written(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel that writes the result into its first operand."""

        def call(*given: Any) -> Any:
            hosts = self._hosts(given)
            arrays = self._arrays(given)
            self._runtime.element_kernel(
                arrays[:1], arrays, lambda: function(*hosts, out=hosts[0], casting="unsafe")
            )
            return given[0]

        return call

    def placed(self, target: Any, key: Any, values: Any) -> None:
        to, at, given = self._hosts((target, key, values))
        self._runtime.element_kernel(
            [target], [key, values], lambda: operator.setitem(to, at, given)
        )

    def _hosts(self, given: Any) -> list[Any]:
        return [x._host if isinstance(x, self._kind) else x for x in given]

    def _arrays(self, given: Any) -> list[Any]:
        return [x for x in given if isinstance(x, self._kind)]


def _split(array: Any, parts: int, axis: int) -> list[Any]:
    assert axis == 1
    width = array.shape[1] // parts
    return [array[:, i * width : (i + 1) * width] for i in range(parts)]


class _Keeping(weakref.WeakSet[Any]):
    """The living arrays; new ones live as long as ``pool``."""

    def __init__(self, living: Any, pool: list[Any]) -> None:
        self._pool: list[Any] = []
        super().__init__(living)
        self._pool = pool

    def add(self, item: Any) -> None:
        self._pool.append(item)
        super().add(item)


@contextlib.contextmanager
def _allocating(host: HostCupy, pool: list[Any]) -> Iterator[None]:
    """Arrays made within this context keep their memory as long as the pool exists."""
    kind = host.runtime.ndarray
    with mock.patch.object(kind, "living", _Keeping(kind.living, pool)):
        yield
    kind.living.update(pool)


class _Stream:
    """A stream that captures queued work and replays it."""

    def __init__(self, host: HostCupy, stream: int) -> None:
        self._runtime, self._stream = host.runtime, stream

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        self._runtime.capturing[self._stream] = []

    def end_capture(self) -> Any:
        steps = self._runtime.capturing.pop(self._stream)

        def launch(_: Any) -> None:
            for step in steps:
                step()

        return SimpleNamespace(launch=launch)
