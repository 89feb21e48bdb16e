"""What the computations of this package have in common; knows nothing of JAX."""

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
    """One computation without its arrays: a frozen dataclass, for it is a key of JAX's caches.

    Attributes
    ----------
    function
        The public function that it is of.
    names
        Of the arguments, in the order that they come in.
    """

    function: ClassVar[str]
    names: tuple[str, ...]

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """Names of the results, in their order."""

    @property
    def aliases(self) -> Mapping[int, int]:
        """Numbers of the arguments that are written in place, and of the results that they are."""
        every = self.names
        return {every.index(n): i for i, n in enumerate(self.results) if n in every}

    @abc.abstractmethod
    def entries(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """How many entries there are: sizes of the mapped axes and of the batch."""

    @abc.abstractmethod
    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every result.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the arrays are of no such call.
        """

    @abc.abstractmethod
    def plan_on(self, arrays: Sequence[Any], device: int) -> CallPlan | CachePlan:
        """What runs on a CUDA device.

        Raises
        ------
        UnsupportedError, BackendUnavailableError, ToolchainError, CompileError
            As :func:`cuflash.prepare` does.
        """

    def named(self, arrays: Iterable[_Item]) -> dict[str, _Item]:
        """The arguments by name."""
        return dict(zip(self.names, arrays, strict=True))

    def taking(self: _Self, names: Iterable[str]) -> _Self:
        """The same with these arguments."""
        return replace(self, names=tuple(names))  # type: ignore[type-var]
