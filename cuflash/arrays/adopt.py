"""Any array as a NumPy or CuPy array without a copy, and the way back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArgumentTypeError, BackendUnavailableError
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

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

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
        Of the argument, for errors.
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
        itemsize = array.dtype.itemsize
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
    """Where a native array's first element is."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def adopt(name: str, value: Any) -> Adopted:
    """See an argument as a native array over the same memory.

    Raises
    ------
    ArgumentTypeError
        If it is not an array, or one whose type or byte order cannot be taken over,
        or a tracer of JAX.
    BackendUnavailableError
        If it is a CUDA array and CuPy is not installed.
    """
    if isinstance(value, np.ndarray):
        _check_numpy(name, value)
        return Adopted(name, value, _same, value)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, getattr(cupy, "ndarray", ())):
        return Adopted(name, value, _same, value)
    _check_tracer(name, value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _adopt_dlpack(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        return _adopt_cuda_interface(name, value)
    raise ArgumentTypeError(name, _kind_of(value), _EXPECTED)


def _check_tracer(name: str, value: Any) -> None:
    """Refuse what stands for an array while JAX traces a function: it has no memory yet."""
    core = getattr(sys.modules.get("jax"), "core", None)
    if isinstance(value, getattr(core, "Tracer", ())):
        raise ArgumentTypeError(
            name,
            f"{_kind_of(value)}: JAX is tracing, and there is no memory yet",
            "an array; inside jax.jit, jax.grad or jax.vmap call cuflash.jax.attention",
        )


def _check_numpy(name: str, array: np.ndarray[Any, Any]) -> None:
    """Refuse what would lose its meaning: a mask, another ``*``, another byte order."""
    if isinstance(array, (np.ma.MaskedArray, np.matrix)):
        raise ArgumentTypeError(name, _kind_of(array), "a plain NumPy array")
    if not array.dtype.isnative:
        raise ArgumentTypeError(
            name, f"dtype {array.dtype.str!r}, not in native byte order", "native byte order"
        )


def _same(native: Any) -> Any:
    return native


def _kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _adopt_dlpack(name: str, value: Any) -> Adopted:
    device_type = int(value.__dlpack_device__()[0])
    try:
        if device_type in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            native = _host_view(value)
        elif device_type in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            native = _require_cupy(name).from_dlpack(value)
        else:
            raise ArgumentTypeError(
                name, f"memory of DLPack device type {device_type}", "host or CUDA memory"
            )
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, (ArgumentTypeError, BackendUnavailableError)):
            raise
        raise ArgumentTypeError(
            name, f"{_kind_of(value)}, which refused to share its memory ({error})", _EXPECTED
        ) from error
    return Adopted(name, native, _answer_like(value), value)


def _host_view(value: Any) -> Any:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):
        # NumPy's DLPack has no bfloat16; JAX hands it over as an ml_dtypes array.
        if hasattr(value, "__array__") and "bfloat16" in str(getattr(value, "dtype", "")):
            array = np.asarray(value)
            if array.dtype == BFLOAT16:
                return array
        raise


def _adopt_cuda_interface(name: str, value: Any) -> Adopted:
    typestr = value.__cuda_array_interface__["typestr"]
    if typestr[1:] == "V2":
        raise ArgumentTypeError(
            name,
            f"{_kind_of(value)} with {typestr!r}: __cuda_array_interface__ cannot say bfloat16",
            "bfloat16 as a CuPy array or through DLPack",
        )
    return Adopted(name, _require_cupy(name).asarray(value), _answer_like(value), value)


def _require_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"{name} is in CUDA memory, which needs CuPy: pip install 'cuflash[cuda13]'"
        ) from error
    return cupy


def _answer_like(value: Any) -> Callable[[Any], Any]:
    """The caller's own from_dlpack: of its array namespace, else of its module."""
    namespace: Any = None
    if hasattr(value, "__array_namespace__"):
        namespace = value.__array_namespace__()
    if not hasattr(namespace, "from_dlpack"):
        namespace = sys.modules.get(type(value).__module__.split(".")[0])
    if not hasattr(namespace, "from_dlpack"):
        return _same

    def answer(native: Any) -> Any:
        if isinstance(native, np.ndarray) and native.dtype == BFLOAT16:
            return namespace.asarray(native)
        return namespace.from_dlpack(native)

    return answer


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name; NumPy has no name for bfloat16."""
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
    """A device array as a C-contiguous one whose elements are aligned; a copy if need be."""
    import cupy

    if _is_aligned(array):
        return cupy.ascontiguousarray(array)
    copy = cupy.empty(array.shape, array.dtype)
    _as_bytes(copy)[...] = _as_bytes(array)
    return copy


def fill(destination: Any, source: Any) -> None:
    """Copy a C-contiguous device array into one of any strides and address."""
    if _is_aligned(destination):
        destination[...] = source
    else:
        _as_bytes(destination)[...] = _as_bytes(source)


def _is_aligned(array: Any) -> bool:
    return all(n % array.dtype.itemsize == 0 for n in (address(array), *array.strides))


def _as_bytes(array: Any) -> Any:
    """A device array's bytes with one axis more: what may be read at any address."""
    import cupy

    shape, strides = (*array.shape, array.dtype.itemsize), (*array.strides, 1)
    return cupy.ndarray(shape, np.uint8, array.data, strides)


def to_host(source: Any, destination: Any) -> None:
    """Copy a device array into a host array of the same shape, and wait for it."""
    destination[...] = source.get()
