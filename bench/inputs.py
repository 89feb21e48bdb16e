"""The arrays of a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuflash.errors import UnsupportedError

from .case import CAP
from .cases import Case
from .float8 import bytes_of, nearest
from .lengths import offsets_of
from .masks import BLOCK, shown, shown_blocks

__all__ = ["Inputs", "Paged", "array_module", "make_inputs", "narrowed", "widened"]


class Paged(NamedTuple):
    """Keys and values in pages, in any order, in one pool for all entries."""

    k: Any  # (pages, page_size, heads, head_dim)
    v: Any
    table: Any  # (batch, pages of an entry)


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case, (batch, seqlen, heads, head_dim), all on the device or all on the
    host."""

    q: Any
    k: Any
    v: Any
    dout: Any
    sinks: Any = None  # (heads_q,), where the case has them
    alibi_slopes: Any = None  # (heads_q,) too
    bias: Any = None  # of the case's shape
    mask: Any = None  # of the case's kind
    block_mask: Any = None  # a number for each block
    cu_seqlens_q: Any = None  # where packed sequences begin, and where the last one ends
    cu_seqlens_kv: Any = None
    cache_seqlens: Any = None  # (batch,), for full caches
    paged: Paged | None = None  # k and v in pages; only ``of`` sets it
    stored: tuple[Any, Any] | None = None  # k and v as float8 bytes; only ``of`` sets it

    def of(self, case: Case) -> Inputs:
        """The same numbers for a case with another batch size, and its pages or float8 bytes."""
        matrices = {name: getattr(self, name) for name in ("q", "k", "v", "dout")}
        made = {name: x.reshape(case.batch, -1, *x.shape[2:]) for name, x in matrices.items()}
        paged = _in_pages(made["k"], made["v"], case.page_size) if case.page_size else None
        stored = (_stored(made["k"]), _stored(made["v"])) if case.float8 else None
        return replace(self, **made, paged=paged, stored=stored)

    def matrices(self, case: Case) -> list[Any]:
        """The q, k, v and dout of our own call; without a batch axis if the case is packed.

        ``case`` must be the one that was given to ``of``, which made the pages or bytes for it.
        """
        keys = (self.k, self.v) if self.paged is None else self.paged[:2]
        made = [self.q, *(self.stored or keys), self.dout]
        return [x[0] for x in made] if case.lengths else made

    def features(self, case: Case) -> dict[str, Any]:
        """The arrays of a case's features, by the keyword of our own call."""
        return {name: getattr(self, name) for name in case.arrays}

    def asked(self, case: Case) -> dict[str, Any]:
        """All keywords of our own call.

        Raises
        ------
        UnsupportedError
            If the library has no such feature.
        """
        keywords = {"causal": case.causal, **case.keywords, **self.features(case)}
        if case.kvcache:
            keywords["cache_seqlens"] = self.cache_seqlens
        if self.paged is not None:
            keywords["page_table"] = self.paged.table
        if self.stored is not None:
            keywords |= {"cache_dtype": "float8_e4m3fn", "k_scale": 1.0, "v_scale": 1.0}
        if case.block_mask:
            keywords["block_mask"] = _class("BlockMask")(self.block_mask, block=(BLOCK, BLOCK))
        if case.score_mod:
            keywords["score_mod"] = _class("ScoreMod")("return p.cap * tanh(s / p.cap);", cap=CAP)
        return keywords


def _class(name: str) -> Any:
    """A class of the library; older versions, which are timed too, lack some."""
    import cuflash

    if not hasattr(cuflash, name):
        raise UnsupportedError(f"there is no cuflash.{name}")
    return getattr(cuflash, name)


def _in_pages(k: Any, v: Any, size: int) -> Paged:
    """Copies in pages; the order of pages is random but the same in every run."""
    xp, (batch, seqlen) = array_module(k), k.shape[:2]
    table = np.random.default_rng(1).permutation(batch * seqlen // size)
    held = xp.asarray(np.argsort(table))  # the number of the run of keys in each page

    def copied(x: Any) -> Any:
        bits = x.view(f"uint{8 * x.dtype.itemsize}")  # CuPy may lack the type
        return bits.reshape(-1, size, *x.shape[2:])[held].view(x.dtype)

    return Paged(copied(k), copied(v), xp.asarray(table.reshape(batch, -1).astype(np.int32)))


def _stored(x: Any) -> Any:
    """Bytes of an array that holds float8 numbers."""
    xp = array_module(x)
    return bytes_of(widened(x).astype(np.float32), xp)


def array_module(array: Any) -> Any:
    """NumPy for a NumPy array, else CuPy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def widened(array: Any) -> Any:
    """An array in float64."""
    if array.dtype == ml_dtypes.bfloat16:
        xp = array_module(array)  # bfloat16 is the upper half of a float32
        array = (array.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return array.astype(np.float64)


def narrowed(array: Any, dtype: str) -> Any:
    """An array in a storage type, rounded to the nearest, ties to even."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    xp = array_module(array)
    bits = array.view(xp.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return upper.astype(xp.uint16).view(ml_dtypes.bfloat16)


def make_inputs(case: Case, xp: Any) -> Inputs:
    """Standard normal arrays, the same in every run, of CuPy or of NumPy.

    The slopes are those of the ALiBi paper; a mask is the one of the case's kind. Keys and values
    of float8 caches are rounded to float8 numbers.
    """
    generator = xp.random.default_rng(1)
    drawn = np.float64 if case.dtype == "float64" else np.float32

    def drawn_of(shape: tuple[int, ...]) -> Any:
        return narrowed(generator.standard_normal(shape, dtype=drawn), case.dtype)

    def normal(seqlen: int, heads: int, dim: int, of_cache: bool = False) -> Any:
        made = drawn_of((case.batch, seqlen, heads, dim))
        if not (case.float8 and of_cache):
            return made
        return narrowed(nearest(widened(made).astype(np.float32), xp), case.dtype)

    matrices = (
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim, True),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim_v, True),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
    )
    made: dict[str, Any] = {}
    if case.sinks:
        made["sinks"] = drawn_of((case.heads_q,))
    if case.alibi:
        halvings = 8 * np.arange(1, case.heads_q + 1) / case.heads_q
        made["alibi_slopes"] = xp.asarray((2.0**-halvings).astype(drawn))
    if case.bias:
        made["bias"] = drawn_of(case.bias_shape)
    if case.mask is not None:
        made["mask"] = xp.asarray(shown(case.mask, case.batch, case.seqlen_q, case.seqlen_kv))
    if case.block_mask:
        made["block_mask"] = xp.asarray(shown_blocks(case.seqlen_q, case.seqlen_kv))
    if case.lengths is not None:
        offsets = xp.asarray(offsets_of(case.lengths))
        made |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    if case.kvcache:
        made["cache_seqlens"] = xp.full(case.batch, case.seqlen_kv, np.int32)
    return Inputs(*matrices, **made)
