"""Device memory that is host memory: blocks with guarded margins, pooled by stream like CuPy's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "Block", "Memory"]

#: Where blocks begin, as CuPy's pool has it.
ALIGNMENT = 512
#: Bytes before and behind a block.
MARGIN = 4096
#: What margins hold, and what a block holds before it is written: NaN in every floating type.
AROUND, FRESH = 0x7F, 0xFF


@dataclass(eq=False)
class Block:
    """One allocation.

    Attributes
    ----------
    device, stream
        Where it was allocated; its memory is given to the next who asks on that stream.
    inside
        Whether the library allocated it, in a call that is watched.
    life
        How often the memory was given out; another life is another array.
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
        """What it holds."""
        return self.raw[MARGIN : MARGIN + self.nbytes]

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether so many bytes lie in it."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def check(self) -> None:
        """Fail if anything was written beside it."""
        size = MARGIN + self.nbytes
        for name, part in (("before", self.raw[:MARGIN]), ("behind", self.raw[size:])):
            assert (part == AROUND).all(), f"a kernel wrote {name} an allocation of {self.nbytes}"


@dataclass
class Memory:
    """All blocks of all devices."""

    blocks: list[Block] = field(default_factory=list)
    _free: dict[tuple[int, int, int], list[Block]] = field(default_factory=dict)

    def allocate(self, nbytes: int, device: int, stream: int, inside: bool) -> tuple[Block, object]:
        """A block, and the object that holds it: it is free once nobody has that any more."""
        block = self._taken(nbytes, device, stream)
        block.inside, block.alive, block.life = inside, True, block.life + 1
        block.bytes[...] = FRESH
        holder = _Holder()
        weakref.finalize(holder, self._release, block)
        return block, holder

    def at(self, address: int) -> Block | None:
        """The block that an address lies in."""
        return next((b for b in self.blocks if b.holds(address, 1)), None)

    def living(self) -> Iterator[Block]:
        """Blocks that somebody has."""
        return (block for block in self.blocks if block.alive)

    def check(self) -> None:
        """Fail if anything was written beside blocks."""
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
    """Has a block as long as it lives."""
