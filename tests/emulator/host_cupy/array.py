"""CuPy's arrays, over blocks of host memory: what the library and the tests ask of them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Pointer", "ndarray_of"]


class Pointer:
    """Stands for cupy.cuda.MemoryPointer; it holds the block that it points into."""

    def __init__(self, ptr: int, device_id: int, holder: object, block: Any) -> None:
        self.ptr, self.device_id, self.holder, self.block = ptr, device_id, holder, block


def _is_aligned(array: Any) -> bool:
    size = array.dtype.itemsize
    return all(n % size == 0 for n in (array.data.ptr, *array.strides)) or not array.size


def ndarray_of(runtime: Runtime) -> type:
    """The class of a runtime's arrays."""

    class ndarray:  # noqa: N801
        """Stands for cupy.ndarray. Its memory is on a device: the host does not touch it."""

        __array_ufunc__ = None
        living: weakref.WeakSet[Any] = weakref.WeakSet()

        def __init__(
            self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None
        ) -> None:
            kind = np.dtype(dtype)
            size = (shape,) if isinstance(shape, int) else tuple(shape)
            self.data = memptr or runtime.allocate(int(np.prod(size, dtype=int)) * kind.itemsize)
            block = self.data.block
            whole = np.empty(0, np.uint8) if block is None else block.bytes
            offset = 0 if block is None else self.data.ptr - block.address
            self._host = np.ndarray(size, kind, whole, offset, strides)
            self.living.add(self)

        shape = property(lambda self: self._host.shape)
        strides = property(lambda self: self._host.strides)
        dtype = property(lambda self: self._host.dtype)
        size = property(lambda self: self._host.size)
        nbytes = property(lambda self: self._host.nbytes)
        itemsize = property(lambda self: self._host.itemsize)
        ndim = property(lambda self: self._host.ndim)
        flags = property(lambda self: self._host.flags)
        device = property(lambda self: SimpleNamespace(id=self.data.device_id))

        def __len__(self) -> int:
            return len(self._host)

        def __getitem__(self, key: Any) -> Any:
            return self._seen(self._host[key])

        def transpose(self, *axes: Any) -> Any:
            return self._seen(self._host.transpose(*axes))

        def reshape(self, *shape: Any) -> Any:
            return self._seen(np.reshape(self._host, *shape, copy=False))

        def view(self, dtype: Any) -> Any:
            return self._seen(self._host.view(dtype))

        def __setitem__(self, key: Any, value: Any) -> None:
            """A kernel of CuPy's."""
            target = self[key]
            sources = [value] if isinstance(value, ndarray) else []
            runtime.element_kernel([target], sources)
            target._host[...] = value._host if sources else value

        def astype(self, dtype: Any, copy: bool = True) -> Any:
            if not copy and self.dtype == np.dtype(dtype):
                return self
            made = ndarray(self.shape, dtype)
            runtime.element_kernel([made], [self])
            made._host[...] = self._host.astype(made.dtype)
            return made

        def get(self) -> np.ndarray:
            """A copy on the host, which waits for the stream."""
            runtime.queued("get", [self])
            return np.array(self._host, order="C")

        def set(self, array: np.ndarray) -> None:
            runtime.queued("set", [self])
            self._host[...] = array

        def peek(self) -> np.ndarray:
            """What it holds, for tests alone."""
            return np.array(self._host, order="C")

        def is_aligned(self) -> bool:
            """Whether every element lies at a multiple of its size."""
            return _is_aligned(self)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, self.data.device_id)

        def __dlpack__(self, **_: Any) -> Any:
            return self

        def _seen(self, host: Any) -> Any:
            if not isinstance(host, np.ndarray):  # NumPy's scalars; CuPy has arrays without axes
                raise NotImplementedError("one element")
            pointer = self.data
            if pointer.block is not None and host.size:
                pointer = Pointer(
                    host.ctypes.data, pointer.device_id, pointer.holder, pointer.block
                )
            made = ndarray.__new__(type(self))
            made.data, made._host = pointer, host
            made.living.add(made)
            return made

    return ndarray
