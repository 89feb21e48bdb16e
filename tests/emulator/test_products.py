"""Products of float32 and float64 on the emulated tensor cores, in FlashAttention-1's kernels.

Its plans multiply these types by fused multiply-adds, so the configurations are
changed on their way from the plan to the kernel.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash import pipeline
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Plan, plan
from cuflash.planning.tiles import fa1
from cuflash.planning.tiles.common import ProductKind, shared_array

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .device import EmulatedRunner
from .test_device_code import _cases

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


@dataclass(frozen=True)
class ProductRunner(EmulatedRunner):
    """A runner of FlashAttention-1 with other products than it plans."""

    products: ProductKind = "tf32"
    mma_depth: int = 8
    fragment_rows: int = 16

    def prepare(self, case: Case, operation: Any, tensors: Any) -> cuflash.Prepared:
        with self._planned():
            return super().prepare(case, operation, tensors)

    @contextlib.contextmanager
    def _planned(self) -> Iterator[None]:
        def rows(_: str) -> tuple[int, ...]:
            return (self.fragment_rows,)

        with (
            mock.patch.object(fa1, "fragment_row_choices", rows),
            # Registers are no concern of the emulator.
            mock.patch.object(fa1, "_OTHER_REGISTERS", defaultdict(int)),
            mock.patch.object(pipeline, "plan", self._plan),
        ):
            yield

    def _plan(self, *args: Any, **options: Any) -> Plan:
        chosen = plan(*args, **options)
        spare = _scratch_bytes(chosen.tile) if isinstance(chosen.tile, fa1.Fa1ForwardTile) else 0

        def changed(config: KernelConfig) -> KernelConfig:
            if config.kernel == "delta":
                return config
            return replace(
                config,
                products=self.products,
                mma_depth=self.mma_depth,
                shared_bytes=config.shared_bytes - spare,
            )

        launches = tuple(replace(x, config=changed(x.config)) for x in chosen.launches)
        return replace(chosen, launches=launches)


def _scratch_bytes(tile: fa1.Fa1ForwardTile) -> int:
    """What the weights pass through on their way to scalar products, and no others."""
    elements = tile.block_q // tile.warps_q * tile.block_kv
    scratch, unused = (shared_array(n, tile.storage) for n in (elements, 0))
    return tile.warps_q * (scratch - unused)


_Make = Callable[[tuple[int, int]], ProductRunner]

#: By name: dtype, and the runner of given blocks.
RUNNERS: dict[str, tuple[str, _Make]] = {
    "tf32-sm_80": ("float32", lambda b: ProductRunner("80", blocks=b)),
    "tf32-sm_90": ("float32", lambda b: ProductRunner("90", blocks=b)),
    "fp64-k4": ("float64", lambda b: ProductRunner("80", "fa1", b, "fp64", 4, 8)),
    "fp64-k8": ("float64", lambda b: ProductRunner("90", "fa1", b, "fp64", 8, 16)),
    "fp64-k16": ("float64", lambda b: ProductRunner("90", "fa1", b, "fp64", 16, 16)),
}
#: Blocks whose depths are one step of an instruction, and several with a remainder.
_BOTH = (False, True)
_BLOCKS = {(64, 64): (16, 32), (5, 24): (48, 16), (96, 128): (16, 48)}


def _params() -> list[Any]:
    found = [(name, dims, causal) for name in RUNNERS for dims in _BLOCKS for causal in _BOTH]
    masks = ("full", "causal")
    return [
        pytest.param(*row, id=f"{row[0]}-d{row[1][0]}-dv{row[1][1]}-{masks[row[2]]}")
        for row in found
    ]


@pytest.mark.parametrize(("name", "dims", "causal"), _params())
def test_against_float64(name: str, dims: tuple[int, int], causal: bool) -> None:
    dtype, make = RUNNERS[name]
    runner = make(_BLOCKS[dims])
    for case in _cases(dtype, dims, causal):
        x = arrays(case, "q", "k", "v", "dout", "dlse")
        out, lse = runner.forward(case, x["q"], x["k"], x["v"])
        truth = judge(case, x)
        given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
        grads = runner.backward(case, *given)
        for which, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
            compare(truth, which, got).check()


@pytest.mark.parametrize("name", ["tf32-sm_80", "tf32-sm_90"])
def test_infinities_and_nan_come_through(name: str) -> None:
    """Where a tf32 part is not finite the small products are NaN, and must not count."""
    dtype, make = RUNNERS[name]
    runner, case = make((16, 32)), Case(1, 2, 1, 33, 40, 16, 16, dtype)
    x = arrays(case, "q", "k", "v")
    x["v"][0, 3, 0, 2] = np.inf
    x["v"][0, 4, 0, 5] = np.nan
    x["v"][0, 6, 0, 7] = -np.inf
    out, _ = runner.forward(case, x["q"], x["k"], x["v"])
    assert (out[..., 2] == np.inf).all()
    assert np.isnan(out[..., 5]).all()
    assert (out[..., 7] == -np.inf).all()
    assert np.isfinite(out[..., [0, 1, 3, 4, 6]]).all()
