"""A case of attention without its data, and the line that reproduces it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np

from .repro import line_of, read
from .seen import LENGTHS, Seen, named_lengths
from .strides import CONTIGUOUS, Strides, any_recipe

__all__ = ["LAYOUTS", "OF_FEATURES", "OF_HEADS", "TENSORS", "VALUES", "Case"]

STORAGE: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
LAYOUTS = ("bshd", "bhsd", "shd", "hsd", "sd")
#: Families of values; see ``data``.
VALUES = (
    "normal",
    "small",
    "x8",
    "x30",
    "integers",
    "outliers",
    "equal",
    "zeros",
    "zero_q",
    "positive_v",
)
#: The tensors with a recipe of strides, in the order of ``Case.strides``.
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_SIZES_OF = {"q": "qd", "k": "kd", "v": "kv", "out": "qv"}
_LIKE = {"dq": "q", "dk": "k", "dv": "v", "dout": "out", "dlse": "lse"}
#: Arrays with a number for each head, and their gradients.
OF_HEADS = ("alibi_slopes", "sinks", "dalibi_slopes", "dsinks")
#: All arrays with axes of their own.
OF_FEATURES = (*OF_HEADS, "bias", "dbias", "mask", "dropout_seed", *LENGTHS)


@dataclass(frozen=True)
class Case(Seen):
    """One problem for either pass; ``seed`` and ``values`` determine its data."""

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    seqlen_q: int = 1
    seqlen_kv: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    causal: bool = False
    q_offset: int | None = None
    scale: float | None = None
    layout: str = "bshd"
    seed: int = 0
    values: str = "normal"
    window: str = ""  # "left:right"; an absent side has no bound
    sinks: str = ""  # their dtype; empty for none
    softcap: float | None = None
    alibi: str = ""  # "heads": a slope for each head, "batch": for each batch entry too
    #: Its last axes, each a letter of "bhqk" or 1; after ":" its dtype, if not the case's; "-inf"
    #: at the end hides some pairs. Its strides follow from the seed.
    bias: str = ""
    mask: str = ""  # its last axes, as for a bias; True for most pairs. "-blocks": hides blocks
    #: The share of the weights that is dropped. The seed is an integer; with ":2" or ":4" at the
    #: end it is an array of this many words.
    dropout: str = ""
    #: The first rows that count: "q", "k" or "qk", with numbers for each entry from the seed; or
    #: the numbers, as in "3,5/7,9" for queries and for keys.
    used: str = ""
    written: bool = False  # soft cap, slopes, bias and mask are one function of scores
    strides: tuple[Strides, ...] = (CONTIGUOUS,) * len(TENSORS)

    def __post_init__(self) -> None:
        grouped = self.heads_q % self.heads_kv == 0 if self.heads_kv else self.heads_q == 0
        fits = ("b" in self.layout or self.batch == 1) and (
            "h" in self.layout or self.heads_q == self.heads_kv == 1
        )
        used = named_lengths(self.used)
        known = self.dtype in STORAGE and self.values in VALUES
        known &= self.sinks in ("", self.dtype, self.statistics.name)
        known &= self.alibi in ("", "heads", "batch")
        known &= all(len(rows or self.batch * "b") == self.batch for rows in used.values())
        for axes in (self.bias_axes, self.mask_axes):
            own = zip(axes, "bhqk"[4 - len(axes) :], strict=True)
            known &= all(one in ("1", letter) for one, letter in own)
        if not (grouped and fits and known):
            raise ValueError(f"no such case: {self}")

    @property
    def storage(self) -> np.dtype[Any]:
        """Dtype of q, k and v and of similar tensors."""
        return np.dtype(STORAGE[self.dtype])

    @property
    def statistics(self) -> np.dtype[Any]:
        """Dtype of lse."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def operands(self) -> tuple[str, ...]:
        """Arrays beside q, k and v, in the order of their gradients."""
        has = {"alibi_slopes": self.alibi, "bias": self.bias, "mask": self.mask}
        has |= {"sinks": self.sinks, "dropout_seed": self.dropout.partition(":")[2]}
        has |= dict.fromkeys(named_lengths(self.used), "used")
        return tuple(name for name, kind in has.items() if kind)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The results of the backward pass."""
        return tuple(f"d{name}" for name in self.wrt)

    @property
    def wrt(self) -> tuple[str, ...]:
        """The arrays that have gradients."""
        without = {
            "mask",
            "dropout_seed",
            *LENGTHS,
            *(("alibi_slopes", "bias") if self.written else ()),
        }
        return ("q", "k", "v", *(name for name in self.operands if name not in without))

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Dtype of any input or result."""
        if name in ("lse", "dlse", "alibi_slopes", "dalibi_slopes"):
            return self.statistics
        if name in ("bias", "dbias"):
            _, _, dtype = self.bias.removesuffix("-inf").partition(":")
            return np.dtype(STORAGE[dtype or self.dtype])
        if name in LENGTHS:
            return np.dtype(np.int32)
        if name in ("mask", "dropout_seed"):
            return np.dtype(bool if name == "mask" else np.uint32)
        return np.dtype(STORAGE[self.sinks]) if name in ("sinks", "dsinks") else self.storage

    @property
    def bias_axes(self) -> str:
        """The axes of the bias: letters of "bhqk", or 1."""
        return self.bias.removesuffix("-inf").partition(":")[0]

    @property
    def mask_axes(self) -> str:
        """The axes of the mask: letters of "bhqk", or 1."""
        return self.mask.removesuffix("-blocks")

    @property
    def dropout_p(self) -> float:
        """The share of the weights that is dropped."""
        return float(self.dropout.partition(":")[0] or 0)

    @property
    def dropout_seed(self) -> Any:
        """An integer of up to 64 bits, or an array."""
        words = self.dropout.partition(":")[2]
        drawn = np.random.default_rng([self.seed, 104]).integers(0, 2**32, int(words or 2))
        return drawn.astype(np.uint32) if words else int(drawn[0]) + 2**32 * int(drawn[1])

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def factor(self) -> float:
        """The scale, with the default filled in."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The window: keys to the left and right of a query's own key; None for no bound."""
        left, _, right = self.window.partition(":")
        return int(left) if left else None, int(right) if right else None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of the problem, without arrays."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "q_offset": self.q_offset,
            "layout": self.layout,
            **({"window_size": self.sides} if self.window else {}),
            **({"softcap": self.softcap} if self.softcap and not self.written else {}),
            **({"dropout_p": self.dropout_p} if self.dropout else {}),
            **({"dropout_seed": self.dropout_seed} if self._counted else {}),
        }

    @property
    def _counted(self) -> bool:
        """Whether the seed is an integer."""
        return bool(self.dropout) and ":" not in self.dropout

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in the layout."""
        name = _LIKE.get(name, name)
        if name in ("bias", "dbias", "mask"):
            axes = self.mask_axes if name == "mask" else self.bias_axes
            sizes = {"b": self.batch, "h": self.heads_q, "q": self.seqlen_q, "k": self.seqlen_kv}
            return tuple(sizes.get(axis, 1) for axis in axes)
        if name == "dropout_seed":
            return (int(self.dropout.partition(":")[2]),)
        if name in LENGTHS:
            return (self.batch,)
        if name in OF_HEADS:
            each = self.alibi == "batch" and "alibi" in name
            return (self.batch, self.heads_q) if each else (self.heads_q,)
        if name == "lse":
            sizes = {"b": self.batch, "h": self.heads_q, "s": self.seqlen_q}
            return tuple(sizes[axis] for axis in "bhs" if axis in self.layout)
        rows, width = _SIZES_OF[name]
        sizes = {
            "b": self.batch,
            "h": self.heads_q if rows == "q" else self.heads_kv,
            "s": self.seqlen_q if rows == "q" else self.seqlen_kv,
            "d": self.head_dim if width == "d" else self.head_dim_v,
        }
        return tuple(sizes[axis] for axis in self.layout)

    def heads_first(self, name: str, array: np.ndarray) -> np.ndarray:
        """The (batch, head, row, dim) view of a tensor; (batch, head, row) for lse and dlse.

        An array with axes of its own is returned unchanged.
        """
        if name in OF_FEATURES:
            return array
        wanted = "bhs" if name in ("lse", "dlse") else "bhsd"
        present = [axis for axis in wanted if axis in self.layout]
        order = present if len(wanted) == 3 else list(self.layout)
        view = array.transpose([order.index(axis) for axis in present])
        return np.expand_dims(view, [i for i, axis in enumerate(wanted) if axis not in present])

    def in_layout(self, array: np.ndarray) -> np.ndarray:
        """A (batch, head, row, dim) array, C-contiguous in the case's layout."""
        order = ["bhsd".index(axis) for axis in self.layout]
        absent = tuple(i for i, axis in enumerate("bhsd") if axis not in self.layout)
        view = array.transpose([*absent, *order])[(0,) * len(absent)]
        return np.ascontiguousarray(view)

    def recipe(self, name: str) -> Strides:
        """The recipe of a tensor's strides; lse, dlse and arrays of heads are contiguous."""
        if name in ("bias", "dbias", "mask"):
            other = ("bias", "dbias", "mask").index(name)
            return any_recipe(len(self.shape(name)), self.seed + other)
        return self.strides[TENSORS.index(name)] if name in TENSORS else CONTIGUOUS

    def with_strides(self, **recipes: Strides) -> Case:
        """The same case with other recipes for the named tensors."""
        merged = dict(zip(TENSORS, self.strides, strict=True)) | recipes
        return replace(self, strides=tuple(merged[name] for name in TENSORS))

    def without_broadcast(self) -> Case:
        """The same case, every element in a place of its own."""
        return replace(self, strides=tuple(replace(r, broadcast=()) for r in self.strides))

    @property
    def repro(self) -> str:
        """One line that :meth:`parse` reads back."""
        return line_of(self, zip(TENSORS, self.strides, strict=True))

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case of a :attr:`repro` line."""
        given, recipes = read(line, {field.name: str(field.type) for field in fields(cls)})
        return cls(**given).with_strides(**recipes)
