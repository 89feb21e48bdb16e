"""A traced call with caches, described without JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..arrays.spec import TensorSpec
from ..caches.as_attention import describe_attention, plan_attention
from ..caches.checks import check_specs
from ..caches.float8 import Numbers, scale_spec
from ..caches.given import Sizes
from ..caches.planned import CachePlan, plan_caches
from ..features.float8 import NAMES as SCALES
from ..features.float8 import NUMBERS
from ..options import Options
from ..pipeline import choose_device
from .call import spec_of
from .passes import Pass

__all__ = ["FEATURES", "CachedCall"]

#: Arrays of features of attention, which the checks of caches do not take.
FEATURES = ("alibi_slopes", "sinks")
_CACHES = ("k_cache", "v_cache")

_Specs = tuple[tuple[str, TensorSpec], ...]


@dataclass(frozen=True)
class CachedCall(Pass):
    """An append, if the call has new tokens, and attention after it.

    Attributes
    ----------
    options
        The checked keywords.
    interleaved
        Whether the columns of a rotated pair are neighbours; None if nothing is rotated.
    names
        Names of the arguments, in order.
    scales
        Scales of float8 caches that are numbers; None for other caches.
    """

    function: ClassVar[str] = "cuflash.jax.attention_with_kvcache"
    options: Options
    interleaved: bool | None
    names: tuple[str, ...]
    scales: Numbers | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results, with new tokens also the caches and ``overflow``."""
        written = ("k_cache", "v_cache", "overflow") if "k" in self.names else ()
        return ("out", "lse", *written)

    @property
    def numbers(self) -> dict[str, float]:
        """The scales that are numbers, by argument name."""
        given = dict(self.scales or ())
        return {name: given[word] for name, word in NUMBERS.items() if word in given}

    def entries(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """As for :class:`~.passes.Pass`."""
        return tuple(self.named(arrays)["q"].shape[:1])

    def specs(self, arrays: Sequence[Any]) -> dict[str, TensorSpec]:
        """Return descriptions of all arrays of a call and of ``overflow``, in XLA's layout.

        Float8 caches are bytes.
        """
        given = self.named(arrays)
        specs = {name: spec_of(tuple(array.shape), array.dtype) for name, array in given.items()}
        specs |= {name: scale_spec(specs[name]) for name in SCALES if name in specs}
        if self.scales is not None:
            specs |= {name: replace(specs[name], dtype="uint8") for name in _CACHES}
        if "k" in specs:
            specs["overflow"] = spec_of(specs["q"].shape[:1], "int32")
        return specs

    def results_of(
        self, arrays: Sequence[Any], length: int | None = None
    ) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every result; ``length`` is ``cache_seqlens``, if known."""
        return _described(self, tuple(self.specs(arrays).items()), length)

    def check_host(self, arrays: Sequence[Any]) -> None:
        """Raise the errors of the tiled NumPy code before it runs.

        Raises
        ------
        UnsupportedError
            If it has no such algorithm.
        """
        specs = self.specs(arrays)
        plan_attention(specs, _sizes(self, specs, None), self.options, self.scales)

    def plan_on(self, arrays: Sequence[Any], device: int) -> CachePlan:
        """As for :class:`~.passes.Pass`."""
        choose_device(device, self.options)
        specs = {name: spec.on_device(device) for name, spec in self.specs(arrays).items()}
        return plan_caches(specs, self.interleaved, self.options, self.scales)


def _sizes(call: CachedCall, specs: dict[str, TensorSpec], length: int | None) -> Sizes:
    """Check the arrays of a call against each other, and return its sizes."""
    plain = {name: spec for name, spec in specs.items() if name not in FEATURES}
    return check_specs(plain, length, call.interleaved, call.scales is not None)[1]


@functools.lru_cache(maxsize=1024)  # eager calls repeat with the same arrays
def _described(
    call: CachedCall, given: _Specs, length: int | None
) -> list[tuple[tuple[int, ...], str]]:
    specs = dict(given)
    found = describe_attention(specs, _sizes(call, specs, length), call.options, call.scales)
    made: dict[str, tuple[tuple[int, ...], str]]
    made = {name: (found.shapes[name], found.dtypes[name]) for name in ("out", "lse")}
    made |= {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
    if call.scales is not None:
        made |= {name: (specs[name].shape, "float8_e4m3fn") for name in _CACHES}
    return [made[name] for name in call.results]
