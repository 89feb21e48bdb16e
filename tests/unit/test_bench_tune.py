"""The tuner's candidates, and the changes that it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from bench import forced, tune
from bench.cases import Case
from bench.forced import call_of, poisoned
from bench.inputs import Inputs, make_inputs
from bench.tune import (
    Choice,
    candidates_of,
    change_lines,
    choose,
    rows_of,
    select_cases,
    speed_lines,
)
from cuflash import pipeline
from cuflash.errors import CompileError, UnsupportedError
from cuflash.planning.fa3 import fa3_plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from .fake_device import FakeDevice, device_array, fake_device

__all__ = ["fake_device"]

CASE = Case("forward", "float32", 1, 1, 1, 16, 16, 40, 40, False, "fa2")


@dataclass(frozen=True)
class Tile:
    block_q: int
    block_kv: int
    warps: int = 4
    head_dim: int = 16


PLANNED, QUICK, SLOW, BAD, BIG = Tile(64, 64), Tile(128, 64), Tile(32, 32), Tile(1, 1), Tile(512, 9)
PROBLEM = object()


def _call_of(case: Case, tile: Any, inputs: Inputs) -> tuple[Callable[[], Any], Any]:
    if tile == BIG:
        raise CompileError("too much shared memory\nsecond line")
    out = cuflash.attention(inputs.q, inputs.k, inputs.v)

    def call() -> Any:
        call_times.append(tile)
        return [inputs.v if tile == BAD else out]

    return call, SimpleNamespace(tile=tile or PLANNED, problem=PROBLEM)


call_times: list[Any] = []
MILLISECONDS = {PLANNED: 2.0, None: 2.0, QUICK: 1.0, SLOW: 3.0}


def _clock(name: str, function: Callable[[], Any]) -> float:
    function()
    return MILLISECONDS[call_times[-1]]


def _candidates(case: Case, problem: Any) -> Iterator[Tile]:
    assert problem is PROBLEM
    return iter([QUICK, PLANNED, SLOW, BAD, BIG])


def _choose(
    case: Case = CASE, call_of: Any = _call_of, beside: tuple[str, ...] = ()
) -> tuple[Choice | None, list[str]]:
    lines: list[str] = []
    inputs = make_inputs(case, np)
    return choose(case, inputs, call_of, lines.append, _candidates, _clock, beside), lines


def _choice(times: dict[Any, list[float]]) -> Choice:
    return Choice(CASE, PLANNED, times, dict.fromkeys(times, 0.5))


def test_the_fastest_tile_is_found_and_bad_ones_are_left_out() -> None:
    choice, lines = _choose()
    assert choice is not None
    assert list(choice.times) == [PLANNED, QUICK, SLOW]
    assert (choice.planned, choice.best, choice.gain) == (PLANNED, QUICK, (2.0, 2.0))
    assert {len(times) for times in choice.times.values()} == {tune.ROUNDS}
    assert len(lines) == 2
    assert "1x1 warps 4: " in lines[0]
    assert lines[0].endswith("times what rounding explains")
    assert lines[1] == "left out: 512x9 warps 4: too much shared memory"


@dataclass(frozen=True)
class OlderTile(Tile):
    """A tile of another generation, with the same blocks as the plan's tile."""


def test_another_generation_takes_turns_with_its_own_tile() -> None:
    older = OlderTile(64, 64)

    def call_of(case: Case, tile: Any, inputs: Inputs) -> Any:
        call, plan = _call_of(case, tile, inputs)
        if case.algorithm == "fa2":
            return call, plan
        assert (case, tile) == (replace(CASE, algorithm="fa1"), None)
        return lambda: (call(), call_times.append(SLOW))[0], replace_tile(plan, older)

    choice, _ = _choose(call_of=call_of, beside=("fa1",))
    assert choice is not None
    assert list(choice.times) == [PLANNED, QUICK, SLOW, older]
    assert set(choice.times[older]) == {3.0}
    assert set(choice.worst) == set(choice.times)


def replace_tile(plan: Any, tile: Any) -> Any:
    return SimpleNamespace(tile=tile, problem=plan.problem)


def test_a_plan_that_computes_something_else_is_not_timed() -> None:
    def wrong(case: Case, tile: Any, inputs: Inputs) -> Any:
        call, plan = _call_of(case, tile, inputs)
        return (call if tile else lambda: [inputs.v]), plan

    choice, lines = _choose(call_of=wrong)
    assert choice is None
    assert lines[0].startswith("left out: 64x64 warps 4: ")


