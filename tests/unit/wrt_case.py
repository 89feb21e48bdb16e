"""Generated calls with windows, slopes, biases, masks, sinks and dropout, each of them small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cuflash import BlockMask
from cuflash.tensors import differentiable

__all__ = ["DTYPES", "GivenCall", "biases", "calls", "masks", "pair_sizes", "sides"]

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_COMPUTE = {"float64": "float64"}


@dataclass
class GivenCall:
    """Arrays and keywords of a call of ``attention``.

    Attributes
    ----------
    inputs
        q, k, v, and slopes, bias, mask, sinks and a seed if there are any.
    keywords
        Arguments that are not arrays.
    """

    inputs: dict[str, Any]
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def wide(self) -> dict[str, Any]:
        """The inputs in float64; a mask, a seed and lengths have one dtype."""
        named, others = self.inputs.items(), (bool, np.uint32, np.int32)
        narrow = ((n, a) for n, a in named if not isinstance(a, BlockMask))
        wide = {n: a if a.dtype in others else a.astype(np.float64) for n, a in narrow}
        return self.inputs | wide

    @property
    def wrt(self) -> tuple[str, ...]:
        """Names of the inputs that have a gradient; slopes of packed sequences have none."""
        without = {"alibi_slopes"} if "cu_seqlens_q" in self.inputs else set()
        return tuple(name for name in self.inputs if name in {*differentiable()} - without)


def sides() -> st.SearchStrategy[tuple[int | None, int | None]]:
    """Windows: short sides, long ones, and none."""
    side = st.one_of(st.none(), st.integers(0, 9), st.sampled_from([2**31, 2**70]))
    return st.tuples(side, side)


@st.composite
def calls(
    draw: Any,
    sinks: bool | None = None,
    alibi: bool | None = None,
    bias: bool | None = None,
    mask: bool | None = None,
    dropout: bool = False,
    layouts: str = "bshd bhsd shd hsd sd",
) -> GivenCall:
    """A call of the NumPy backend; a feature whose argument is None may be drawn or not."""
    layout = draw(st.sampled_from(layouts.split()))
    batch = draw(st.integers(0, 2)) if "b" in layout else 1
    heads_kv = draw(st.integers(1, 2)) if "h" in layout else 1
    heads_q = heads_kv * (draw(st.integers(1, 3)) if "h" in layout else 1)
    seqlen_q, seqlen_kv = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    width, width_v = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([*DTYPES]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = {
        "q": {"b": batch, "s": seqlen_q, "h": heads_q, "d": width},
        "k": {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": width},
        "v": {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": width_v},
    }
    inputs: dict[str, Any] = {
        name: random.standard_normal([sizes[axis] for axis in layout]).astype(DTYPES[dtype])
        for name, sizes in shapes.items()
    }
    if draw(st.booleans()) if alibi is None else alibi:
        inputs["alibi_slopes"] = draw(_slopes(random, batch, heads_q, dtype))
    sizes = batch, heads_q, seqlen_q, seqlen_kv
    if draw(st.booleans()) if bias is None else bias:
        inputs["bias"] = draw(biases(random, sizes, draw(st.sampled_from([dtype, "float32"]))))
    if draw(st.booleans()) if mask is None else mask:
        inputs["mask"] = draw(masks(random, sizes))
    if draw(st.booleans()) if sinks is None else sinks:
        inputs["sinks"] = draw(_sinks(random, heads_q, dtype))
    call = GivenCall(inputs, _keywords(draw, layout))
    if dropout:
        _drop(draw, call)
    return call


@st.composite
def biases(
    draw: Any,
    random: np.random.Generator,
    sizes: tuple[int, ...],
    dtype: str,
    hidden: bool = False,
) -> Any:
    """A bias that broadcasts against these sizes: first axes may be missing, others may be 1.

    If pairs are ``hidden``, one number in four is minus infinity.
    """

    def values(shape: list[int]) -> Any:
        numbers = np.asarray(random.standard_normal(shape)).astype(DTYPES[dtype])
        if hidden:
            numbers[random.random(shape) < 0.25] = -np.inf
        return numbers

    return draw(_broadcast(sizes, values))


def masks(random: np.random.Generator, sizes: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """A boolean mask that broadcasts in the same way; it hides one pair in three."""
    return _broadcast(sizes, lambda shape: np.asarray(random.random(shape) < 2 / 3))


@st.composite
def _broadcast(draw: Any, sizes: tuple[int, ...], values_of: Callable[[list[int]], Any]) -> Any:
    """An array that broadcasts against these sizes: axes in any order, backwards, stride 0."""
    kept = sizes[draw(st.integers(0, len(sizes))) :]
    kinds = [draw(st.sampled_from(["own", "own", "one", "same"])) for _ in kept]
    order = draw(st.permutations(range(len(kept))))
    own = [1 if kind in ("one", "same") else size for kind, size in zip(kinds, kept, strict=True)]
    values = values_of([own[axis] for axis in order])
    values = values.transpose(np.argsort(order)) if order else values
    values = values[tuple(slice(None, None, draw(st.sampled_from([1, -1]))) for _ in kept)]
    whole = [1 if kind == "one" else size for kind, size in zip(kinds, kept, strict=True)]
    return np.broadcast_to(values, whole)


def pair_sizes(call: GivenCall) -> tuple[int, int, int, int]:
    """(batch, heads_q, seqlen_q, seqlen_kv) of a call."""
    layout, q, k = call.keywords["layout"], call.inputs["q"], call.inputs["k"]
    batch, heads = (q.shape[layout.index(axis)] if axis in layout else 1 for axis in "bh")
    return batch, heads, q.shape[layout.index("s")], k.shape[layout.index("s")]


def _drop(draw: Any, call: GivenCall) -> None:
    """Add dropout to the call."""
    parts = [0.1, 0.5, 0.875, 2.0**-14, 1 - 2.0**-14]
    call.keywords["dropout_p"] = draw(st.sampled_from(parts))
    seed = draw(_seeds())
    (call.keywords if isinstance(seed, int) else call.inputs)["dropout_seed"] = seed


def _seeds() -> st.SearchStrategy[Any]:
    """Seeds of dropout: integers, and arrays of either length."""
    word = st.integers(0, 2**32 - 1)
    words = st.one_of(st.lists(word, min_size=n, max_size=n) for n in (2, 4))
    return st.one_of(st.integers(0, 2**64 - 1), words.map(lambda some: np.array(some, np.uint32)))


def _slopes(
    random: np.random.Generator, batch: int, heads: int, dtype: str
) -> st.SearchStrategy[Any]:
    kind = _COMPUTE.get(dtype, "float32")
    shapes = st.sampled_from([(heads,), (batch, heads)])
    return shapes.map(lambda shape: (0.2 * random.standard_normal(shape)).astype(kind))


def _sinks(random: np.random.Generator, heads: int, dtype: str) -> st.SearchStrategy[Any]:
    kinds = st.sampled_from([dtype, _COMPUTE.get(dtype, "float32")])
    return kinds.map(lambda kind: random.standard_normal(heads).astype(DTYPES[kind]))


def _keywords(draw: Any, layout: str) -> dict[str, Any]:
    return {
        "layout": layout,
        "causal": draw(st.booleans()),
        "window_size": draw(st.one_of(st.none(), sides())),
        "q_offset": draw(st.one_of(st.none(), st.integers(-4, 12))),
        "algorithm": draw(st.sampled_from(["auto", "fa1", "fa2"])),
        "backend": "numpy",
    }
