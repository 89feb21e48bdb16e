"""Descriptions of future calls, and the problems that represent all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from .arrays.adopt import adopt
from .errors import ArgumentValueError
from .features.packed_lengths import NAMES as OFFSETS
from .features.table import with_features
from .features.use import Operand
from .features.used_lengths import NAMES
from .options import AlgorithmChoice
from .planning.problem import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_SEQLEN,
    AttentionProblem,
    DTypeName,
    MaskKind,
    Operation,
)
from .score_mod import ScoreMod, with_arrays
from .telling import GROUPS, entries_of, groups_of, heads_of, telling_lengths, windows_of
from .tensors import QKV, differentiable, dtypes_of, tensors

__all__ = ["Calls", "problems_of"]

#: (q or k, v), or (queries, keys).
Pair = tuple[int, int]

#: The most query heads: beyond them no plan changes.
_MOST_HEADS = 4**7
#: From this number of pairs on, the gradient of a bias has enough blocks for every device.
_FEW_BLOCKS = 2**22
#: The number of sequences, including the rows after the last one; it changes no kernel.
_SEQUENCES = 2


class _Features(NamedTuple):
    """One combination of features, each as :class:`Calls` has it or absent."""

    softcap: bool
    score_mod: ScoreMod | None
    alibi: bool
    bias: str | None
    mask: str | None
    block_mask: Pair | None
    sinks: str | None
    dropout: bool
    used_lengths: bool
    packed: bool

    @property
    def possible(self) -> bool:
        """Whether one call may have all of them; see ``features/refused.py``."""
        if self.packed and any((self.bias, self.mask, self.block_mask, self.used_lengths)):
            return False
        return not (self.softcap and self.score_mod)


@dataclass(frozen=True)
class Calls:
    """Future calls: all combinations of these values.

    Attributes
    ----------
    head_dims
        Widths of q and k, and of v.
    dtypes, operations, algorithm, deterministic
        The same as in the calls.
    masks
        "causal", "full", or a window: "left" bounds the keys of a query on the left only, "band" on
        both sides.
    softcap
        Whether scores are capped; the kernels do not depend on the cap.
    score_mod
        Score functions, and None for calls without one; not with a soft cap. The kernels depend on
        the number of axes of its arrays, but not on their sizes nor on the values of its numbers.
    alibi
        Whether the calls have ALiBi slopes; the kernels do not depend on their shape. Gradients are
        compiled both with and without the gradient of the slopes.
    bias
        The axes along which the bias differs: "q", "k", "qk", or "1" for neither, then ":" and its
        dtype if it is not that of q; None for calls without a bias.
    mask_array
        The same axes for a boolean mask, which has one dtype.
    block_mask
        Queries and keys of each block of a block mask; None for calls without one.
    sinks
        Dtypes of sinks: None for calls without sinks, "query" for the dtype of q. Gradients of
        calls with sinks include those of the sinks.
    dropout
        Whether weights are dropped; the kernels depend neither on the probability nor on the seed.
    used_lengths
        Whether some rows do not count; the kernels are the same for queries, keys or both.
    packed
        Whether sequences are packed; the kernels do not depend on their number. Not with used
        lengths, a bias or a mask; slopes then have no gradient.
    unaligned
        Whether rows begin at addresses that are no multiples of 16 bytes. They always do where a
        row is not a multiple of 16 bytes long.
    seqlens
        Lengths of q and of k; None for all lengths that change a kernel.
    """

    head_dims: tuple[Pair, ...]
    dtypes: tuple[DTypeName, ...]
    operations: tuple[Operation, ...] = ("forward", "backward")
    masks: tuple[MaskKind, ...] = ("full", "causal")
    softcap: tuple[bool, ...] = (False,)
    score_mod: tuple[ScoreMod | None, ...] = (None,)
    alibi: tuple[bool, ...] = (False,)
    bias: tuple[str | None, ...] = (None,)
    mask_array: tuple[str | None, ...] = (None,)
    block_mask: tuple[Pair | None, ...] = (None,)
    sinks: tuple[str | None, ...] = (None,)
    dropout: tuple[bool, ...] = (False,)
    used_lengths: tuple[bool, ...] = (False,)
    packed: tuple[bool, ...] = (False,)
    algorithm: AlgorithmChoice = "auto"
    deterministic: bool = False
    unaligned: bool = False
    seqlens: tuple[Pair, ...] | None = None

    @property
    def features(self) -> Iterator[_Features]:
        """The requested combinations of features."""
        arrays = self.bias, self.mask_array, self.block_mask, self.sinks
        last = self.dropout, self.used_lengths, self.packed
        every = product(self.softcap, self.score_mod, self.alibi, *arrays, *last)
        asked = (_Features(*one) for one in every)
        return (one for one in asked if one.possible)

    def check(self) -> None:
        """Raise ArgumentValueError for widths and lengths that no call can have."""
        limits = (("head_dim", self.head_dims, MAX_HEAD_DIM), ("seqlen", self.seqlens, MAX_SEQLEN))
        for name, pairs, most in limits:
            for value in (value for pair in pairs or () for value in pair):
                if not 1 <= value <= most:
                    raise ArgumentValueError(name, str(value), f"1 to {most}")


def problems_of(calls: Calls) -> Iterator[AttentionProblem]:
    """Problems that together plan every kernel of such calls.

    Raises
    ------
    ArgumentValueError
        If no such call takes the requested dtype of a bias or of sinks.
    """
    seqlens = telling_lengths() if calls.seqlens is None else calls.seqlens
    for dims, dtype, operation, mask, asked in product(
        calls.head_dims, calls.dtypes, calls.operations, calls.masks, calls.features
    ):
        rows = [dim * DTYPES[dtype].itemsize for dim in dims]
        aligned = not calls.unaligned and all(row % 16 == 0 for row in rows)
        windows = windows_of(operation) if mask in ("left", "band") else (0,)
        entries = entries_of(operation, asked.bias)
        for (seqlen_q, seqlen_kv), heads, group, window, batch in product(
            seqlens, heads_of(operation, calls.seqlens is not None), GROUPS, windows, entries
        ):
            groups = groups_of(operation, (seqlen_q, seqlen_kv), calls.seqlens is not None)
            if heads * group > _MOST_HEADS or group not in groups:
                continue
            if batch > 1 and operation == "backward" and seqlen_q * seqlen_kv > _FEW_BLOCKS:
                continue
            plain = AttentionProblem(
                operation=operation,
                batch=batch,
                heads_q=heads * group,
                heads_kv=heads,
                seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
                head_dim=dims[0],
                head_dim_v=dims[1],
                storage=dtype,
                output=dtype,
                mask=mask,
                scale=1.0 / math.sqrt(dims[0]),
                q_offset=seqlen_kv - seqlen_q if mask in ("causal", "band") else 0,
                q_first=seqlen_kv - window - (seqlen_q - 1 if mask == "band" else 0)
                if window
                else 0,
                alignment="tensor_map" if aligned else "element",
                deterministic=calls.deterministic,
            )
            yield from _featured(plain, asked)


def _featured(problem: AttentionProblem, asked: _Features) -> Iterator[AttentionProblem]:
    """The problem with the requested features; their numbers are examples, such as a cap of 1.

    Gradients cover all arrays that have one. With slopes there are also the gradients without
    theirs, which are cheaper.
    """
    keywords: dict[str, Any] = {"softcap": 1.0} if asked.softcap else {}
    keywords |= {"dropout_p": 0.5, "dropout_seed": 0} if asked.dropout else {}
    operands: dict[str, Operand] = {}
    if asked.score_mod is not None:
        score, arrays = with_arrays(asked.score_mod)
        keywords["score_mod"] = score
        adopted = ((name, adopt("score_mod", array).spec) for name, array in arrays.items())
        operands |= {name: Operand(name, spec.dtype, spec.shape) for name, spec in adopted}
    if asked.packed:
        problem = replace(problem, sequences=_SEQUENCES)
        operands |= {name: Operand(name, "int32", (_SEQUENCES,)) for name in OFFSETS}
    if asked.alibi:
        shape = (problem.heads_q,) if asked.packed else (problem.batch, problem.heads_q)
        operands["alibi_slopes"] = Operand("alibi_slopes", problem.compute, shape)
    if asked.bias is not None:
        axes, _, of_bias = asked.bias.partition(":")
        dtype = _dtype_of("bias", problem, of_bias or "query")
        operands["bias"] = Operand("bias", dtype, _of_pairs(problem, axes))
    if asked.mask is not None:
        operands["mask"] = Operand("mask", "bool", _of_pairs(problem, asked.mask))
    if asked.block_mask is not None:
        keywords["block_mask"] = asked.block_mask
        problem = replace(problem, block=asked.block_mask)
        blocks = (1, 1, problem.q_blocks, problem.kv_blocks)
        operands["block_mask"] = Operand("block_mask", "bool", blocks)
    if asked.sinks is not None:
        dtype = _dtype_of("sinks", problem, asked.sinks)
        operands["sinks"] = Operand("sinks", dtype, (problem.heads_q,))
    if asked.used_lengths:
        operands |= {name: Operand(name, "int32", (problem.batch,)) for name in NAMES}
    every = tuple(name for name in operands if name in differentiable())
    without = tuple(name for name in every if name != "alibi_slopes")
    of_gradients = (without,) if asked.packed else (every, without)
    named = of_gradients if problem.operation == "backward" else ((),)
    for names in dict.fromkeys(named):
        yield with_features(replace(problem, wrt=(*QKV, *names)), keywords, operands)


def _of_pairs(problem: AttentionProblem, axes: str) -> tuple[int, ...]:
    """The shape of an array that differs along these axes and that entries and heads share."""
    lengths = {"q": problem.seqlen_q, "k": problem.seqlen_kv}
    return (1, 1, *(size if axis in axes else 1 for axis, size in lengths.items()))


def _dtype_of(name: str, problem: AttentionProblem, asked: str) -> str:
    """The requested dtype of an array; "query" is that of q."""
    dtype = problem.storage if asked == "query" else asked
    allowed = dtypes_of(tensors()[name], problem, {})
    if dtype not in allowed:
        raise ArgumentValueError(name, f"{dtype} for {problem.storage}", " or ".join(allowed))
    return dtype
