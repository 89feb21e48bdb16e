"""Calls of the public functions, drawn, for kernels that compile once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cuflash.planning.tiles.fa2_tables import ForwardRow

from ..kit.case import LAYOUTS, OF_HEADS, TENSORS, Case
from ..kit.data import arrays
from ..kit.problem import recipes, windows
from ..kit.strides import CONTIGUOUS, Strides

__all__ = ["PLACED", "QKV", "Call", "Kernels", "calls"]

#: Every array of either pass.
PLACED = (*TENSORS, "lse", "dlse", "lse_out", *OF_HEADS)
#: What a backward pass differentiates by where nobody says so.
QKV = ("q", "k", "v")
#: Query heads of all batch entries that short problems have room for.
_MANY = 8
#: Values that none of the kernels' sums overflow for.
_VALUES = ("normal", "normal", "small", "x8", "integers", "outliers", "equal", "zeros")
#: Not "equal": one number is then all scores of a head, and a sink, unlike softmax alone, lets its
#: error through, which no model of independent errors holds.
_WITH_SINKS = tuple(values for values in _VALUES if values != "equal")


@dataclass(frozen=True)
class Kernels:
    """What is compiled: a kernel of each pass, for two alignments and two types of output."""

    algorithm: str
    dtype: str
    dims: tuple[int, int]
    causal: bool
    blocks: tuple[int, int] | None = None
    architecture: str = "90"
    num_sms: int | None = None  # in place of the device's; few make a block do several tiles
    deterministic: bool = False
    steps: tuple[int, ...] = (16, 64)  # multiples that lengths are about
    parted: bool = False  # also kernels of several blocks for a kv tile
    plain: bool = False  # of one alignment and type of output
    forward_row: ForwardRow | None = None  # the only one that the forward pass has
    window: str = ""  # "left" or "band": the bounds that the keys of a query mostly have
    sinks: str = ""  # their dtype, if there are any
    softcap: bool = False
    alibi: str = ""  # "heads" or "batch": what has a slope of its own

    @property
    def name(self) -> str:
        words = [
            self.algorithm,
            f"sm_{self.architecture}",
            self.dtype,
            "d{}-dv{}".format(*self.dims),
        ]
        mask = self.window or ("causal" if self.causal else "full")
        words += [mask, "ordered" * self.deterministic]
        words += ["softcap" * self.softcap, f"sinks-{self.sinks}" * bool(self.sinks)]
        words += [f"alibi-{self.alibi}" * bool(self.alibi)]
        words += ["x".join(map(str, self.blocks or ())), f"{self.num_sms or ''}"]
        return "-".join(word for word in words if word)

    @property
    def options(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "blocks": self.blocks}


@dataclass(frozen=True, repr=False)
class Call:
    """A problem, and how the public functions are asked to solve it.

    Attributes
    ----------
    wide, wide_dout
        Whether the output of 16-bit inputs is float32, and the gradient of the output.
    made
        Whether destinations are given, with the strides of the case.
    odd
        Arrays at addresses that are not multiples of their elements' size.
    host
        Whether the arrays are NumPy's, which go to the device and back.
    parts
        Blocks that share a kv tile of FlashAttention-3's backward pass.
    turns
        How often it is made, at other places and on other streams.
    shift
        What is added to every score, through the first column of q and k: exponentials of a
        log-sum-exp so far from 0 are beyond float32 where a score is taken for 0.
    dead
        Queries whose scores are all minus infinity, and whose gradients are infinite.
    wrt
        What the backward pass differentiates by.
    """

    case: Case
    wide: bool = False
    wide_dout: bool = False
    with_dlse: bool = False
    made: bool = False
    workspace: bool = False
    host: bool = False
    odd: tuple[str, ...] = ()
    rows: Strides = CONTIGUOUS
    parts: int = 1
    stream: int = 0
    device: int = 0
    turns: int = 1
    shift: float = 0
    dead: tuple[int, ...] = ()
    wrt: tuple[str, ...] = QKV

    def __repr__(self) -> str:
        """What makes it again."""
        said = [f"Case.parse({self.case.repro!r})"]
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default:
                said.append(f"{one.name}={value!r}")
        return f"Call({', '.join(said)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints."""
        printer.text(repr(self))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of what the backward pass gives."""
        return tuple(f"d{name}" for name in self.wrt)

    @property
    def out_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.wide else self.case.storage

    def inputs(self) -> dict[str, np.ndarray]:
        """Of both passes."""
        x = arrays(self.case, "q", "k", "v", "dout", "dlse")
        if self.dead:  # rows of zeros that give nothing, and so the same gradients
            x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
            for name in ("q", "dout", "dlse"):
                self.case.heads_first(name, x[name])[:, :, self.dead] = 0
        elif self.shift:
            x["q"][..., 0] = 8
            x["k"][..., 0] = self.shift / (8 * self.case.factor)
        if not self.with_dlse:
            del x["dlse"]
        return x | (arrays(self.case, *self.case.operands) if self.case.operands else {})

    def killed(self, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same inputs, the dead queries as the kernels are given them."""
        if not self.dead:
            return x
        x = {name: array.copy() for name, array in x.items()}
        self.case.heads_first("q", x["q"])[:, :, self.dead, 0] = -np.inf
        self.case.heads_first("dout", x["dout"])[:, :, self.dead] = np.inf
        return x

    def recipe(self, name: str) -> Strides:
        """Of any array of the call."""
        if name in TENSORS:
            return self.case.recipe(name)
        row = self.rows
        ndim = len(self.case.shape(name if name in OF_HEADS else "lse"))
        return Strides(gaps=row.gaps[-ndim:], offset=row.offset) if row.gaps else row


