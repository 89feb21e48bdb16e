"""Runners of the tests: the public API with a backend and an algorithm, in guarded buffers.

A new pair is one line in :data:`PAIRS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash import dispatch
from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa2 import takes_few
from cuflash.planning.plan import Plan
from cuflash.planning.problem import DTYPES, AttentionProblem
from cuflash.planning.tiles import fa3

from .arena import Arena
from .case import Case
from .data import operands, tensor
from .poisoned import without
from .seen import LENGTHS
from .written import WRITTEN, given_to

__all__ = ["PAIRS", "RUNNERS", "ApiRunner", "fa3_serves"]

#: The backends and algorithms. "auto" stands for FlashAttention-3, which does not serve every
#: problem; "auto" gives the others, and those of few queries, to FlashAttention-2.
PAIRS = (
    ("numpy", "fa1"),
    ("numpy", "fa2"),
    ("cuda", "fa1"),
    ("cuda", "fa2"),
    ("cuda", "auto"),
)


@dataclass(frozen=True)
class ApiRunner:
    """Calls ``cuflash`` with every tensor in an :class:`Arena` and its own strides.

    Every call must run the named backend and algorithm.

    Attributes
    ----------
    backend, algorithm : str
        The ones that the call names.
    destinations : bool
        Whether ``out=``, ``lse_out=`` and ``grads=`` are given, with the case's strides; otherwise
        the library makes the results.
    poison : {"nan", "huge"}
        The arena's fill. In rows that do not count, infinity stands for "huge".
    options : tuple of (str, value)
        More keywords, such as ``("blocks", (64, 64))`` or ``("deterministic", True)``,
        for the pass that takes them.
    """

    backend: str
    algorithm: str
    destinations: bool = True
    poison: str = "nan"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def xp(self) -> ModuleType:
        """The module of the arrays."""
        if self.backend == "numpy":
            return np
        import cupy

        return cupy

    def explain(self, case: Case, operation: str = "forward") -> Any:
        """The plan of a case with contiguous arrays; only this function calls ``explain``."""
        shapes = [case.shape(name) for name in ("q", "k", "v")]
        options = self._options(case, operation)
        if case.sinks:
            options["sinks"] = case.sinks
        if case.alibi and not case.written:
            options["alibi_slopes"] = case.shape("alibi_slopes")
        named = ("bias", "mask", "dropout_seed", *LENGTHS, *(WRITTEN if case.written else ()))
        pairs = {name: tensor(case, name) for name in case.operands if name in named}
        options |= given_to(case, _named(Arena(self.xp, self.poison), case, pairs))
        if case.operands and operation == "backward":
            options["wrt"] = case.wrt
        return cuflash.explain(*shapes, operation=operation, dtype=case.dtype, **options)

    def tiles(self, case: Case, operation: str = "forward") -> tuple[int, int]:
        """``(block_q, block_kv)`` of the plan."""
        explanation = self.explain(case, operation)
        return explanation.block_q, explanation.block_kv

    def forward(
        self,
        case: Case,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        **beside: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse."""
        arena = Arena(self.xp, self.poison)
        inputs = _place(arena, case, {"q": q, "k": k, "v": v})
        options = self._options(case, "forward") | self._workspace(arena, case, "forward")
        options |= given_to(case, _named(arena, case, operands(case, **beside)))
        if self.destinations:
            options["out"] = arena.output(
                "out", case.shape("out"), case.storage, case.recipe("out")
            )
            options["lse_out"] = arena.output("lse", case.shape("lse"), case.statistics)
        results = self._spied(
            case, "forward", lambda: cuflash.attention(*inputs, return_lse=True, **options)
        )
        return self._finish(arena, case, results)

    def backward(
        self,
        case: Case,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        dlse: np.ndarray | None = None,
        **beside: np.ndarray | None,
    ) -> tuple[np.ndarray, ...]:
        """Gradients, as ``case.gradients`` names them."""
        arena = Arena(self.xp, self.poison)
        named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        inputs = _place(arena, case, named)
        options = self._options(case, "backward") | self._workspace(arena, case, "backward")
        options |= given_to(case, _named(arena, case, operands(case, **beside)))
        if case.operands:
            options["wrt"] = case.wrt
        if dlse is not None:
            (options["dlse"],) = _place(arena, case, {"dlse": dlse})
        if self.destinations:
            options["grads"] = tuple(
                arena.output(name, case.shape(name), case.dtype_of(name), case.recipe(name))
                for name in case.gradients
            )
        results = self._spied(
            case, "backward", lambda: cuflash.attention_backward(*inputs, **options)
        )
        return self._finish(arena, case, results)

    def _spied(self, case: Case, operation: str, call: Callable[[], Any]) -> Any:
        """The result of the call; fails unless this backend and algorithm ran, once, and no
        other."""
        ran: list[Any] = []
        with dispatch.observe(ran.append):
            results = call()
        rows_q = case.batch * case.heads_q * case.seqlen_q
        rows_kv = case.batch * case.heads_kv * case.seqlen_kv
        of_heads = sum(math.prod(case.shape(name)) for name in case.wrt if name in case.operands)
        something = rows_q or (operation == "backward" and (rows_kv or of_heads))
        expected = [(self.backend, self._expected(plan)) for plan in ran[:1]] if something else []
        assert [(plan.backend, plan.algorithm) for plan in ran] == expected, case.repro
        assert bool(ran) == bool(something), case.repro
        return results

    def _expected(self, plan: Plan) -> str:
        """The algorithm that must have run."""
        if self.algorithm != "auto":
            return self.algorithm
        limits, blocks = DeviceLimits.query(0), dict(self.options).get("blocks")
        if takes_few(plan.problem, limits, blocks, None):
            return "fa2"
        served = fa3_serves(plan.problem) and limits.compute_capability == (9, 0)
        if served and blocks is not None:  # fa3, if one of its tiles has these blocks
            tiles = fa3.candidates(plan.problem, limits, every=True)
            served = any((tile.block_q, tile.block_kv) == blocks for tile in tiles)
        return "fa3" if served else "fa2"

    def _options(self, case: Case, operation: str) -> dict[str, Any]:
        named = {"backend": self.backend, "algorithm": self.algorithm, **case.options}
        only = {"deterministic": "backward", "out_dtype": "forward"}
        more = {key: value for key, value in self.options if only.get(key, operation) == operation}
        return named | more

    def _workspace(self, arena: Arena, case: Case, operation: str) -> dict[str, Any]:
        """A poisoned workspace for any strides: fa2 handles strides that fa3 cannot load."""
        if self.backend == "numpy":
            return {}
        algorithms = ("auto", "fa2") if self.algorithm == "auto" else (self.algorithm,)
        runners = [replace(self, algorithm=algorithm) for algorithm in algorithms]
        needed = max(runner.explain(case, operation).workspace_bytes for runner in runners)
        return {"workspace": arena.workspace(needed)}

    def _finish(self, arena: Arena, case: Case, results: tuple[Any, ...]) -> Any:
        arena.check(case.repro)
        if self.backend == "numpy":
            return tuple(results)
        return tuple(self.xp.asnumpy(result) for result in results)


def fa3_serves(problem: AttentionProblem) -> bool:
    """Whether "auto" gives a problem to FlashAttention-3, on a device for it."""
    served = problem.alignment == "tensor_map" and problem.seqlen_kv > 0
    served &= DTYPES[problem.storage].itemsize == 2
    if problem.operation == "forward":
        served &= all(one.mappable or not one.staged for one in problem.operands.values())
    if problem.operation == "backward":
        served &= problem.heads_q * problem.seqlen_q > 0
    return served


def _named(arena: Arena, case: Case, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays of a call, with poison in all rows that do not count."""
    given = without(case, arrays, np.inf if arena.poison == "huge" else np.nan)
    return {name: arena.input(name, array, case.recipe(name)) for name, array in given.items()}


def _place(arena: Arena, case: Case, arrays: dict[str, np.ndarray]) -> list[Any]:
    return list(_named(arena, case, arrays).values())


RUNNERS = {pair: ApiRunner(*pair) for pair in PAIRS}
