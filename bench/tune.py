"""Times the candidate tiles on the GPU at hand, beside the one that the plan takes."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .cases import Case, select
from .inputs import Inputs, make_inputs
from .timing import median_ratio, turns
from .verify import WRONG, Truth

__all__ = [
    "Choice",
    "candidates_of",
    "change_lines",
    "choose",
    "launch_of",
    "select_cases",
    "tune",
]

ROUNDS = 11


@dataclass(frozen=True)
class Choice:
    """What was seen of the tiles of one case."""

    case: Case
    planned: Any
    times: Mapping[Any, list[float]]  # by tile

    @property
    def best(self) -> Any:
        """The tile with the least median."""
        return min(self.times, key=lambda tile: statistics.median(self.times[tile]))

    @property
    def gain(self) -> tuple[float, float]:
        """How many times as fast as the plan's tile the best one is, and at least is."""
        ratio, low, _ = median_ratio(self.times[self.best], self.times[self.planned])
        return ratio, low

    @property
    def changes(self) -> bool:
        """Whether the best tile is faster than the plan's by more than the rounds differ."""
        return self.best != self.planned and self.gain[1] > 1.0


def tune(names: str, op: str | None = None, dtype: str | None = None) -> list[Choice]:
    """Time the candidates of every case; print a table each, then what the plan would change."""
    from cuflash.cuda.available import require_device

    cases = select_cases(names, op, dtype)
    require_device()
    import cupy
    from rich.console import Console

    console, choices = Console(width=100), []
    for case in cases:
        found = choose(case, make_inputs(case, cupy), _call_of, print)
        if found is not None:
            console.print(_table(found))
            choices.append(found)
        cupy.get_default_memory_pool().free_all_blocks()
    print("\n".join(change_lines(choices)))
    return choices


def select_cases(names: str, op: str | None, dtype: str | None) -> list[Case]:
    """The cases of the sets that are of a pass and a dtype, where those are named."""
    cases = [
        case
        for case in select(names)
        if op in (None, case.op) and dtype in (None, case.dtype) and case.blocks is None
    ]
    if not cases:
        raise SystemExit(f"--op {op} --dtype {dtype}: no such case in {names}")
    return cases


def candidates_of(case: Case, problem: Any, limits: Any = None) -> Iterator[Any]:
    """The tiles that the planning module has for a problem, whatever their width is meant for."""
    from cuflash.planning.device import DeviceLimits

    module = importlib.import_module(f"cuflash.planning.tiles.{case.algorithm}")
    if not hasattr(module, "candidates"):
        raise SystemExit(f"tune: cuflash.planning.tiles.{case.algorithm} lists no candidates")
    limits = limits or DeviceLimits.query(0)
    found = module.candidates(problem, limits, every=True)
    return (tile for tile in found if tile.footprint.excess(limits) is None)


_Prepared = tuple[Callable[[], Sequence[Any]], Any]  # the call, and its plan


def choose(
    case: Case,
    inputs: Inputs,
    call_of: Callable[[Case, Any, Inputs], _Prepared],
    say: Callable[[str], None],
    candidates: Callable[[Case, Any], Iterator[Any]] = candidates_of,
    clock: Any = None,
) -> Choice | None:
    """Time the tiles of a case in turns; None, and a line, where the library cannot do it.

    Parameters
    ----------
    call_of
        Gives the call of a case with a tile, or with the plan's for None, and
        its plan.
    candidates
        Gives the tiles of a case's problem.
    """
    from cuflash.errors import CuflashError, UnsupportedError

    try:
        call, plan = call_of(case, None, inputs)
    except UnsupportedError as error:
        say(f"left out: {case}: {error}")
        return None
    truth, calls = Truth(case, inputs), {plan.tile: call}
    for tile in candidates(case, plan.problem):
        if tile in calls:
            continue
        try:
            call, _ = call_of(case, tile, inputs)
            worst = truth.worst_ratio(call())
        except CuflashError as error:  # one that does not fit, or does not compile
            say(f"left out: {_name(tile)}: {str(error).splitlines()[0]}")
            continue
        if worst <= WRONG:
            calls[tile] = call
        else:
            say(f"left out: {_name(tile)}: {worst:.3g} times the error of its roundings")
    names = {str(place): tile for place, tile in enumerate(calls)}
    timed = turns({n: calls[tile] for n, tile in names.items()}, rounds=ROUNDS, clock=clock)
    return Choice(case, plan.tile, {tile: timed[n] for n, tile in names.items()})


