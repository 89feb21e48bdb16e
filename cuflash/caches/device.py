"""Caches in CUDA memory: one kernel appends, rotates and counts; the host reads no length."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.adopt import Adopted, address, adopt, contiguous, dtype_named
from ..arrays.spec import TensorSpec
from ..cuda.current import current_stream, is_capturing
from ..cuda.launch import PreparedPlan
from ..errors import ArgumentTypeError
from ..features.cached_keys import NAMES
from ..features.float8 import NAMES as SCALES
from ..features.float8 import float8_use
from ..features.packed_queries import packed_tokens
from ..features.use import Operand
from ..planning.append_step import AppendProblem, RowPlan, append_plan
from ..planning.device import DeviceLimits
from ..planning.problem import DTYPES
from .float8 import Numbers
from .given import CacheCall, Sizes
from .packed import ARGUMENT, with_batch_axis

__all__ = [
    "AppendPlan",
    "Appended",
    "append",
    "forget_appends",
    "lengths_before",
    "places",
    "plan_append",
    "planned_append",
]

#: Arrays that captured calls allocated: their graphs may run as long as the process does.
_kept_for_graphs: list[Any] = []

_MATRICES = ("k", "v", "k_cache", "v_cache", "q", "q_rotated")
#: The other arrays of the kernel, by the names of its parameters.
_OTHERS = (
    *("cache_seqlens", "page_table", "cache_batch_idx", "rotary_seqlens"),
    *("rotary_cos", "rotary_sin", "overflow", "lengths_after", ARGUMENT),
)

_Specs = tuple[tuple[str, TensorSpec], ...]


class Appended(NamedTuple):
    """Results of an append for the attention after it; ``queries`` is None if there are none."""

    lengths: Any  # int32, (batch,): length of every entry after the append
    queries: Any  # rotated, or as they were given


@dataclass(frozen=True)
class AppendPlan:
    """The plan of an append.

    Attributes
    ----------
    plan
        One kernel.
    strides
        Strides of every array of the kernel, by the name of its parameter, in the order of the
        addresses of a run.
    device
        The device that runs it.
    """

    plan: RowPlan
    strides: Mapping[str, tuple[int, ...]]
    device: int

    @functools.cached_property
    def launcher(self) -> PreparedPlan:
        """The compiled kernel, kept as long as this plan."""
        return PreparedPlan(self.plan, self.strides, self.device)


def lengths_before(call: CacheCall) -> Any:
    """Return ``cache_seqlens`` as a device array; a new one if it is a number.

    Raises
    ------
    ArgumentTypeError
        If it is a number while a CUDA graph is captured.
    """
    import cupy

    if call.length is None:
        return call.native("cache_seqlens")
    device = call.device or 0
    if is_capturing(current_stream(device)):
        expected = "an int32 array, which the graph reads when it runs"
        raise ArgumentTypeError("cache_seqlens", f"{call.length} in a capture", expected)
    with cupy.cuda.Device(device):
        lengths = cupy.empty((call.sizes.batch,), np.int32)
        lengths[...] = call.length
    return lengths


def append(call: CacheCall, before: Any, advance: bool, tell: Any = lambda plan: None) -> Appended:
    """Queue the kernel on CuPy's current stream of the caches' device.

    Parameters
    ----------
    call
        A checked call with new tokens. Queries, if given, are rotated if keys are.
    before
        The result of :func:`lengths_before`.
    advance
        Whether each query is one position after the query before it.
    tell
        Called with the plan before the launch.
    """
    import cupy

    device, sizes = call.device or 0, call.sizes
    with cupy.cuda.Device(device):
        stream = current_stream(device)
        natives = {name: array.native for name, array in call.arrays.items()}
        natives["cache_seqlens"] = before
        natives |= {name: _readable(call, name) for name in ("k", "v")}
        made, queries = [before, natives["k"], natives["v"]], natives.pop("q", None)
        if queries is not None:
            natives["lengths_after"] = cupy.empty((sizes.batch,), np.int32)
            made.append(natives["lengths_after"])
        if queries is not None and call.interleaved is not None:
            natives["q"] = _readable(call, "q")
            natives["q_rotated"] = cupy.empty(queries.shape, dtype_named(call.spec("q").dtype))
            made += [natives["q"], natives["q_rotated"]]
        if is_capturing(stream):
            _kept_for_graphs.extend(made)
        if sizes.batch:
            _launch(call, natives, advance, stream, tell)
    return Appended(natives.get("lengths_after"), natives.get("q_rotated", queries))


def places(call: CacheCall) -> dict[str, Adopted]:
    """Return the arrays that locate an entry's keys.

    None are needed if entry i of the batch is entry i of the caches.
    ``cache_batch_idx`` becomes a page table: every entry of the caches is one page.
    """
    found = {name: call.arrays[name] for name in NAMES if name in call.arrays}
    if "cache_batch_idx" in call.arrays:
        entries = call.native("cache_batch_idx")
        found["page_table"] = adopt("cache_batch_idx", entries.reshape(-1, 1))
    return found


def _readable(call: CacheCall, name: str) -> Any:
    """Return an array that the kernel can read; a copy if necessary."""
    spec, native = call.spec(name), call.native(name)
    return native if spec.rows_are_unit and spec.whole_elements else contiguous(native)


def _launch(
    call: CacheCall, natives: dict[str, Any], advance: bool, stream: int, tell: Any
) -> None:
    specs = {name: adopt(name, array).spec for name, array in natives.items()}
    made = specs, call.sizes, call.interleaved, advance
    ready = plan_append(*made, call.device or 0, call.scales).launcher
    tell(ready.plan)
    ready.run(tuple(address(natives[name]) for name in ready.names), 0, stream)


def plan_append(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    interleaved: bool | None,
    advance: bool,
    device: int,
    scales: Numbers | None = None,
) -> AppendPlan:
    """Return the plan of an append, which nothing compiles yet.

    Parameters
    ----------
    specs
        Arrays by argument name, and the results of an append: ``lengths_after``,
        ``q_rotated``. ``q`` is absent if queries are not rotated.
    sizes, interleaved, advance, device
        As for :func:`append`.
    scales
        For float8 caches the scales that are numbers, not arrays; None for other caches.
    """
    names = (*_MATRICES, *_OTHERS, *SCALES)
    given = tuple((name, specs[name]) for name in names if name in specs)
    table = specs.get("page_table")
    numbers = {
        "table_stride": table.strides[0] if table is not None and table.strides else 0,
        "capacity": sizes.capacity,
        "page_size": sizes.slots if table is not None else 0,
        "rotary_interleaved": int(interleaved or 0),
        "queries_advance": int(advance),
    }
    return planned_append(given, tuple(numbers.items()), device, scales)


@functools.lru_cache(maxsize=256)
def planned_append(
    given: _Specs,
    numbers: tuple[tuple[str, int], ...],
    device: int,
    scales: Numbers | None = None,
) -> AppendPlan:
    """Return the plan for arrays of these descriptions.

    Parameters
    ----------
    given
        Description of every array of the kernel, by the name of its parameter.
    numbers
        The parameters that do not follow from the arrays.
    device
        The device that runs the kernel.
    scales
        As for :func:`plan_append`.
    """
    specs = dict(given)
    limits = DeviceLimits.query(device)
    problem = _problem(specs, scales)
    rows, pairs = specs["rotary_cos"].shape if "rotary_cos" in specs else (0, 0)
    more = {"entries": problem.entries, "rotates": int("rotary_cos" in specs)}
    more |= {"rotary_rows": rows, "rotary_pairs": pairs}
    fields = {**dict(numbers), **more}
    unsigned = tuple((name, value % 2**64) for name, value in fields.items())
    plan = append_plan(problem, limits, unsigned)
    return AppendPlan(plan, {name: _strides(name, spec) for name, spec in given}, device)


def forget_appends() -> None:
    """Forget the planned appends: later ones are compiled in the environment of that time."""
    planned_append.cache_clear()


def _problem(specs: dict[str, TensorSpec], scales: Numbers | None) -> AppendProblem:
    k, v = specs["k"], specs["v"]
    entries, slots, heads_kv, head_dim = specs["k_cache"].shape
    packed = ARGUMENT in specs
    batch, new = specs["cache_seqlens"].shape[0], k.shape[-3]
    queries, heads_q = specs["q"].shape[-3:-1] if "q" in specs else (0, heads_kv)
    storage = DTYPES[k.dtype].name
    operands = {
        name: Operand(name, s.dtype, s.shape)
        for name, s in specs.items()
        if name in (*SCALES, ARGUMENT)
    }
    uses = [packed_tokens(operands[ARGUMENT])] if packed else []
    if scales is not None:
        uses.insert(0, float8_use(operands, dict(scales)))
    return AppendProblem(
        operation="forward",
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=queries,
        seqlen_kv=new,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        storage=storage,
        output=storage,
        mask="full",
        scale=1.0,
        q_offset=0,
        alignment="element",
        entries=entries,
        slots=slots,
        uses=tuple(uses),
        float8=scales is not None,
        most_queries=int(packed),
    )


def _strides(name: str, spec: TensorSpec) -> tuple[int, ...]:
    """Return a matrix's strides (batch, row, head); 0 for an axis of at most one element."""
    if name not in _MATRICES:
        return 0, 0, 0
    if len(spec.shape) == 3:
        spec = with_batch_axis(spec)
    pairs = zip(spec.shape[:3], spec.strides or (0, 0, 0), strict=False)
    batch, row, head = (0 if size <= 1 else stride for size, stride in pairs)
    return batch, row, head
