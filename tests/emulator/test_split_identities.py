"""Split keys on the emulated device: changes that must not change a bit, and drawn lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from ..kit.case import Case
from ..kit.data import arrays
from ..kit.split_keys import Row
from .apart import apart
from .build import compiler, last_blocks_first
from .host_cupy import HostCupy, host_cupy

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with"),
    pytest.mark.few_tiles,
]

_BLOCKS = {"fa2": (64, 64), "fa3": (64, 64)}


def _called(host: HostCupy, x: dict[str, Any], algorithm: str, **options: Any) -> list[np.ndarray]:
    options = {"causal": True, "blocks": _BLOCKS[algorithm], **options}
    found = host.call(cuflash.attention, **x, algorithm=algorithm, return_lse=True, **options)
    return [np.asarray(array) for array in found]


def _equal(found: list[np.ndarray], expected: list[np.ndarray], said: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=str(said))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_row_has_the_same_bits_in_any_batch(algorithm: str) -> None:
    """Tile and chunk are given; the device has few multiprocessors or many."""
    case = Case(5, 2, 1, 70, 700, 64, 64, "float16", seed=5)
    x = arrays(case, "q", "k", "v")
    for chunk, sms in ((128, 1), (256, 132)):
        with host_cupy("90", sms) as host:
            every = _called(host, x, algorithm, kv_chunk=chunk)
            for b in range(case.batch):
                one = {name: array[b : b + 1] for name, array in x.items()}
                alone = _called(host, one, algorithm, kv_chunk=chunk)
                _equal(alone, [array[b : b + 1] for array in every], (chunk, b))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_an_entry_of_a_cache_has_the_same_bits_in_any_batch(algorithm: str) -> None:
    """The call has one new token or a few, and the planned tile and chunk."""
    lengths = np.array([1500, 3, 700, 0], np.int32)
    for queries in (1, 5):
        x = arrays(Case(4, 4, 2, queries, 1500, 64, 64, "float16", seed=11), "q", "k", "v")
        given = {"q": x["q"], "k_cache": x["k"], "v_cache": x["v"], "cache_seqlens": lengths}
        options = {"causal": True, "algorithm": algorithm, "return_lse": True}
        with host_cupy("90", 132) as host:
            placed = {name: host.array(array) for name, array in given.items()}
            every = host.call(cuflash.attention_with_kvcache, **placed, **options)
            for b in range(4):
                one = {name: host.array(array[b : b + 1]) for name, array in given.items()}
                alone = host.call(cuflash.attention_with_kvcache, **one, **options)
                _equal([a.peek() for a in alone], [a.peek()[b : b + 1] for a in every], b)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_row_has_the_same_bits_beside_more_keys_that_it_does_not_see(algorithm: str) -> None:
    """Chunks begin at fixed keys, and later chunks add nothing to the row."""
    x = arrays(Case(1, 2, 1, 130, 900, 64, 64, "bfloat16", seed=6), "q", "k", "v")
    short = {"q": x["q"], "k": x["k"][:, :500], "v": x["v"][:, :500]}
    with host_cupy("90", 3) as host:
        options = {"q_offset": 300, "kv_chunk": 128}
        _equal(
            _called(host, x, algorithm, **options), _called(host, short, algorithm, **options), ""
        )


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_chunks_beyond_the_keys_are_one_chunk(algorithm: str) -> None:
    """Any larger chunk gives the same bits; without chunks only the merge's rounding differs."""
    x = arrays(Case(2, 2, 1, 70, 300, 64, 64, "float16", seed=7), "q", "k", "v")
    with host_cupy("90", 3) as host:
        one = _called(host, x, algorithm, kv_chunk=320)
        for chunk in (384, 1024, 1 << 20):
            _equal(_called(host, x, algorithm, kv_chunk=chunk), one, chunk)
        whole = _called(host, x, algorithm, kv_chunk=0)
        for got, true in zip(one, whole, strict=True):
            np.testing.assert_allclose(got, true, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_runs_are_equal_whatever_comes_first(algorithm: str) -> None:
    """Blocks run in either order, on one or many multiprocessors, over any workspace."""
    x = arrays(Case(1, 4, 1, 1, 1300, 64, 64, "float16", seed=8), "q", "k", "v")
    found = []
    for sms, poison, turned in ((1, 0xFF, False), (1, 0x00, True), (132, 0x7F, False)):
        with host_cupy("90", sms) as host:
            options = {"kv_chunk": 128, "workspace": host.array(np.full(1 << 20, poison, np.uint8))}
            if turned:
                with last_blocks_first():
                    found.append(_called(host, x, algorithm, **options))
            else:
                found.append(_called(host, x, algorithm, **options))
    for other in found[1:]:
        _equal(other, found[0], "")


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_heads_in_a_packed_group_have_the_bits_of_heads_alone(algorithm: str) -> None:
    """A row does not depend on the other rows of its tile."""
    x = arrays(Case(2, 6, 2, 1, 300, 64, 64, "float16", seed=9), "q", "k", "v")
    for chunk in (0, 128):
        with host_cupy("90", 2) as host:
            every = _called(host, x, algorithm, kv_chunk=chunk)
            for head in range(6):
                kv = {name: x[name][:, :, head // 3 : head // 3 + 1] for name in ("k", "v")}
                alone = _called(
                    host, {"q": x["q"][:, :, head : head + 1], **kv}, algorithm, kv_chunk=chunk
                )
                own = [every[0][:, :, head : head + 1], every[1][:, head : head + 1]]
                _equal(alone, own, (chunk, head))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_rows_that_do_not_count_change_no_bit(algorithm: str) -> None:
    """They may hold anything; their output is 0, and their log-sum-exp is minus infinity."""
    x = arrays(Case(3, 2, 1, 100, 300, 64, 64, "float16", seed=10), "q", "k", "v")
    x["seqused_q"] = np.array([100, 70, 0], np.int32)
    x["seqused_kv"] = np.array([130, 300, 200], np.int32)
    found = []
    for value in (1, 40, np.nan, np.inf):
        given = {name: array.copy() for name, array in x.items()}
        for b, (q, kv) in enumerate(zip(x["seqused_q"], x["seqused_kv"], strict=True)):
            given["q"][b, q:] = value
            given["k"][b, kv:] = given["v"][b, kv:] = value
        with host_cupy("90", 2) as host:
            found.append(_called(host, given, algorithm, kv_chunk=128))
        _equal(found[-1], found[0], value)
    assert not found[0][0][1, 70:].any()
    assert (found[0][1][1, :, 70:] == -np.inf).all()


@dataclass(frozen=True)
class Split:
    """A compiled kernel; tests draw lengths near multiples of its tile and chunk."""

    algorithm: str
    case: Case
    chunk: int
    blocks: tuple[int, int]
    packed: bool = False

    @property
    def name(self) -> str:
        case = self.case
        mask = "causal" if case.causal else case.window or "full"
        return f"{self.algorithm}-{case.dtype}-{mask}-{case.used}-{self.chunk}-{self.packed}"


_ANY = Case(2, 4, 2, 1, 1, 64, 64, "float16")
SPLIT = (
    Split("fa2", replace(_ANY, causal=True, used="qk"), 64, (64, 32)),
    Split("fa2", replace(_ANY, dtype="float32", window="50:20"), 64, (32, 32)),
    Split("fa2", replace(_ANY, used="k"), 64, (64, 64), packed=True),
    Split("fa3", replace(_ANY, causal=True, sinks="float32"), 128, (64, 64)),
    Split("fa3", replace(_ANY, used="qk", dtype="bfloat16"), 128, (64, 128)),
    Split("fa3", replace(_ANY, window="90:40"), 128, (128, 64)),
    Split("fa3", replace(_ANY, causal=True), 128, (256, 64)),
    Split("fa3", replace(_ANY, used="k"), 64, (64, 64), packed=True),
)


@st.composite
def _lengths(draw: st.DrawFn, split: Split) -> tuple[int, int]:
    """Queries and keys at, and beside, multiples of tiles and chunks."""

    def near(steps: tuple[int, ...], most: int) -> int:
        times, step = draw(st.integers(0, most)), draw(st.sampled_from(steps))
        return max(1, times * step + draw(st.sampled_from((-1, 0, 1))))

    # A single query's group is packed where it may be.
    queries = 1 if split.packed else max(2, near((split.blocks[0], 16), 3))
    return queries, near((split.chunk, split.blocks[1]), draw(st.sampled_from((2, 10))))


def _check(split: Split, lengths: tuple[int, int], batch: int, sms: int, seed: int) -> None:
    case = replace(split.case, batch=batch, seqlen_q=lengths[0], seqlen_kv=lengths[1], seed=seed)
    row = Row("drawn", split.algorithm, case, split.chunk, split.blocks, split.packed)
    with host_cupy("90", sms) as host:
        workspace = host.array(np.full(1 << 25, 0xFF, np.uint8))
        row.check(host.call, host.array, lambda array: array.peek(), workspace=workspace)


@pytest.mark.in_turns(by="split", days=4)
@pytest.mark.parametrize("split", SPLIT, ids=lambda split: split.name)
@settings(max_examples=15)
@given(data=st.data())
def test_any_lengths(split: Split, data: Any) -> None:
    batch, sms = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 3, 132)))
    lengths, seed = data.draw(_lengths(split)), data.draw(st.integers(0, 9999))
    apart(partial(_check, split, lengths, batch, sms, seed))
