"""Block-sparse masks: which blocks of pairs of a query and a key take part."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays.adopt import adopt
from .arrays.meaning import kind_of
from .errors import ArgumentTypeError, ArgumentValueError, shown
from .features.block_mask import check_block

__all__ = ["BlockMask", "split_block_mask"]

_NAME = "block_mask"


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of queries and keys take part in attention.

    A pair of query i and key j takes part where ``blocks[b, h, i // bq, j //
    bkv]`` is True and all else that hides keys lets it. Tiles of blocks that are
    all False are neither loaded nor computed on CUDA, but for deterministic
    gradients of FlashAttention-2 and 3.

    Parameters
    ----------
    blocks : array, broadcasts against (batch, heads_q, q_blocks, kv_blocks)
        bool, or uint8 of which everything but 0 is True; of any kind that q
        may be of, where q is. Each axis may be 1 and the first ones may be
        left out. There are ``ceil(seqlen_q / bq)`` and ``ceil(seqlen_kv /
        bkv)`` blocks. A shape or a dtype for :func:`prepare` and
        :func:`explain`.
    block : (int, int)
        ``(bq, bkv)``, queries and keys of a block: multiples of 64.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If ``block`` is no pair of such numbers.
    """

    blocks: Any
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", check_block("block", self.block))

    @classmethod
    def from_csr(
        cls, indptr: Any, indices: Any, kv_blocks: int, block: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """The mask of lists of blocks, as SciPy's ``csr_matrix`` and ``bsr_array`` have them.

        Parameters
        ----------
        indptr : array of integers, (..., q_blocks + 1)
            Row i of blocks shows the columns ``indices[indptr[i]:indptr[i + 1]]``.
            Axes in front are those of heads, or of the batch and heads.
        indices : array of integers, (n,)
            Columns in any order; a column that comes twice counts once. All
            heads index the same array.
        kv_blocks : int
            Blocks of keys in a row.
        block : (int, int)
            As of :class:`BlockMask`.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If an argument is not of this kind, ``indptr`` decreases along a row
            of its last axis or leaves ``indices``, or a column is none of
            ``kv_blocks``. Arrays on a device are waited for.
        """
        starts, columns = adopt("indptr", indptr), adopt("indices", indices)
        for name, array in (("indptr", starts), ("indices", columns)):
            if array.native.dtype.kind not in "iu":
                raise ArgumentTypeError(name, f"dtype {array.spec.dtype}", "integers")
        if isinstance(kv_blocks, bool) or not isinstance(kv_blocks, (int, np.integer)):
            raise ArgumentTypeError("kv_blocks", shown(kv_blocks), "an integer")
        if kv_blocks < 0:
            raise ArgumentValueError("kv_blocks", shown(kv_blocks), "at least 0")
        if not 1 <= len(starts.spec.shape) <= 3 or starts.spec.shape[-1] == 0:
            expected = "(q_blocks + 1,), (heads, q_blocks + 1) or (batch, heads, q_blocks + 1)"
            raise ArgumentValueError("indptr", f"shape {starts.spec.shape}", expected)
        if len(columns.spec.shape) != 1:
            raise ArgumentValueError("indices", f"shape {columns.spec.shape}", "one axis")
        if columns.spec.device != starts.spec.device:
            raise ArgumentValueError("indices", "an array elsewhere", "one where indptr is")
        dense = _dense(starts.native, columns.native, int(kv_blocks))
        return cls(starts.answer(dense), block)


def _dense(starts: Any, columns: Any, kv_blocks: int) -> Any:
    """Lists of columns as booleans."""
    xp: Any = np
    if not isinstance(starts, np.ndarray):
        xp = importlib.import_module("cupy")
    starts, columns = starts.astype(np.int64), columns.astype(np.int64)
    shape = (*starts.shape[:-1], starts.shape[-1] - 1)
    begins, ends = starts[..., :-1].reshape(-1), starts[..., 1:].reshape(-1)
    if bool(((begins < 0) | (ends < begins) | (ends > columns.size)).any()):
        expected = f"rows that begin and end from 0 to {columns.size}, in this order"
        raise ArgumentValueError("indptr", "a row that does not", expected)
    if bool(((columns < 0) | (columns >= kv_blocks)).any()):
        raise ArgumentValueError("indices", "another column", f"0 to {kv_blocks - 1}")
    dense = xp.zeros((begins.size, kv_blocks), bool)
    after = xp.cumsum(ends - begins)  # entries of all rows up to this one
    entries = xp.arange(int(after[-1]) if after.size else 0)
    if entries.size:
        row = xp.searchsorted(after, entries, side="right")
        dense[row, columns[ends[row] - after[row] + entries]] = True
    return dense.reshape(*shape, kv_blocks)


def split_block_mask(value: Any) -> tuple[tuple[int, int] | None, Any]:
    """A block mask as a keyword, the size of its blocks, and as an array.

    Raises
    ------
    ArgumentTypeError
        If it is something else, and not None.
    """
    if value is None:
        return None, None
    if not isinstance(value, BlockMask):
        raise ArgumentTypeError(_NAME, kind_of(value), "a cuflash.BlockMask, or None")
    return value.block, value.blocks
