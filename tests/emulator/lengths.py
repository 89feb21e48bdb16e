"""Used lengths and packed sequences of any lengths, for kernels that compile once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.planning.kernel import KernelConfig

from ..kit.packed_lengths import Row as Packed
from ..kit.used_lengths import Row as Used
from .build import last_blocks_first
from .host_cupy import HostCupy, host_cupy

__all__ = ["KERNELS", "Kernels", "Lengths", "check", "drawn_lengths"]

_Arrays = dict[str, Any]
_CAUSAL = {"causal": True}
_SMALL = (32, 32)
_DROPPED = {"dropout_p": 0.3, "dropout_seed": 7}


@dataclass(frozen=True, eq=False)  # rows hold dictionaries, which have no hash
class Kernels:
    """The compiled kernels of a row of the kit; tests draw its lengths."""

    days_of_turn: ClassVar[int] = 7  # every row has its turn once in so many days
    row: Packed | Used
    blocks: tuple[int, int] | None = None
    num_sms: int | None = None  # any problem fills a single one
    wide: bool = False  # an output of float32
    steps: tuple[int, ...] = (32, 64)  # lengths are near multiples of these

    @property
    def name(self) -> str:
        words = [type(self.row).__module__.rpartition(".")[2], self.row.name, "wide" * self.wide]
        return "-".join([*filter(None, words), str(self.num_sms or "")]).rstrip("-")

    @property
    def configs(self) -> set[KernelConfig]:
        """The configurations that its calls compile."""
        found: set[KernelConfig] = set()

        def make(config: KernelConfig) -> Any:
            found.add(config)
            return lambda *_: None

        row = _row_of(self, Lengths(((64, 70), (3, 5)), (1, 1), False, -1, True))
        with host_cupy(row.architecture, self.num_sms, make) as host:
            _results(host, self, row, row.arrays())
        return found


@dataclass(frozen=True)
class Lengths:
    """Drawn lengths, and what else a test varies."""

    each: tuple[tuple[int, int], ...]
    behind: tuple[int, int]
    last_first: bool
    spoilt: int  # a sequence whose inputs are all NaN; negative for none
    with_dlse: bool
    none: int = -1  # the used length of an entry without rows: 0 or negative


_WIDE = (64, 128)
_SUNK = Packed("fa3", "float16", heads=(4, 4), more=("sinks",))
KERNELS = (
    Kernels(Packed("fa1", "float16", options=_CAUSAL | _DROPPED), _SMALL),
    Kernels(Packed("fa1", "float32", width=20, more=("sinks",)), (16, 32), steps=(16, 32)),
    Kernels(Packed("fa2", "float16", options=_CAUSAL, more=("sinks",)), _SMALL, wide=True),
    Kernels(Packed("fa2", "float16", width=20), _SMALL),
    Kernels(Packed("fa2", "float16", options=_CAUSAL | _DROPPED), num_sms=1, steps=_WIDE),
    Kernels(Packed("fa2", "bfloat16", deterministic=True), num_sms=1, steps=_WIDE),
    # With so many heads, blocks would clear sums for other blocks.
    Kernels(_SUNK, num_sms=1, wide=True, steps=_WIDE),
    Kernels(Packed("fa3", "bfloat16", options=_CAUSAL, heads=(4, 2)), num_sms=1, steps=_WIDE),
    Kernels(Packed("fa3", "float16", width=192, options=_DROPPED), num_sms=1, steps=_WIDE),
    Kernels(Used("fa1", "float16"), _SMALL),
    Kernels(Used("fa2", "float16", width=20, more=("sinks",)), _SMALL),
    Kernels(Used("fa2", "float16", options=_CAUSAL), num_sms=1, wide=True, steps=_WIDE),
    Kernels(Used("fa3", "float16", options=_CAUSAL), num_sms=1, steps=_WIDE),
    Kernels(Used("fa3", "bfloat16", width=128), num_sms=1, wide=True, steps=_WIDE),
)


def _lengths(steps: tuple[int, ...]) -> st.SearchStrategy[int]:
    """Lengths 0, 1 and 2, and lengths near multiples of the steps."""
    near = st.builds(
        lambda step, times, beside: step * times + beside,
        st.sampled_from(steps),
        st.integers(1, 2),
        st.sampled_from((-1, 0, 1)),
    )
    return st.one_of(st.sampled_from((0, 0, 1, 2)), near)


@st.composite
def drawn_lengths(draw: st.DrawFn, kernels: Kernels) -> Lengths:
    length = _lengths(kernels.steps)
    count = draw(st.integers(1, 5))
    each = [(draw(length), draw(length)) for _ in range(count)]
    kind = draw(st.sampled_from(("some", "some", "many", "many", "one")))
    if isinstance(kernels.row, Used):
        each = [each[0], (draw(length), 0), (0, draw(length)), *each[1:2], each[-1]]
    elif kind == "one":  # few padded keys in its tiles
        each = [(each[0][0], 4 * max(kernels.steps) + each[0][1])]
    elif kind == "many":  # more sequences than warps that list them
        most = draw(st.sampled_from((1, 2)))
        few = st.tuples(st.integers(0, 1), st.integers(0, most))
        each += draw(st.lists(few, min_size=32, max_size=40))
    long = draw(st.sampled_from((False, False, kind != "one")))
    if long:  # a sequence with more rows than a block has threads
        each.insert(0, (1040, draw(st.integers(1, 9))))
    behind = draw(st.sampled_from((0, 1, 40))), draw(st.sampled_from((0, 1, 70)))
    each[0] = (each[0][0], max(each[0][1], 1))  # fa3 does not take empty arrays
    each[-1] = (max(each[-1][0], 1), each[-1][1])
    spoilt = draw(st.integers(-1, len(each) - 1))
    none = draw(st.sampled_from((0, -1, -100, -100, -(2**31))))
    return Lengths(tuple(each), behind, draw(st.booleans()), spoilt, draw(st.booleans()), none)


def _used(row: Used, drawn: Lengths) -> Used:
    """The row with the drawn lengths, some of them negative or longer than the arrays."""
    each = drawn.each
    whole = tuple(max(max(one[i] for one in each), 1) for i in (0, 1))
    used = [
        [
            _said(drawn, n, most, more)
            for n, most, more in zip(one, whole, drawn.behind, strict=True)
        ]
        for one in each
    ]
    return replace(row, used=tuple(map(tuple, used)), lengths=whole)  # type: ignore[arg-type]


def _said(drawn: Lengths, count: int, most: int, more: int) -> int:
    """The used length for ``count`` rows: ``drawn.none`` for no rows, too large for all rows."""
    if not count:
        return drawn.none
    return count + more if count == most else count


def _row_of(kernels: Kernels, drawn: Lengths) -> Packed | Used:
    row = kernels.row
    if isinstance(row, Used):
        return _used(row, drawn)
    return replace(row, sequences=drawn.each, behind=drawn.behind)


def _spoil_sequence(row: Packed, x: _Arrays, number: int) -> None:
    """Put NaN into all inputs of a sequence."""
    for name, at in zip(("cu_seqlens_q", "cu_seqlens_kv"), row.offsets, strict=True):
        rows = slice(at[number], at[number + 1])
        for array in ("q", "dout") if name.endswith("q") else ("k", "v"):
            x[array][rows] = np.nan


def _results(host: HostCupy, kernels: Kernels, row: Packed | Used, x: _Arrays) -> _Arrays:
    """The results of both passes; the backward pass gets NaN in rows that do not count."""
    given = {n: array for n, array in x.items() if n not in ("dout", "dlse")} | row.options
    options: _Arrays = {"algorithm": row.algorithm, "backend": "cuda", "blocks": kernels.blocks}
    if isinstance(row, Packed):
        options["layout"] = "shd"
    wide = {"out_dtype": "float32"} if kernels.wide else {}
    out, lse = host.call(cuflash.attention, **given, **options, **wide, return_lse=True)
    saved = {"dout": x["dout"], "out": out.copy(), "lse": lse.copy()}
    row.spoil(saved)
    if "dlse" in x:
        saved["dlse"] = x["dlse"]
    options |= {"deterministic": row.deterministic, "wrt": row.wrt(x)}
    if row.algorithm == "fa3":
        del options["blocks"]
    grads = host.call(cuflash.attention_backward, **saved, **given, **options)
    names = ("out", "lse", *(f"d{name}" for name in row.wrt(x)))
    return dict(zip(names, (out, lse, *grads), strict=True))


def _dlse(row: Packed | Used, x: _Arrays) -> np.ndarray:
    """Random numbers; NaN in rows that do not count."""
    heads = row.heads[0]
    rows = x["q"].shape[:-2]
    shape = (heads, *rows) if isinstance(row, Packed) else (rows[0], heads, rows[1])
    dtype = np.float64 if row.dtype == "float64" else np.float32
    saved = {"out": x["q"].copy(), "lse": np.zeros(shape, dtype)}
    row.spoil(saved)
    random = np.random.default_rng(5)
    return saved["lse"] + random.standard_normal(shape).astype(dtype)


def _expected(row: Packed | Used, x: _Arrays) -> _Arrays:
    """The reference's results, sequence by sequence; draws depend on the sequence's number."""
    if not isinstance(row, Packed) or "dropout_p" not in row.options:
        return row.expected(x)
    given = {n: array for n, array in x.items() if n not in ("dout", "dlse")} | row.options
    given["layout"] = "shd"
    out, lse = reference.attention(**given)
    grads = reference.attention_backward(x["dout"], dlse=x.get("dlse"), **given)
    named = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in row.wrt(x)[3:]))
    return dict(zip(named, (out, lse, *grads), strict=True))


def _of_saved_output(row: Packed | Used, x: _Arrays, out: Any, expected: _Arrays) -> _Arrays:
    """The expected results, with gradients that follow from the rounded output of the forward pass.

    Where every row sees one key, dq and dk are 0 but for the error of delta from that rounding. An
    error of delta is an error of dlse with the other sign.
    """
    off = np.nan_to_num(np.asarray(out).astype(np.float64) - expected["out"])
    of_rows = (np.nan_to_num(x["dout"].astype(np.float64)) * off).sum(axis=-1)
    again = _expected(row, x | {"dlse": x.get("dlse", 0) - of_rows.swapaxes(-1, -2)})
    return again | {name: expected[name] for name in ("out", "lse")}


def check(kernels: Kernels, drawn: Lengths) -> None:
    row = _row_of(kernels, drawn)
    x = row.arrays()
    if drawn.with_dlse:
        x["dlse"] = _dlse(row, x)
    expected, clean = _expected(row, x), {name: array.copy() for name, array in x.items()}
    if isinstance(row, Packed) and drawn.spoilt >= 0:
        _spoil_sequence(row, x, drawn.spoilt)
    # Blocks of fa3's backward pass wait for sums that earlier blocks clear.
    waits = isinstance(row, Packed) and row.algorithm == "fa3"
    order = last_blocks_first() if drawn.last_first and not waits else contextlib.nullcontext()
    with host_cupy(row.architecture, kernels.num_sms) as host, order:
        found = _results(host, kernels, row, x)
    expected = _of_saved_output(row, clean, found["out"], expected)
    if isinstance(row, Packed) and drawn.spoilt >= 0:
        found = _without(row, found, expected, drawn.spoilt)
    row.check(found, expected)  # type: ignore[arg-type]


def _without(row: Packed, found: _Arrays, expected: _Arrays, number: int) -> _Arrays:
    """The results, with the expected ones for one sequence and for sums over all sequences."""
    for at, names in zip(row.offsets, (("out", "lse", "dq"), ("dk", "dv")), strict=True):
        rows = slice(at[number], at[number + 1])
        for name in names:
            place = (slice(None), rows) if name == "lse" else rows
            found[name] = np.asarray(found[name]).astype(np.float64)
            found[name][place] = expected[name][place]
    if "dsinks" in expected:
        found["dsinks"] = expected["dsinks"]
    return found
