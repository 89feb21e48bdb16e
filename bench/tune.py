"""Times the candidate tiles on the current GPU, beside the plan's tile."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .cases import Case, select
from .forced import Prepared, call_of
from .inputs import Inputs, make_inputs
from .run import common_columns, store
from .timing import median_ratio, turns
from .verify import Truth

__all__ = [
    "Choice",
    "candidates_of",
    "change_lines",
    "choose",
    "rows_of",
    "select_cases",
    "speed_lines",
    "tune",
]

ROUNDS = 11


@dataclass(frozen=True)
class Choice:
    """The timings of the tiles of one case."""

    case: Case
    planned: Any
    times: Mapping[Any, list[float]]  # by tile
    worst: Mapping[Any, float]  # the error of each, relative to that of the roundings

    @property
    def best(self) -> Any:
        """The tile with the least median."""
        return min(self.times, key=lambda tile: statistics.median(self.times[tile]))

    @property
    def gain(self) -> tuple[float, float]:
        """The speed of the best tile relative to the plan's, and its lower bound."""
        ratio, low, _ = median_ratio(self.times[self.best], self.times[self.planned])
        return ratio, low

    @property
    def changes(self) -> bool:
        """Whether the best tile beats the plan's by more than the spread of the rounds."""
        return self.best != self.planned and self.gain[1] > 1.0


def tune(
    names: str,
    op: str | None = None,
    dtype: str | None = None,
    beside: Sequence[str] = (),
    output: Path | None = None,
) -> list[Choice]:
    """Time the candidates of every case; print a table for each, then a summary.

    The generations in ``beside`` take turns with the candidates, each with the tile of its own
    plan. Rows go to the file ``output`` after every case.
    """
    from cuflash.cuda.available import require_device

    cases = select_cases(names, op, dtype)
    require_device()
    import cupy
    from rich.console import Console

    console, choices, common = Console(width=100), [], common_columns()
    for case in cases:
        found = choose(case, make_inputs(case, cupy), call_of, print, beside=beside)
        if found is not None:
            console.print(_table(found))
            choices.append(found)
            if output is not None:
                store(output, [{**common, **row} for row in rows_of(found)])
        cupy.get_default_memory_pool().free_all_blocks()
    print("\n".join([*speed_lines(choices), *change_lines(choices)]), flush=True)
    return choices


def select_cases(names: str, op: str | None, dtype: str | None) -> list[Case]:
    """The cases of the sets, restricted to a pass and a dtype if given."""
    cases = [
        case
        for case in select(names)
        if op in (None, case.op) and dtype in (None, case.dtype) and case.blocks is None
    ]
    if not cases:
        raise SystemExit(f"--op {op} --dtype {dtype}: no such case in {names}")
    return cases


def candidates_of(case: Case, problem: Any, limits: Any = None) -> Iterator[Any]:
    """The planning module's tiles that fit a problem, also those intended for other widths."""
    from cuflash.planning.device import DeviceLimits

    module = importlib.import_module(f"cuflash.planning.tiles.{case.algorithm}")
    if not hasattr(module, "candidates"):
        raise SystemExit(f"tune: cuflash.planning.tiles.{case.algorithm} lists no candidates")
    limits = limits or DeviceLimits.query(0)
    found = module.candidates(problem, limits, every=True)
    return (tile for tile in found if tile.footprint.excess(limits) is None)


def choose(
    case: Case,
    inputs: Inputs,
    call_of: Callable[[Case, Any, Inputs], Prepared],
    say: Callable[[str], None],
    candidates: Callable[[Case, Any], Iterator[Any]] = candidates_of,
    clock: Any = None,
    beside: Sequence[str] = (),
) -> Choice | None:
    """Time the tiles of a case in turns; if it is unsupported, print a line and return None.

    Parameters
    ----------
    call_of
        Takes a case, a tile (None: the plan's) and inputs; returns the call and its plan.
    candidates
        Takes a case and its problem; returns the tiles to time.
    beside
        Other generations to time, each with the tile of its own plan.
    """
    from cuflash.errors import UnsupportedError

    try:
        call, plan = call_of(case, None, inputs)
    except UnsupportedError as error:
        say(f"left out: {case}: {error}")
        return None
    truth = Truth(case, inputs)
    found: dict[Any, Callable[[], Any]] = {}
    worst: dict[Any, float] = {}
    asked: dict[Any, Callable[[], Prepared]] = {plan.tile: lambda: (call, plan)}
    for tile in candidates(case, plan.problem):
        asked.setdefault(tile, partial(call_of, case, tile, inputs))
    for name in beside:
        asked[name] = partial(call_of, replace(case, algorithm=name), None, inputs)
    for which, make in asked.items():
        name = which if isinstance(which, str) else _name(which)
        checked = _checked(make, truth, name, say)
        if checked is not None:
            one, made, most = checked
            tile = made.tile if isinstance(which, str) else which
            found[tile], worst[tile] = one, most
    if plan.tile not in found:
        return None
    names = {str(place): tile for place, tile in enumerate(found)}
    timed = turns({n: found[tile] for n, tile in names.items()}, rounds=ROUNDS, clock=clock)
    return Choice(case, plan.tile, {tile: timed[n] for n, tile in names.items()}, worst)


