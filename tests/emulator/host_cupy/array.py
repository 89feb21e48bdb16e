"""CuPy's arrays over blocks of host memory, as far as the library and the tests use them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["HostArray", "Pointer", "ndarray_of"]


class Pointer:
    """Stands for cupy.cuda.MemoryPointer; it holds the block that it points into."""

    def __init__(self, ptr: int, device_id: int, holder: object, block: Any) -> None:
        self.ptr, self.device_id, self.holder, self.block = ptr, device_id, holder, block


def ndarray_of(runtime: Runtime) -> type[HostArray]:
    """The class of a runtime's arrays."""
    return type("ndarray", (HostArray,), {"runtime": runtime, "living": weakref.WeakSet()})


class HostArray:
    """Stands for cupy.ndarray. Its memory is on a device: the host does not touch it."""

    __array_ufunc__ = None
    runtime: ClassVar[Any]
    living: ClassVar[weakref.WeakSet[Any]]

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None
    ) -> None:
        kind = np.dtype(dtype)
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(size, dtype=int)) * kind.itemsize
        self.data = memptr or self.runtime.allocate(nbytes)
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
        return self.seen(self._host[key])

    def transpose(self, *axes: Any) -> Any:
        return self.seen(self._host.transpose(*axes))

    def reshape(self, *shape: Any) -> Any:
        made = self._host.reshape(*shape)
        assert np.shares_memory(made, self._host) or not made.size, "a reshape that copies"
        return self.seen(made)

    def view(self, dtype: Any) -> Any:
        return self.seen(self._host.view(dtype))

    def __setitem__(self, key: Any, value: Any) -> None:
        """A copy by a kernel of CuPy's."""
        target = self[key]
        sources = [value] if isinstance(value, HostArray) else []
        to, given = target._host, value._host if sources else value

        def run() -> None:
            to[...] = given

        self.runtime.element_kernel([target], sources, run)

    def astype(self, dtype: Any, order: str = "C", copy: bool = True) -> Any:
        assert order == "C", "made C-contiguous"
        if not copy and self.dtype == np.dtype(dtype):
            return self
        made = type(self)(self.shape, dtype)
        to, given = made._host, self._host

        def run() -> None:
            to[...] = given.astype(to.dtype)

        self.runtime.element_kernel([made], [self], run)
        return made

    def get(self) -> np.ndarray:
        """A copy on the host, which waits for the stream."""
        self.runtime.queued("get", [self])
        return np.array(self._host, order="C")

    def set(self, array: np.ndarray) -> None:
        self.runtime.queued("set", [self])
        self._host[...] = array

    def peek(self) -> np.ndarray:
        """The content, for tests only: it waits for no stream."""
        return np.array(self._host, order="C")

    def is_aligned(self) -> bool:
        """Whether every element lies at a multiple of its size."""
        places = (self.data.ptr, *self.strides)
        return all(n % self.itemsize == 0 for n in places) or not self.size

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)

    def __dlpack__(self, **_: Any) -> Any:
        return self

    def seen(self, host: Any) -> Any:
        """An array over a view of this one's memory."""
        if not isinstance(host, np.ndarray):  # NumPy's scalars; CuPy has arrays without axes
            raise TypeError("this stand-in gives no view of a single element")
        pointer = self.data
        if pointer.block is not None and host.size:
            pointer = Pointer(host.ctypes.data, pointer.device_id, pointer.holder, pointer.block)
        made = type(self).__new__(type(self))
        made.data, made._host = pointer, host
        made.living.add(made)
        return made
