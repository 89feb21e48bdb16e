"""Draws calls of the public functions for kernels that compile once."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ..kit.case import LAYOUTS, TENSORS, Case
from ..kit.problem import recipes, windows
from ..kit.strides import CONTIGUOUS, Strides
from .call import PLACED, QKV, Call, Kernels

__all__ = ["calls"]

#: The most query heads over the batch of short problems.
_MANY = 8
#: Families of values with which no sum of a kernel overflows.
_VALUES = ("normal", "normal", "small", "x8", "integers", "outliers", "equal", "zeros")
#: Without "equal": all scores of a head are then one number with one error. Softmax cancels it, but
#: a sink does not, and the error model assumes independent errors.
_WITH_SINKS = tuple(values for values in _VALUES if values != "equal")

#: Dropped shares, the smallest and the largest among them, and kinds of seeds.
_DROPOUTS = ("0.1", "0.5:2", "0.25:4", "0.9", "0.00003:4", "0.99992:2")


def _lengths(steps: tuple[int, ...], longest: int) -> st.SearchStrategy[int]:
    """Lengths near multiples of the steps; also one, two and sometimes 0."""
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
    many = draw(st.booleans())  # many heads, several for a kv head, or else many rows
    steps = (min(kernels.steps),) if many else kernels.steps
    longest = (2 if many else 3) * max(steps)
    seqlen_q, seqlen_kv = draw(_lengths(steps, longest)), draw(_lengths(steps, longest))
    if kernels.algorithm == "fa3":  # fa3 does not take empty problems
        seqlen_q, seqlen_kv = kernels.queries(max(seqlen_q, 1)), max(seqlen_kv, 1)
    # With one query or key an array does not differ along that axis, which needs another kernel.
    axes = kernels.bias.partition(":")[0] + kernels.mask
    seqlen_q, seqlen_kv = max(seqlen_q, 2 * ("q" in axes)), max(seqlen_kv, 2 * ("k" in axes))
    room = max(_MANY if many else 1, work // ((seqlen_q + 32) * (seqlen_kv + 32)))
    heads_kv, group, batch = 1, 1, 1
    if "h" in layout:
        heads_kv = draw(st.sampled_from([n for n in (1, 2, 3) if n <= room]))
        group = draw(st.sampled_from([n for n in kernels.groups if n * heads_kv <= room]))
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
        bias=draw(_of_pairs(kernels.bias, "-inf")),
        mask=draw(_of_pairs(kernels.mask, "-blocks")),
        **draw(_numbers(kernels)),
        written=kernels.written,
        q_offset=draw(_offsets(kernels, seqlen_q, seqlen_kv)),
        scale=draw(st.sampled_from((None, None, 0.3, 2.0**-5))),
        layout=layout,
        seed=draw(st.integers(0, 2**31 - 1)),
        values=draw(st.sampled_from(_WITH_SINKS if kernels.sinks else _VALUES)),
        strides=tuple(draw(recipes(layout, name)) for name in TENSORS),
    )


def _numbers(kernels: Kernels) -> st.SearchStrategy[dict[str, Any]]:
    """Dropout and a soft cap, if the kernels have them."""
    dropout = st.sampled_from(_DROPOUTS) if kernels.dropout else st.just("")
    softcap = st.sampled_from((0.5, 5.0, 50.0)) if kernels.softcap else st.none()
    return st.fixed_dictionaries({"dropout": dropout, "softcap": softcap})


def _of_pairs(axes: str, hidden: str) -> st.SearchStrategy[str]:
    """A bias or a mask with any axes of entries and heads; half have the mark ``hidden``."""
    if not axes:
        return st.just("")
    first = st.sampled_from(("bh", "1h", "b1", "11", "h", "1", ""))
    return st.builds("{}{}{}".format, first, st.just(axes), st.sampled_from(("", hidden)))


def _offsets(kernels: Kernels, seqlen_q: int, seqlen_kv: int) -> st.SearchStrategy[int | None]:
    """Offsets; with some a tile has a single live row, or a single dead one."""
    near = st.builds(
        lambda step, times, beside: step * times + beside,
        st.sampled_from(kernels.steps),
        st.integers(-3, 3),
        st.sampled_from((-1, 0, 1)),
    )
    far = st.sampled_from((1 - seqlen_q, -seqlen_q, -1, seqlen_kv - 1, seqlen_kv))
    return st.one_of(st.none(), st.none(), near, near, far)


def _dead_queries(kernels: Kernels, case: Case) -> st.SearchStrategy[tuple[int, ...]]:
    """Mostly none; else one query, or the first or last of every tile."""
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
    # Plain strides are those that the best kernel of an algorithm takes without a copy.
    plain = kernels.plain or draw(st.booleans())
    if plain or kernels.algorithm == "fa3":
        case = case.with_strides(**{name: _loadable(case.recipe(name)) for name in TENSORS})
    odd = st.lists(st.sampled_from(PLACED), max_size=3, unique=True).map(tuple)
    rows = st.sampled_from((CONTIGUOUS, CONTIGUOUS, Strides(gaps=(5, 3, 1), offset=1)))
    host = draw(st.sampled_from((False,) * 5 + (True,)))
    if kernels.mapped:  # a copy by the library has no gaps between rows
        odd = odd.map(lambda names: tuple(name for name in names if name != kernels.mapped))
        host = host and case.seqlen_kv * case.dtype_of(kernels.mapped).itemsize % 16 == 0
    flags = {name: draw(st.booleans()) for name in ("with_dlse", "made", "workspace")}
    # Integers give many equal scores, whose dS have equal errors. The shift's column is the same in
    # all rows and adds these errors up, but the rule for rows takes them for independent. A shift
    # beyond a soft cap makes all scores equal.
    # Small scores do not change a large shift where sums round to nearest, as in plain NumPy. The
    # tensor cores truncate and may err by a unit, where the rule compares with an error of 0.
    coarse = kernels.dtype == "float32" and case.values == "small"
    unshifted = case.values == "integers" or case.softcap is not None or coarse
    return Call(
        case,
        wide=narrow and draw(st.booleans()),
        wide_dout=narrow and draw(st.booleans()),
        host=host,
        odd=() if plain else draw(odd),
        rows=draw(rows),
        shared=draw(_parts(kernels, case)),
        stream=draw(st.sampled_from((0, 0, 77, 78))),
        device=draw(st.sampled_from((0, 0, 0, 1))),
        turns=turns,
        shift=0 if unshifted else draw(st.sampled_from((0, 0, -300, 200))),
        dead=() if case.sinks or case.softcap else draw(_dead_queries(kernels, case)),
        wrt=draw(_named(kernels)),
        mapped=kernels.mapped,
        **flags,
    )


def _parts(kernels: Kernels, case: Case) -> st.SearchStrategy[tuple[int, bool, int]]:
    """How blocks share a kv tile, see ``Call.shared``."""
    if not kernels.parted:
        return st.just((1, False, 0))
    whole = [(number, False, 0) for number in (1, 2, case.group)]
    cut = [(number, True, last) for number in (2, 3, 5) for last in (0, 1)]
    return st.sampled_from([*whole, *cut * kernels.cut])


def _named(kernels: Kernels) -> st.SearchStrategy[tuple[str, ...]]:
    """Mostly all arrays that have gradients; else some, in any order."""
    own = not kernels.written  # a written function has no gradients of its arrays
    has = {"alibi_slopes": kernels.alibi and own, "bias": kernels.bias and own}
    has |= {"sinks": kernels.sinks}
    every = (*QKV, *(name for name, kind in has.items() if kind))
    some = st.lists(st.sampled_from(every), min_size=1, unique=True).map(tuple)
    return st.one_of(st.just(every), st.just(every), some)


def _loadable(recipe: Strides) -> Strides:
    """The nearest recipe from which whole vectors, and the copy engine, can load."""
    inner = len(recipe.gaps) - 1
    gaps = tuple(0 if i == inner else -(-gap // 8) * 8 for i, gap in enumerate(recipe.gaps))
    order = recipe.order
    if order and order[-1] != len(order) - 1:
        order = (*(axis for axis in order if axis != len(order) - 1), len(order) - 1)
    return Strides(order, gaps, -(-recipe.offset // 8) * 8, (), (), recipe.absurd)
