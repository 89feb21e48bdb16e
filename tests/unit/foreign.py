"""A made-up array library, whose arrays share their memory by DLPack."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

__all__ = ["Tensor", "library"]

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
# From dlpack.h: the position of the type code in a DLTensor, where it follows the pointer, the
# device and the number of axes; the number of bytes before the DLTensor in a versioned structure;
# and the codes of two types.
_CODE, _HEADER, _UNSIGNED, _BFLOAT = 20, 32, 1, 4


def _place(capsule: Any) -> int:
    versioned = "versioned" in repr(capsule)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return int(_pointer(capsule, name)) + (_HEADER if versioned else 0)


class Tensor:
    """An array that shares its memory by DLPack.

    Parameters
    ----------
    array
        The memory, as a NumPy array.
    dtype
        The name of its type in the library. For "bfloat16" the NumPy array holds 16-bit integers.
    """

    def __init__(self, array: np.ndarray, dtype: str = "", versioned: bool = True) -> None:
        self.array, self.dtype, self.versioned = array, dtype or array.dtype.name, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__(**(options if self.versioned else {}))
        assert ("versioned" in repr(capsule)) == (self.versioned and "max_version" in options)
        if self.dtype == "bfloat16":
            self._change(capsule)
        return capsule

    def _change(self, capsule: Any) -> None:
        code = ctypes.c_uint8.from_address(_place(capsule) + _CODE)
        assert code.value == _UNSIGNED
        code.value = _BFLOAT


class Nowhere(Tensor):
    """An array without memory."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__(**options)
        ctypes.c_void_p.from_address(_place(capsule)).value = None
        return capsule


class Negative(Tensor):
    """An array whose numbers are the negatives of the numbers in its memory, if ``pending``."""

    pending = True

    def is_neg(self) -> bool:
        return self.pending


class Deleted(Tensor):
    """An array that says that it is deleted; a request for its device raises an error."""

    def is_deleted(self) -> bool:
        return True

    def __dlpack_device__(self) -> tuple[int, int]:
        return len(None), 0  # type: ignore[arg-type]


def _from_dlpack(shared: Any) -> Tensor:
    """The ``from_dlpack`` of the library, which also takes bfloat16."""
    assert tuple(shared.__dlpack_device__()) == (1, 0)

    class Integers:
        changed = False

        def __dlpack_device__(self) -> Any:
            return shared.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            capsule = shared.__dlpack__(**options)
            code = ctypes.c_uint8.from_address(_place(capsule) + _CODE)
            if code.value == _BFLOAT:
                self.changed, code.value = True, _UNSIGNED
            return capsule

    integers = Integers()
    array = np.from_dlpack(integers)
    return Tensor(array, "bfloat16" if integers.changed else "")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``foreign_arrays`` with these classes and ``from_dlpack``."""
    module = ModuleType("foreign_arrays")
    vars(module).update(from_dlpack=_from_dlpack)
    for kind in (Tensor, Nowhere, Negative, Deleted):
        monkeypatch.setattr(kind, "__module__", "foreign_arrays.tensors")
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "foreign_arrays", module)
    return module
