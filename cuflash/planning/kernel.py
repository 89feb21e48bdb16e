"""The elements of a plan: kernel configurations, launches, workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..features.device import DevicePart, KernelName
from .device import DeviceLimits
from .problem import AttentionProblem, DTypeName, MaskKind
from .tiles.common import Arithmetic, Footprint, ProductKind, bucket

__all__ = [
    "Buffer",
    "CompiledFeature",
    "CopyKind",
    "KernelConfig",
    "KernelLaunch",
    "bare_config",
    "kernel_config",
    "lay_out",
]

CopyKind = Literal["asynchronous", "vector", "element"]


@dataclass(frozen=True)
class CompiledFeature:
    """The contribution of a feature to the machine code of a kernel."""

    name: str
    device: DevicePart
    constants: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True)
class KernelConfig:
    """Everything that changes the machine code of a kernel, and nothing else.

    It is the only key of ``cuda.source`` and ``cuda.compile``: lengths, batch,
    heads, strides, scale and offsets are not in it, so calls that differ only
    in those share one compilation as long as the plan takes the same tile.
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
    blocks_per_sm: int = 1  # the compiler limits registers so that these fit
    features: tuple[CompiledFeature, ...] = ()
    waits: bool = False  # first of all for the kernel before, which may still run

    @property
    def entry(self) -> str:
        """Name of the compiled function."""
        return f"cuflash_{self.generation}_{self.kernel}"


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan and its grid."""

    config: KernelConfig
    grid: int  # thread blocks
    arguments: tuple[tuple[str, int], ...] = ()  # fields of its parameters that the plan sets
    boxes: tuple[tuple[str, int], ...] = ()  # tensors loaded through maps; rows of a copy
    overlaps: bool = False  # it may begin before the kernel before it has ended, and waits itself


def kernel_config(
    problem: AttentionProblem,
    limits: DeviceLimits,
    kernel: KernelName,
    arithmetic: Arithmetic,
    constants: dict[str, int],
    footprint: Footprint,
) -> KernelConfig:
    """Return the configuration of a kernel, ``(generation, name)``, for a problem on a device."""
    fast: CopyKind = "asynchronous" if limits.compute_capability >= (8, 0) else "vector"
    return KernelConfig(
        architecture=limits.architecture,
        generation=kernel[0],
        kernel=kernel[1],
        storage=problem.storage,
        compute=problem.compute,
        output=problem.output,
        statistics=problem.statistics,
        head_dim=bucket(problem.head_dim),
        head_dim_v=bucket(problem.head_dim_v),
        mask=problem.mask,
        copies="element" if problem.alignment == "element" else fast,
        workspace_copies=fast,
        products=arithmetic.products,
        mma_depth=arithmetic.mma_depth,
        constants=tuple(constants.items()),
        threads=footprint.threads,
        shared_bytes=footprint.shared_bytes,
        blocks_per_sm=footprint.blocks_per_sm,
        features=_features(problem, kernel, constants.get("operand_stages", 0) > 0),
    )


def bare_config(
    problem: AttentionProblem,
    limits: DeviceLimits,
    kernel: KernelName,
    arithmetic: Arithmetic,
    constants: dict[str, int],
    footprint: Footprint,
) -> KernelConfig:
    """Return the configuration of a kernel whose code depends on its constants alone."""
    config = kernel_config(problem, limits, kernel, arithmetic, constants, footprint)
    config = replace(config, storage="float32", output="float32", compute="float32")
    config = replace(config, statistics="float32", mask="full", copies="element", features=())
    return replace(config, head_dim=0, head_dim_v=0, products="scalar", mma_depth=0)


def _features(
    problem: AttentionProblem, kernel: KernelName, staging: bool
) -> tuple[CompiledFeature, ...]:
    """Return the contributions of a problem's features to a kernel."""
    parts = ((use, use.part_in(kernel, staging)) for use in problem.uses)
    return tuple(
        CompiledFeature(use.feature, part, use.compiled) for use, part in parts if part is not None
    )


@dataclass(frozen=True)
class Buffer:
    """A range of the workspace."""

    name: str
    offset: int
    nbytes: int


def lay_out(sizes: list[tuple[str, int]]) -> Iterator[Buffer]:
    """Yield buffers of these names and bytes, in order, each at a multiple of 256."""
    offset = 0
    for name, nbytes in sizes:
        yield Buffer(name, offset, nbytes)
        offset += -(-nbytes // 256) * 256
