"""A feature in kernels: its header, its parameters, and the types that ``Config`` names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["MAIN_KERNELS", "TENSOR_MAP", "DevicePart", "KernelName", "with_map"]

#: Folder and file of a kernel.
KernelName = tuple[str, str]

#: CUtensorMap of the driver; its address is a multiple of 64 bytes.
TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))])
_MAP_ALIGNMENT = 64


def with_map(*fields: tuple[str, Any]) -> np.dtype[np.void]:
    """A block of parameters with a tensor map among its fields: a multiple of 64 bytes long."""
    block = np.dtype(list(fields), align=True)
    size = -(-block.itemsize // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    kinds = {name: field[:2] for name, field in (block.fields or {}).items()}
    return np.dtype(
        {
            "names": [*kinds],
            "formats": [kind for kind, _ in kinds.values()],
            "offsets": [offset for _, offset in kinds.values()],
            "itemsize": size,
        }
    )


#: Kernels that compute tiles of scores.
MAIN_KERNELS: frozenset[KernelName] = frozenset(
    (
        *(
            (generation, kernel)
            for generation in ("fa1", "fa2", "fa3")
            for kernel in ("forward", "backward")
        ),
        ("steps", "bias_gradient"),
    )
)


@dataclass(frozen=True)
class DevicePart:
    """A feature's additions to kernels.

    Attributes
    ----------
    kernels
        The kernels that it changes. A term of the scores changes :data:`MAIN_KERNELS`; lengths and
        ends of rows also change the small kernels that need the dead rows.
    struct
        C++ name of its parameters; the member has the feature's name.
    block
        The same as a NumPy dtype. A field with the name of an array holds its address.
    seams
        Types that ``Config`` names, each with the C++ type that the feature puts there. A name in
        braces stands for a constant of the use, or for the C++ name of a dtype; ``{before}`` stands
        for the type without the feature.
    header
        Its file, relative to the root of the CUDA sources.
    text
        The header's text, if it is not a file of the CUDA sources.
    """

    kernels: frozenset[KernelName]
    struct: str
    block: np.dtype[np.void]
    seams: tuple[tuple[str, str], ...]
    header: str = ""
    text: str = field(default="", repr=False)

    @property
    def alignment(self) -> int:
        """The alignment of its parameters in bytes."""
        kinds = [field[0] for field in (self.block.fields or {}).values()]
        return _MAP_ALIGNMENT if TENSOR_MAP in kinds else self.block.alignment
