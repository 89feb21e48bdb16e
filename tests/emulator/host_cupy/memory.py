"""Device memory that is host memory: blocks with guarded margins, pooled by stream like CuPy's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "Block", "Memory"]

#: Blocks begin at multiples of this, as in CuPy's pool.
ALIGNMENT = 512
#: Bytes before and after a block.
MARGIN = 4096
#: The bytes of margins, and of a block before it is written: NaN in every floating type.
AROUND, FRESH = 0x7F, 0xFF


@dataclass(eq=False)
class Block:
    """One allocation.

    Attributes
    ----------
    device, stream
        Where it was allocated; once free, the memory serves the next allocation on that stream.
    inside
        Whether the library allocated it in a watched call.
    life
        The number of allocations of this memory; another life is another array.
    """

    raw: Any
    address: int
    nbytes: int
    device: int
    stream: int
    inside: bool = False
    alive: bool = True
    life: int = 0

    @property
    def bytes(self) -> Any:
        """The content."""
        return self.raw[MARGIN : MARGIN + self.nbytes]

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether the block contains ``nbytes`` bytes at an address."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def check(self) -> None:
        """Fail if a margin was written."""
        size = MARGIN + self.nbytes
        for name, part in (("before", self.raw[:MARGIN]), ("behind", self.raw[size:])):
            assert (part == AROUND).all(), f"a kernel wrote {name} an allocation of {self.nbytes}"


@dataclass
class Memory:
    """All blocks of all devices."""

    blocks: list[Block] = field(default_factory=list)
    _free: dict[tuple[int, int, int], list[Block]] = field(default_factory=dict)

    def allocate(self, nbytes: int, device: int, stream: int, inside: bool) -> tuple[Block, object]:
        """A block, and an object that holds it: the block is free once the object is gone."""
        block = self._taken(nbytes, device, stream)
        block.inside, block.alive, block.life = inside, True, block.life + 1
        block.bytes[...] = FRESH
        holder = _Holder()
        weakref.finalize(holder, self._release, block)
        return block, holder

    def at(self, address: int) -> Block | None:
        """The block that contains an address."""
        return next((b for b in self.blocks if b.holds(address, 1)), None)

    def living(self) -> Iterator[Block]:
        """Blocks in use."""
        return (block for block in self.blocks if block.alive)

    def check(self) -> None:
        """Fail if a margin of any block was written."""
        for block in self.blocks:
            block.check()

    def _taken(self, nbytes: int, device: int, stream: int) -> Block:
        waiting = self._free.get((device, stream, nbytes))
        if waiting:
            return waiting.pop()
        room = np.full(nbytes + 2 * MARGIN + ALIGNMENT, AROUND, np.uint8)
        skip = -(room.ctypes.data + MARGIN) % ALIGNMENT
        raw = room[skip : skip + nbytes + 2 * MARGIN]
        block = Block(raw, raw.ctypes.data + MARGIN, nbytes, device, stream)
        self.blocks.append(block)
        return block

    def _release(self, block: Block) -> None:
        block.alive = False
        block.bytes[...] = FRESH
        self._free.setdefault((block.device, block.stream, block.nbytes), []).append(block)


class _Holder:
    """Keeps a block in use as long as it lives."""
