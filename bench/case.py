"""A timed problem, and the arguments that our call and the peers' calls get for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuflash.planning.problem import DTYPES
from cuflash.planning.visibility import Visibility

from .lengths import equal_entries, lengths_of
from .masks import BLOCK, part_shown

__all__ = ["CAP", "HIDDEN", "TOKENS", "Case", "Window", "mask_text", "square"]

#: Options in rows that :attr:`Case.keywords` leaves out, because their arrays come from the inputs.
_ARRAYS = ("alibi", "bias", "block_mask", "dbias", "lengths", "mask", "sinks")
#: All options in rows that :attr:`Case.keywords` leaves out.
_NO_KEYWORDS = (*_ARRAYS, "score_mod", "kvcache", "page_size", "float8", "rotated")
#: The soft cap in the score modification of a case; no other case has it.
CAP = 50.0
#: The grid of the FlashAttention papers: every case has this many tokens and this width of a layer.
TOKENS, HIDDEN = 16384, 2048

#: (left, right): how many keys a query sees before and after its position; None: all of them.
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Case:
    """One problem of attention on (batch, seqlen, heads, head_dim) arrays.

    A call that "takes turns" is timed in turns with the call of the case.
    """

    op: str  # forward or backward
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_kv: int
    causal: bool
    algorithm: str
    blocks: tuple[int, int] | None = None  # None: the plan's blocks
    deterministic: bool = False
    beside: tuple[str, ...] = ()  # older generations that take turns with it, instead of peers
    window_size: Window | None = None
    sinks: bool = False  # a learned logit for each query head; the call without them takes turns
    softcap: float | None = None  # the cap of scores; the call without it takes turns
    alibi: bool = False  # a slope for each query head; the call without them takes turns
    bias: bool = False  # a number per query, key and head; the call without it takes turns
    dbias: bool = False  # the backward pass also gives the gradient of the bias
    mask: str | None = None  # a kind of boolean mask array; the call ``plain`` takes turns
    dropout_p: float | None = None  # dropped share; the call without dropout takes turns
    block_mask: bool = False  # shows a quarter of the blocks; the call without it takes turns
    score_mod: bool = False  # a soft cap written by the caller; ``softcap`` takes turns
    lengths: str | None = None  # kind of packed sequences; if they are equal, a batch takes turns
    kvcache: bool = False  # the call for caches, lengths given; ``attention`` takes turns
    # Page sizes: the case has the first one; the other sizes, and caches without pages, take turns.
    pages: tuple[int, ...] = ()
    float8: bool = False  # float8 caches; 16-bit caches of the same numbers take turns
    rotated: bool = False  # each call uses another copy of keys and values, which is not in L2

    @property
    def options(self) -> dict[str, Any]:
        """The options in a row of our own call, besides ``causal``."""
        blocks = {} if self.blocks is None else {"blocks": self.blocks}
        cached: dict[str, Any] = {"kvcache": True} if self.kvcache else {}
        cached |= {"page_size": self.page_size} if self.page_size else {}
        cached |= {"float8": True} if self.float8 else {}
        return {"algorithm": self.algorithm, **blocks, **self.peer_options, **cached}

    @property
    def page_size(self) -> int | None:
        """The number of keys in a page of its caches; None without pages."""
        return self.pages[0] if self.pages else None

    @property
    def peer_options(self) -> dict[str, Any]:
        """The options in a peer's row, besides ``causal``."""
        asked = {
            "deterministic": self.deterministic,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "alibi": self.alibi,
            "bias": self.bias and self.bias_shape,
            "dbias": self.dbias,
            "mask": self.mask,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "block_mask": self.block_mask and (BLOCK, BLOCK),
            "score_mod": self.score_mod and f"softcap {CAP:g}",
            "lengths": self.lengths,
            "rotated": self.rotated,
        }
        return {name: value for name, value in asked.items() if value}

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of our own call, besides ``causal``, that need no array and no class."""
        asked = {**self.options, **({"dropout_seed": 1} if self.dropout_p else {})}
        if self.lengths:
            asked["layout"] = "shd"
        return {n: value for n, value in asked.items() if n not in _NO_KEYWORDS}

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of its features, by keyword of our own call."""
        asked = {"alibi_slopes": self.alibi, "bias": self.bias}
        asked |= {"mask": self.mask is not None, "sinks": self.sinks}
        asked |= {"block_mask": self.block_mask}
        asked |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), self.lengths is not None)
        return tuple(name for name, given in asked.items() if given)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The arrays with gradients in the backward pass, after those of q, k and v."""
        asked = {"bias": self.dbias, "sinks": self.sinks}
        return tuple(name for name, given in asked.items() if given and self.op == "backward")

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """The shape of a bias that all batch entries share."""
        return 1, self.heads_q, self.seqlen_q, self.seqlen_kv

    @property
    def features(self) -> tuple[str, ...]:
        """The features of the case that the kernels have to support."""
        asked = {
            "window": self.window_size,
            "softcap": self.softcap,
            "alibi": self.alibi,
            "bias": self.bias,
            "dbias": self.dbias,
            "mask": self.mask,
            "sinks": self.sinks,
            "dropout": self.dropout_p,
            "block_mask": self.block_mask,
            "score_mod": self.score_mod,
            "packed_lengths": self.lengths,
        }
        return tuple(name for name, value in asked.items() if value)

    @property
    def sources(self) -> tuple[str, ...]:
        """The features, and further additions to the kernels, that the source digest covers."""
        planned = {"used_lengths": self.kvcache, "split_keys": self.rotated}
        planned |= {"cached_keys": bool(self.pages), "float8": self.float8}
        return (*self.features, *(name for name, added in planned.items() if added))

    @property
    def companions(self) -> list[Case]:
        """Our other calls that take turns with this one; the call without extras is the last.

        Older generations, or pages of other sizes, come before it.
        """
        older = [replace(self, algorithm=name, beside=()) for name in self.beside]
        paged = [replace(self, pages=(size,)) for size in self.pages[1:]]
        return older + paged + ([self.plain] if self.extras else [])

    @property
    def plain(self) -> Case:
        """The same call without extras; ``causal=True`` replaces a causal mask in an array.

        For a score modification it is the call with the equivalent keyword; for paged caches it is
        the call with the same caches in one piece; for float8 caches it is the call with 16-bit
        caches.
        """
        if self.pages:
            return replace(self, pages=())
        if self.float8:
            return replace(self, float8=False)
        causal = self.causal or self.mask == "causal"
        case = replace(self, sinks=False, softcap=None, alibi=False, bias=False, dbias=False)
        case = replace(case, dropout_p=None, block_mask=False, score_mod=False, kvcache=False)
        case = replace(case, causal=causal, mask=None, softcap=CAP if self.score_mod else None)
        entries = equal_entries(self.lengths)
        if not entries:
            return case
        seqlen = self.seqlen_q // entries
        return replace(case, lengths=None, batch=entries, seqlen_q=seqlen, seqlen_kv=seqlen)

    @property
    def extras(self) -> list[str]:
        """The features that are compared with ``plain``: all but windows and unequal lengths."""
        without = {"window"} if equal_entries(self.lengths) else {"window", "packed_lengths"}
        cached = ["kvcache"] if self.kvcache else []
        cached += [f"pages of {self.page_size}"] if self.pages else []
        cached += ["float8"] if self.float8 else []
        return [name for name in self.features if name not in without] + cached

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys: the last query is at the last key."""
        return self.seqlen_kv - self.seqlen_q

    @property
    def visibility(self) -> Visibility:
        """The keys that a query sees; the last query's window is around the last key."""
        offset = self.offset
        left, right = self.window_size or (None, None)
        right = 0 if self.causal else right
        first = None if left is None else offset - left
        last = None if right is None else offset + right
        return Visibility(self.seqlen_q, self.seqlen_kv, first, last)

    @property
    def hidden_by(self) -> str:
        """A description of what hides keys."""
        return mask_text(self.causal, self.window_size, self.mask, self.block_mask)

    @property
    def scores(self) -> int:
        """Elements of the whole score matrix; for packed sequences, of all their matrices."""
        if self.lengths is not None:
            return self.heads_q * sum(length**2 for length in lengths_of(self.lengths))
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv

    @property
    def flops(self) -> float:
        """FLOP of the matrix products; the backward pass has 2.5 times as many as the forward pass.

        A causal mask counts half of the square, as in the papers; a window counts the visible
        pairs, and a mask in an array or of blocks counts the pairs that it shows.
        """
        pairs = self.scores * (0.5 if self.causal else 1.0)
        if self.window_size is not None:
            pairs = self.batch * self.heads_q * self.visibility.pairs
        kind = "blocks" if self.block_mask else self.mask
        if kind is not None:
            pairs = self.scores * part_shown(kind, self.batch, self.seqlen_q, self.seqlen_kv)
        forward = 2.0 * pairs * (self.head_dim + self.head_dim_v)
        return forward * (2.5 if self.op == "backward" else 1.0)

    @property
    def key_bytes(self) -> int:
        """Bytes of keys and values."""
        itemsize = 1 if self.float8 else DTYPES[self.dtype].itemsize
        return self.batch * self.heads_kv * self.seqlen_kv * self._row * itemsize

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and the output, each once: the least that a forward pass moves."""
        of_queries = self.batch * self.heads_q * self.seqlen_q * self._row
        return self.key_bytes + of_queries * DTYPES[self.dtype].itemsize

    @property
    def _row(self) -> int:
        """Elements of a key and its value, or of a query and its output."""
        return self.head_dim + self.head_dim_v

    def __str__(self) -> str:
        heads = f"{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        rows = f"{self.seqlen_q}"
        rows += f"/{self.seqlen_kv}" if self.seqlen_kv != self.seqlen_q else ""
        dims = f"{self.head_dim}"
        dims += f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        more = f" {self.blocks}" if self.blocks else ""
        more += " deterministic" if self.deterministic else ""
        more += f" beside {', '.join(self.beside)}" if self.beside else ""
        more += f" softcap {self.softcap:g}" if self.softcap else ""
        more += f" dropout {self.dropout_p:g}" if self.dropout_p else ""
        more += f" {self.lengths}" if self.lengths else ""
        more += f" pages of {', '.join(map(str, self.pages))}" if self.pages else ""
        named = {"alibi": self.alibi, "bias": self.bias, "dbias": self.dbias, "sinks": self.sinks}
        named |= {"score_mod": self.score_mod, "kvcache": self.kvcache, "float8": self.float8}
        named |= {"rotated": self.rotated}
        more += "".join(f" {name}" for name, given in named.items() if given)
        return (
            f"{self.algorithm} {self.op} {self.dtype} {self.batch}x{rows}x{heads}"
            f"x{dims} {self.hidden_by}{more}"
        )


def square(
    op: str, dtype: str, batch: int, heads: int, dim: int, seqlen: int, causal: bool, algorithm: str
) -> Case:
    """A case with as many keys as queries, no grouped heads and one width."""
    return Case(op, dtype, batch, heads, heads, dim, dim, seqlen, seqlen, causal, algorithm)


def mask_text(
    causal: bool,
    window_size: Sequence[int | None] | None,
    mask: str | None = None,
    block_mask: Any = None,
) -> str:
    """A description of what hides keys; tables and cases use the same text."""
    if block_mask:  # a case with a block mask or a mask array has no other mask
        return "block mask"
    if mask is not None:
        return f"array ({mask})"
    if window_size is None:
        return "causal" if causal else "full"
    sides = ", ".join("all" if side is None else str(side) for side in window_size)
    return f"causal window ({sides})" if causal else f"window ({sides})"
