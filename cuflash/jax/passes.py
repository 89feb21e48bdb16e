"""The common base of the computations of this package, without JAX."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from ..caches.planned import CachePlan
from ..pipeline import CallPlan

__all__ = ["Pass"]

_Item = TypeVar("_Item")
_Self = TypeVar("_Self", bound="Pass")


class Pass(abc.ABC):
    """One computation without its arrays; a frozen dataclass, since it is a key of JAX's caches.

    Attributes
    ----------
    function
        Name of its public function.
    names
        Names of the arguments, in order.
    """

    function: ClassVar[str]
    names: tuple[str, ...]

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """Names of the results, in order."""

    @property
    def aliases(self) -> Mapping[int, int]:
        """Indices of arguments that are written in place, with the indices of their results."""
        every = self.names
        return {every.index(n): i for i, n in enumerate(self.results) if n in every}

    @abc.abstractmethod
    def entries(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Return the sizes of the mapped axes and of the batch."""

    @abc.abstractmethod
    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every result.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the arrays do not fit the call.
        """

    @abc.abstractmethod
    def plan_on(self, arrays: Sequence[Any], device: int) -> CallPlan | CachePlan:
        """Return the plan for a CUDA device.

        Raises
        ------
        UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
            As :func:`cuflash.prepare` does.
        """

    def named(self, arrays: Iterable[_Item]) -> dict[str, _Item]:
        """Return the arguments by name."""
        return dict(zip(self.names, arrays, strict=True))

    def taking(self: _Self, names: Iterable[str]) -> _Self:
        """Return the pass with these arguments."""
        return replace(self, names=tuple(names))  # type: ignore[type-var]
