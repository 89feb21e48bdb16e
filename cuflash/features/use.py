"""A feature as one problem uses it: hashable, without arrays."""

from __future__ import annotations

from dataclasses import dataclass

from .device import DevicePart, KernelName
from .host import HostPart

__all__ = ["Operand", "Use"]


@dataclass(frozen=True)
class Operand:
    """An array that a feature reads; C-contiguous unless its rule says that it broadcasts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    #: For an array that broadcasts: the numbers of batch entries that share one of its entries, and
    #: one of its gradient's; None if it has one entry for all, or one for each.
    entries: tuple[int, int] | None = None
    #: Whether FlashAttention-3 loads it into shared memory tile by tile, and whether the copy
    #: engine can read it in place.
    staged: bool = False
    mappable: bool = True

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        """The shape of an array that broadcasts, with all its axes."""
        batch, heads, rows, keys = (*(1,) * (4 - len(self.shape)), *self.shape)
        return batch, heads, rows, keys


@dataclass(frozen=True)
class Use:
    """A feature's additions to one problem.

    Attributes
    ----------
    feature
        Its name in the table of features.
    device
        Its additions to kernels; None if it changes none.
    staged
        The same for kernels that bring its array to shared memory.
    packed
        The same for kernels that read its array as an earlier step has prepared it.
    host
        Its additions to the tiled NumPy code; None if it changes no score.
    unit
        One unit of its kernels' scores in natural units; None if the feature does not change it.
    pair_sums
        The operand whose gradient is requested, if it has one number for each head: kernels sum
        every pair's contribution while they make dS. None without such a gradient.
    shown
        Its text in plans and errors; if empty, its numbers by name.
    host_needs
        What the NumPy backend needs and the call did not give; if empty, nothing could help.
    compiled
        Constants that change the machine code, by name.
    numbers
        Values of the fields of its device block, by name.
    operands
        Its arrays. The device block has a field with each name for the address.
    """

    feature: str
    device: DevicePart | None = None
    compiled: tuple[tuple[str, int | str], ...] = ()
    numbers: tuple[tuple[str, int | float], ...] = ()
    operands: tuple[Operand, ...] = ()
    host: HostPart | None = None
    unit: float | None = None
    pair_sums: str | None = None
    shown: str = ""
    staged: DevicePart | None = None
    packed: DevicePart | None = None
    host_needs: str = ""

    def part_in(self, kernel: KernelName, staging: bool) -> DevicePart | None:
        """Its additions to a kernel, which may bring arrays to shared memory."""
        if self.packed is not None and kernel in self.packed.kernels:
            return self.packed
        part = self.staged if staging and self.staged is not None else self.device
        return part if part is not None and kernel in part.kernels else None

    @property
    def needs_cuda(self) -> bool:
        """Whether it changes scores in kernels but has no part in the tiled NumPy code."""
        changes = self.device is not None and "Score" in dict(self.device.seams)
        return changes and self.host is None