def change_lines(choices: Sequence[Choice]) -> list[str]:
    """What the measurements would change in the plan's table."""
    lines = []
    for choice in choices:
        if choice.changes:
            ratio, low = choice.gain
            lines.append(
                f"would change: {choice.case}: {_name(choice.planned)} -> {_name(choice.best)}, "
                f"{ratio:.2f} times as fast (at least {low:.2f})"
            )
    return lines or ["would change nothing"]


def _name(tile: Any) -> str:
    """The blocks of a tile, and its other small numbers, which tell alike blocks apart."""
    fields = getattr(tile, "__dataclass_fields__", {})
    apart = ("block_q", "block_kv", "head_dim", "head_dim_v")
    more = [
        f"{field} {getattr(tile, field)}"
        for field in fields
        if field not in apart and isinstance(getattr(tile, field), int)
    ]
    return " ".join([f"{tile.block_q}x{tile.block_kv}", *more])


def _table(choice: Choice) -> Any:
    from rich.table import Table

    table = Table(title=str(choice.case), title_justify="left")
    for header in ("tile", "ms", "TFLOP/s", ""):
        table.add_column(header, justify="left" if header in ("tile", "") else "right")
    medians = {tile: statistics.median(times) for tile, times in choice.times.items()}
    for tile in sorted(medians, key=lambda tile: medians[tile]):
        said = ["plan"] if tile == choice.planned else []
        said += ["fastest"] if tile == choice.best else []
        rate = choice.case.flops / medians[tile] / 1e9
        table.add_row(_name(tile), f"{medians[tile]:.4f}", f"{rate:.1f}", ", ".join(said))
    return table


def _call_of(case: Case, tile: Any, inputs: Inputs) -> _Prepared:
    """A prepared call of a case, with a tile in place of the plan's unless that is None.

    The one place that knows how a tile is forced: the plan of this pass is
    made with it, outside the cache of plans.
    """
    import cuflash
    from cuflash import pipeline
    from cuflash.planning.plan import plan

    module = importlib.import_module(f"cuflash.planning.{case.algorithm}")
    make = getattr(module, f"{case.algorithm}_plan")

    def planned(problem: Any, limits: Any, **options: Any) -> Any:
        if tile is None or problem.operation != case.op:
            return plan(problem, limits, **options)
        return make(problem, limits, None, (), tile)

    decide = pipeline._decide.__wrapped__
    operation: Any = case.op
    with mock.patch.multiple(pipeline, plan=planned, _decide=decide):
        prepared = cuflash.prepare(
            inputs.q,
            inputs.k,
            inputs.v,
            operation=operation,
            causal=case.causal,
            **case.options,
        )
    return launch_of(case, prepared, inputs), prepared.plan


def launch_of(case: Case, prepared: Any, inputs: Inputs) -> Callable[[], Sequence[Any]]:
    """A call without arguments of what was prepared; it gives the output or the gradients."""
    import cupy

    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
    results = ("out",) if case.op == "forward" else ("dq", "dk", "dv")
    if case.op == "backward":
        arrays["out"], arrays["lse"] = _forward(case, inputs)
    for name in (*results, "lse"):
        if name not in arrays:
            spec = prepared.tensors[name]
            arrays[name] = cupy.empty(spec.shape, spec.dtype if name == "lse" else inputs.q.dtype)
    pointers = {n: arrays[n].data.ptr for n in prepared.tensors if n in arrays}
    workspace = cupy.empty(prepared.workspace_bytes, "uint8")

    def call() -> Sequence[Any]:
        prepared.run(pointers, workspace=workspace.data.ptr)
        return [arrays[name] for name in results]

    return call


def _forward(case: Case, inputs: Inputs) -> tuple[Any, Any]:
    import cuflash

    found: tuple[Any, Any] = cuflash.attention(
        inputs.q, inputs.k, inputs.v, causal=case.causal, return_lse=True
    )
    return found
