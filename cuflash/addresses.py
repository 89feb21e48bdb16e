"""The addresses of a prepared run; addresses that have been checked are not checked again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np

from .arrays.spec import TensorSpec
from .bounded_cache import BoundedCache
from .errors import ArgumentTypeError, ArgumentValueError
from .pipeline import CallPlan
from .tensors import tensors

__all__ = ["Addresses", "Planned", "addresses_of", "multiples_of"]

#: The number of runs whose addresses are kept.
_KEPT = 64


class Planned(Protocol):
    """A plan, against which addresses are checked."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every array that a run is given, by name."""

    @property
    def scratch(self) -> Mapping[str, int]:
        """Offset in the workspace, in bytes, of every array in it."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace."""


def addresses_of(planned: CallPlan) -> Addresses:
    """The address checks of the runs of a call."""
    problem = planned.plan.problem
    table, operands = tensors(), problem.operands
    required = frozenset(
        n for n in planned.tensors if problem.operation not in table[n].optional or n in operands
    )
    return Addresses(planned, required, multiples_of(planned))


def multiples_of(planned: CallPlan) -> dict[str, int]:
    """The number that the address of every tensor of a call must be a multiple of."""
    table, problem = tensors(), planned.plan.problem
    in_rows = problem.alignment != "element"
    boxed = {name for launch in planned.plan.launches for name, _ in launch.boxes}
    return {
        name: 16 if name in boxed or (in_rows and table[name].role == "matrix") else spec.itemsize
        for name, spec in planned.tensors.items()
    }


class Addresses:
    """Checks the addresses of the runs of a call, and puts them in order.

    Parameters
    ----------
    planned
        The plan of the run.
    required
        Names of the arrays that every run needs.
    multiples
        For every array, the number that its address must be a multiple of.
    """

    def __init__(
        self, planned: Planned, required: frozenset[str], multiples: Mapping[str, int]
    ) -> None:
        self._tensors = planned.tensors
        self._required, self._multiples = required, multiples
        self._scratch = [*planned.scratch.values()]
        self._workspace_bytes = planned.workspace_bytes
        self._kept: BoundedCache[Hashable, tuple[int, ...]] = BoundedCache(_KEPT)

    def of(self, pointers: Mapping[str, int], workspace: int) -> tuple[int, ...]:
        """The addresses of all tensors in the order of a launch; 0 for an absent tensor.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If they do not fit the plan.
        """
        if type(pointers) is not dict:
            return self._checked(pointers, workspace)
        # The key has the types too: 256.0 is the same key as 256, but it is not an address.
        values = pointers.values()
        key = (workspace, type(workspace), *pointers, *values, *map(type, values))
        try:
            found = self._kept.get(key)
        except Exception:  # not hashable, so not an address; the hash may raise anything
            return self._checked(pointers, workspace)
        if found is None:
            found = self._checked(pointers, workspace)
            self._kept[key] = found
        return found

    def _checked(self, pointers: Mapping[str, int], workspace: int) -> tuple[int, ...]:
        if not isinstance(pointers, Mapping):
            raise ArgumentTypeError("pointers", repr(pointers), "a mapping of names to addresses")
        unknown = pointers.keys() - self._tensors.keys()
        if unknown:
            raise ArgumentValueError(
                "pointers", f"{', '.join(map(repr, unknown))}", ", ".join(sorted(self._tensors))
            )
        missing = self._required - pointers.keys()
        if missing:
            raise ArgumentValueError(
                "pointers", f"no {', '.join(sorted(missing))}", ", ".join(sorted(self._required))
            )
        for name, pointer in pointers.items():
            self._check_pointer(name, pointer)
        if not isinstance(workspace, (int, np.integer)):
            raise ArgumentTypeError("workspace", repr(workspace), "an integer, its address")
        if self._workspace_bytes and (workspace <= 0 or workspace % 256):
            raise ArgumentValueError(
                "workspace",
                f"address {workspace:#x}",
                f"{self._workspace_bytes} bytes at a multiple of 256",
            )
        scratch = [int(workspace) + offset for offset in self._scratch]
        return (*(int(pointers.get(name, 0)) for name in self._tensors), *scratch)

    def _check_pointer(self, name: str, pointer: int) -> None:
        if not isinstance(pointer, (int, np.integer)):
            raise ArgumentTypeError("pointers", f"{name} at {pointer!r}", "an integer")
        spec = self._tensors[name]
        if not pointer and name in self._required and 0 not in spec.shape:
            raise ArgumentValueError("pointers", f"{name} at 0", "the address of its memory")
        multiple = self._multiples[name]
        if pointer < 0 or pointer % multiple:
            raise ArgumentValueError(
                "pointers", f"{name} at {pointer:#x}", f"a multiple of {multiple}, as planned"
            )
