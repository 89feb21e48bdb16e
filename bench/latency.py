"""Host time of a call: the time in which many calls are queued, divided by their number.

The problem is so small that the device finishes before the host: a caller waits only for the
library's own work. The implementations take turns, one block of calls each, and nothing waits for
the device inside a block.
"""

from __future__ import annotations

import contextlib
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import torch_peers
from .cases import Case
from .host import cpu_name
from .inputs import make_inputs
from .peers import OURS, PEERS, Peer, importable, select_peers
from .run import common_columns, results_file, store
from .stored import label

__all__ = ["PEERS_TIMED", "Contestant", "run_latency", "time_blocks"]

CASE = Case("forward", "bfloat16", 1, 4, 4, 64, 64, 64, 64, False, "auto")
#: The number of sets of arrays through which calls cycle.
SETS = 16
CALLS = 500
BLOCKS = 15
#: The most launches in the queue: beyond about 1024 the driver makes the host wait.
QUEUE = 900
#: The timed peers, by their names in :data:`bench.peers.PEERS`.
PEERS_TIMED = ("flash", "cudnn", "fa4")

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to call: ``call(number)`` makes call ``number`` of a block."""

    impl: str
    version: str
    op: str
    what: str  # cycling, repeating or prepared
    call: Call
    launches: int = 1  # per call
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """The number of calls in a block, whose launches all fit the queue."""
        return min(CALLS, QUEUE // self.launches)


def time_blocks(
    contestants: Sequence[Contestant],
    wait: Callable[[], Any],
    blocks: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Microseconds of a call of every contestant in each of its blocks; they take turns.

    Parameters
    ----------
    contestants
        The contestants, in another order each round.
    wait
        Returns when the device has nothing left to do; it is not timed.
    """
    times: list[list[float]] = [[] for _ in contestants]
    order, numbers = random.Random(0), [*range(len(contestants))]
    for each in contestants:
        _block(each, wait, clock)  # compiles, and sees every set of arrays
    for _ in range(blocks):
        order.shuffle(numbers)
        for number in numbers:
            times[number].append(_block(contestants[number], wait, clock))
    return times


def _block(contestant: Contestant, wait: Callable[[], Any], clock: Callable[[], float]) -> float:
    call, count = contestant.call, contestant.calls
    with contestant.around():
        wait()
        start = clock()
        for number in range(count):
            call(number)
        end = clock()
        wait()
    return 1e6 * (end - start) / count


def run_latency(output: Path | None = None, peers: str | None = None) -> list[dict[str, Any]]:
    """Time calls of this library and of peers, print a line for each and store the rows."""
    from cuflash.cuda.available import require_device

    asked = select_peers(",".join(PEERS_TIMED) if peers is None else peers)
    require_device()
    import cupy

    common = {**common_columns(), "cpu": cpu_name(), "python": platform.python_version()}
    contestants = ours()
    for peer in importable(asked, print):
        contestants += _able(of_peer(peer))
    timed = time_blocks(contestants, cupy.cuda.runtime.deviceSynchronize, BLOCKS)
    rows = [{**common, **_row(c, t)} for c, t in zip(contestants, timed, strict=True)]
    for row in rows:
        print(f"{label(row):<16}{row['op']:<10}{row['what']:<11}{row['us']:>8.2f} us", flush=True)
    store(output or results_file(common["gpu"], "-latency"), rows)
    return rows


