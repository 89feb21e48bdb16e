"""Packed batches, and their expected results from the reference, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cuflash import reference
from cuflash.planning.plan import Algorithm

from .limits import OF_LARGEST

__all__ = ["ROWS", "Row"]

_Arrays = dict[str, Any]
#: Queries and keys of every sequence: empty ones at the beginning, in the middle and at the end,
#: queries or keys alone, whole tiles, ends inside a tile, single rows.
_SEQUENCES = (
    *((0, 0), (129, 200), (64, 128), (1, 1), (0, 70), (33, 0), (0, 0)),
    *((200, 333), (7, 3), (96, 64), (0, 5)),
)


@dataclass(frozen=True)
class Row:
    """A packed batch and other features of the call."""

    days_of_turn: ClassVar[int] = 7  # the emulator has its turn once in so many days
    algorithm: Algorithm
    dtype: str
    sequences: tuple[tuple[int, int], ...] = _SEQUENCES
    behind: tuple[int, int] = (37, 150)  # rows after the last sequence
    heads: tuple[int, int] = (2, 1)
    width: int = 64
    architecture: str = "90"
    deterministic: bool = False
    wild: bool = False  # offsets that decrease or lie outside of the arrays, with the same meaning
    num_sms: int | None = None  # of an emulated device; with few, blocks do several tiles
    options: _Arrays = field(default_factory=dict)  # keywords of the call
    more: tuple[str, ...] = ()  # names of arrays of features

    @property
    def name(self) -> str:
        words = [self.algorithm, self.dtype, f"d{self.width}", "ordered" * self.deterministic]
        words += [self.architecture, "few" * (len(self.sequences) < 5), "wild" * self.wild]
        words += ["many" * (len(self.sequences) > 50), "heads" * (self.heads[0] > 4), *self.more]
        words += [f"{name}-{value}".replace(" ", "") for name, value in self.options.items()]
        return "-".join(filter(None, words))

    @property
    def offsets(self) -> tuple[list[int], list[int]]:
        """The begin of each sequence, and the end of the last one."""
        found: tuple[list[int], list[int]] = ([0], [0])
        for lengths in self.sequences:
            for begins, length in zip(found, lengths, strict=True):
                begins.append(begins[-1] + length)
        return found

    @property
    def totals(self) -> tuple[int, int]:
        """The number of rows of the arrays."""
        queries, keys = self.offsets
        return queries[-1] + self.behind[0], keys[-1] + self.behind[1]

    def arrays(self) -> _Arrays:
        """Random numbers; rows after the last sequence are NaN."""
        random = np.random.default_rng(list(self.name.encode()))
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        (rows, keys), (heads_q, heads_kv) = self.totals, self.heads
        shapes = {"q": (rows, heads_q), "k": (keys, heads_kv), "v": (keys, heads_kv)}
        shapes |= {"dout": (rows, heads_q)}
        made: _Arrays = {
            name: random.standard_normal((*shape, self.width)).astype(dtype)
            for name, shape in shapes.items()
        }
        for name, array in made.items():
            end = self.offsets[name in ("k", "v")][-1]
            array[end:] = np.nan
        compute = np.float64 if self.dtype == "float64" else np.float32
        features = {
            "alibi_slopes": random.random(heads_q).astype(compute) / 16,
            "sinks": random.standard_normal(heads_q).astype(compute),
        }
        made |= {name: features[name] for name in self.more}
        given = map(_wild, self.offsets) if self.wild else self.offsets
        queries_at, keys_at = (np.array(begins, np.int32) for begins in given)
        return made | {"cu_seqlens_q": queries_at, "cu_seqlens_kv": keys_at}

    def expected(self, x: _Arrays) -> _Arrays:
        """Every result in float64, sequence by sequence; then 0 or minus infinity."""
        heads = self.heads[0]
        rows = np.zeros((self.totals[0], heads, self.width))
        keys = np.zeros((self.totals[1], self.heads[1], self.width))
        found = {"out": rows, "lse": np.full((heads, self.totals[0]), -np.inf)}
        found |= {"dq": rows.copy(), "dk": keys, "dv": keys.copy()}
        if "sinks" in x:
            found["dsinks"] = np.zeros(heads)
        for of_queries, of_keys in self._places():
            given = {"q": x["q"][of_queries], "k": x["k"][of_keys], "v": x["v"][of_keys]}
            given |= {name: x[name] for name in self.more} | self.options | {"layout": "shd"}
            out, lse = reference.attention(**given)
            found["out"][of_queries], found["lse"][:, of_queries] = out, lse
            dlse = x["dlse"][:, of_queries] if "dlse" in x else None
            grads = reference.attention_backward(x["dout"][of_queries], dlse=dlse, **given)
            found["dq"][of_queries], found["dk"][of_keys], found["dv"][of_keys] = grads[:3]
            if "sinks" in x:
                found["dsinks"] += grads[-1]
        return found

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Rows of queries and of keys of every sequence."""
        queries, keys = ([slice(*pair) for pair in pairwise(at)] for at in self.offsets)
        yield from zip(queries, keys, strict=True)

    def spoil(self, saved: _Arrays) -> None:
        """Put NaN into the rows that a forward pass wrote after the sequences."""
        end = self.offsets[0][-1]
        saved["out"][end:] = np.nan
        saved["lse"][:, end:] = np.nan

    def wrt(self, x: _Arrays) -> tuple[str, ...]:
        """The arrays with gradients."""
        return ("q", "k", "v", *(name for name in ("sinks",) if name in x))

    def check(self, found: _Arrays, expected: _Arrays) -> None:
        """Compare results with the truth, relative to the largest number of each."""
        for name, true in expected.items():
            got = np.asarray(found[name]).astype(np.float64)
            finite = np.isfinite(true)
            assert ((got == true) | finite).all(), f"{self.name}: {name}, where it is not finite"
            error = np.abs(np.where(finite, got - np.where(finite, true, 0), 0)).max(initial=0)
            limit = OF_LARGEST[self.dtype] * np.abs(true[finite]).max(initial=1)
            assert error <= limit, f"{self.name}: {name} is off by {error:.3g} of {limit:.3g}"


