"""Packed sequences, on every backend and algorithm: each has the results of a separate call.

All arrays lie in guarded buffers. Rows after the last sequence are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
from cuflash import dispatch

from ..kit.arena import Arena
from ..kit.case import VALUES, Case
from ..kit.compare import compare
from ..kit.data import tensor
from ..kit.oracle import Truth, judge
from ..kit.problem import cases, lengths
from ..kit.runners import ApiRunner
from .sweep import examples, runners, several_tiles, skip_unless_served, sweep, tiles
from .test_windows import inputs

_BUDGET = {"float16": 2**16, "bfloat16": 2**16, "float32": 2**16, "float64": 2**14}
#: The longest of all sequences but the first, whose length belongs to the drawn case.
_LONGEST = 150
#: With sinks; see ``test_sinks``.
_VALUES = tuple(values for values in VALUES if values != "equal")
_OF_KEYS, _OF_ROWS = ("k", "v", "dk", "dv"), ("lse", "dlse")
_of_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
_of_runners = pytest.mark.parametrize("runner", runners())


@dataclass(frozen=True)
class _Packed:
    """The sequences of one call, and the case that they share."""

    case: Case  # without its lengths
    sequences: tuple[tuple[int, int], ...]
    behind: tuple[int, int] = (0, 0)

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of queries and of keys, (2, sequences + 1)."""
        return np.cumsum([(0, 0), *self.sequences], axis=0).astype(np.int32).T.copy()

    @property
    def whole(self) -> Case:
        """A case with as many rows as the arrays have."""
        rows, keys = (int(n) for n in self.offsets[:, -1] + self.behind)
        return replace(self.case, seqlen_q=rows, seqlen_kv=keys)

    @property
    def shared(self) -> dict[str, np.ndarray]:
        """The arrays that all sequences share."""
        return {name: tensor(self.whole, name) for name in self.case.operands}

    @property
    def wrt(self) -> tuple[str, ...]:
        """The arrays with gradients: slopes have none here."""
        return tuple(name for name in self.case.wrt if name != "alibi_slopes")

    def alone(self) -> list[tuple[Case, dict[str, np.ndarray]]]:
        """Every sequence as a call of its own: its case and its arrays."""
        found = []
        for number, (rows, keys) in enumerate(self.sequences):
            seed = self.case.seed + number
            own = replace(self.case, seqlen_q=rows, seqlen_kv=keys, seed=seed)
            found.append((own, inputs(own) | self.shared))
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the call, without shared ones."""
        every = [x for _, x in self.alone()]
        found = {}
        for name in ("q", "k", "v", "dout", "dlse"):
            shape = self.whole.shape(name)
            found[name] = np.full(shape, np.nan, self.whole.dtype_of(name))
            for number, x in enumerate(every):
                self.part(name, found[name], number)[...] = x[name]
        return found

    def part(self, name: str, array: np.ndarray, number: int) -> np.ndarray:
        """The rows of an array or a result for a sequence, or those after the last one."""
        ends = [*self.offsets[int(name in _OF_KEYS)], None]
        rows = slice(*[*pairwise(ends)][number])
        return array[:, rows] if name in _OF_ROWS else array[rows]


def _results(runner: ApiRunner, packed: _Packed) -> dict[str, np.ndarray]:
    """The results of both passes, which must write all of them and nothing else."""
    x, case = packed.arrays(), packed.whole
    keywords = {"backend": runner.backend, "algorithm": runner.algorithm, **case.options}
    beside = packed.shared | dict(
        zip(("cu_seqlens_q", "cu_seqlens_kv"), packed.offsets, strict=True)
    )
    ran: list[Any] = []

    def place(arena: Arena, names: tuple[str, ...]) -> dict[str, Any]:
        given = {name: x[name] for name in names} | beside
        return {name: arena.input(name, array) for name, array in given.items()}

    def finish(arena: Arena, results: Any) -> Any:
        arena.check(repr(packed))
        numpy = runner.backend == "numpy"
        return [one if numpy else runner.xp.asnumpy(one) for one in results]

    with dispatch.observe(ran.append):
        arena = Arena(runner.xp, runner.poison)
        out = arena.output("out", case.shape("out"), case.storage)
        lse = arena.output("lse", case.shape("lse"), case.statistics)
        cuflash.attention(
            **place(arena, ("q", "k", "v")), **keywords, out=out, lse_out=lse, return_lse=True
        )
        found = dict(zip(("out", "lse"), finish(arena, (out, lse)), strict=True))
        x |= {name: array.copy() for name, array in found.items()}
        for name in ("out", "lse"):
            packed.part(name, x[name], len(packed.sequences))[...] = np.nan
        arena = Arena(runner.xp, runner.poison)
        names = [f"d{name}" for name in packed.wrt]
        grads = tuple(arena.output(n, case.shape(n), case.dtype_of(n)) for n in names)
        cuflash.attention_backward(
            **place(arena, tuple(x)), **keywords, wrt=packed.wrt, grads=grads
        )
        found |= dict(zip(names, finish(arena, grads), strict=True))
    named = {plan.algorithm for plan in ran} if runner.algorithm != "auto" else {"auto"}
    assert named <= {runner.algorithm}
    return found


def _check(runner: ApiRunner, packed: _Packed) -> None:
    """Compare both passes with the truth of every sequence by itself."""
    found, last = _results(runner, packed), len(packed.sequences)
    truths = [judge(*one) for one in packed.alone()]
    sinks = found.pop("dsinks", None)
    for name, got in found.items():
        for number, truth in enumerate(truths):
            compare(truth, name, packed.part(name, got, number)).check()
        assert (packed.part(name, got, last) == (-np.inf if name == "lse" else 0)).all(), name
    if sinks is not None:
        _check_sinks(truths, sinks)


def _check_sinks(truths: list[Truth], got: np.ndarray) -> None:
    """Check a gradient to which all sequences contribute, within the roundings of all."""
    if not truths:
        assert (got == 0).all()
        return
    results, models = (
        {"dsinks": np.sum([of(truth)["dsinks"] for truth in truths], axis=0)}
        for of in (lambda truth: truth.results, lambda truth: truth.model)
    )
    compare(replace(truths[0], results=results, model=models, plain=()), "dsinks", got).check()


@st.composite
def _sequences(draw: st.DrawFn, tile: tuple[int, int], drawn: st.SearchStrategy[Case]) -> _Packed:
    """Draw a few sequences, the first of any lengths."""
    case = draw(drawn)
    few = st.tuples(*(lengths(min(step, _LONGEST // 2), _LONGEST) for step in tile))
    others = draw(st.lists(few, max_size=4))
    others.insert(draw(st.integers(0, len(others))), (case.seqlen_q, case.seqlen_kv))
    behind = st.sampled_from((0, 0, 1, 70, 200))
    return _Packed(case, tuple(others), (draw(behind), draw(behind)))


def _beside(dims: tuple[int, int], causal: bool, dtype: str) -> list[dict[str, Any]]:
    """Features beside offsets; another feature is another kernel to compile."""
    if dims == (40, 40):
        sunk = "float64" if dtype == "float64" else "float32"
        return [{}, {"sinks": (sunk,), "values": _VALUES}]
    return [{"alibis": ("heads",), "windowed": True}, {"softcaps": (3.0,), "windowed": not causal}]


@sweep(((40, 40), (128, 128)))
def test_against_float64(
    runner: ApiRunner, dtype: str, dims: tuple[int, int], causal: bool
) -> None:
    skip_unless_served(runner, dtype, dims)
    tile = tiles(runner, dtype, dims, causal, "backward")
    options: dict[str, Any] = {"causal": causal, "tile": tile, "budget": _BUDGET[dtype]}
    options |= {"layouts": ("shd",), "strided": False}
    some = [cases(dtype, *dims, **options, **more) for more in _beside(dims, causal, dtype)]
    first: Any = several_tiles(tile, dtype, dims, causal)
    own = (first.seqlen_q, first.seqlen_kv)
    first = _Packed(replace(first, layout="shd"), ((0, 3), own, (5, 0), own), (9, 200))

    def check(packed: Any) -> None:
        _check(runner, packed)

    drawn: Any = _sequences(tile, st.one_of(*some))
    examples(runner, drawn, check, 32, first=first)


#: Lengths of queries and keys: 0, 1, and the end of a tile with its neighbours.
_ENDS = ((0, 200), (1, 64), (63, 65), (64, 0), (65, 1), (127, 127), (128, 128), (129, 199), (0, 0))


@_of_runners
@_of_dtypes
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": "40:10"}], ids=str)
@pytest.mark.parametrize("q_offset", [None, 20])
def test_a_sequence_is_a_call_of_its_own(
    runner: ApiRunner, dtype: str, more: dict[str, Any], q_offset: int | None
) -> None:
    """Sequences of any length. Slopes use the positions of queries."""
    sunk = "float64" if dtype == "float64" else "float32"
    case = Case(*(1, 4, 2, 1, 1, 40, 40), dtype=dtype, q_offset=q_offset, layout="shd", **more)
    case = replace(case, alibi="heads", sinks=sunk, seed=3)
    _check(runner, _Packed(case, _ENDS, (30, 130)))


@_of_runners
@_of_dtypes
def test_many_short_sequences(runner: ApiRunner, dtype: str) -> None:
    case = Case(*(1, 2, 1, 1, 1, 40, 40), dtype=dtype, causal=True, layout="shd", seed=4)
    _check(runner, _Packed(case, tuple((n % 5, n % 7) for n in range(90)), (1, 1)))


@_of_runners
@_of_dtypes
def test_one_sequence_of_all_rows_is_a_plain_call(runner: ApiRunner, dtype: str) -> None:
    case = Case(*(1, 4, 2, 150, 200, 40, 40), dtype=dtype, causal=True, layout="shd", seed=2)
    packed = _Packed(case, ((150, 200),))
    (_, x), found = packed.alone()[0], _results(runner, packed)
    truth = judge(case, x)
    for name, got in found.items():
        compare(truth, name, got).check()