def _row(contestant: Contestant, times: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(times)
    sizes = ("dtype", "batch", "heads_q", "head_dim", "seqlen_q", "causal")
    return {
        "impl": contestant.impl,
        "version": contestant.version,
        "op": contestant.op,
        **{name: getattr(CASE, name) for name in sizes},
        "options": dict(contestant.options),
        "what": contestant.what,
        "calls": contestant.calls,
        "blocks": len(times),
        "us": round(median, 3),
        "spread": round((max(times) - min(times)) / median, 4),
    }


def ours() -> list[Contestant]:
    """This library: both passes, the older generation, and a prepared pass."""
    return [
        *_passes("forward", "auto"),
        *_passes("forward", "fa2"),
        *_passes("backward", "auto"),
        _prepared(),
    ]


def _sets() -> list[tuple[Any, ...]]:
    import cupy

    made = [make_inputs(CASE, cupy) for _ in range(SETS)]
    return [(inputs.q, inputs.k, inputs.v) for inputs in made]


def _calls(function: Callable[..., Any], sets: Sequence[Any], **options: Any) -> dict[str, Call]:
    """Calls over all sets in turn, and over the first set only."""
    return {
        "cycling": lambda number: function(*sets[number % SETS], **options),
        "repeating": lambda number: function(*sets[0], **options),
    }


def _passes(op: Any, algorithm: Any) -> list[Contestant]:
    import cuflash

    function: Callable[..., Any] = cuflash.attention
    options = {} if algorithm == "auto" else {"algorithm": algorithm}
    sets = _sets()
    shapes = [array.shape for array in sets[0]]
    said = cuflash.explain(
        *shapes, dtype=CASE.dtype, operation=op, algorithm=algorithm, backend="cuda"
    )
    if op == "backward":
        function = cuflash.attention_backward
        saved = [cuflash.attention(*qkv, return_lse=True) for qkv in sets]
        sets = [(out, *qkv, out, lse) for qkv, (out, lse) in zip(sets, saved, strict=True)]
    calls = _calls(function, sets, **options)
    return [_our(op, what, call, len(said.kernels), algorithm) for what, call in calls.items()]


def _our(op: str, what: str, call: Call, launches: int, algorithm: str) -> Contestant:
    options = {"algorithm": algorithm}
    return Contestant(OURS, PEERS[OURS].version(), op, what, call, launches, options=options)


def _prepared() -> Contestant:
    """A prepared pass, called with addresses; results and workspace are allocated before."""
    import cupy

    import cuflash

    sets = [(*qkv, cupy.empty_like(qkv[0])) for qkv in _sets()]
    prepared = cuflash.prepare(*sets[0][:3])
    workspace = cupy.empty(prepared.workspace_bytes + 256, "uint8")
    place = -(-workspace.data.ptr // 256) * 256
    names = ("q", "k", "v", "out")
    pointers = [
        {name: array.data.ptr for name, array in zip(names, arrays, strict=True)} for arrays in sets
    ]

    def call(number: int, keep: Any = (sets, workspace)) -> None:
        prepared.run(pointers[number % SETS], workspace=place)

    return _our("forward", "prepared", call, len(prepared.plan.launches), "auto")


def of_peer(peer: Peer) -> list[Contestant]:
    """A peer's forward pass; its context is entered once for a block, as in a program."""
    if peer.name not in PEERS_TIMED:
        timed = ", ".join(PEERS_TIMED)
        raise SystemExit(f"--peers: {peer.name!r} is not timed here; these peers are: {timed}")
    sets = [tuple(map(torch_peers.to_torch, arrays)) for arrays in _sets()]
    function, around = torch_peers.direct(peer.name)
    if peer.name != "fa4":  # PyTorch takes the heads before the rows
        sets = [tuple(tensor.transpose(1, 2) for tensor in tensors) for tensors in sets]
    return [
        Contestant(peer.label, peer.version(), "forward", what, call, around=around)
        for what, call in _calls(function, sets).items()
    ]


def _able(contestants: Sequence[Contestant]) -> list[Contestant]:
    """The contestants that work; prints a line for each one that does not."""
    found = []
    for each in contestants:
        try:
            with each.around():
                each.call(0)
        except Exception as error:  # a peer may fail in any way; it is then left out
            print(f"left out: {each.impl}, {each.what}: {type(error).__name__}: {error}")
        else:
            found.append(each)
    return found