def _wild(offsets: list[int]) -> list[int]:
    """Other offsets of the same meaning: an offset below earlier ones makes no rows.

    The first always means row 0 and the last the end of the array.
    """
    inside = [
        offset if offset > before else before - 3 * number
        for number, (before, offset) in enumerate(pairwise(offsets[:-1]), 1)
    ]
    return [17, *inside, 2**31 - 1]


_CAUSAL = {"causal": True}
_WINDOW = {"window_size": (90, 40)}
_FEW = ((129, 200), (0, 7), (40, 70))
#: More sequences than rows of a tile, so that most tiles have no row or one.
_MANY = tuple((number % 3 // 2, number % 4) for number in range(160))
#: The last sequence has the rest of both arrays.
_WILD = {"wild": True, "behind": (0, 0), "sequences": (*_SEQUENCES, (40, 30))}
ROWS = (
    Row("fa1", "float16"),
    Row("fa1", "float32", options=_CAUSAL, more=("sinks",)),
    Row("fa1", "float64", options=_WINDOW, heads=(4, 2)),
    Row("fa2", "float16"),
    Row("fa2", "bfloat16", options=_CAUSAL, architecture="80"),
    Row("fa2", "float32", options=_WINDOW, more=("sinks",)),
    Row("fa2", "float64", options=_CAUSAL, more=("alibi_slopes",)),
    Row("fa2", "float16", deterministic=True, options=_CAUSAL),
    Row("fa2", "float16", deterministic=True),
    Row("fa2", "float16", width=256, options=_CAUSAL, sequences=_FEW),
    Row("fa1", "float32", more=("sinks",), **_WILD),
    Row("fa2", "float16", options=_CAUSAL, more=("sinks",), **_WILD),
    Row("fa3", "float16", options=_CAUSAL, more=("sinks",), **_WILD),
    Row("fa3", "float16", sequences=_FEW, num_sms=1, heads=(6, 6)),
    Row("fa3", "float16", sequences=_FEW, num_sms=1, heads=(6, 6), deterministic=True),
    Row("fa2", "float16", sequences=_MANY, more=("sinks",)),
    Row("fa3", "float16", sequences=_MANY),
    Row("fa3", "float16"),
    Row("fa3", "bfloat16", options=_CAUSAL, heads=(4, 2)),
    Row("fa3", "float16", options=_WINDOW),
    Row("fa3", "float16", options={"causal": True, "q_offset": 20}),
    Row("fa3", "float16", options=_CAUSAL, deterministic=True),
    Row("fa3", "float16", deterministic=True),
    Row("fa3", "float16", width=96, options=_CAUSAL),
    Row("fa3", "bfloat16", width=128, options=_CAUSAL, heads=(4, 1)),
    Row("fa3", "float16", width=192, sequences=_FEW),
    Row("fa3", "float16", width=256, options=_CAUSAL, sequences=_FEW),
    Row("fa3", "float16", options=_CAUSAL, more=("alibi_slopes", "sinks")),
    Row("fa3", "float16", options={"causal": True, "softcap": 5.0}),
)
