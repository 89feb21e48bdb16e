"""Runs drawn calls on the stand-in of CuPy and compares each with the truth."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

import cuflash
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan
from cuflash.planning.tiles.fa2_tables import FORWARD

from ..kit.arena import Arena
from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.few import few_alone, short_alone
from ..kit.oracle import Truth, judge
from ..kit.parts import parts_forced
from ..kit.strides import Strides
from ..kit.written import given_to
from .build import emulate
from .call import QKV, Call, Kernels
from .host_cupy import HostCupy, host_cupy

__all__ = ["Session", "check", "configs_of", "session_of"]

#: Bytes enough for the workspace of any of these problems.
_WORKSPACE = 1 << 24


#: The tiles of gradients, by the most queries that a block keeps.
_TILES: dict[int, Callable[[], contextlib.AbstractContextManager[None]]] = {
    0: contextlib.nullcontext,
    128: few_alone,
    256: short_alone,
}


@contextlib.contextmanager
def session_of(
    kernels: Kernels,
    shared: tuple[int, bool, int] = (1, False, 0),
    make: Callable[[Any], Any] = emulate,
) -> Iterator[HostCupy]:
    """A stand-in for CuPy that runs these kernels."""
    rows = {2: (kernels.forward_row,)} if kernels.forward_row else {}
    with (
        mock.patch.dict(FORWARD, rows),
        parts_forced(*shared),
        _TILES[kernels.kept](),
        host_cupy(kernels.architecture, kernels.num_sms, make) as host,
    ):
        yield host


def check(kernels: Kernels, call: Call) -> None:
    """Run both passes of a call several times, with arrays at other places and on other streams."""
    x = call.inputs()
    truth, x = judge(call.case, x), call.killed(x)
    with session_of(kernels, call.shared) as host:
        kept: list[Session] = []
        for turn in range(call.turns):
            # The first two turns have their own arrays; the last one has memory of the first.
            session = Session(host, kernels, call, call.stream + turn % 2)
            session.run(x, truth)
            kept = [session] if turn == 0 else []
        del kept


def configs_of(kernels: Kernels) -> set[KernelConfig]:
    """The configurations that calls of these kernels compile."""
    found: set[KernelConfig] = set()

    def make(config: KernelConfig) -> Any:
        found.add(config)
        return lambda *_: None

    case = Case(
        2, 4, 4 if kernels.kept else 1, 70, 100, *kernels.dims, kernels.dtype, causal=kernels.causal
    )
    window = {"": "", "left": "9:", "band": "9:3"}[kernels.window]
    case = replace(case, window=window, causal=kernels.causal and not window)
    case = replace(case, sinks=kernels.sinks, softcap=9.0 if kernels.softcap else None)
    case = replace(case, alibi=kernels.alibi, bias=kernels.bias, mask=kernels.mask)
    case = replace(case, dropout="0.3" if kernels.dropout else "", written=kernels.written)
    odd = case.with_strides(**{name: Strides(gaps=(0, 0, 1, 0)) for name in ("q", "out", "dq")})
    x = arrays(case, "q", "k", "v", "dout") | {"out": np.zeros(case.shape("out"), case.storage)}
    x["lse"] = np.zeros(case.shape("lse"), case.statistics)
    x |= arrays(case, *case.operands) if case.operands else {}
    wide = (False, True) if case.storage.itemsize == 2 and not kernels.plain else (False,)
    strided = (case,) if kernels.plain or kernels.algorithm == "fa3" else (case, odd)
    ways = [(1, False, 0), *[(2, False, 0)] * kernels.parted]
    ways += [(2, True, 0), (2, True, 1)] * kernels.cut
    for shared in ways:
        with session_of(kernels, shared, make) as host:
            named = dict.fromkeys((QKV, case.wrt))
            for w, one, wrt in itertools.product(wide, strided, named):
                call = Call(one, wide=w, made=True, wrt=wrt, mapped=kernels.mapped)
                session = Session(host, kernels, call, 0)
                out, _ = session.forward(x)
                session.backward(x | {"out": np.zeros_like(out.peek())})
    return found


@dataclass
class Session:
    """One repetition of a call, with its arrays."""

    host: HostCupy
    kernels: Kernels
    call: Call
    stream: int
    arenas: list[Arena] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def run(self, x: Mapping[str, np.ndarray], truth: Truth) -> None:
        """Run both passes and compare every result with the truth."""
        call, case = self.call, self.call.case
        runtime = self.host.runtime
        with runtime.on_device(call.device), runtime.on_stream(self.stream, call.device):
            out, lse = self.forward(x)
            self._judge(truth, {"out": out, "lse": lse})
            saved = {"out": self._read(out), "lse": self._read(lse)}
            assert saved["out"].dtype == call.out_dtype, case.repro
            grads = self.backward({**x, **saved})
            self._judge(truth, dict(zip(call.gradients, grads, strict=True)))
        for arena in self.arenas:
            arena.check(case.repro)

    def forward(self, x: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        """Out and lse of the forward pass."""
        call, case = self.call, self.call.case
        options = {**case.options, **self.kernels.options, **self._more()}
        if call.wide and not call.made:
            options["out_dtype"] = "float32"
        if call.made:
            options["out"] = self._place("out", case.shape("out"), call.out_dtype)
            options["lse_out"] = self._place("lse_out", case.shape("lse"), case.statistics)
        inputs = [self._place(name, x[name]) for name in "qkv"]
        options |= given_to(case, {name: self._place(name, x[name]) for name in case.operands})
        results = self._called(cuflash.attention, *inputs, return_lse=True, **options)
        if call.made:
            assert results[0] is options["out"]
            assert results[1] is options["lse_out"]
        return results  # type: ignore[no-any-return]

    def backward(self, x: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        """The gradients of the backward pass."""
        call, case = self.call, self.call.case
        options = {**case.options, **self.kernels.options, **self._more()}
        if self.kernels.algorithm == "fa3":
            del options["blocks"]
        options["deterministic"] = self.kernels.deterministic
        given = dict(x)
        if call.wide_dout and call.wide:
            given["dout"] = given["dout"].astype(np.float32)
        if call.with_dlse:
            options["dlse"] = self._place("dlse", given["dlse"])
        options |= given_to(case, {name: self._place(name, x[name]) for name in case.operands})
        if call.wrt != QKV:
            options["wrt"] = call.wrt
        if call.made:
            options["grads"] = tuple(
                self._place(name, case.shape(name), case.dtype_of(name)) for name in call.gradients
            )
        names = ("dout", "q", "k", "v", "out", "lse")
        inputs = [self._place(name, given[name]) for name in names]
        results = self._called(cuflash.attention_backward, *inputs, **options)
        if call.made:
            assert all(a is b for a, b in zip(results, options["grads"], strict=True))
        return results  # type: ignore[no-any-return]

    def _called(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        ran: list[Plan] = []
        with cuflash.dispatch.observe(ran.append):
            results = self.host.call(function, *inputs, **options)
        assert [(p.backend, p.algorithm) for p in ran] in (
            [],
            [("cuda", self.kernels.algorithm)],
        )
        return results

    def _more(self) -> dict[str, Any]:
        """Keywords: a workspace if the caller has one, and the backend for NumPy's arrays."""
        more: dict[str, Any] = {"backend": "cuda"} if self.call.host else {}
        if self.call.workspace:
            more["workspace"] = self.host.cupy.empty(_WORKSPACE, np.uint8)
        return more

    def _place(self, name: str, given: Any, dtype: Any = None) -> Any:
        """An input with the given values, or a destination of a shape and dtype, in its module."""
        call = self.call
        xp = np if call.host else self.host.cupy
        if name in call.odd:
            return self._at_odd_address(xp, given, dtype)
        arena = Arena(xp)
        self.arenas.append(arena)
        recipe = call.recipe(name)
        if dtype is not None:
            return arena.output(name, given, dtype, recipe)
        return arena.input(name, given, recipe)

    def _at_odd_address(self, xp: Any, given: Any, dtype: Any) -> Any:
        values = np.full(given, np.nan, dtype) if dtype is not None else np.asarray(given)
        held = np.concatenate(
            [np.zeros(1, np.uint8), np.ascontiguousarray(values).reshape(-1).view(np.uint8)]
        )
        array = xp.asarray(held)[1:].view(values.dtype).reshape(values.shape)
        self.kept.append(array)
        return array

    def _judge(self, truth: Truth, results: Mapping[str, Any]) -> None:
        for name, result in results.items():
            got = self._read(result)
            if self.call.dead:
                got = self._without_dead_rows(truth, name, got)
            compare(truth, name, got).check()

    def _without_dead_rows(self, truth: Truth, name: str, got: np.ndarray) -> np.ndarray:
        """Check dead rows of a result, and replace them by the truth's rows for ``compare``."""
        if name not in ("out", "lse", "dq"):
            return got
        case, dead, got = self.call.case, self.call.dead, got.copy()
        rows = case.heads_first(name, got)
        expected = -np.inf if name == "lse" else 0
        assert (rows[:, :, dead] == expected).all(), f"{name} of dead rows: {case.repro}"
        rows[:, :, dead] = truth.results[name][:, :, dead].astype(got.dtype)
        return got

    def _read(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.peek()