def _lengths(steps: tuple[int, ...], longest: int) -> st.SearchStrategy[int]:
    """At and beside what the kernels count in; one, two, and now and then none."""
    near = st.builds(
        lambda step, times, beside: min(step * times, longest // step * step) + beside,
        st.sampled_from(steps),
        st.integers(1, 5),
        st.sampled_from((-1, 0, 1)),
    )
    return st.one_of(near, near, near, st.sampled_from((1, 2, 3, 1, 0)), st.integers(4, longest))


@st.composite
def _problems(draw: st.DrawFn, kernels: Kernels, work: int) -> Case:
    layout = draw(st.sampled_from((*LAYOUTS, "bshd", "bhsd")))
    many = draw(st.booleans())  # heads, with several for a kv head, or else rows
    steps = (min(kernels.steps),) if many else kernels.steps
    longest = (2 if many else 3) * max(steps)
    seqlen_q, seqlen_kv = draw(_lengths(steps, longest)), draw(_lengths(steps, longest))
    if kernels.algorithm == "fa3":  # which leaves it to the others to do nothing
        seqlen_q, seqlen_kv = max(seqlen_q, 1), max(seqlen_kv, 1)
    room = max(_MANY if many else 1, work // ((seqlen_q + 32) * (seqlen_kv + 32)))
    heads_kv, group, batch = 1, 1, 1
    if "h" in layout:
        heads_kv = draw(st.sampled_from([n for n in (1, 2, 3) if n <= room]))
        group = draw(st.sampled_from([n for n in (1, 2, 4, 3) if n * heads_kv <= room]))
    if "b" in layout:
        batch = draw(st.sampled_from([n for n in (1, 2, 3) if n * group * heads_kv <= room]))
    window, causal = "", kernels.causal
    if kernels.window:
        window = draw(windows(kernels.steps, seqlen_q, seqlen_kv, kernels.window))
        causal = kernels.window == "band" and draw(st.booleans())
    return Case(
        *(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_kv, *kernels.dims, kernels.dtype),
        causal=causal,
        window=window,
        sinks=kernels.sinks,
        alibi=kernels.alibi,
        q_offset=draw(_offsets(kernels, seqlen_q, seqlen_kv)),
        softcap=draw(st.sampled_from((0.5, 5.0, 50.0))) if kernels.softcap else None,
        scale=draw(st.sampled_from((None, None, 0.3, 2.0**-5))),
        layout=layout,
        seed=draw(st.integers(0, 2**31 - 1)),
        values=draw(st.sampled_from(_WITH_SINKS if kernels.sinks else _VALUES)),
        strides=tuple(draw(recipes(layout, name)) for name in TENSORS),
    )


def _offsets(kernels: Kernels, seqlen_q: int, seqlen_kv: int) -> st.SearchStrategy[int | None]:
    """Of which some leave one row of a tile alive, or kill a single one."""
    near = st.builds(
        lambda step, times, beside: step * times + beside,
        st.sampled_from(kernels.steps),
        st.integers(-3, 3),
        st.sampled_from((-1, 0, 1)),
    )
    far = st.sampled_from((1 - seqlen_q, -seqlen_q, -1, seqlen_kv - 1, seqlen_kv))
    return st.one_of(st.none(), st.none(), near, near, far)


def _dead_queries(kernels: Kernels, case: Case) -> st.SearchStrategy[tuple[int, ...]]:
    """None mostly; else one, or the first or last of every tile."""
    length = case.seqlen_q
    if not length:
        return st.just(())
    first = st.sampled_from(kernels.steps).map(lambda n: tuple(range(0, length, n)))
    last = st.sampled_from(kernels.steps).map(lambda n: tuple(range(n - 1, length, n)))
    one = st.integers(0, length - 1).map(lambda i: (i,))
    return st.one_of(st.just(()), st.just(()), first, last, one)


@st.composite
def calls(draw: st.DrawFn, kernels: Kernels) -> Call:
    """Draw a call: a small problem several times, or a larger one."""
    work, turns = draw(st.sampled_from(((2**12, 3), (2**13, 2), (2**14, 1), (2**15, 1))))
    case = draw(_problems(kernels, work))
    narrow = case.storage.itemsize == 2 and not kernels.plain
    plain = kernels.plain or draw(
        st.booleans()
    )  # what the kernels take as it is, of each algorithm the best
    if plain or kernels.algorithm == "fa3":
        case = case.with_strides(**{name: _loadable(case.recipe(name)) for name in TENSORS})
    odd = st.lists(st.sampled_from(PLACED), max_size=3, unique=True).map(tuple)
    rows = st.sampled_from((CONTIGUOUS, CONTIGUOUS, Strides(gaps=(5, 3, 1), offset=1)))
    flags = {name: draw(st.booleans()) for name in ("with_dlse", "made", "workspace")}
    return Call(
        case,
        wide=narrow and draw(st.booleans()),
        wide_dout=narrow and draw(st.booleans()),
        host=draw(st.sampled_from((False,) * 5 + (True,))),
        odd=() if plain else draw(odd),
        rows=draw(rows),
        parts=draw(st.sampled_from((1, 2, case.group))) if kernels.parted else 1,
        stream=draw(st.sampled_from((0, 0, 77, 78))),
        device=draw(st.sampled_from((0, 0, 0, 1))),
        turns=turns,
        shift=draw(st.sampled_from((0, 0, -300, 200))),
        dead=() if case.sinks or case.softcap else draw(_dead_queries(kernels, case)),
        wrt=draw(_named(kernels)),
        **flags,
    )


def _named(kernels: Kernels) -> st.SearchStrategy[tuple[str, ...]]:
    """All mostly; else any, in any order."""
    every = (*QKV, *["alibi_slopes"] * bool(kernels.alibi), *["sinks"] * bool(kernels.sinks))
    some = st.lists(st.sampled_from(every), min_size=1, unique=True).map(tuple)
    return st.one_of(st.just(every), st.just(every), some)


def _loadable(recipe: Strides) -> Strides:
    """The same as far as whole vectors can be loaded from it, and the copy engine can."""
    inner = len(recipe.gaps) - 1
    gaps = tuple(0 if i == inner else -(-gap // 8) * 8 for i, gap in enumerate(recipe.gaps))
    order = recipe.order
    if order and order[-1] != len(order) - 1:
        order = (*(axis for axis in order if axis != len(order) - 1), len(order) - 1)
    return Strides(order, gaps, -(-recipe.offset // 8) * 8, (), (), recipe.absurd)
