"""``jax.jit`` programs of cuflash and of peers: compiled, timed, stored and shown."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import run, tables
from bench.cases import Case
from bench.inputs import make_inputs, widened
from bench.verify import Truth

jax = pytest.importorskip("jax", reason="JAX is not installed")

from bench import jitted  # noqa: E402
from bench.jitted import CALLBACK, CUDNN, TRIVIAL, XLA, Program  # noqa: E402

CASE = Case("forward", "float32", 1, 4, 2, 16, 16, 24, 24, True, "fa2")
COMMON = {"run": "20261128-000000", "date": "2026-11-28", "gpu": "NVIDIA H200", "version": "jax 1"}
BOTH = pytest.mark.parametrize("op", ["forward", "backward"])


def _measure(program: Program, **functions: Any) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[str] = []
    inputs = make_inputs(program.case, np)
    arrays = [jax.numpy.asarray(array) for array in inputs.matrices(program.case)]
    truth = Truth(program.case, inputs)

    def check(found: list[Any]) -> float:
        return truth.worst_ratio([np.asarray(array) for array in found])

    return jitted.measure(program, arrays, check, lines.append, functions or None), lines


@BOTH
def test_every_program_that_runs_here_is_verified(op: str) -> None:
    rows, lines = _measure(Program(replace(CASE, op=op)))
    assert [row["impl"] for row in rows] == ["cuflash", CALLBACK, XLA, TRIVIAL]
    assert rows[0]["ratio"] == 1.0
    assert all(row["us"] > 0 for row in rows)
    assert all(0 < row["worst_ratio"] < 10 for row in rows[:-1])
    assert rows[-1]["worst_ratio"] is None
    left_out = [line.split(",")[0] for line in lines if line.startswith("left out")]
    assert left_out == ["left out: cudnn", "left out: flash-attn-3"]


@BOTH
def test_calls_follow_one_another(op: str) -> None:
    """Each call takes the output of the call before it as its queries."""
    seen: list[int] = []

    def make(case: Case) -> Any:
        def function(q: Any, k: Any, v: Any) -> Any:
            seen.append(1)
            return 2 * q

        return function

    case = replace(CASE, op=op)
    inputs = make_inputs(case, np)
    arrays = [jax.numpy.asarray(array) for array in inputs.matrices(case)]
    found = jitted.compiled_program(Program(case, 3), make(case), arrays)()
    assert len(seen) == 3
    q, *_, dout = (widened(array) for array in inputs.matrices(case))
    if op == "forward":
        np.testing.assert_allclose(found, 8 * q, rtol=1e-6)
        return
    dq, dk, dv = found
    np.testing.assert_allclose(dq, 8 * dout, rtol=1e-6)
    assert not np.any(dk)
    assert not np.any(dv)


def test_only_one_of_ours_is_lowered_to_python() -> None:
    seen: list[Any] = []

    def make(case: Case) -> Any:
        def function(q: Any, k: Any, v: Any) -> Any:
            seen.append(os.environ["CUFLASH_JAX_NATIVE"])
            return q

        return function

    before = os.environ.get("CUFLASH_JAX_NATIVE")
    _measure(Program(CASE, 2), **{"cuflash": make, CALLBACK: make})
    assert seen == ["1", "1", "0", "0"]
    assert os.environ.get("CUFLASH_JAX_NATIVE") == before


def test_a_wrong_peer_is_left_out_and_a_wrong_result_of_ours_is_an_error() -> None:
    def check(found: list[Any]) -> float:
        raise RuntimeError("wrong by 400 times what rounding explains")

    lines: list[str] = []
    arrays = [jax.numpy.ones((1, 4, 1, 4))] * 4
    functions = {"cuflash": jitted.FUNCTIONS[TRIVIAL], XLA: jitted.FUNCTIONS[TRIVIAL]}
    with pytest.raises(RuntimeError, match="400 times"):
        jitted.measure(Program(CASE), arrays, check, lines.append, functions)

    def once(found: list[Any]) -> float:
        return check(found) if lines or seen.append(1) or len(seen) > 1 else 0.5

    seen: list[int] = []
    rows = jitted.measure(Program(CASE), arrays, once, lines.append, functions)
    assert [row["impl"] for row in rows] == ["cuflash"]
    assert "left out: xla" in lines[0]


@pytest.mark.parametrize(("seconds", "count"), [(1e-5, 300), (1e-3, 30), (1.0, 4)])
def test_long_programs_are_queued_less_often(seconds: float, count: int) -> None:
    now = 0.0

    def each() -> int:
        nonlocal now
        now += seconds
        return 0

    assert jitted._count(each, lambda: now) == pytest.approx(count, abs=1)


def _row(program: Program, impl: str, us: float, ratio: float) -> dict[str, Any]:
    row = jitted._row(program, impl, {"cuflash": [us / ratio / 1e3] * 9, impl: [us / 1e3] * 9}, 0.5)
    return {**COMMON, **row}


def test_a_line_compares_with_the_best_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert tables.render(tables.JITTED) == ""
    gradients = Program(replace(CASE, op="backward", causal=False))
    rows = [
        *(_row(Program(CASE), "cuflash", 10, 1), _row(Program(CASE), CALLBACK, 5, 0.5)),
        *(_row(Program(CASE), CUDNN, 12.5, 1.25), _row(Program(CASE), XLA, 40, 4)),
        *(_row(Program(CASE), TRIVIAL, 4, 0.4), _row(Program(CASE, 4), "cuflash", 20, 1)),
        *(_row(Program(CASE, 4), CUDNN, 40, 2), _row(gradients, "cuflash", 30, 1)),
        _row(gradients, XLA, 15, 0.5),
    ]
    (tmp_path / "nvidia-h200-jitted.json").write_text(json.dumps(rows))
    shown = tables.render(tables.JITTED).replace("| 4/2 | 16 | 24 |", "|")
    assert "| no | causal | 1 | 10.0 | 5.0 | 12.5 | 40.0 |  | 4.0 | 1.250 |" in shown
    assert "| no | causal | 4 | 20.0 |  | 40.0 |  |  |  | 2.000 |" in shown
    assert "| yes | full | 1 | 30.0 |  |  | 15.0 |  |  | 0.500 |" in shown
    assert "without gradients 1.58 times the best of the others, worst 1.25" in shown
    assert "with gradients 0.50 times the best of the others, worst 0.50" in shown


def test_programs_are_of_both_passes_and_several_calls() -> None:
    assert [(p.case.op, p.calls) for p in jitted.PROGRAMS[:3]] == [
        ("forward", 1),
        ("forward", 4),
        ("backward", 1),
    ]
    ops = [program.case.op for program in jitted.PROGRAMS[1:]]
    assert ops.count("forward") == ops.count("backward")
    assert len(set(jitted.PROGRAMS)) == len(jitted.PROGRAMS)
