"""What is compiled for calls of the public functions, and a call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from cuflash.planning.tiles.fa2_tables import ForwardRow

from ..kit.case import OF_FEATURES, OF_HEADS, TENSORS, Case
from ..kit.data import arrays
from ..kit.strides import CONTIGUOUS, Strides, boxed

__all__ = ["PLACED", "QKV", "Call", "Kernels"]

#: Every array of either pass.
PLACED = (*TENSORS, "lse", "dlse", "lse_out", *OF_FEATURES)
#: What a backward pass differentiates by where nobody says so.
QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Kernels:
    """What is compiled: a kernel of each pass, for two alignments and two types of output."""

    days_of_turn: ClassVar[int] = 4  # within which a whole run has it
    algorithm: str
    dtype: str
    dims: tuple[int, int]
    causal: bool
    blocks: tuple[int, int] | None = None
    architecture: str = "90"
    num_sms: int | None = None  # in place of the device's; few make a block do several tiles
    deterministic: bool = False
    steps: tuple[int, ...] = (16, 64)  # multiples that lengths are about
    parted: bool = False  # also kernels of several blocks for a kv tile
    plain: bool = False  # of one alignment and type of output
    forward_row: ForwardRow | None = None  # the only one that the forward pass has
    window: str = ""  # "left" or "band": the bounds that the keys of a query mostly have
    sinks: str = ""  # their dtype, if there are any
    softcap: bool = False
    alibi: str = ""  # "heads" or "batch": what has a slope of its own
    bias: str = ""  # by which of "qk" it differs, 1 for none of them; after ":" its dtype
    mask: str = ""  # the same of a boolean mask
    dropout: bool = False
    written: bool = False  # the soft cap, slopes, bias and mask, as a function of scores

    @property
    def mapped(self) -> str:
        """The array that comes through the copy engine, from where it lies; empty: none."""
        of_keys = "k" in self.bias.partition(":")[0]
        staged = of_keys and self.algorithm == "fa3" and not self.written
        return "bias" if staged else ""

    @property
    def name(self) -> str:
        words = [
            self.algorithm,
            f"sm_{self.architecture}",
            self.dtype,
            "d{}-dv{}".format(*self.dims),
        ]
        mask = self.window or ("causal" if self.causal else "full")
        words += [mask, "ordered" * self.deterministic]
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
    """A problem, and how the public functions are asked to solve it.

    Attributes
    ----------
    wide, wide_dout
        Whether the output of 16-bit inputs is float32, and the gradient of the output.
    made
        Whether destinations are given, with the strides of the case.
    odd
        Arrays at addresses that are not multiples of their elements' size.
    host
        Whether the arrays are NumPy's, which go to the device and back.
    parts
        Blocks that share a kv tile of FlashAttention-3's backward pass.
    turns
        How often it is made, at other places and on other streams.
    shift
        What is added to every score, through the first column of q and k: exponentials of a
        log-sum-exp so far from 0 are beyond float32 where a score is taken for 0.
    dead
        Queries whose scores are all minus infinity, and whose gradients are infinite.
    wrt
        What the backward pass differentiates by.
    mapped
        The array of pairs that lies as the copy engine reads it, if any.
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
    parts: int = 1
    stream: int = 0
    device: int = 0
    turns: int = 1
    shift: float = 0
    dead: tuple[int, ...] = ()
    wrt: tuple[str, ...] = QKV
    mapped: str = ""

    def __repr__(self) -> str:
        """What makes it again."""
        said = [f"Case.parse({self.case.repro!r})"]
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default:
                said.append(f"{one.name}={value!r}")
        return f"Call({', '.join(said)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints."""
        printer.text(repr(self))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of what the backward pass gives."""
        return tuple(f"d{name}" for name in self.wrt)

    @property
    def out_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.wide else self.case.storage

    def inputs(self) -> dict[str, np.ndarray]:
        """Of both passes."""
        x = arrays(self.case, "q", "k", "v", "dout", "dlse")
        if self.dead:  # rows of zeros that give nothing, and so the same gradients
            x["k"][..., 0] = 1 + np.abs(x["k"][..., 0])
            for name in ("q", "dout", "dlse"):
                self.case.heads_first(name, x[name])[:, :, self.dead] = 0
        elif self.shift:
            # The larger one in q: over the keys dS adds up to nothing, and its errors do not.
            x["q"][..., 0] = self.shift / (8 * self.case.factor)
            x["k"][..., 0] = 8
        if not self.with_dlse:
            del x["dlse"]
        return x | (arrays(self.case, *self.case.operands) if self.case.operands else {})

    def killed(self, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same inputs, the dead queries as the kernels are given them."""
        if not self.dead:
            return x
        x = {name: array.copy() for name, array in x.items()}
        self.case.heads_first("q", x["q"])[:, :, self.dead, 0] = -np.inf
        self.case.heads_first("dout", x["dout"])[:, :, self.dead] = np.inf
        return x

    def recipe(self, name: str) -> Strides:
        """Of any array of the call."""
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
