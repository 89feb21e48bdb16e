"""A bias that entries and heads share: the walkers of its gradient, and neighbouring entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cuflash import plan_ahead
from cuflash.options import check_options

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.oracle import judge
from ..kit.strides import Strides
from .build import compiler
from .call import QKV, Call, Kernels
from .device import EmulatedRunner
from .featured_rows import BIASED
from .rows import Row, params
from .session import check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    runner: EmulatedRunner, case: Case, x: dict[str, np.ndarray], bias: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = runner.forward(case, x["q"], x["k"], x["v"], bias=bias)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = runner.backward(case, *given, bias=bias)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _inputs(case: Case) -> dict[str, np.ndarray]:
    return arrays(case, "q", "k", "v", "dout", "dlse")


#: Entries, heads and width; the numbers of walkers of a block, and of slots of each.
_WALKS = {
    "11qk": (5, 4, 32, 6, 4),
    "1hqk": (13, 2, 64, 6, 2),
    "b1qk": (2, 5, 64, 4, 2),
    "hqk": (3, 2, 32, 2, 2),
}


@pytest.mark.parametrize(("bias", "softcap"), [*((bias, None) for bias in _WALKS), ("11qk", 3.0)])
def test_walkers_take_all_steps_in_turns(bias: str, softcap: float | None) -> None:
    """Each walker takes several steps, over heads, entries or both; some take one step more."""
    batch, heads, width, walkers, slots = _WALKS[bias]
    case = Case(batch, heads, heads, 40, 50, width, width, "float16", causal=True, seed=7)
    case = replace(case, bias=bias, softcap=softcap, q_offset=-10)  # rows that see no key
    runner = EmulatedRunner("90", "fa2", (32, 32))
    (config,) = (one for one in runner.configs(case) if one.kernel == "bias_gradient")
    constants = dict(config.constants)
    assert (constants["walkers"], constants["slots"]) == (walkers, slots)
    assert constants["keeps_terms"] == (softcap is None)
    x = _inputs(case)
    truth = judge(case, x)
    for name, got in _results(runner, case, x, tensor(case, "bias")).items():
        compare(truth, name, got).check()


@dataclass(frozen=True)
class _Shared(Case):
    """A case with given numbers of biases and gradients instead of one for each entry."""

    own: int = 1
    own_gradients: int = 1

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        own = {"bias": self.own, "dbias": self.own_gradients}
        return (own[name], *shape[1:]) if name in own else shape


_SHARING = [row for row in BIASED if not (row.softcap or row.alibi or row.sinks or row.window)]


@pytest.mark.parametrize("row", params(*_SHARING))
@pytest.mark.parametrize(
    ("entries", "own"),
    [((2, 1), 3), ((2, 2), 2), ((4, 2), 2), ((1, 3), 1), ((1, 3), 6)],
    ids=["2-1", "2-2", "4-2", "1-3", "1-3-of-6"],
)
def test_neighbouring_entries_share_one_of_the_bias_and_of_its_gradient(
    row: Row, entries: tuple[int, int], own: int
) -> None:
    """JAX asks for this under vmap: entry e reads bias ``e // n`` modulo the number of biases.

    Entries that add to one gradient also share a bias.
    """
    axes, mark, dtype = row.bias.removesuffix("-inf").partition(":")
    pairs = f"{axes.rjust(4, '1')[1:]}{mark}{dtype}"
    neighbours, summed = entries
    batch = 8 if own == 2 else 6
    each = Case(batch, 2, 2, 70, 90, *row.dims, row.dtype, causal=row.causal, bias=f"b{pairs}")
    fields = {name: getattr(each, name) for name in each.__dataclass_fields__}
    case = _Shared(**fields, own=own, own_gradients=batch // summed)
    if row.algorithm == "fa3":
        case, each = (replace(one, seqlen_kv=104) for one in (case, each))
    x, bias = _inputs(each), tensor(case, "bias")
    truth = judge(each, {**x, "bias": bias[np.arange(batch) // neighbours % own]})

    def checked(**options: Any) -> Any:
        return replace(check_options(**options), entries=(("bias", entries),))

    with mock.patch.object(plan_ahead, "check_options", checked):
        found = _results(row.runner, case, x, bias)
    expected, dbias = truth.results["dbias"], found.pop("dbias").astype(np.float64)
    expected = expected.reshape(batch // summed, summed, *expected.shape[1:]).sum(axis=1)
    assert dbias.shape == expected.shape
    most = {"float16": 0.01, "bfloat16": 0.05}.get(row.dtype, 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(dbias, expected, rtol=0, atol=most)
    for name, got in found.items():
        compare(truth, name, got).check()


@dataclass(frozen=True, repr=False)
class _Padded(Call):
    """A call with a free number after every row of the bias' gradient."""

    def recipe(self, name: str) -> Strides:
        return Strides(gaps=(1, 0)) if name == "dbias" else super().recipe(name)


@pytest.mark.parametrize("seqlen_kv", [33, 49, 64, 65])
def test_nothing_is_written_behind_the_rows_of_the_gradient(seqlen_kv: int) -> None:
    """Rows are an even number of elements apart; the kernel writes pairs, except for a last one."""
    kernels = Kernels("fa2", "float32", (24, 24), True, (16, 32), "80", bias="qk")
    case = Case(2, 2, 1, 70, seqlen_kv, 24, 24, "float32", causal=True, bias="qk", seed=5)
    check(kernels, _Padded(case, made=True, wrt=(*QKV, "bias")))


@pytest.mark.parametrize("row", params(*(row for row in BIASED if row.bias in ("bh1k", "b111"))))
def test_parts_are_longer_than_the_block_that_adds_them_up(row: Row) -> None:
    """A thread adds several numbers of a sum, or a block computes only some of the sums."""
    case = Case(2, 2, 1, 40, 1100, *row.dims, row.dtype, causal=True, bias=row.bias, seed=2)
    if row.bias == "b111":
        case = replace(case, seqlen_q=1100, seqlen_kv=40, q_offset=10, sinks=row.sinks)
    x = _inputs(case)
    truth, found = judge(case, x), _results(row.runner, case, x, tensor(case, "bias"))
    for name, got in found.items():
        compare(truth, name, got).check()
