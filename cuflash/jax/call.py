"""A traced call of attention, described without JAX."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..arrays.spec import LayoutName, TensorSpec, contiguous_strides
from ..checks import describe
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.score_text import ScoreText
from ..options import AlgorithmChoice, Options, check_dtype, check_flag, check_options
from ..pipeline import CallPlan, choose_device, plan_call
from ..planning.problem import MAX_SEQLEN, DTypeName, Operation
from ..tensors import QKV, made_by
from .axes import broadcasts, has_batch, may_share_batch, source_of
from .entries import sharing
from .passes import Pass

__all__ = ["Call", "call_of", "check_arrays", "folded", "renamed", "spec_of"]

#: Names of the arguments in :mod:`cuflash.jax`, by their names in the rest of the library.
_NAMES = {"q": "query", "k": "key", "v": "value", "out_dtype": "residual_dtype"}


@dataclass(frozen=True)
class Call(Pass):
    """One pass of attention.

    Attributes
    ----------
    operation
        "forward" or "backward".
    options
        The checked keywords.
    residual
        The dtype of the output that is kept for the backward pass; None for query's.
    names
        Names of the arguments, in order.
    draw_heads
        With dropout the number of query heads of the whole call; every head and
        every entry of the batch drops different weights. 0: all drop the same.
        None without dropout.
    score_heads
        The number of query heads of the whole call, if a function of scores reads
        entries or heads; otherwise None.
    """

    function: ClassVar[str] = "cuflash.jax.attention"
    operation: Operation
    options: Options
    residual: DTypeName | None = None
    names: tuple[str, ...] = QKV
    draw_heads: int | None = None
    score_heads: int | None = None

    @property
    def packed(self) -> bool:
        """Whether the arrays, of one batch entry, hold packed sequences."""
        return "cu_seqlens_q" in self.names

    @property
    def described(self) -> Options:
        """The keywords for the rest of the library."""
        return replace(self.options, layout="shd") if self.packed else self.options

    @property
    def counts_parts(self) -> bool:
        """Whether a part of divided arrays needs its first entry and head."""
        return bool(self.draw_heads) or self.score_heads is not None

    @property
    def saving(self) -> Call:
        """The same pass with the output dtype that a backward pass after it needs."""
        return replace(self, options=replace(self.options, out_dtype=self.residual))

    def backward(self, wrt: tuple[str, ...]) -> Call:
        """Return the backward pass of this pass, for the gradients that ``wrt`` names."""
        options = replace(self.saving.options, wrt=wrt)
        return replace(self, operation="backward", options=options)

    def drawing(self, heads: int = 0, *, alike: bool) -> Call:
        """Return the pass with dropout; with ``alike`` all of its ``heads`` drop the same."""
        return replace(self, draw_heads=0 if alike else heads)

    def counting(self, heads: int) -> Call:
        """Return the pass with a function of scores that reads entries or heads."""
        return replace(self, score_heads=heads)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results, in order."""
        return made_by(self.operation, self.options.wrt)

    def mapped(self, arrays: Sequence[Any]) -> int:
        """Return the number of axes of :func:`jax.vmap` before the batch axis."""
        return len(self.named(arrays)["q"].shape) - len(self.options.layout or "bshd")

    def entries(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """As for :class:`~.passes.Pass`."""
        return tuple(self.named(arrays)["q"].shape[: self.mapped(arrays) + 1])

    def plan_on(self, arrays: Sequence[Any], device: int) -> CallPlan:
        """As for :class:`~.passes.Pass`."""
        options = replace(self.over(arrays).described, backend="cuda")
        given = tuple((name, spec.on_device(device)) for name, spec in self.specs(arrays).items())
        return plan_call(self.operation, given, options, choose_device(device, options))

    def specs(self, arrays: Sequence[Any]) -> dict[str, TensorSpec]:
        """Return descriptions of its arguments by name, C-contiguous as JAX asks XLA for.

        The mapped axes are part of the batch.
        """
        given, mapped = self.named(arrays), self.mapped(arrays)
        specs = {
            name: spec_of(self.shape_of(name, array.shape, mapped), array.dtype)
            for name, array in given.items()
        }
        if mapped and 0 in given["q"].shape[: mapped + 1]:  # no entries to share arrays
            for name in filter(broadcasts, given):
                specs[name] = spec_of((1, *specs[name].shape[1:]), given[name].dtype)
        return specs

    def shape_of(self, name: str, shape: Sequence[int], mapped: int) -> tuple[int, ...]:
        """Return the shape of an array for the rest of the library, without mapped axes."""
        whole = folded(name, shape, mapped)
        return whole[1:] if self.packed and has_batch(name) and len(whole) > 1 else whole

    def over(self, arrays: Sequence[Any]) -> Call:
        """Return the pass with the options that say which entries share draws and arrays.

        They follow from the shapes; if arrays are divided, from the shapes of a device's parts.
        """
        given, mapped = self.named(arrays), self.mapped(arrays)
        if not mapped and self.draw_heads is None and self.score_heads is None:
            return self
        batch = given["q"].shape[: mapped + 1]
        found = {
            name: sharing(given[name].shape[: mapped + 1], batch, name in self.options.wrt)
            for name in filter(broadcasts, given if mapped else ())
        }
        entries = tuple((name, shared) for name, shared in found.items() if shared is not None)
        entries_of_all = given["cu_seqlens_q"].shape[0] if self.packed else batch[-1]
        draws = self._draws(entries_of_all)
        places = None if self.score_heads is None else (entries_of_all, self.score_heads)
        options = replace(self.options, entries=entries, draws=draws, places=places)
        return replace(self, options=options)

    def _draws(self, batch: int) -> tuple[int, int] | None:
        """Return the numbers of entries and heads after which draws repeat."""
        if self.draw_heads is None:
            return None
        return (batch, self.draw_heads) if self.draw_heads else (1, 1)

    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every result, with the mapped axes of the arguments."""
        specs, mapped = self.specs(arrays), self.mapped(arrays)
        described = _described(self.over(arrays), tuple(specs.items()))
        if self.packed:
            return [((1, *s) if has_batch(name) else s, kind) for name, s, kind in described]
        if not mapped:
            return [(shape, kind) for _, shape, kind in described]
        given = self.named(arrays)
        first = tuple(given["q"].shape[: mapped + 1])
        return [
            ((*_batch_of(name, first, given), *shape[1:]) if has_batch(name) else shape, kind)
            for name, shape, kind in described
        ]


def _batch_of(name: str, batch: tuple[int, ...], given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return mapped axes and batch of a result: those of the array for a broadcast gradient."""
    if not broadcasts(name):
        return batch
    *mapped, _ = batch
    return (*mapped, given[source_of(name)].shape[len(mapped)])


@functools.lru_cache(maxsize=1024)  # eager calls repeat with the same arrays
def _described(
    call: Call, specs: tuple[tuple[str, TensorSpec], ...]
) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and dtype of every result, without mapped axes."""
    described = describe(call.operation, dict(specs), call.described)
    return [(name, described.shapes[name], described.dtypes[name]) for name in call.results]


def folded(name: str, shape: Sequence[int], mapped: int) -> tuple[int, ...]:
    """Return a tensor's shape with the mapped axes merged into its batch, if it has one."""
    if not mapped or not has_batch(name):
        return tuple(shape)
    return (math.prod(shape[: mapped + 1]), *shape[mapped + 1 :])


def spec_of(shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    """Return the description of an array of XLA on the host."""
    dtype = np.dtype(dtype)
    return TensorSpec(shape, dtype.name, contiguous_strides(shape), dtype.itemsize)


def call_of(
    *,
    is_causal: Any,
    local_window_size: tuple[int, int] | None,
    softcap: Any,
    score_mod: ScoreText | None,
    scale: Any,
    q_offset: Any,
    algorithm: AlgorithmChoice,
    deterministic_gradients: Any,
    residual_dtype: Any,
    block_mask: tuple[int, int] | None,
    dropout_rate: float,
) -> Call:
    """Return the forward pass of the keywords; the window's sides and the block are checked.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the keyword.
    """
    checked = check_options(
        causal=check_flag("is_causal", is_causal),
        softcap=softcap,
        score_mod=score_mod,
        scale=scale,
        q_offset=q_offset,
        algorithm=algorithm,
        deterministic=check_flag("deterministic_gradients", deterministic_gradients),
        layout="bshd",
        block_mask=block_mask,
        dropout_p=dropout_rate or None,
    )
    checked = _with_window(checked, local_window_size)
    return Call("forward", checked, check_dtype("residual_dtype", residual_dtype))


def _with_window(options: Options, sides: tuple[int, int] | None) -> Options:
    """Return the keywords with a window, whose sides may be negative: a negative side is a bound.

    A window without any key becomes a causal mask before the first key.
    """
    if sides is None:
        return options
    left, right = sides
    if options.causal:
        right = min(right, 0)
    if -left > right:
        return replace(options, causal=True, q_offset=-MAX_SEQLEN)
    others = [one for one in options.more if one[0] != "window_size"]
    return replace(options, more=(*others, ("window_size", (left, right))))


def check_arrays(arrays: Mapping[str, Any], call: Call) -> None:
    """Check the arrays of a forward pass against each other and the keywords.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        With the argument's name in :mod:`cuflash.jax`.
    """
    shape = tuple(arrays["q"].shape)
    if len(shape) not in (3, 4):
        expected = "(batch, seqlen, heads, head_dim) or (seqlen, heads, head_dim)"
        raise ArgumentValueError("query", f"{len(shape)} axes {shape}", expected)
    layout: LayoutName = "shd" if len(shape) == 3 else "bshd"
    if layout == "shd":
        _check_no_batch(arrays)
    taking = call.taking(arrays)
    if taking.packed:
        arrays = {name: a[None] if has_batch(name) else a for name, a in arrays.items()}
        layout = "bshd"
    asked = replace(taking, options=replace(call.options, layout=layout))
    try:
        asked.saving.results_of(list(arrays.values()))
    except (ArgumentTypeError, ArgumentValueError) as error:
        argument, got, expected = map(renamed, (error.argument, error.got, error.expected))
        raise type(error)(argument, got, expected) from error


def _check_no_batch(arrays: Mapping[str, Any]) -> None:
    """Raise ArgumentValueError for an array that has a batch where query has none."""
    for name, array in arrays.items():
        if may_share_batch(name) and array.ndim != 1:
            expected = f"({arrays['q'].shape[1]},), without a batch as query is"
            raise ArgumentValueError(name, f"shape {tuple(array.shape)}", expected)


def renamed(text: str) -> str:
    """Return a text with the argument names of :mod:`cuflash.jax`."""
    return re.sub(r"\b([qkv]|out_dtype)\b", lambda found: _NAMES[found[0]], text)
