"""Plans calls with caches ahead: from shapes to kernels and a workspace."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..addresses import Addresses, multiples_of
from ..arrays.spec import TensorSpec
from ..cuda.launch import PreparedPlan
from ..features.float8 import NAMES as SCALES
from ..options import Options
from ..pipeline import CallPlan
from ..planning.kernel import lay_out
from ..planning.plan import Plan
from .as_attention import OWN_NAMES, advances, plan_attention
from .checks import check_specs
from .described import FEATURES, PER_ENTRY, TABLES
from .device import AppendPlan, plan_append
from .float8 import Numbers
from .given import Sizes
from .packed import ARGUMENT, without_batch_axis

__all__ = ["CACHE_ARGUMENTS", "NO_ARRAYS", "TAKEN", "CachePlan", "plan_caches"]

#: Arguments that only calls with caches have.
CACHE_ARGUMENTS = (
    *("k_cache", "v_cache", "rotary_interleaved", "cache_dtype", "max_seqlen_q"),
    *(*TABLES, *PER_ENTRY, *SCALES),
)
#: The cache arguments that neither are arrays nor describe one.
NO_ARRAYS = ("rotary_interleaved", "max_seqlen_q")
_OF_ATTENTION = ("cache_leftpad", "max_seqlen_q")
_OF_APPEND = ("k", "v", *(name for name in CACHE_ARGUMENTS if name not in _OF_ATTENTION))
#: Arguments of the operations with caches, besides a dtype and a device.
TAKEN: Mapping[str, tuple[str, ...]] = {
    "append": _OF_APPEND,
    "kvcache": (
        *("q", ARGUMENT, *_OF_ATTENTION, "causal", "window_size", "softcap", "scale"),
        *("kv_chunk", "algorithm", "blocks", *FEATURES, *_OF_APPEND),
    ),
}


class _Step(NamedTuple):
    """The compiled kernels of a plan, and the indices of their addresses in a run's addresses."""

    launcher: PreparedPlan
    places: tuple[int, ...]


