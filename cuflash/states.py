"""States of rows in CUDA memory: one kernel merges two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .arrays.adopt import address, adopt, contiguous, fill
from .arrays.spec import Layout, TensorSpec
from .cuda.current import current_stream, is_capturing
from .cuda.launch import PreparedPlan
from .pipeline import strides_of
from .planning.append_step import MergeProblem, merge_plan
from .planning.device import DeviceLimits
from .planning.plan import Plan
from .planning.problem import DTYPES

__all__ = ["STATE", "forget_merges", "merge_states"]

#: The arrays of a state, in the order of the argument ``resume``.
STATE = ("out", "lse")

#: Arrays that captured calls allocated: their graphs may run as long as the process does.
_kept_for_graphs: list[Any] = []


def merge_states(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    to: Mapping[str, Any],
    layout: Layout,
    tell: Callable[[Plan], None],
) -> None:
    """Queue the kernel on CuPy's current stream of the arrays' device.

    Parameters
    ----------
    before, now
        ``out`` and ``lse`` over two sets of keys; CuPy's arrays of one dtype.
    to
        Destinations of ``out`` and ``lse`` over both sets: other arrays, or either state.
    layout
        Order of the axes of ``out``.
    tell
        Called with the plan before the launch.
    """
    import cupy

    if not now["out"].size and not now["lse"].size:
        return
    device = int(now["out"].device.id)
    with cupy.cuda.Device(device):
        stream = current_stream(device)
        given = {f"{name}_before": _readable(before[name]) for name in STATE}
        given |= {f"{name}_now": now[name] for name in STATE}
        # A result that the kernel cannot write in place is written elsewhere and copied.
        given |= {n: a if _usable(a) else cupy.empty(a.shape, a.dtype) for n, a in to.items()}
        if is_capturing(stream):
            made = [id(array) for array in now.values()]  # the caller may not get these arrays
            own = [id(a) for a in (*before.values(), *to.values()) if id(a) not in made]
            _kept_for_graphs.extend(a for a in given.values() if id(a) not in own)
        specs = tuple((name, adopt(name, array).spec) for name, array in given.items())
        ready = prepared_merge(specs, layout, device)
        tell(ready.plan)
        ready.run(tuple(address(given[name]) for name in ready.names), 0, stream)
        for name, array in to.items():
            if given[name] is not array:
                fill(array, given[name])


def _usable(array: Any) -> bool:
    spec = adopt("resume", array).spec
    return spec.whole_elements and (spec.rows_are_unit or 0 in spec.shape)


def _readable(array: Any) -> Any:
    return array if _usable(array) else contiguous(array)


@functools.lru_cache(maxsize=256)
def prepared_merge(
    given: tuple[tuple[str, TensorSpec], ...], layout: Layout, device: int
) -> PreparedPlan:
    """Return the compiled kernel for arrays of these descriptions.

    Parameters
    ----------
    given
        Description of every array, by the name of its parameter.
    layout, device
        The arrays' order of axes, and the device that runs the kernel.
    """
    specs = dict(given)
    batch, rows, heads, width = layout.canonical(specs["out"].shape, 1)
    storage = DTYPES[specs["out"].dtype].name
    problem = MergeProblem(
        operation="forward",
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=rows,
        seqlen_kv=0,
        head_dim=width,
        head_dim_v=width,
        storage=storage,
        output=storage,
        mask="full",
        scale=1.0,
        q_offset=0,
        alignment="element",
    )
    plan = merge_plan(problem, DeviceLimits.query(device))
    kinds = {name: name.partition("_")[0] for name in specs}
    strides = {name: strides_of(kinds[name], spec, layout) for name, spec in given}
    return PreparedPlan(plan, strides, device)


def forget_merges() -> None:
    """Forget the prepared merges: later ones are prepared in the environment of that time."""
    prepared_merge.cache_clear()
