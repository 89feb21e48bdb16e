"""Standard attention, the three generations and the best peers over lengths, widths and masks.

As in the papers, the number of tokens and the width of a layer are the same at every length.
FlashAttention-1 runs a head on one multiprocessor. Where that leaves multiprocessors idle, it is
also timed with one head for each of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..case import HIDDEN, TOKENS, Case
from ..inputs import Inputs
from ..peers import OURS, PEERS, Peer
from ..sources import digest_now
from ..timing import Timer, turns
from ..verify import WRONG, Truth
from . import standard

__all__ = ["GENERATIONS", "STANDARD", "Panel", "cases", "filled", "measure_panel", "panels"]
__all__ += ["reason_of"]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
WIDTHS = (64, 128)
GENERATIONS = ("fa1", "fa2", "fa3")
STANDARD = "standard (CuPy)"
DTYPE = "float16"

#: A call of fewer milliseconds takes turns with the others; a slower one is timed alone.
QUICK = 25.0
ROUNDS = 7
SLOW_ROUNDS = 2

Panel = tuple[int, bool, str]  # head_dim, causal, op


def panels() -> list[Panel]:
    """The panels of the papers' figures."""
    return list(product(WIDTHS, (False, True), ("forward", "backward")))


def cases(panel: Panel) -> list[Case]:
    """The lengths of a panel, with the newest generation."""
    dim, causal, op = panel
    heads = HIDDEN // dim
    return [
        Case(op, DTYPE, TOKENS // n, heads, heads, dim, dim, n, n, causal, GENERATIONS[-1])
        for n in LENGTHS
    ]


def filled(case: Case, num_sms: int) -> Case | None:
    """A case with a head per multiprocessor for FlashAttention-1; None if ``case`` has enough."""
    if case.batch * case.heads_q >= 0.9 * num_sms:
        return None
    return replace(case, batch=1, heads_q=num_sms, heads_kv=num_sms, algorithm="fa1")


@dataclass(frozen=True)
class _Entry:
    """An implementation of a case."""

    label: str
    setting: str  # papers: a constant number of tokens; filled: one head per multiprocessor
    case: Case
    peer: Peer | None  # None for standard attention
    inputs: Inputs


def measure_panel(
    panel: Panel,
    peers: Sequence[Peer],
    device: Any,
    make: Callable[[Case], Inputs],
    say: Callable[[str], None],
    clock: Timer,
) -> Iterator[dict[str, Any]]:
    """Rows of a panel, length after length.

    Parameters
    ----------
    panel
        Width, mask and pass.
    peers
        The peers to time beside the generations.
    device
        An object with ``num_sms`` and ``free_bytes()``.
    make
        Makes the arrays of a case.
    say
        Is called with every row.
    clock
        Returns the milliseconds of a call.
    """
    for case in cases(panel):
        inputs = make(case)
        rows = list(_measure(_entries(case, inputs, peers), device, clock))
        full = filled(case, device.num_sms)
        if full is not None:
            del inputs
            one = _Entry("cuflash fa1", "filled", full, PEERS[OURS], make(full))
            rows += _measure([one], device, clock)
        for row in rows:
            say(_line(row))
        yield from rows


def _entries(case: Case, inputs: Inputs, peers: Sequence[Peer]) -> list[_Entry]:
    entries = [_Entry(STANDARD, "papers", case, None, inputs)]
    for name in GENERATIONS:
        one = replace(case, algorithm=name)
        entries.append(_Entry(f"{OURS} {name}", "papers", one, PEERS[OURS], inputs))
    entries += [_Entry(p.label, "papers", case, p, inputs) for p in peers if p.supports(case)]
    return entries


def _measure(entries: Sequence[_Entry], device: Any, clock: Timer) -> list[dict[str, Any]]:
    """Rows of entries of one case; if one fails or does not fit, its row has the reason."""
    truth = Truth(entries[0].case, entries[0].inputs)
    rows, quick = [], {}
    for entry in entries:
        row = _row(entry)
        rows.append(row)
        try:
            call = _prepared(entry, device)
            row["worst_ratio"] = round(_checked(entry, truth, call()), 4)
            once = clock(entry.label, call)
            if once < QUICK:
                quick[entry.label] = call
            else:
                times = [clock(entry.label, call) for _ in range(SLOW_ROUNDS - 1)]
                _fill(row, entry.case, [once, *times])
            del call
        except Exception as error:  # a peer may fail in any way, or run out of memory
            row["skipped"] = reason_of(error)
    timed = turns(quick, rounds=ROUNDS, clock=clock)
    for entry, row in zip(entries, rows, strict=True):
        if entry.label in timed:
            _fill(row, entry.case, timed[entry.label])
    return rows


def _prepared(entry: _Entry, device: Any) -> Callable[[], Any]:
    if entry.peer is not None:
        return entry.peer.prepare(entry.case, entry.inputs)
    needed, free = standard.needed_bytes(entry.case), device.free_bytes()
    if needed > free:
        raise MemoryError(standard.too_large(needed, free))
    return standard.prepare(entry.case, entry.inputs)


def _checked(entry: _Entry, truth: Truth, result: Any) -> float:
    as_arrays = entry.peer.arrays if entry.peer is not None else _as_tuple
    worst = truth.worst_ratio(as_arrays(result))
    if not worst <= WRONG:
        raise ArithmeticError(f"wrong by {worst:.3g} times what rounding explains")
    return worst


def _as_tuple(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def reason_of(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _row(entry: _Entry) -> dict[str, Any]:
    case = entry.case
    ours = entry.label.startswith(OURS)
    return {
        "part": "speed",
        "label": entry.label,
        "version": entry.peer.version() if entry.peer else PEERS["by-hand"].version(),
        "sources": digest_now(case.algorithm, case.op) if ours else None,
        "setting": entry.setting,
        "op": case.op,
        "dtype": case.dtype,
        "heads": case.batch * case.heads_q,
        "head_dim": case.head_dim,
        "seqlen": case.seqlen_q,
        "causal": case.causal,
        "skipped": None,
        "ms": None,
        "tflops": None,
        "rounds": None,
        "worst_ratio": None,
    }


def _fill(row: dict[str, Any], case: Case, times: Sequence[float]) -> None:
    milliseconds = statistics.median(times)
    row["ms"] = round(milliseconds, 5)
    row["tflops"] = round(case.flops / milliseconds / 1e9, 2)
    row["rounds"] = len(times)


def _line(row: dict[str, Any]) -> str:
    mask = "causal" if row["causal"] else "full"
    where = f"{row['op']} {row['head_dim']} {mask} {row['heads']}x{row['seqlen']} {row['label']}"
    if row["skipped"]:
        return f"{where}: skipped: {row['skipped']}"
    return f"{where}: {row['ms']:.3f} ms, {row['tflops']:.1f} TFLOP/s"
