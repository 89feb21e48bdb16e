"""Draws cases and seeds, but no arrays, so that shrinking is fast and prints one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from .case import LAYOUTS, TENSORS, VALUES, Case
from .strides import CONTIGUOUS, Strides

__all__ = [
    "LAYOUTS",
    "TENSORS",
    "VALUES",
    "Case",
    "cases",
    "lengths",
    "recipes",
    "register_profiles",
    "windows",
]


def windows(
    steps: Sequence[int], seqlen_q: int, seqlen_kv: int, kind: str = "any"
) -> st.SearchStrategy[str]:
    """``Case.window``: sides near multiples of the steps, of no key, or beyond all keys.

    "left" bounds only that side, "band" both, "any" either or both.
    """
    longest = seqlen_q + seqlen_kv
    near = st.builds(
        lambda step, times, beside: max(0, step * times + beside),
        st.sampled_from(tuple(steps)),
        st.integers(0, 3),
        st.sampled_from((-1, 0, 1)),
    )
    side = st.one_of(near, near, st.sampled_from((0, 1, longest)), st.integers(0, longest))
    left, right = side.map("{}:".format), side.map(":{}".format)
    few = st.sampled_from(("0:0", "0:0", "1:0", "0:1"))
    pairs = st.builds("{}:{}".format, side, side)
    both = st.one_of(pairs, pairs, pairs, few)
    return {"left": left, "band": both, "any": st.one_of(left, both, both, right)}[kind]


def lengths(tile: int, longest: int) -> st.SearchStrategy[int]:
    """Sequence lengths: none (sometimes), one, two, near whole tiles, anything."""
    edges = st.builds(
        lambda count, step: count * tile + step,
        st.integers(1, max(1, longest // tile)),
        st.sampled_from((-1, 0, 1)),
    )
    few = st.sampled_from((1, 1, 2, 0))
    drawn = st.one_of(few, edges, edges, st.integers(min(3, longest), longest))
    return drawn.map(lambda length: min(length, longest))


@st.composite
def cases(
    draw: st.DrawFn,
    dtype: str,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    causal: bool,
    tile: tuple[int, int],
    budget: int = 2**19,
    layouts: Sequence[str] = LAYOUTS,
    values: Sequence[str] = VALUES,
    strided: bool = True,
    windowed: bool = False,
    sinks: Sequence[str] = ("",),
    softcaps: Sequence[float | None] = (None,),
    alibis: Sequence[str] = ("",),
    biases: Sequence[str] = ("",),
    masks: Sequence[str] = ("",),
    dropouts: Sequence[str] = ("",),
    used: Sequence[str] = ("",),
) -> Case:
    """Draw a case and a seed. Properties that need a compilation are given; the rest is drawn.

    Parameters
    ----------
    dtype, head_dim, head_dim_v, causal
        The dtype, widths and mask of the kernel under test.
    tile
        Its ``(block_q, block_kv)``, from the plan.
    budget
        The most of ``batch * heads_q * (seqlen_q + 64) * (seqlen_kv + 64)``.
    layouts, values
        The choices to draw from.
    strided
        Whether tensors get strides, each its own.
    windowed
        Whether there is a window, with or without the causal mask.
    sinks
        Dtypes of sinks to draw from; "" means none.
    softcaps
        Caps to draw from; None means none.
    alibis
        Shapes of ALiBi's slopes to draw from, as in ``Case.alibi``.
    biases
        Biases to draw from, as in ``Case.bias``.
    masks
        Boolean masks to draw from, as in ``Case.mask``.
    dropouts
        Dropped shares and seeds to draw from, as in ``Case.dropout``.
    used
        Used lengths to draw from, as in ``Case.used``.
    """
    seqlen_q, seqlen_kv = _both_lengths(draw, tile, budget)
    layout = draw(st.sampled_from(layouts))
    room = max(1, budget // ((seqlen_q + 64) * (seqlen_kv + 64)))
    batch, heads_q, heads_kv = draw(_counts(layout, room))
    sides = windows((1, *tile), seqlen_q, seqlen_kv) if windowed else st.just("")
    alibi = draw(st.sampled_from(alibis))
    return Case(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        causal=causal,
        q_offset=draw(_offsets(seqlen_q, seqlen_kv, windowed or bool(alibi))),
        scale=draw(st.sampled_from((None, None, 1 / head_dim, 0.3 / math.sqrt(head_dim)))),
        layout=layout,
        seed=draw(st.integers(0, 2**31 - 1)),
        values=draw(st.sampled_from(values)),
        window=draw(sides),
        sinks=draw(st.sampled_from(sinks)),
        softcap=draw(st.sampled_from(softcaps)),
        alibi=alibi,
        bias=draw(st.sampled_from(biases)),
        mask=draw(st.sampled_from(masks)),
        dropout=draw(st.sampled_from(dropouts)),
        used=draw(st.sampled_from(used)),
        strides=tuple(draw(recipes(layout, name, strided)) for name in TENSORS),
    )


def _offsets(seqlen_q: int, seqlen_kv: int, distant: bool) -> st.SearchStrategy[int | None]:
    """Offsets of either sign; sometimes far from all keys: with a window no query then sees one."""
    near = st.one_of(st.none(), st.just(0), st.integers(-seqlen_q - 1, seqlen_kv + 1))
    far = st.sampled_from((-3 * seqlen_q, 3 * seqlen_kv))
    return st.one_of(near, near, far) if distant else near


def _both_lengths(draw: st.DrawFn, tile: tuple[int, int], budget: int) -> tuple[int, int]:
    """Queries and keys; the first one drawn may take most of the budget."""
    q_first = draw(st.booleans())
    first, second = tile if q_first else tile[::-1]
    side = max(math.isqrt(budget) - 64, 2)
    one = draw(lengths(first, draw(st.sampled_from((side,) * 4 + (budget // 256,)))))
    other = draw(lengths(second, max(budget // (one + 64) - 64, 2)))
    return (one, other) if q_first else (other, one)


@st.composite
def _counts(draw: st.DrawFn, layout: str, room: int) -> tuple[int, int, int]:
    """Batch, query heads and kv heads with at most ``room`` of batch * heads_q."""
    if "h" not in layout:
        return 1, 1, 1
    group = draw(st.sampled_from([g for g in (1, 2, 3, 4, 8) if g <= room]))
    heads_kv = draw(st.sampled_from([n for n in (1, 2, 3, 5) * 4 if n * group <= room]))
    batch = draw(st.integers(1, room // (group * heads_kv))) if "b" in layout else 1
    nothing = draw(st.sampled_from(("",) * 18 + ("heads", "batch")))
    if nothing == "heads":
        heads_kv = 0
    elif nothing == "batch" and "b" in layout:
        batch = 0
    return batch, group * heads_kv, heads_kv


def recipes(layout: str, name: str, strided: bool = True) -> st.SearchStrategy[Strides]:
    """Strides of a tensor: half contiguous, the others mostly with a last stride of one element."""
    if not strided:
        return st.just(CONTIGUOUS)
    axes = range(len(layout))
    outer = [axis for axis in axes if layout[axis] != "d"]
    shared = [axis for axis in outer if layout[axis] in "bh"] if name in "kv" else []
    inner_last = st.permutations(outer).map(lambda order: (*order, len(layout) - 1))
    gap = st.sampled_from((0, 0, 8, 16, 1, 3))
    last_gap = st.sampled_from((0, 0, 0, 0, 0, 1))
    recipe = st.builds(
        Strides,
        order=st.one_of(inner_last, inner_last, st.permutations(axes).map(tuple)),
        gaps=st.tuples(*(gap if axis in outer else last_gap for axis in axes)),
        offset=st.sampled_from((0, 8, 16, 64, 1)),
        flipped=_subsets(outer),
        broadcast=_subsets(shared),
        absurd=st.booleans(),
    )
    return st.one_of(st.just(CONTIGUOUS), recipe)


def _subsets(axes: Sequence[int]) -> st.SearchStrategy[tuple[int, ...]]:
    if not axes:
        return st.just(())
    some = st.sets(st.sampled_from(axes), max_size=2).map(lambda chosen: tuple(sorted(chosen)))
    return st.one_of(st.just(()), some)


def register_profiles(load: str = "drawn") -> None:
    """Profiles of hypothesis, one of them loaded; ``--hypothesis-profile`` takes another."""
    shared = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    few = {**shared, "max_examples": 50, "database": None, "print_blob": True}
    settings.register_profile("ci", derandomize=True, **few)
    settings.register_profile("drawn", **few)
    settings.register_profile("device", max_examples=300, print_blob=True, **shared)
    settings.register_profile("soak", max_examples=20_000, print_blob=True, **shared)
    settings.load_profile(load)