class _Steps(NamedTuple):
    """The steps in the order they run; used in place of the launcher of one plan."""

    device_id: int
    steps: tuple[_Step, ...]

    @property
    def counter_offset(self) -> int | None:
        """As for :class:`~cuflash.cuda.launch.PreparedPlan`; an append has no counter."""
        found = [step.launcher.counter_offset for step in self.steps]
        return next((offset for offset in found if offset is not None), None)

    def run(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
        """Launch every step; as for :class:`~cuflash.cuda.launch.PreparedPlan`."""
        for launcher, places in self.steps:
            launcher.run(tuple(addresses[place] for place in places), workspace, stream)


@dataclass(frozen=True)
class CachePlan:
    """An append, attention over caches, or both, for arrays of known shapes.

    Attributes
    ----------
    plan
        The plan of attention, or of the append where there is no attention.
    append, attention
        Both parts; None where there is no such part.
    tensors
        Every array of a run, by argument name, and ``out`` and ``lse``.
    scratch
        Byte offsets in the workspace of the append's results for attention.
    workspace_bytes
        Bytes of attention's workspace and of the scratch after it.
    copied
        Names of the arrays that the kernels cannot read in place.
    device
        The device that computes.
    """

    plan: Plan
    append: AppendPlan | None
    attention: CallPlan | None
    tensors: Mapping[str, TensorSpec]
    scratch: Mapping[str, int]
    workspace_bytes: int
    copied: tuple[str, ...]
    device: int

    @property
    def parts(self) -> tuple[AppendPlan | CallPlan, ...]:
        """The parts that launch kernels, in the order in which they run."""
        attention = self.attention
        if attention is not None and attention.plan.problem.empty:
            attention = None
        return tuple(part for part in (self.append, attention) if part is not None)

    @functools.cached_property
    def launcher(self) -> _Steps:
        """The compiled kernels, kept as long as this plan."""
        there = (*self.tensors, *self.scratch)
        places = {name: place for place, name in enumerate(there)}
        steps = []
        for part in self.parts:
            names = part.launcher.names
            if part is self.attention:
                names = tuple(_argument_of(name, places) for name in part.tensors)
            steps.append(_Step(part.launcher, tuple(places[name] for name in names)))
        return _Steps(self.device, tuple(steps))

    @functools.cached_property
    def addresses(self) -> Addresses:
        """Checks the addresses of a run; only ``lse`` may be left out."""
        required = frozenset(name for name in self.tensors if name != "lse")
        return Addresses(self, required, self.multiples)

    @property
    def multiples(self) -> dict[str, int]:
        """Required alignment of the address of every array of a run, in bytes."""
        multiples = {name: spec.itemsize for name, spec in self.tensors.items()}
        if self.attention is not None:
            for name, multiple in multiples_of(self.attention).items():
                own = _argument_of(name, {*self.scratch, *self.tensors})
                if own in multiples:
                    multiples[own] = max(multiple, multiples[own])
        return multiples


def plan_caches(
    specs: Mapping[str, TensorSpec],
    interleaved: Any,
    options: Options,
    scales: Numbers | None = None,
    max_seqlen_q: Any = None,
    length: int | None = None,
) -> CachePlan:
    """Check a call with caches, and plan it; its kernels are compiled where they are first used.

    Parameters
    ----------
    specs
        As for :func:`~.described.describe_caches`, all of one CUDA device.
    interleaved
        ``rotary_interleaved`` as it was given.
    options
        The checked keywords.
    scales
        For float8 caches the scales that are numbers, not arrays; None for other caches.
    max_seqlen_q
        As it was given.
    length
        ``cache_seqlens`` if it is a number.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError
        As for the call itself.
    """
    plain = {name: spec for name, spec in specs.items() if name not in FEATURES}
    rotates, sizes = check_specs(plain, length, interleaved, scales is not None, max_seqlen_q)
    attends = "q" in specs
    made = _left_by_append(specs, sizes, rotates) if attends and "k" in specs else {}
    attention = None
    if attends:
        seen = {**specs, "q": made.get("q_rotated", specs["q"])}
        attention = plan_attention(seen, sizes, options, scales)
    append = _append(specs, made, sizes, rotates, options, scales)
    return _planned(specs, made, attention, append)


def _planned(
    specs: Mapping[str, TensorSpec],
    made: Mapping[str, TensorSpec],
    attention: CallPlan | None,
    append: AppendPlan | None,
) -> CachePlan:
    """Return both parts over one list of addresses: the arrays, then the scratch."""
    tensors, first = dict(specs), 0
    copied = [name for name in ("q", "k", "v") if name in specs and not _readable(specs[name])]
    plans: list[Plan] = [] if append is None else [append.plan]
    if attention is not None:
        plans = [attention.plan]
        made_by_it = {name: attention.tensors[name] for name in ("out", "lse")}
        packed = ARGUMENT in specs
        tensors |= {n: without_batch_axis(s) if packed else s for n, s in made_by_it.items()}
        first = attention.workspace_bytes
        copied += [OWN_NAMES.get(name, name) for name in attention.copied]
    behind = [(name, spec.nbytes) for name, spec in made.items()]
    scratch = {b.name: b.offset for b in lay_out([("", first), *behind]) if b.name}
    ends = [scratch[name] + made[name].nbytes for name in scratch]
    return CachePlan(
        plan=plans[0],
        append=append,
        attention=attention,
        tensors=tensors,
        scratch=scratch,
        workspace_bytes=max([first, *ends]),
        copied=tuple(dict.fromkeys(copied)),
        device=specs["k_cache"].device or 0,
    )


def _append(
    specs: Mapping[str, TensorSpec],
    made: Mapping[str, TensorSpec],
    sizes: Sizes,
    rotates: bool | None,
    options: Options,
    scales: Numbers | None,
) -> AppendPlan | None:
    if "k" not in specs:
        return None
    taken = {name: spec for name, spec in specs.items() if name != "q" or "q_rotated" in made}
    device = specs["k_cache"].device or 0
    return plan_append({**taken, **made}, sizes, rotates, advances(options), device, scales)


def _argument_of(name: str, there: Container[str]) -> str:
    """Return the array for one of attention's tensors: an argument, or a result of the append."""
    first = {"q": "q_rotated", "seqused_kv": "lengths_after", "page_table": "cache_batch_idx"}
    if first.get(name) in there:
        return first[name]
    return OWN_NAMES.get(name, name)


def _left_by_append(
    specs: Mapping[str, TensorSpec], sizes: Sizes, rotates: bool | None
) -> dict[str, TensorSpec]:
    """Return descriptions of an append's results for the attention after it."""
    q = specs["q"]
    made = {"lengths_after": TensorSpec((sizes.batch,), "int32", (1,), 4, q.device)}
    return made | ({"q_rotated": q.contiguous()} if rotates is not None else {})


def _readable(spec: TensorSpec) -> bool:
    return spec.rows_are_unit and spec.whole_elements
