"""Packed groups: which calls have query heads as rows of a tile, and the strides of these rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.features.packed_group import with_packed_group
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from ..emulator.host_cupy import host_cupy
from .test_forward_time import few
from .told_calls import no_kernel

H200 = LIMITS["90"]
ONE = few(3, (8, 2), (1, 700), 64, storage="float16")


def _with(problem: AttentionProblem = ONE, *names: str, **keywords: Any) -> AttentionProblem:
    heads, pairs = problem.heads_q, (1, problem.heads_q, 1, problem.seqlen_kv)
    operands = {
        "seqused_q": Operand("seqused_q", "int32", (problem.batch,)),
        "seqused_kv": Operand("seqused_kv", "int32", (problem.batch,)),
        "alibi_slopes": Operand("alibi_slopes", "float32", (heads,)),
        "sinks": Operand("sinks", "float32", (heads,)),
        "bias": Operand("bias", "float16", pairs),
        "mask": Operand("mask", "bool", pairs),
    }
    given = {name: operands[name] for name in names}
    return with_features(problem, keywords, given, bottom_right=True)


_PACKED = {
    "plain": ONE,
    "causal": replace(ONE, mask="causal", q_offset=600),
    "a window": _with(replace(ONE, mask="left", q_first=300)),
    "used keys": _with(ONE, "seqused_kv"),
    "a soft cap": _with(ONE, softcap=3.0),
    "all of them": _with(
        replace(ONE, mask="band", q_first=9, q_offset=600), "seqused_kv", softcap=3.0
    ),
    "one head of keys": replace(ONE, heads_kv=1),
    "many heads": replace(ONE, heads_q=200, heads_kv=1),
}

_NOT = {
    "two queries": replace(ONE, seqlen_q=2),
    "no query": replace(ONE, seqlen_q=0),
    "no group": replace(ONE, heads_kv=8),
    "no heads": replace(ONE, heads_q=0, heads_kv=0),
    "a backward pass": replace(ONE, operation="backward"),
    "packed sequences": replace(ONE, batch=1, sequences=2),
    "used queries": _with(ONE, "seqused_q", "seqused_kv"),
    "slopes": _with(ONE, "alibi_slopes"),
    "sinks": _with(ONE, "sinks"),
    "a bias": _with(ONE, "bias"),
    "a mask": _with(ONE, "mask"),
    "dropout": _with(ONE, dropout_p=0.5, dropout_seed=1),
}


@pytest.mark.parametrize("name", _PACKED)
def test_heads_of_one_query_are_rows(name: str) -> None:
    problem = _PACKED[name]
    found = with_packed_group(problem)
    assert found.group_rows == found.seqlen_q == problem.group
    assert found.heads_q == found.heads_kv == problem.heads_kv
    assert found.features == (*problem.features, "packed_group")
    assert dict(found.uses[-1].numbers) == {"group": problem.group}
    same = replace(found, heads_q=problem.heads_q, seqlen_q=1, group_rows=1, uses=problem.uses)
    assert same == problem
    assert with_packed_group(found) == found


@pytest.mark.parametrize("name", _NOT)
def test_what_a_head_or_a_row_has_for_itself_is_not_packed(name: str) -> None:
    assert with_packed_group(_NOT[name]) == _NOT[name]


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_tile_has_the_rows_of_a_group(algorithm: Any) -> None:
    """With one query, each tile of a group's query heads reads the keys of its kv head once."""
    for group in (2, 3, 64, 65, 200):
        problem = replace(ONE, heads_q=2 * group, heads_kv=2)
        chosen = plan(problem, H200, algorithm=algorithm, kv_chunk=0)
        tiles = 3 * 2 * -(-group // chosen.tile.block_q)
        assert chosen.launches[0].grid == min(tiles, 10**9 if algorithm == "fa2" else 3 * 132)
        assert [f.name for f in chosen.launches[0].config.features] == ["packed_group"]


def test_fa1_takes_no_packed_groups() -> None:
    chosen = plan(ONE, H200, algorithm="fa1")
    assert chosen.problem == ONE


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("gap", [0, 64])
def test_any_strides_of_heads_are_those_of_rows(layout: str, gap: int) -> None:
    """Every launch is audited: its rows of joined heads are the memory that the call was given."""
    with host_cupy(make=no_kernel) as host:
        shape = (2, 1, 6, 64 + gap) if layout == "bshd" else (2, 6, 1, 64 + gap)
        keys = (2, 300, 2, 64) if layout == "bshd" else (2, 2, 300, 64)
        q, kv = host.array(np.zeros(shape, np.float16)), host.array(np.zeros(keys, np.float16))
        for algorithm in ("fa2", "fa3"):
            out = host.array(np.zeros(shape, np.float16))[..., :64]
            lse = host.array(np.zeros((2, 6, 1), np.float32))
            options = {"layout": layout, "algorithm": algorithm, "out": out, "lse_out": lse}
            ran: list[Plan] = []
            with dispatch.observe(ran.append):
                given = (q[..., :64], kv, kv)
                host.call(cuflash.attention, *given, **options, return_lse=True)
            assert ran[0].problem.group_rows == 3
            assert ran[0].problem.shapes["q"] == (2, 3, 2, 64)
