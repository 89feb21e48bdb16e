"""Types of the elements of arrays, and of the computation with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DTYPES", "ELEMENTS", "DType", "DTypeName", "Element", "ElementName"]

DTypeName = Literal["float16", "bfloat16", "float32", "float64"]
ElementName = Literal[
    "float16", "bfloat16", "float32", "float64", "bool", "int32", "int64", "uint8", "uint32"
]


@dataclass(frozen=True)
class Element:
    """A type of array elements."""

    name: ElementName
    itemsize: int
    cuda: str  # its name in CUDA C++


@dataclass(frozen=True)
class DType(Element):
    """A storage type and the type of the computation with it."""

    name: DTypeName
    compute: DTypeName  # of accumulators, softmax, lse and delta

    @property
    def scales(self) -> tuple[float, float]:
        """The smallest and the largest ``scale`` for which scores of this type are accurate.

        A product q.k below the smallest normal number of the compute type may
        become 0. Times the largest scale this is an error of 2^-26 of a
        score in float32, and of 2^-122 in float64: less than one rounding.
        The smallest scale is a normal number, and so is its product with log2(e).
        """
        exponent = 100 if self.compute == "float32" else 900
        return 2.0**-exponent, 2.0**exponent


#: The four storage types.
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float16", 2, "__half", "float32"),
        DType("bfloat16", 2, "__nv_bfloat16", "float32"),
        DType("float32", 4, "float", "float32"),
        DType("float64", 8, "double", "float64"),
    )
}
#: The storage types and the types of arrays of features only, by name.
ELEMENTS: dict[str, Element] = {
    **DTYPES,
    "bool": Element("bool", 1, "bool"),
    "int32": Element("int32", 4, "int"),
    "int64": Element("int64", 8, "long long"),
    "uint8": Element("uint8", 1, "unsigned char"),
    "uint32": Element("uint32", 4, "unsigned"),
}
