"""What a plan is made of: kernel configurations, launches, workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .problem import DTypeName, MaskKind

__all__ = ["Buffer", "CopyKind", "KernelConfig", "KernelLaunch", "ProductKind", "lay_out"]

CopyKind = Literal["asynchronous", "vector", "element"]

#: What multiplies tiles: the tensor cores where storage has 16 bits, for float32 by three tf32
#: products for each and for float64 (both from sm_80 on); or fused multiply-adds.
ProductKind = Literal["tensor_cores", "tf32", "fp64", "scalar"]


@dataclass(frozen=True)
class KernelConfig:
    """Everything that changes the machine code of a kernel, and nothing else.

    It is the only key of ``cuda.source`` and ``cuda.compile``: lengths, batch,
    heads, strides, scale and offsets are not in it, so calls that differ only
    in those share one compilation.
    """

    architecture: str
    generation: str  # folder of cuda_src
    kernel: str  # file and entry of that folder
    storage: DTypeName
    compute: DTypeName
    output: DTypeName
    statistics: DTypeName
    head_dim: int  # buckets
    head_dim_v: int
    mask: MaskKind
    copies: CopyKind
    workspace_copies: CopyKind
    products: ProductKind
    mma_depth: int  # of the matrix instruction; 0: scalar products
    constants: tuple[tuple[str, int], ...]  # of the tile
    threads: int
    shared_bytes: int
    features: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        """Name of the compiled function."""
        return f"cuflash_{self.generation}_{self.kernel}"


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan and its grid."""

    config: KernelConfig
    grid: int  # thread blocks


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace."""

    name: str
    offset: int
    nbytes: int


def lay_out(sizes: list[tuple[str, int]]) -> Iterator[Buffer]:
    """Buffers of these names and bytes, one after the other, each at a multiple of 256."""
    offset = 0
    for name, nbytes in sizes:
        yield Buffer(name, offset, nbytes)
        offset += -(-nbytes // 256) * 256
