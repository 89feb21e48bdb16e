"""How a feature enters the kernels: a header, parameters, and types that ``Config`` names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["MAIN_KERNELS", "DevicePart", "KernelName"]

#: Folder and file of a kernel.
KernelName = tuple[str, str]

#: Those that compute tiles of scores.
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
    """What a feature adds to the kernels that it enters.

    Attributes
    ----------
    kernels
        Those kernels. A term of the scores enters :data:`MAIN_KERNELS`; lengths and ends of rows
        enter also the small kernels that ask which rows are dead.
    struct
        C++ name of its parameters; the member is named as the feature.
    block
        The same as a NumPy dtype. A field of the name of an array holds its address.
    seams
        Types that ``Config`` names, each with the C++ type that the feature puts there. A name in
        braces stands for a constant of the use, or for the C++ name of a dtype.
    header
        Its file, from the root of the CUDA sources.
    text
        The header itself, where it is no file of the CUDA sources.
    """

    kernels: frozenset[KernelName]
    struct: str
    block: np.dtype[np.void]
    seams: tuple[tuple[str, str], ...]
    header: str = ""
    text: str = ""