def _checked(
    make: Callable[[], Prepared], truth: Truth, name: str, say: Callable[[str], None]
) -> tuple[Callable[[], Any], Any, float] | None:
    """A call, its plan and its error; if it is impossible or wrong, print a line, return None."""
    from cuflash.errors import CuflashError

    try:
        call, plan = make()
        worst = truth.worst_ratio(call())
    except CuflashError as error:  # a tile that does not fit, or does not compile
        say(f"left out: {name}: {str(error).splitlines()[0]}")
        return None
    if worst <= truth.limit:
        return call, plan, worst
    say(f"left out: {name}: wrong by {worst:.3g} times what rounding explains")
    return None


def rows_of(choice: Choice) -> list[dict[str, Any]]:
    """A row for every timed tile."""
    case, planned = choice.case, choice.times[choice.planned]
    rows = []
    for tile, times in choice.times.items():
        median = statistics.median(times)
        ratio, low, high = median_ratio(times, planned)
        rows.append(
            {
                **{n: getattr(case, n) for n in ("op", "dtype", "batch", "heads_q", "heads_kv")},
                **{n: getattr(case, n) for n in ("head_dim", "head_dim_v", "seqlen_q")},
                **{n: getattr(case, n) for n in ("seqlen_kv", "causal", "options")},
                "tile": _name(tile),
                "generation": _generation(tile),
                "planned": tile == choice.planned,
                "ms": round(median, 5),
                "tflops": round(case.flops / median / 1e9, 2),
                "of_the_plan": [round(x, 4) for x in (ratio, low, high)],
                "worst_ratio": round(choice.worst[tile], 4),
            }
        )
    return rows


def speed_lines(choices: Sequence[Choice]) -> list[str]:
    """A line for each case: the speed of the plan's tile, and of others relative to it."""
    lines = []
    for choice in choices:
        rows = sorted(rows_of(choice), key=lambda row: (not row["planned"], row["ms"]))
        parts = [f"{choice.case}: {rows[0]['tile']} {rows[0]['tflops']:.0f} TFLOP/s"]
        for row in rows[1:]:
            apart = row["generation"] != rows[0]["generation"]
            name = f"{row['generation']} {row['tile']}" if apart else row["tile"]
            parts.append(f"{name} {row['of_the_plan'][0]:.3f}")
        lines.append("; ".join(parts))
    return lines


def change_lines(choices: Sequence[Choice]) -> list[str]:
    """The changes of the plan's table that the measurements suggest."""
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
    """The blocks of a tile, and its other integers, by which tiles of equal blocks differ."""
    fields = getattr(tile, "__dataclass_fields__", {})
    apart = ("block_q", "block_kv", "head_dim", "head_dim_v")
    more = [
        f"{field} {getattr(tile, field)}"
        for field in fields
        if field not in apart and isinstance(getattr(tile, field), int)
    ]
    return " ".join([f"{tile.block_q}x{tile.block_kv}", *more])


def _generation(tile: Any) -> str:
    """The generation in the name of a tile's planning module, such as ``fa3_few``."""
    return type(tile).__module__.rpartition(".")[2].partition("_")[0]


def _table(choice: Choice) -> Any:
    from rich.table import Table

    table = Table(title=str(choice.case), title_justify="left")
    for header in ("tile", "ms", "TFLOP/s", "error", ""):
        table.add_column(header, justify="left" if header in ("tile", "") else "right")
    medians = {tile: statistics.median(times) for tile, times in choice.times.items()}
    for tile in sorted(medians, key=lambda tile: medians[tile]):
        said = ["plan"] if tile == choice.planned else []
        said += ["fastest"] if tile == choice.best else []
        said += [_generation(tile)] if type(tile) is not type(choice.planned) else []
        rate = f"{choice.case.flops / medians[tile] / 1e9:.1f}"
        error = f"{choice.worst[tile]:.2f}"
        table.add_row(_name(tile), f"{medians[tile]:.4f}", rate, error, ", ".join(said))
    return table