def test_every_tile_has_a_row_and_a_place_in_its_cases_line() -> None:
    choice = _choice({PLANNED: [2.0] * 11, QUICK: [1.0] * 11, SLOW: [4.0] * 11})
    rows = rows_of(choice)
    assert [(row["tile"], row["planned"], row["ms"]) for row in rows] == [
        ("64x64 warps 4", True, 2.0),
        ("128x64 warps 4", False, 1.0),
        ("32x32 warps 4", False, 4.0),
    ]
    assert [row["of_the_plan"] for row in rows] == [[1.0] * 3, [2.0] * 3, [0.5] * 3]
    assert {row["worst_ratio"] for row in rows} == {0.5}
    assert rows[0]["options"] == CASE.options
    (line,) = speed_lines([choice])
    assert line.startswith(f"{CASE}: 64x64 warps 4 0 TFLOP/s; ")
    assert line.endswith("; 128x64 warps 4 2.000; 32x32 warps 4 0.500")


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_results_hold_nan_before_a_call(dtype: Any) -> None:
    array = poisoned(np, (2, 3), dtype)
    assert (array.shape, array.dtype) == ((2, 3), np.dtype(dtype))
    assert np.isnan(array.astype(np.float64)).all()


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_forced_call_has_the_window_of_its_case(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(forced, "launch_of", lambda case, prepared, inputs: prepared)
    case = Case(op, "float16", 1, 40, 40, 16, 16, 4096, 4096, False, "fa2", window_size=(127, 0))
    inputs = Inputs(*(device_array((1, 4096, 40, 16)) for _ in range(4)))
    _, made = call_of(case, None, inputs)
    assert (made.problem.mask, made.problem.q_first, made.problem.q_offset) == ("band", -127, 0)
    assert made.problem.flops == case.flops


def test_the_tile_of_the_plan_is_prepared_once() -> None:
    asked: list[Any] = []

    def call_of(case: Case, tile: Any, inputs: Inputs) -> Any:
        asked.append(tile)
        return _call_of(case, tile, inputs)

    _choose(call_of=call_of)
    assert asked == [None, QUICK, SLOW, BAD, BIG]


def test_a_case_that_the_library_cannot_do_is_left_out() -> None:
    def unable(case: Case, tile: Any, inputs: Inputs) -> Any:
        raise UnsupportedError("fa2 has no CUDA kernels in this version")

    choice, lines = _choose(call_of=unable)
    assert choice is None
    assert lines == [f"left out: {CASE}: fa2 has no CUDA kernels in this version"]


def test_what_would_change_is_said() -> None:
    choice = _choice({PLANNED: [2.0] * 11, QUICK: [1.0] * 11})
    assert change_lines([choice]) == [
        f"would change: {CASE}: 64x64 warps 4 -> 128x64 warps 4, 2.00 times as fast (at least 2.00)"
    ]


@pytest.mark.parametrize(
    "times",
    [
        {PLANNED: [1.0] * 11, QUICK: [2.0] * 11},
        {PLANNED: [1.0] * 11},
        {PLANNED: [1.0, 2.0] * 5 + [1.5], QUICK: [1.2] * 11},  # the rounds differ by more
    ],
)
def test_nothing_changes_without_a_gain(times: dict[Any, list[float]]) -> None:
    assert change_lines([_choice(times)]) == ["would change nothing"]


def test_the_table_marks_the_plan_and_the_fastest() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    choice = _choice({PLANNED: [2.0], QUICK: [1.0], SLOW: [4.0]})
    console.print(tune._table(choice))
    lines = [line for line in console.export_text().splitlines() if "warps" in line]
    assert ["128x64" in lines[0], "64x64" in lines[1], "32x32" in lines[2]] == [True] * 3
    assert ["fastest" in line for line in lines] == [True, False, False]
    assert ["plan" in line for line in lines] == [False, True, False]
    assert "1.0000" in lines[0]
    assert f"{CASE.flops / 1e9:.1f}" in lines[0]


def test_cases_are_selected_by_pass_and_dtype() -> None:
    cases = select_cases("fa2,fa2-float16,fa1-tiles", "backward", "float16")
    assert len(cases) == 24
    assert {(c.op, c.dtype, c.algorithm) for c in cases} == {("backward", "float16", "fa2")}
    assert len(select_cases("fa2", None, None)) == 48
    with pytest.raises(SystemExit, match="no such case in fa2"):
        select_cases("fa2", None, "float64")


def test_candidates_are_the_tables_that_fit() -> None:
    problem = AttentionProblem(
        "forward", 1, 32, 32, 4096, 4096, 128, 128, "float16", "float16", "full", 0.125, 0
    )
    small = {(t.block_q, t.block_kv) for t in candidates_of(CASE, problem, LIMITS["75"])}
    large = {(t.block_q, t.block_kv) for t in candidates_of(CASE, problem, LIMITS["90"])}
    assert small < large
    with pytest.raises(SystemExit, match=r"tiles\.fa1 lists no candidates"):
        candidates_of(replace(CASE, algorithm="fa1"), problem, LIMITS["90"])


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_candidates_of_the_third_generation_are_of_the_pass(op: str) -> None:
    case = replace(CASE, op=op, dtype="float16", algorithm="fa3")
    problem = AttentionProblem(
        op, 1, 32, 32, 4096, 4096, 64, 64, "float16", "float16", "full", 0.125, 0, "tensor_map"
    )
    tiles = list(candidates_of(case, problem, LIMITS["90"]))
    assert len(tiles) > 1
    for tile in tiles:
        made = fa3_plan(problem, LIMITS["90"], None, (), tile)
        assert ("fa3", op) in {(x.config.generation, x.config.kernel) for x in made.launches}


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_tile_reaches_the_plan_of_its_pass_alone(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(forced, "launch_of", lambda case, prepared, inputs: prepared)
    case = replace(CASE, op=op, dtype="float16", algorithm="fa2")
    inputs = Inputs(*(device_array((1, 4096, 40, 16)) for _ in range(4)))
    kept = pipeline.plan, pipeline._decide
    prepared, made = call_of(case, None, inputs)
    other = list(candidates_of(case, made.problem, LIMITS["80"]))[-1]
    assert other != made.tile
    prepared, chosen = call_of(case, other, inputs)
    assert chosen is prepared.plan
    assert chosen.tile == other
    assert chosen.problem == made.problem
    assert (pipeline.plan, pipeline._decide) == kept
