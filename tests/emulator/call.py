"""Calls of the public functions, and the kernels that are compiled for them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from cuflash.planning.tiles.fa2_tables import ForwardRow

from ..kit.case import OF_FEATURES, OF_HEADS, TENSORS, Case
from ..kit.data import arrays
from ..kit.strides import CONTIGUOUS, Strides, boxed

__all__ = ["PLACED", "QKV", "Call", "Kernels"]

#: Names of all arrays of both passes.
PLACED = (*TENSORS, "lse", "dlse", "lse_out", *OF_FEATURES)
#: The default ``wrt`` of a backward pass.
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels: one for each pass, for two alignments and two types of output."""

    days_of_turn: ClassVar[int] = 7  # every kernel has its turn within so many days
    algorithm: str
    dtype: str
    dims: tuple[int, int]
    causal: bool
    blocks: tuple[int, int] | None = None
    architecture: str = "90"
    num_sms: int | None = None  # replaces the device's; with few, blocks do several tiles
    deterministic: bool = False
    steps: tuple[int, ...] = (16, 64)  # lengths are near multiples of these
    parted: bool = False  # also kernels with several blocks for a kv tile
    kept: int = 0  # the most queries, if a backward block keeps all: 128, or 256 of short heads
    plain: bool = False  # one alignment and one type of output
    forward_row: ForwardRow | None = None  # the forward pass's table has only this row
    window: str = ""  # "left" or "band": the bounds that most cases have
    sinks: str = ""  # their dtype; empty for none
    softcap: bool = False
    alibi: str = ""  # slopes "heads" (one a head) or "batch" (also by batch entry)
    bias: str = ""  # its last two axes ("q" or 1, then "k" or 1), and after ":" its dtype
    mask: str = ""  # the last two axes of a boolean mask
    dropout: bool = False
    written: bool = False  # soft cap, slopes, bias and mask are one function of scores

    @property
    def mapped(self) -> str:
        """The array that the copy engine loads in place; empty for none."""
        of_keys = "k" in self.bias.partition(":")[0]
        staged = of_keys and self.algorithm == "fa3" and not self.written
        return "bias" if staged else ""

    @property
    def cut(self) -> bool:
        """Whether parts may cut the steps of a kv tile: there are no features."""
        few = self.sinks or self.softcap or self.alibi or self.bias or self.mask
        return self.parted and not (few or self.window or self.dropout or self.written)

    @property
    def groups(self) -> tuple[int, ...]:
        """Numbers of query heads for each kv head."""
        return (1,) if self.kept else (1, 2, 4, 3)

    def queries(self, length: int) -> int:
        """The length, or the most queries that the kernels take."""
        return min(length, self.kept) if self.kept else length

    @property
    def name(self) -> str:
        words = [
            self.algorithm,
            f"sm_{self.architecture}",
            self.dtype,
            "d{}-dv{}".format(*self.dims),
        ]
        mask = self.window or ("causal" if self.causal else "full")
        words += [mask, "ordered" * self.deterministic, f"kept{self.kept}" * bool(self.kept)]
        words += ["softcap" * self.softcap, f"sinks-{self.sinks}" * bool(self.sinks)]
        words += [f"alibi-{self.alibi}" * bool(self.alibi)]
        words += [f"bias-{self.bias}" * bool(self.bias), f"mask-{self.mask}" * bool(self.mask)]
        words += ["dropout" * self.dropout, "written" * self.written]
        words += ["x".join(map(str, self.blocks or ())), f"{self.num_sms or ''}"]
        return "-".join(word for word in words if word)

    @property
    def options(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "blocks": self.blocks}


@dataclass(frozen=True, repr=False)
class Call:
    """A problem, and the way in which the public functions are called with it.

    Attributes
    ----------
    wide, wide_dout
        Whether 16-bit inputs have a float32 output, and a float32 gradient of the output.
    made
        Whether the caller gives destinations, with the strides of the case.
    odd
        Arrays at addresses that are not multiples of their elements' size.
    host
        Whether the arrays are NumPy's, which the library copies to the device and back.
    shared
        The number of blocks that share a kv tile of FlashAttention-3's backward pass, whether they
        cut its steps, not only its query heads, and how many of the last tiles only; 0: all.
    turns
        The number of repetitions, with arrays at other places and on other streams.
    shift
        Added to every score, through the first column of q and k. If a kernel computes 0 for a
        score, the distance of this 0 from the log-sum-exp is beyond float32's exponentials.
    dead
        Queries whose scores are all minus infinity, and whose gradients are infinite.
    wrt
        The arrays by which the backward pass differentiates.
    mapped
        The array of pairs that is laid out for the copy engine, if any.
    """

    case: Case
    wide: bool = False
    wide_dout: bool = False
    with_dlse: bool = False
    made: bool = False
    workspace: bool = False
    host: bool = False
    odd: tuple[str, ...] = ()
    rows: Strides = CONTIGUOUS
    shared: tuple[int, bool, int] = (1, False, 0)
    stream: int = 0
    device: int = 0
    turns: int = 1
    shift: float = 0
    dead: tuple[int, ...] = ()
    wrt: tuple[str, ...] = QKV
    mapped: str = ""

    def __repr__(self) -> str:
        """The text that makes the call again."""
        said = [f"Case.parse({self.case.repro!r})"]
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default:
                said.append(f"{one.name}={value!r}")
        return f"Call({', '.join(said)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis prints the same text."""
        printer.text(repr(self))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the backward pass's results."""
        return tuple(f"d{name}" for name in self.wrt)

    @property
    def out_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.wide else self.case.storage

    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of both passes."""
        x = arrays(self.case, "q", "k", "v", "dout", "dlse")
        if self.dead:  # like dead rows, rows of zeros add nothing to gradients
            x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
            for name in ("q", "dout", "dlse"):
                self.case.heads_first(name, x[name])[:, :, self.dead] = 0
        elif self.shift:
            # q has the larger number, since dq is dS times k: over the keys dS sums to 0, but its
            # errors do not.
            x["q"][..., 0] = self.shift / (8 * self.case.factor)
            x["k"][..., 0] = 8
        if not self.with_dlse:
            del x["dlse"]
        return x | (arrays(self.case, *self.case.operands) if self.case.operands else {})

    def killed(self, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inputs with the dead queries that the kernels get."""
        if not self.dead:
            return x
        x = {name: array.copy() for name, array in x.items()}
        self.case.heads_first("q", x["q"])[:, :, self.dead, 0] = -np.inf
        self.case.heads_first("dout", x["dout"])[:, :, self.dead] = np.inf
        return x

    def recipe(self, name: str) -> Strides:
        """The strides of an array of the call."""
        if name in TENSORS:
            return self.case.recipe(name)
        if name == self.mapped:
            return boxed(self.case.shape(name), self.case.dtype_of(name).itemsize)
        if name in ("bias", "dbias", "mask"):
            return self.case.recipe(name)
        row = self.rows
        own = name in (*OF_HEADS, "dropout_seed")
        ndim = len(self.case.shape(name if own else "lse"))
        return Strides(gaps=row.gaps[-ndim:], offset=row.offset) if row.gaps else row
