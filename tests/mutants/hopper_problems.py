"""The problems that planted bugs of FlashAttention-3 are run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kit.case import Case

__all__ = [
    "CAUSAL",
    "GRADIENTS",
    "HALVES_GRADIENTS",
    "LISTS",
    "MANY_HEADS",
    "NARROW",
    "NARROW_GRADIENTS",
    "ORDERED_GRADIENTS",
    "PARTED_GRADIENTS",
    "SERIAL_GRADIENTS",
    "SERIAL_TURNS",
    "SHARED_GRADIENTS",
    "Listed",
]

#: Three warpgroups that take turns, with two stages; four without turns, which skip most blocks.
CAUSAL, NARROW = "three warpgroups in turn", "four warpgroups without turns"
#: The backward pass: dQ divided by columns, divided by rows, and of shared keys.
GRADIENTS, NARROW_GRADIENTS = "gradients of wide heads", "gradients of narrow heads"
SHARED_GRADIENTS, ORDERED_GRADIENTS = "gradients of shared keys", "gradients by turns"
#: Serial score tiles, because dK is wide, with sums of dQ in any order and in a fixed one; and
#: halves of K that are narrower than a panel.
SERIAL_GRADIENTS, SERIAL_TURNS = "gradients of serial score tiles", "the same by turns"
HALVES_GRADIENTS = "gradients of halves of a panel"
#: So many heads that blocks clear sums of the last ones. Rows do not divide evenly among tiles, and
#: blocks clear more than they multiply.
MANY_HEADS = "gradients of many heads"
#: Several blocks share a kv tile; in all other lists each tile has one block.
PARTED_GRADIENTS = "gradients in parts"


@dataclass(frozen=True)
class Listed:
    """The problems on which one configuration of the kernel runs.

    Attributes
    ----------
    few : Case
        Ragged, several kv tiles, grouped heads; each result is compared with float64.
    many : Case
        The same with two q tiles or more for each multiprocessor of an H200.
    blocks : (int, int), optional
        The tile, if it is not the one that the lengths choose.
    parts : int
        The number of blocks among which every group of query heads is divided.
    """

    few: Case
    many: Case
    blocks: tuple[int, int] | None = None
    backward: bool = False
    ordered: bool = False
    parts: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of every call."""
        return {} if self.blocks is None else {"blocks": self.blocks}


def _case(batch: int, heads: tuple[int, int], lengths: tuple[int, int], **more: Any) -> Case:
    return Case(batch, *heads, *lengths, causal=True, seed=1, **more)


_WIDE: dict[str, Any] = {"head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16"}
_FEW_COLUMNS: dict[str, Any] = {"head_dim": 104, "head_dim_v": 8, "dtype": "bfloat16"}
_WIDE_KEYS: dict[str, Any] = {"head_dim": 192, "head_dim_v": 128, "dtype": "float16"}
_WIDER_KEYS: dict[str, Any] = {"head_dim": 160, "head_dim_v": 128, "dtype": "bfloat16"}
_BETWEEN: dict[str, Any] = {"head_dim": 96, "head_dim_v": 96, "dtype": "float16"}
_WIDEST: dict[str, Any] = {"head_dim": 192, "head_dim_v": 256, "dtype": "bfloat16"}
_HALF: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "dtype": "float16"}

LISTS = {
    CAUSAL: Listed(
        _case(2, (6, 2), (300, 500), **_WIDE),
        _case(22, (6, 2), (400, 450), **_WIDE),
        (192, 80),
    ),
    NARROW: Listed(
        _case(2, (4, 2), (600, 700), **_HALF),
        _case(16, (8, 2), (520, 600), **_HALF),
        (256, 64),
    ),
    GRADIENTS: Listed(
        _case(2, (6, 2), (300, 500), **_WIDE), _case(40, (6, 2), (400, 600), **_WIDE), backward=True
    ),
    SHARED_GRADIENTS: Listed(
        _case(2, (4, 2), (300, 500), **_WIDEST),
        _case(24, (4, 2), (400, 600), **_WIDEST),
        backward=True,
    ),
    ORDERED_GRADIENTS: Listed(
        _case(2, (6, 2), (300, 500), **_WIDE),
        _case(14, (6, 2), (1000, 2500), **_WIDE),
        backward=True,
        ordered=True,
    ),
    SERIAL_GRADIENTS: Listed(
        _case(2, (6, 2), (300, 500), **_WIDE_KEYS),
        _case(40, (6, 2), (400, 600), **_WIDE_KEYS),
        backward=True,
    ),
    SERIAL_TURNS: Listed(
        _case(2, (6, 2), (300, 500), **_WIDER_KEYS),
        _case(16, (4, 2), (500, 2100), **_WIDER_KEYS),
        backward=True,
        ordered=True,
    ),
    HALVES_GRADIENTS: Listed(
        _case(2, (6, 2), (300, 500), **_BETWEEN),
        _case(40, (6, 2), (400, 600), **_BETWEEN),
        backward=True,
    ),
    # In `many` all rows but the last ones are dead, so that blocks are done with their tiles long
    # before they have cleared sums; the last rows' sums come last. Padded columns are cleared too.
    MANY_HEADS: Listed(
        _case(3, (39, 39), (122, 300), **_WIDE),
        _case(12, (23, 23), (4000, 100), q_offset=-3990, **_FEW_COLUMNS),
        backward=True,
    ),
    PARTED_GRADIENTS: Listed(
        _case(2, (8, 2), (300, 500), **_WIDE),
        _case(20, (8, 2), (400, 600), **_WIDE),
        backward=True,
        parts=2,
    ),
    NARROW_GRADIENTS: Listed(
        _case(2, (4, 2), (600, 700), **_HALF), _case(40, (8, 2), (590, 600), **_HALF), backward=True
    ),
}
