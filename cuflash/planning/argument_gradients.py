"""The kernels that compute gradients of the arguments of features, and their workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from .device import DeviceLimits
from .kernel import KernelConfig, KernelLaunch, kernel_config
from .problem import DTYPES, AttentionProblem, DTypeName
from .tiles import steps
from .tiles.common import Arithmetic, ceil_div

__all__ = ["ArgumentGradients"]


@dataclass(frozen=True)
class ArgumentGradients:
    """What follows a backward pass for what ``wrt`` names beside q, k and v.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    padded_rows
        Rows of a head in the workspace's ``delta``.
    threads, block_kv
        Of the main kernel: a block's threads, and the keys of its tile.
    """

    problem: AttentionProblem
    limits: DeviceLimits
    arithmetic: Arithmetic
    padded_rows: int
    threads: int
    block_kv: int

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Buffers of the workspace and their bytes."""
        if self._summed is None:
            return []
        problem = self.problem
        sums = problem.batch * problem.heads_q * self._sums_of_head
        return [("pair_sums", sums * DTYPES[problem.compute].itemsize)]

    @property
    def after(self) -> Iterator[KernelLaunch]:
        """Launches, in their order."""
        if self._summed is not None:
            shape = self.problem.operands[self._summed].shape
            entries = self.problem.batch if len(shape) == 1 else 1
            more = (("sums_of_head", self._sums_of_head), ("entries", entries))
            config = self._config("slope_gradient", self.problem.compute)
            yield KernelLaunch(replace(config, mask="full", features=()), prod(shape), more)
        if "sinks" in self.problem.wrt:
            config = self._config(
                "sink_gradient", DTYPES[self.problem.operands["sinks"].dtype].name
            )
            yield KernelLaunch(config, self.problem.heads_q, (("padded_rows", self.padded_rows),))

    @property
    def _summed(self) -> str | None:
        """The operand for whose gradient the main kernel sums pairs."""
        return next((use.pair_sums for use in self.problem.uses if use.pair_sums), None)

    @property
    def _sums_of_head(self) -> int:
        return ceil_div(self.problem.seqlen_kv, self.block_kv) * self.threads

    def _config(self, kernel: str, storage: DTypeName) -> KernelConfig:
        tile = steps.ArgumentTile()
        place, constants = ("steps", kernel), tile.constants()
        config = kernel_config(
            self.problem, self.limits, place, self.arithmetic, constants, tile.footprint
        )
        # Nothing else changes its code.
        config = replace(config, storage=storage, output=storage, head_dim=0, head_dim_v=0)
        return replace(config, copies="element", products="scalar", mma_depth=0)
