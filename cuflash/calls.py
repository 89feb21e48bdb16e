"""The call cache: a call of a kind that has been is a look-up, its results, and a launch.

What a call does follows from its signature: the keywords, and of every array
all but its contents and the upper bits of its address. Whether it may write
where it is told follows from the addresses besides, so those that were found
to be apart are kept with it.
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

#: Signatures whose calls are kept.
_KEPT = 1024
#: Sets of addresses of a signature that are known to be apart.
_APART = 128

#: NumPy's numbers; a subclass may be equal and mean another thing.
_SCALARS = frozenset(np.sctypeDict.values())

_ready: BoundedCache[Hashable, PreparedCall] = BoundedCache(_KEPT)


def see(operation: str, keywords: Mapping[str, Any], arrays: Arrays) -> Seen | None:
    """What decides a call, and where its arrays are; None if one is not plainly CuPy's.

    The keywords are as the caller gave them, so their types go with them: True
    is 1 to a dictionary, and the call takes only one of the two.

    Parameters
    ----------
    operation, keywords
        The pass, and all that is not an array.
    arrays
        Inputs, then destinations, then the workspace; what is not given is absent.
    """
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    values = keywords.values()
    parts: list[Hashable] = [operation, *values, *map(type, values), *arrays]
    addresses = []
    for array in arrays.values():
        if type(array) is not ndarray:
            return None
        data = array.data
        address = data.ptr
        parts += (array.shape, array.strides, array.dtype, data.device_id, address & 15)
        addresses.append(address)
    return tuple(parts), addresses


def find(signature: Hashable, keywords: Mapping[str, Any]) -> PreparedCall | None:
    """The calls of a signature, if one has been; None of what is no key.

    A signature holds the types of keywords, but not those inside of tuples:
    they are compared here, for True is 1 in a tuple too.
    """
    try:
        ready = _ready.get(signature)
    except Exception:  # whatever a keyword of the caller's raises; the checks know what to say
        return None
    if ready is None or not ready.tuples or ready.takes(keywords):
        return ready
    return None


def keep(seen: Seen, keywords: Mapping[str, Any], arrays: Arrays, planned: CallPlan) -> None:
    """Have the next call of this signature found, if it can be that simple.

    A call that copies arrays, or has nothing to launch, always goes the long
    way, and so does one with a keyword that might be equal and mean another thing.
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
    """Whether a keyword is of a type whose values are keys and stay what they are."""
    if type(value) is tuple:
        return all(type(one) is not tuple and _lasts(one) for one in value)
    if isinstance(value, type):  # a dtype by its scalar type, whose hash is Python's own
        return type(value) is type and issubclass(value, np.generic)
    plain = value is None or type(value) in (bool, int, float, str, ScoreText)
    return plain or isinstance(value, np.dtype) or type(value) in _SCALARS


def forget() -> None:
    """Decide about every signature anew, in the environment as it then is."""
    _ready.clear()
    forget_decisions()
    forget_appends()
    forget_merges()


class PreparedCall:
    """The calls of a signature, with everything decided but the addresses.

    Parameters
    ----------
    planned
        Of a CUDA device; it copies nothing.
    arrays, keywords
        Of a call of the signature, as :func:`see` takes them; no array is kept.

    Attributes
    ----------
    plan
        What runs.
    tuples
        Keywords that are tuples, and their values.
    """

    def __init__(self, planned: CallPlan, arrays: Arrays, keywords: Mapping[str, Any]) -> None:
        import cupy

        self.tuples = [(name, v) for name, v in keywords.items() if type(v) is tuple]

        self.plan = plan = planned.plan
        self._cupy = cupy
        self._launcher = planned.launcher
        self._workspace = "workspace" in arrays
        tensor_of = destinations(plan.problem.operation)
        given = {tensor_of.get(name, name) for name in arrays}
        # Arrays that are made come after those that are given, as in a launch.
        self._made = [
            (name, spec.shape, dtype_named(spec.dtype))
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
        """Whether tuples among the keywords of the signature hold what these calls have."""
        for name, value in self.tuples:
            if keywords[name] is not value:
                given = keywords[name]
                if [*map(type, given)] != [*map(type, value)]:
                    return False
        return True

    def allow(self, addresses: list[int]) -> None:
        """Take it that what a call writes lies apart from all else that it was given."""
        if self._apart is not None:
            self._apart[tuple(addresses)] = True

    def run(
        self, arrays: Arrays, addresses: list[int], tell: Callable[[Plan], None]
    ) -> dict[str, Any] | None:
        """Launch, and give the results by name; None, and nothing, if it takes the long way.

        As it does where a graph has to keep what the call makes for itself,
        and for addresses that are not known to be apart. ``tell`` is given the
        plan before the launch.

        Raises
        ------
        LaunchError
            If the driver refuses a launch.
        """
        if self._apart is not None and tuple(addresses) not in self._apart:
            return None
        device = self._launcher.device_id
        if is_current(device):
            return self._run(arrays, addresses, device, tell)
        with self._cupy.cuda.Device(device):
            return self._run(arrays, addresses, device, tell)

    def _run(
        self, arrays: Arrays, addresses: list[int], device: int, tell: Callable[[Plan], None]
    ) -> dict[str, Any] | None:
        stream = current_stream(device)
        if self._temporary and is_capturing(stream):
            return None
        empty, place = self._cupy.empty, 0
        if self._workspace:
            *addresses, place = addresses
        results = {}
        if self._targets:
            results = {name: arrays[argument] for name, argument in self._targets}
        for name, shape, dtype in self._made:
            results[name] = made = empty(shape, dtype)
            addresses.append(made.data.ptr)
        if self._eager_bytes:
            workspace = empty(self._eager_bytes, np.uint8)  # until the launch is queued
            place = workspace.data.ptr
        if self._scratch:  # gradients that nobody asked for
            addresses += [place + offset for offset in self._scratch]
        tell(self.plan)
        self._launcher.launch(tuple(addresses), place, stream)
        return results
