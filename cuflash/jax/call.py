"""What a traced call computes, in the words of the rest of the library; knows nothing of JAX."""

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

#: Names of the arguments here, by those that the rest of the library gives them.
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
        Of the arguments, in the order that they come in.
    draw_heads
        With dropout the number of query heads of the whole call, each of which
        draws for itself, as each entry of its batch does; 0: all draw alike.
        None without dropout.
    score_heads
        With a function of scores that is given entries or heads, the number of
        query heads of the whole call; None without one.
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
        """Whether the arrays, of one batch entry here, hold several sequences."""
        return "cu_seqlens_q" in self.names

    @property
    def described(self) -> Options:
        """The keywords as the rest of the library takes them."""
        return replace(self.options, layout="shd") if self.packed else self.options

    @property
    def counts_parts(self) -> bool:
        """Whether a part of the arrays has to know at which entry and head it begins."""
        return bool(self.draw_heads) or self.score_heads is not None

    @property
    def saving(self) -> Call:
        """The same pass where a backward pass follows it."""
        return replace(self, options=replace(self.options, out_dtype=self.residual))

    def backward(self, wrt: tuple[str, ...]) -> Call:
        """The pass that pulls gradients back through this one to what ``wrt`` names."""
        options = replace(self.saving.options, wrt=wrt)
        return replace(self, operation="backward", options=options)

    def drawing(self, heads: int = 0, *, alike: bool) -> Call:
        """The same pass with dropout, of so many query heads, which may all draw alike."""
        return replace(self, draw_heads=0 if alike else heads)

    def counting(self, heads: int) -> Call:
        """The same pass with a function of scores that is given entries or heads, of so many."""
        return replace(self, score_heads=heads)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results, in their order."""
        return made_by(self.operation, self.options.wrt)

    def mapped(self, arrays: Sequence[Any]) -> int:
        """How many axes of :func:`jax.vmap` stand before the batch, in every array that has one."""
        return len(self.named(arrays)["q"].shape) - len(self.options.layout or "bshd")

    def entries(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """As of :class:`~.passes.Pass`."""
        return tuple(self.named(arrays)["q"].shape[: self.mapped(arrays) + 1])

    def plan_on(self, arrays: Sequence[Any], device: int) -> CallPlan:
        """As of :class:`~.passes.Pass`."""
        options = replace(self.over(arrays).described, backend="cuda")
        given = tuple((name, spec.on_device(device)) for name, spec in self.specs(arrays).items())
        return plan_call(self.operation, given, options, choose_device(device, options))

    def specs(self, arrays: Sequence[Any]) -> dict[str, TensorSpec]:
        """Descriptions of its arguments by name, C-contiguous: the layout JAX asks XLA for.

        The mapped axes are part of the batch.
        """
        given, mapped = self.named(arrays), self.mapped(arrays)
        specs = {
            name: spec_of(self.shape_of(name, array.shape, mapped), array.dtype)
            for name, array in given.items()
        }
        if mapped and 0 in given["q"].shape[: mapped + 1]:  # entries that nothing shares
            for name in filter(broadcasts, given):
                specs[name] = spec_of((1, *specs[name].shape[1:]), given[name].dtype)
        return specs

    def shape_of(self, name: str, shape: Sequence[int], mapped: int) -> tuple[int, ...]:
        """The shape of an array as the rest of the library takes it, lengths those of entries."""
        whole = folded(name, shape, mapped)
        return whole[1:] if self.packed and has_batch(name) and len(whole) > 1 else whole

    def over(self, arrays: Sequence[Any]) -> Call:
        """The same pass, told which entries of its batch draw alike, and share what broadcasts.

        Shapes say that: where arrays are divided, those of a device's parts.
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
        """After how many entries and heads draws repeat: mapped entries draw alike."""
        if self.draw_heads is None:
            return None
        return (batch, self.draw_heads) if self.draw_heads else (1, 1)

    def results_of(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every result, with the mapped axes that the arguments have."""
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
    """Mapped axes and batch of a result; the gradient of what broadcasts has the batch of that."""
    if not broadcasts(name):
        return batch
    *mapped, _ = batch
    return (*mapped, given[source_of(name)].shape[len(mapped)])


@functools.lru_cache(maxsize=1024)  # an eager call asks the same of the same arrays again
def _described(
    call: Call, specs: tuple[tuple[str, TensorSpec], ...]
) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every result, without mapped axes."""
    described = describe(call.operation, dict(specs), call.described)
    return [(name, described.shapes[name], described.dtypes[name]) for name in call.results]


def folded(name: str, shape: Sequence[int], mapped: int) -> tuple[int, ...]:
    """The shape of a tensor with the mapped axes made part of its batch, if it has one."""
    if not mapped or not has_batch(name):
        return tuple(shape)
    return (math.prod(shape[: mapped + 1]), *shape[mapped + 1 :])


def spec_of(shape: tuple[int, ...], dtype: Any) -> TensorSpec:
    """The description of an array of XLA on the host."""
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
    """The forward pass of the keywords: of a window its sides, of a block mask a block, checked.

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
    """The keywords with a window, whose sides may be negative here: such a side is a bound.

    A window that shows nothing becomes a causal mask before the first key.
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
    """Hold the arrays of a forward pass against each other and the keywords.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        Naming the argument as it is named here.
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
    """A text with the arguments named as they are here."""
    return re.sub(r"\b([qkv]|out_dtype)\b", lambda found: _NAMES[found[0]], text)
