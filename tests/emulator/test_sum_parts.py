"""The kernel that adds up dK and dV of several blocks, alone, on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from cuflash.cuda.parameters import parameters_of
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from ..kit.parts import parts_forced
from .build import compiler, emulate

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

BATCH, HEADS, PARTS, KEYS = 2, 3, 5, 150


def _fragments(rows: np.ndarray) -> np.ndarray:
    """Rows in the layout of the main kernel: [.., row / 16, column / 8, lane, row group, which]."""
    *outer, keys, columns = rows.shape
    tiled = rows.reshape(*outer, keys // 16, 2, 8, columns // 8, 4, 2)
    n = len(outer)
    order = (*range(n), n, n + 3, n + 2, n + 4, n + 1, n + 5)
    return np.ascontiguousarray(tiled.transpose(order))


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (72, 40), (192, 128)], ids=str)
def test_every_part_is_added_once_and_nothing_else_written(d: int, dv: int) -> None:
    problem = AttentionProblem(
        *("backward", BATCH, HEADS * PARTS, HEADS, 200, KEYS, d, dv),
        *("float16", "float16", "causal", 0.5, -50, "tensor_map"),
    )
    with parts_forced(PARTS):
        chosen = plan(problem, LIMITS["90"], algorithm="fa3")
    launch, numbers = chosen.launches[-1], dict(chosen.launches[-1].arguments)
    rng, config = np.random.default_rng(1), launch.config
    padded = numbers["padded_keys"]
    assert padded > KEYS
    values: Any = np.zeros(1, parameters_of("fa3", "sum_parts").dtype)
    kept, truths, outs = [], {}, {}
    for name, width, columns in (("dk", config.head_dim, d), ("dv", config.head_dim_v, dv)):
        rows = rng.integers(-50, 50, (BATCH, HEADS, PARTS, padded, width)).astype(np.float32)
        truths[name] = rows.sum(2)[:, :, :KEYS, :columns].transpose(0, 2, 1, 3)
        memory = _fragments(rows)
        # Destinations have more rows, heads and columns than are written.
        out = outs[name] = np.full((BATCH, KEYS + 7, HEADS + 1, columns + 8), np.nan, np.float16)
        values[name] = (out.ctypes.data, *(out.strides[axis] // 2 for axis in (0, 1, 2)))
        values[f"{name}_parts"] = memory.ctypes.data
        kept.append(memory)
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"):
        values["shape"][name] = getattr(problem, name)
    for name, value in numbers.items():
        values[name] = value
    first = ctypes.c_void_p(values.ctypes.data)
    emulate(config)(launch.grid, config.threads, config.shared_bytes, ctypes.addressof(first))
    for name, columns in (("dk", d), ("dv", dv)):
        out = outs[name].copy()
        written = out[:, :KEYS, :HEADS, :columns]
        assert (written == truths[name]).all()
        written[...] = np.nan
        assert np.isnan(out).all()
