"""Times one case: our call and the calls that take turns with it, each verified first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.errors import UnsupportedError

from .cases import Case
from .dropped import truth_of
from .inputs import Inputs
from .peers import OURS, PEERS, Peer
from .planned import plan_of
from .rotation import copies_of, in_turn
from .sources import digest_now
from .timing import Timer, median_ratio, rested, turns
from .verify import Truth

__all__ = ["PROTOCOLS", "LeftOutError", "measure"]

PROTOCOLS: dict[str, Callable[..., dict[str, list[float]]]] = {"rested": rested, "turns": turns}


class LeftOutError(Exception):
    """The library cannot do a case."""


@dataclass(frozen=True)
class _Entry:
    """An implementation that is ready to be timed."""

    peer: Peer
    case: Case
    calls: Sequence[Callable[[], Any]]  # several if copies take turns
    worst: float

    @property
    def name(self) -> str:
        """A name that no other entry of the case has."""
        if not self.ours:
            return self.peer.name
        return " ".join([self.peer.name, self.case.algorithm, *self.of])

    @property
    def of(self) -> list[str]:
        """The extras, by which its problem differs from the problems of other entries."""
        return self.case.extras

    @property
    def ours(self) -> bool:
        """Whether the implementation is this library."""
        return self.peer.name == OURS


def measure(
    case: Case,
    peers: Sequence[Peer],
    protocols: Sequence[str],
    inputs: Inputs,
    say: Callable[[str], None],
    clock: Timer | None = None,
) -> list[dict[str, Any]]:
    """Rows of a case: ours and those of peers that can do it, under every protocol.

    Raises
    ------
    LeftOutError
        If the library says that it cannot do the case.
    """
    entries = _entries(case, peers, inputs, say)
    functions = {entry.name: _all_of(entry.calls) for entry in entries}
    rows = []
    for protocol in protocols:
        timed = PROTOCOLS[protocol](functions, clock=clock)
        timed = {e.name: [one / len(e.calls) for one in timed[e.name]] for e in entries}
        rows += [_row(entry, entries, protocol, timed, inputs) for entry in entries]
    return rows


def _entries(
    case: Case, peers: Sequence[Peer], inputs: Inputs, say: Callable[[str], None]
) -> list[_Entry]:
    truths: dict[tuple[str, ...], Truth] = {}
    entries, copies = [], copies_of(case, inputs)
    for one in (case, *case.companions):
        own = [copy.of(one) for copy in copies]
        calls = _ours(one, own)
        if one.features not in truths:
            truths[one.features] = truth_of(one, own[0])
        entries.append(_verified(PEERS[OURS], one, calls, truths[one.features]))
    for peer in () if case.beside or case.pages or case.float8 else peers:
        if not peer.supports(case):
            continue
        try:
            calls = [peer.prepare(case, copy) for copy in copies]
            entries.append(_verified(peer, case, calls, truths[case.features]))
        except Exception as error:  # a peer may fail in any way; it is then left out
            say(f"left out: {peer.label}, {case}: {_first_line(error)}")
    return entries


def _all_of(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    return calls[0] if len(calls) == 1 else in_turn(calls)


def _ours(case: Case, copies: Sequence[Inputs]) -> list[Callable[[], Any]]:
    try:
        calls = [PEERS[OURS].prepare(case, copy) for copy in copies]
        calls[0]()
    except UnsupportedError as error:
        raise LeftOutError(f"cuflash: {error}") from error
    return calls


def _verified(peer: Peer, case: Case, calls: Sequence[Callable[[], Any]], truth: Truth) -> _Entry:
    worst = max(truth.worst_ratio(peer.arrays(call())) for call in calls)
    if not worst <= truth.limit:
        raise RuntimeError(
            f"{peer.label}, {case}: wrong by {worst:.3g} times what rounding explains"
        )
    return _Entry(peer, case, calls, worst)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _row(
    entry: _Entry,
    entries: Sequence[_Entry],
    protocol: str,
    timed: dict[str, list[float]],
    inputs: Inputs,
) -> dict[str, Any]:
    case, times = entry.case, timed[entry.name]
    milliseconds = statistics.median(times)
    others = {other.name: timed[other.name] for other in _compared(entry, entries)}
    ratio, ratio_low = _ratio(times, others)
    return {
        "sources": digest_now(case.algorithm, case.op, case.sources) if entry.ours else None,
        "impl": entry.peer.label,
        "version": entry.peer.version(),
        "op": case.op,
        "dtype": case.dtype,
        "batch": case.batch,
        "heads_q": case.heads_q,
        "heads_kv": case.heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "seqlen_q": case.seqlen_q,
        "seqlen_kv": case.seqlen_kv,
        "causal": case.causal,
        "options": case.options if entry.ours else case.peer_options,
        "plan": plan_of(case, inputs) if entry.ours else None,
        "protocol": protocol,
        "ms": round(milliseconds, 5),
        "spread": round((max(times) - min(times)) / milliseconds, 4),
        "tflops": round(case.flops / milliseconds / 1e9, 2),
        **({"gb_per_s": round(case.bytes / milliseconds / 1e6, 1)} if case.rotated else {}),
        "ratio": ratio,
        "ratio_low": ratio_low,
        "worst_ratio": round(entry.worst, 4),
    }


def _compared(entry: _Entry, entries: Sequence[_Entry]) -> list[_Entry]:
    """The entries to which the ratio of an entry refers: usually the others of its problem.

    Our call without extras is compared with our call with them. In a rotated case, both of our
    calls are compared with the peers. Paged caches of every page size are compared with caches in
    one piece, and float8 caches with 16-bit caches; the last entry is the call that these are
    compared with.
    """
    main = entries[0]
    if main.case.pages or main.case.float8:
        return [entries[-1]] if entry.case.pages or entry.case.float8 else []
    if main.case.rotated and entry.ours:
        return [other for other in entries if not other.ours]
    if entry.of != main.of:
        return [main]
    return [other for other in entries if other is not entry and other.of == entry.of]


def _ratio(times: list[float], others: dict[str, list[float]]) -> tuple[float | None, float | None]:
    """Our speed relative to the best of the others, and the low end of the interval."""
    if not others:
        return None, None
    best = min(others.values(), key=statistics.median)
    ratio, low, _ = median_ratio(times, best)
    return round(ratio, 4), round(low, 4)
