"""A feature as one problem uses it: hashable, and without arrays."""

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
    #: Of one that broadcasts: entries of the batch that share one of its own, and one of its
    #: gradient; None where it has one entry for all, or one for each.
    entries: tuple[int, int] | None = None
    #: Whether FlashAttention-3 brings it to shared memory tile by tile, and whether the copy engine
    #: can read it where it lies.
    staged: bool = False
    mappable: bool = True

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        """The shape of one that broadcasts with all its axes."""
        batch, heads, rows, keys = (*(1,) * (4 - len(self.shape)), *self.shape)
        return batch, heads, rows, keys


@dataclass(frozen=True)
class Use:
    """What a feature adds to one problem.

    Attributes
    ----------
    feature
        Its name in the table of features.
    device
        What it adds to kernels; None where it changes none.
    staged
        The same for kernels that bring its array to shared memory.
    packed
        The same for kernels that read what a step before has made of it.
    host
        What it adds to the tiled NumPy code; None where it changes no score.
    unit
        What one unit of the scores that its kernels make is, in natural units;
        None where it is what it was before.
    pair_sums
        The operand whose gradient is asked for, where it has one number for
        each head: what every pair gives to it is summed as dS is made. None
        where there is no such gradient.
    shown
        What plans and errors say of it; empty: its numbers by name.
    compiled
        Constants that change the machine code, by name.
    numbers
        Values of the fields of its device block, by name.
    operands
        Arrays. The device block has a field of each name that holds the address.
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

    def part_in(self, kernel: KernelName, staging: bool) -> DevicePart | None:
        """What it adds to a kernel, which may bring arrays to shared memory."""
        if self.packed is not None and kernel in self.packed.kernels:
            return self.packed
        part = self.staged if staging and self.staged is not None else self.device
        return part if part is not None and kernel in part.kernels else None

    @property
    def needs_cuda(self) -> bool:
        """Whether kernels change scores by it, and the tiled NumPy code cannot."""
        changes = self.device is not None and "Score" in dict(self.device.seams)
        return changes and self.host is None
