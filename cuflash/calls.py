"""The call cache: a repeated call is one look-up, the allocation of its results, and a launch.

The signature of a call decides what it does: the keywords and, for every array, everything but its
contents and the upper bits of its address. Whether a call may write to its destinations also
depends on the addresses, so the cache keeps the sets of addresses that are known not to overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from .arrays.adopt import dtype_named
from .bounded_cache import BoundedCache
from .caches.device import forget_appends
from .cuda.current import current_stream, is_capturing, is_current
from .features.score_text import ScoreText
from .pipeline import CallPlan, forget_decisions
from .planning.plan import Plan
from .states import forget_merges
from .tensors import destinations

__all__ = ["Arrays", "PreparedCall", "Seen", "find", "forget", "keep", "see"]

#: Arrays of a call by argument name.
Arrays = Mapping[str, Any]

#: Signature of a call, and the addresses of its arrays in their order.
Seen = tuple[Hashable, list[int]]

#: The number of signatures whose calls are kept.
_KEPT = 1024
#: The number of sets of addresses of a signature that are known not to overlap.
_APART = 128

#: NumPy's number types; an instance of a subclass may be equal and mean another thing.
_SCALARS = frozenset(np.sctypeDict.values())

_ready: BoundedCache[Hashable, PreparedCall] = BoundedCache(_KEPT)


def see(operation: str, keywords: Mapping[str, Any], arrays: Arrays) -> Seen | None:
    """The signature of a call and its arrays' addresses; None if one is not a ``cupy.ndarray``.

    The keywords are as the caller gave them. Their types are part of the signature: True and 1 are
    the same key of a dictionary, and a call may accept only one of the two.

    Parameters
    ----------
    operation, keywords
        The pass, and every argument that is not an array; those with their defaults may be left
        out.
    arrays
        Inputs, then destinations, then the workspace; absent arguments are left out.
    """
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    parts: list[Hashable] = [operation, *arrays]
    addresses = []
    for array in arrays.values():
        if type(array) is not ndarray:
            return None
        data = array.data
        address = data.ptr
        parts.append((array.shape, array.strides, array.dtype, data.device_id, address & 15))
        addresses.append(address)
    if keywords:
        values = keywords.values()
        parts += (*keywords, *values, *map(type, values))
    return tuple(parts), addresses


def find(signature: Hashable, keywords: Mapping[str, Any]) -> PreparedCall | None:
    """The prepared call of a signature, if there is one; None also if it is not hashable.

    A signature holds the types of keywords but not the types inside tuples. Those are compared
    here, because True also equals 1 inside a tuple.
    """
    try:
        ready = _ready.get(signature)
    except Exception:  # a keyword of the caller's may raise anything; the checks report it
        return None
    if ready is None or not ready.tuples or ready.takes(keywords):
        return ready
    return None


def keep(seen: Seen, keywords: Mapping[str, Any], arrays: Arrays, planned: CallPlan) -> None:
    """Keep this call for the next one of its signature, if a launch is all that it needs.

    A call that copies arrays, or has nothing to launch, is not kept. Neither is a call with a
    keyword of a type whose equal values may mean different things.
    """
    signature, addresses = seen
    if planned.device is None or planned.copied or planned.plan.problem.empty:
        return
    if not all(map(_lasts, keywords.values())):
        return
    ready = _ready.get(signature)
    if ready is None or not ready.takes(keywords):
        _ready[signature] = ready = PreparedCall(planned, arrays, keywords)
    ready.allow(addresses)


def _lasts(value: Any) -> bool:
    """Whether a keyword is of a type whose values are hashable and immutable."""
    if type(value) is tuple:
        return all(type(one) is not tuple and _lasts(one) for one in value)
    if isinstance(value, type):  # a dtype given as its scalar type, which has Python's own hash
        return type(value) is type and issubclass(value, np.generic)
    plain = value is None or type(value) in (bool, int, float, str, ScoreText)
    return plain or isinstance(value, np.dtype) or type(value) in _SCALARS


def forget() -> None:
    """Forget every decision, so that the next calls decide in the environment of that time."""
    _ready.clear()
    forget_decisions()
    forget_appends()
    forget_merges()


class PreparedCall:
    """The calls of one signature, with everything decided except the addresses.

    Parameters
    ----------
    planned
        The plan, for a CUDA device; it copies no array.
    arrays, keywords
        Those of a call of the signature, as :func:`see` takes them; no array is kept.

    Attributes
    ----------
    plan
        The plan that runs.
    tuples
        The keywords that are tuples, with their values.
    """

    def __init__(self, planned: CallPlan, arrays: Arrays, keywords: Mapping[str, Any]) -> None:
        import cupy

        self.tuples = [(name, v) for name, v in keywords.items() if type(v) is tuple]

        self.plan = plan = planned.plan
        self._cuda, self._ndarray = cupy.cuda, cupy.ndarray
        self._launcher = planned.launcher
        self._device = planned.launcher.device_id
        self._workspace = "workspace" in arrays
        tensor_of = destinations(plan.problem.operation)
        given = {tensor_of.get(name, name) for name in arrays}
        # Arrays that the call makes come after the given ones, as in a launch. CuPy finds the dtype
        # of a scalar type quicker than that of a dtype.
        self._made = [
            (name, spec.shape, dtype_named(spec.dtype).type)
            for name, spec in planned.tensors.items()
            if name not in given
        ]
        self._temporary = planned.workspace_bytes > 0 and not self._workspace
        self._eager_bytes = 0 if self._workspace else planned.eager_bytes
        self._scratch = [*planned.scratch.values()]
        self._targets = [(tensor_of[name], name) for name in arrays if name in tensor_of]
        self._apart: BoundedCache[tuple[int, ...], bool] | None = None
        if self._workspace or self._targets:
            self._apart = BoundedCache(_APART)

    def takes(self, keywords: Mapping[str, Any]) -> bool:
        """Whether the tuples among the keywords equal those of this signature."""
        for name, value in self.tuples:
            if keywords[name] is not value:
                given = keywords[name]
                if [*map(type, given)] != [*map(type, value)]:
                    return False
        return True

    def allow(self, addresses: list[int]) -> None:
        """Record that the destinations overlap no other array at these addresses."""
        if self._apart is not None:
            self._apart[tuple(addresses)] = True

    def run(
        self, arrays: Arrays, addresses: list[int], tell: Callable[[Plan], None]
    ) -> dict[str, Any] | None:
        """Launch and return the results by name; None, without a launch, if this is not possible.

        It is not possible where a CUDA graph must keep the call's own allocations, and for
        addresses that are not known to be free of overlap. ``tell`` receives the plan before the
        launch.

        Raises
        ------
        LaunchError
            If the driver refuses a launch.
        """
        if self._apart is not None and tuple(addresses) not in self._apart:
            return None
        if is_current(self._device):
            return self._run(arrays, addresses, tell)
        with self._cuda.Device(self._device):
            return self._run(arrays, addresses, tell)

    def _run(
        self, arrays: Arrays, addresses: list[int], tell: Callable[[Plan], None]
    ) -> dict[str, Any] | None:
        stream = current_stream(self._device)
        if self._temporary and is_capturing(stream):
            return None
        ndarray, place = self._ndarray, 0
        if self._workspace:
            *addresses, place = addresses
        results = {}
        if self._targets:
            results = {name: arrays[argument] for name, argument in self._targets}
        for name, shape, dtype in self._made:
            results[name] = made = ndarray(shape, dtype)
            addresses.append(made.data.ptr)
        if self._eager_bytes:
            workspace = self._cuda.alloc(self._eager_bytes)  # freed once the launch is queued
            place = workspace.ptr
        if self._scratch:  # gradients that the caller did not ask for
            addresses += [place + offset for offset in self._scratch]
        tell(self.plan)
        self._launcher.launch(addresses, place, stream)
        return results
