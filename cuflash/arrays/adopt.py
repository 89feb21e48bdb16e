"""Any array as a NumPy or CuPy array without a copy, and the way back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cuda.available import require_cupy
from ..errors import ArgumentTypeError, CuflashError
from .dlpack import BFLOAT16, NoMemoryError, answer_like, host_view
from .meaning import check_byte_order, check_foreign, check_subclass, class_of, kind_of
from .spec import TensorSpec

__all__ = [
    "Adopted",
    "address",
    "adopt",
    "contiguous",
    "dtype_named",
    "empty",
    "fill",
    "to_device",
    "to_host",
]

# DLPack device types.
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13

_EXPECTED = (
    "an array: NumPy, CuPy, or anything with DLPack or __cuda_array_interface__ "
    "(JAX, PyTorch, Numba, ...)"
)


@dataclass(frozen=True)
class Adopted:
    """An argument as a native array.

    Attributes
    ----------
    name
        The name of the argument, for errors.
    native
        A NumPy or CuPy array over the caller's memory.
    answer
        Turns a native array into the caller's kind.
    given
        The caller's own object.
    """

    name: str
    native: Any
    answer: Callable[[Any], Any]
    given: Any

    @functools.cached_property
    def spec(self) -> TensorSpec:
        """Its description."""
        array = self.native
        itemsize = array.dtype.itemsize or 1  # "V0" has size 0; checks refuse it later
        whole = all(stride % itemsize == 0 for stride in array.strides)
        return TensorSpec(
            shape=tuple(array.shape),
            dtype=array.dtype.name,
            strides=tuple(s // itemsize for s in array.strides) if whole else None,
            itemsize=itemsize,
            device=None if isinstance(array, np.ndarray) else int(array.device.id),
            offset=address(array) % 16,
        )


def address(array: Any) -> int:
    """Return the address of a native array's first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def adopt(name: str, value: Any) -> Adopted:
    """An argument as a native array over the same memory.

    Subclasses of NumPy's and CuPy's arrays become plain arrays.

    Raises
    ------
    ArgumentTypeError
        If it is not an array, if its type, byte order or memory cannot be used, or if it would lose
        its meaning.
    BackendUnavailableError
        If it is a CUDA array and CUDA is unusable.
    """
    try:
        native, answer = _adopt(name, value)
        check_byte_order(name, native)
    except CuflashError:
        raise
    except NoMemoryError as error:
        raise ArgumentTypeError(
            name, f"{kind_of(value)} without memory (a fake one, or a wrapper)", _EXPECTED
        ) from error
    except Exception as error:  # another library may raise anything
        said = f"{type(error).__name__}: {error}"
        raise ArgumentTypeError(
            name, f"{kind_of(value)}, which refused to share its memory ({said})", _EXPECTED
        ) from error
    return Adopted(name, native, answer, value)


def _adopt(name: str, value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A native array over the memory of a value, and the way back."""
    kind = type(value)
    if issubclass(kind, np.ndarray):
        if kind is np.ndarray:
            return value, _same
        check_subclass(name, value)
        return np.ndarray.view(value, np.ndarray), _same
    of_cupy = class_of("cupy", "ndarray")
    if issubclass(kind, of_cupy):
        return value if kind is of_cupy else value.view(type=of_cupy), _same
    check_foreign(name, value)
    # The class must have the methods, as for Python's own protocols: a wrapper that forwards every
    # attribute (``__getattr__``) may mean something else than the wrapped object.
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _dlpack_view(name, value), answer_like(value)
    if inspect.getattr_static(value, "__cuda_array_interface__", None) is not None:
        return _cuda_interface_view(name, value), answer_like(value)
    raise ArgumentTypeError(name, kind_of(value), _EXPECTED)


def _same(native: Any) -> Any:
    return native


def _dlpack_view(name: str, value: Any) -> Any:
    device_type = int(value.__dlpack_device__()[0])
    if device_type in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        return host_view(value)
    if device_type not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        raise ArgumentTypeError(
            name, f"memory of DLPack device type {device_type}", "host or CUDA memory"
        )
    native = _cupy_for(name).from_dlpack(value)
    if native.size and not address(native):
        raise NoMemoryError
    return native


def _cuda_interface_view(name: str, value: Any) -> Any:
    described = value.__cuda_array_interface__
    typestr = described.get("typestr") if isinstance(described, Mapping) else None
    if not isinstance(typestr, str):
        raise ArgumentTypeError(
            name, f"{kind_of(value)} whose __cuda_array_interface__ has no typestr", _EXPECTED
        )
    if typestr[1:] == "V2":
        raise ArgumentTypeError(
            name,
            f"{kind_of(value)} with {typestr!r}: __cuda_array_interface__ cannot say bfloat16",
            "bfloat16 as a CuPy array or through DLPack",
        )
    return _cupy_for(name).asarray(value)


def _cupy_for(name: str) -> Any:
    return require_cupy(f"{name} is in CUDA memory, which")


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of this name; NumPy has no name for bfloat16."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A fresh C-contiguous array in the memory of the native array ``like``."""
    kind = dtype_named(dtype)
    if isinstance(like, np.ndarray):
        return np.empty(shape, kind)
    import cupy

    with cupy.cuda.Device(like.device.id):
        return cupy.empty(shape, kind)


def to_device(array: Any, device_id: int) -> Any:
    """A C-contiguous copy of a host array on a device, on the current stream."""
    import cupy

    with cupy.cuda.Device(device_id):
        return cupy.asarray(np.ascontiguousarray(array))


def contiguous(array: Any) -> Any:
    """A C-contiguous device array with aligned elements; a copy only if needed."""
    import cupy

    if _is_aligned(array):
        return cupy.ascontiguousarray(array)
    copy = cupy.empty(array.shape, array.dtype)
    _as_bytes(copy)[...] = _as_bytes(array)
    return copy


def fill(destination: Any, source: Any) -> None:
    """Copy a C-contiguous device array into an array of any strides and address."""
    if _is_aligned(destination):
        destination[...] = source
    else:
        _as_bytes(destination)[...] = _as_bytes(source)


def _is_aligned(array: Any) -> bool:
    return all(n % array.dtype.itemsize == 0 for n in (address(array), *array.strides))


def _as_bytes(array: Any) -> Any:
    """The bytes of a device array, with one more axis: bytes can be read at any address."""
    import cupy

    shape, strides = (*array.shape, array.dtype.itemsize), (*array.strides, 1)
    return cupy.ndarray(shape, np.uint8, array.data, strides)


def to_host(source: Any, destination: Any) -> None:
    """Copy a device array into a host array of the same shape, and wait for it."""
    destination[...] = source.get()
