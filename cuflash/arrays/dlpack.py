"""DLPack, the protocol by which array libraries share memory, beyond NumPy's support for it.

NumPy has no bfloat16, and takes a null pointer for memory that is still to be allocated. This
module therefore reads the description in the protocol's capsule, and passes a bfloat16 array to
NumPy as an array of 16-bit integers. The structures are those of ``dlpack.h``, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["BFLOAT16", "NoMemoryError", "answer_like", "host_view"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Type codes of dlpack.h.
_UNSIGNED, _BFLOAT = 1, 4
#: Bytes before the tensor in a versioned structure: version, two pointers, flags.
_HEADER = 32


class NoMemoryError(Exception):
    """An array with elements but without memory: a fake one, or one not yet computed."""


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _tensor_in(capsule: Any) -> _Tensor | None:
    """The description in a capsule that has not been consumed; None for another version."""
    name = _name_of(capsule)
    place = _pointer_of(capsule, name) or 0
    if name == b"dltensor":
        return _Tensor.from_address(place)
    if name == b"dltensor_versioned" and ctypes.c_uint32.from_address(place).value == 1:
        return _Tensor.from_address(place + _HEADER)
    return None


class _Shared:
    """Stands in for an array, and replaces one type code by another."""

    def __init__(self, array: Any, was: int, becomes: int) -> None:
        self._array, self._was, self._becomes = array, was, becomes
        self.changed = False

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        tensor = _tensor_in(capsule)
        if tensor is None:
            return capsule
        if not tensor.data and all(tensor.shape[axis] for axis in range(tensor.ndim)):
            raise NoMemoryError
        if (tensor.code, tensor.bits) == (self._was, 16):
            tensor.code, self.changed = self._becomes, True
        return capsule


def host_view(value: Any) -> Any:
    """A NumPy array over the memory of a host array with DLPack, bfloat16 included.

    Raises
    ------
    NoMemoryError
        If the array has elements but no memory.
    """
    shared = _Shared(value, _BFLOAT, _UNSIGNED)
    array = np.from_dlpack(shared)
    return array.view(BFLOAT16) if shared.changed else array


def answer_like(value: Any) -> Callable[[Any], Any]:
    """A function that converts a native array to the library of ``value``.

    It uses ``from_dlpack`` of the value's array namespace, else of the module of its class or of
    the first base class whose module has one. If none has, it returns the native array.
    """
    take = _from_dlpack_of(value)
    if take is None:
        return lambda native: native

    def answer(native: Any) -> Any:
        if isinstance(native, np.ndarray) and native.dtype == BFLOAT16:
            return take(_Shared(native.view(np.uint16), _UNSIGNED, _BFLOAT))
        return take(native)

    return answer


def _from_dlpack_of(value: Any) -> Callable[[Any], Any] | None:
    if hasattr(value, "__array_namespace__"):
        take = getattr(value.__array_namespace__(), "from_dlpack", None)
        if take is not None:
            return take  # type: ignore[no-any-return]
    for base in type(value).__mro__:
        take = getattr(sys.modules.get(base.__module__.split(".")[0]), "from_dlpack", None)
        if take is not None:
            return take  # type: ignore[no-any-return]
    return None
