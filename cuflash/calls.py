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
from .cuda.current import current_stream, is_capturing, is_current
from .pipeline import DESTINATIONS, TARGETS, Pipeline, forget_decisions
from .planning.plan import Plan

__all__ = ["Arrays", "ReadyCall", "Seen", "find", "forget", "keep", "see"]

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

_ready: dict[Hashable, ReadyCall] = {}


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


def find(signature: Hashable) -> ReadyCall | None:
    """The calls of a signature, if one has been; None of what is no key."""
    try:
        return _ready.get(signature)
    except Exception:  # whatever a keyword of the caller's raises; the checks know what to say
        return None


def keep(seen: Seen, keywords: Mapping[str, Any], arrays: Arrays, pipeline: Pipeline) -> None:
    """Have the next call of this signature found, if it can be that simple.

    A call that copies arrays, or has nothing to launch, always goes the long
    way, and so does one with a keyword that might be equal and mean another thing.
    """
    global _ready
    signature, addresses = seen
    if pipeline.device is None or pipeline.copied or pipeline.plan.problem.empty:
        return
    if not all(map(_lasts, keywords.values())):
        return
    ready = _ready.get(signature)
    if ready is None:
        ready = ReadyCall(pipeline, arrays)
        if len(_ready) >= _KEPT:
            _ready = {}  # a new one: other threads may be looking at the old
        _ready[signature] = ready
    ready.allow(addresses)


def _lasts(value: Any) -> bool:
    """Whether a keyword is of a type whose values are keys and stay what they are."""
    if isinstance(value, type):  # a dtype by its scalar type, whose hash is Python's own
        return type(value) is type and issubclass(value, np.generic)
    plain = value is None or type(value) in (bool, int, float, str)
    return plain or isinstance(value, np.dtype) or type(value) in _SCALARS


def forget() -> None:
    """Decide about every signature anew, in the environment as it then is."""
    global _ready
    _ready = {}
    forget_decisions()


class ReadyCall:
    """The calls of a signature, with everything decided but the addresses.

    Parameters
    ----------
    pipeline
        Of a CUDA device; it copies nothing.
    arrays
        Of a call of the signature, as :func:`see` takes them; none is kept.

    Attributes
    ----------
    plan
        What runs.
    """

    def __init__(self, pipeline: Pipeline, arrays: Arrays) -> None:
        import cupy

        self.plan = plan = pipeline.plan
        self._cupy = cupy
        self._launcher = pipeline.launcher
        self._workspace = "workspace" in arrays
        given = {DESTINATIONS.get(name, name) for name in arrays}
        # What is made comes after what is given, in the pipeline and so in a launch.
        self._made = [
            (name, spec.shape, dtype_named(spec.dtype))
            for name, spec in pipeline.tensors.items()
            if name not in given
        ]
        self._temporary = plan.workspace_bytes > 0 and not self._workspace
        self._eager_bytes = 0 if self._workspace else plan.eager_bytes
        targets = TARGETS[plan.problem.operation]
        self._targets = [(DESTINATIONS[name], name) for name in arrays if name in targets]
        self._apart: dict[tuple[int, ...], bool] | None = None
        if self._workspace or self._targets:
            self._apart = {}

    def allow(self, addresses: list[int]) -> None:
        """Take it that what a call writes lies apart from all else that it was given."""
        if self._apart is None:
            return
        if len(self._apart) >= _APART:
            self._apart = {}  # a new one: other threads may be looking at the old
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
        results = {name: arrays[argument] for name, argument in self._targets}
        for name, shape, dtype in self._made:
            results[name] = made = empty(shape, dtype)
            addresses.append(made.data.ptr)
        if self._eager_bytes:
            workspace = empty(self._eager_bytes, np.uint8)  # until the launch is queued
            place = workspace.data.ptr
        tell(self.plan)
        self._launcher.launch(tuple(addresses), place, stream)
        return results
