"""Block-sparse masks: the blocks of pairs of a query and a key that take part."""

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
    """The blocks of queries and keys that take part in attention.

    Query i and key j take part where ``blocks[b, h, i // bq, j // bkv]`` is True and nothing else
    hides the pair. On CUDA, tiles whose blocks are all False are neither loaded nor computed,
    except for deterministic gradients of FlashAttention-2 and 3.

    Parameters
    ----------
    blocks : array, broadcasts against (batch, heads_q, q_blocks, kv_blocks)
        bool, or uint8 where every value but 0 is True. An array of any kind that q may have, on the
        same device. Each axis may be 1, and leading axes may be left out. There are ``ceil(seqlen_q
        / bq)`` and ``ceil(seqlen_kv / bkv)`` blocks. :func:`prepare` and :func:`explain` also take
        a shape or a dtype.
    block : (int, int)
        ``(bq, bkv)``, queries and keys of a block: multiples of 64.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If ``block`` is not a pair of such numbers.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> mask = cuflash.BlockMask(np.tri(2, dtype=bool), block=(64, 64))
    >>> q = np.ones((1, 128, 1, 16), np.float32)
    >>> cuflash.attention(q, q, q, block_mask=mask).shape
    (1, 128, 1, 16)
    """

    blocks: Any
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", check_block("block", self.block))

    @classmethod
    def from_csr(
        cls, indptr: Any, indices: Any, kv_blocks: int, block: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """The mask from lists of blocks, in the format of SciPy's ``csr_matrix`` and ``bsr_array``.

        Parameters
        ----------
        indptr : array of integers, (..., q_blocks + 1)
            Row i of blocks shows the columns ``indices[indptr[i]:indptr[i + 1]]``.
            Leading axes are those of heads, or of the batch and heads.
        indices : array of integers, (n,)
            Columns in any order; a repeated column counts once. All heads index the same array.
        kv_blocks : int
            Blocks of keys in a row.
        block : (int, int)
            As for :class:`BlockMask`.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If an argument is of another kind, ``indptr`` decreases along its last axis or points
            outside of ``indices``, or a column is not below ``kv_blocks``. The call waits for
            arrays on a device.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> rows, columns = np.array([0, 1, 3]), np.array([0, 0, 1])
        >>> cuflash.BlockMask.from_csr(rows, columns, kv_blocks=2).blocks
        array([[ True, False],
               [ True,  True]])
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
    """Return lists of columns as a boolean array."""
    xp: Any = np
    if not isinstance(starts, np.ndarray):
        xp = importlib.import_module("cupy")
    starts, columns = starts.astype(np.int64), columns.astype(np.int64)
    shape = (*starts.shape[:-1], starts.shape[-1] - 1)
    begins, ends = starts[..., :-1].reshape(-1), starts[..., 1:].reshape(-1)
    if bool(((begins < 0) | (ends < begins) | (ends > columns.size)).any()):
        expected = f"rows within 0 to {columns.size}, none of which ends before it begins"
        raise ArgumentValueError("indptr", "a row out of range", expected)
    if bool(((columns < 0) | (columns >= kv_blocks)).any()):
        raise ArgumentValueError("indices", "a column out of range", f"0 to {kv_blocks - 1}")
    dense = xp.zeros((begins.size, kv_blocks), bool)
    after = xp.cumsum(ends - begins)  # entries of all rows up to this one
    entries = xp.arange(int(after[-1]) if after.size else 0)
    if entries.size:
        row = xp.searchsorted(after, entries, side="right")
        dense[row, columns[ends[row] - after[row] + entries]] = True
    return dense.reshape(*shape, kv_blocks)


def split_block_mask(value: Any) -> tuple[tuple[int, int] | None, Any]:
    """Split a block mask into the size of its blocks, the keyword ``block_mask``, and its array.

    Raises
    ------
    ArgumentTypeError
        If it is neither a block mask nor None.
    """
    if value is None:
        return None, None
    if not isinstance(value, BlockMask):
        raise ArgumentTypeError(_NAME, kind_of(value), "a cuflash.BlockMask, or None")
    return value.block, value.blocks
