"""The kernels that compute gradients of the arguments of features, and their workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ..errors import UnsupportedError
from .device import DeviceLimits
from .kernel import KernelConfig, KernelLaunch, kernel_config
from .problem import DTYPES, AttentionProblem, DTypeName
from .row_steps import launchable
from .tiles import steps
from .tiles.bias import BiasTile, bias_tiles
from .tiles.common import Arithmetic, ceil_div

__all__ = ["ArgumentGradients"]


@dataclass(frozen=True)
class _Bias:
    """A bias: entries and heads of its gradient, and the axes along which it varies."""

    batch: int
    heads: int
    by_rows: bool
    by_keys: bool
    length: int  # of a partial gradient, if two kernels sum the gradient
    dtype: DTypeName
    alone: bool  # the terms added to scores are the same in every step that is summed

    @property
    def whole(self) -> bool:
        """Whether the gradient has an element for every pair of a query and a key."""
        return self.by_rows and self.by_keys


@dataclass(frozen=True)
class ArgumentGradients:
    """The kernels after a backward pass that compute the other gradients of ``wrt``.

    Attributes
    ----------
    problem, limits, arithmetic
        Those of the pass.
    padded_rows
        Rows of a head in the workspace's ``delta``.
    threads, block_kv
        Threads of a block of the main kernel, and keys of its tile.
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
        sizes = []
        heads = self.problem.batch * self.problem.heads_q
        itemsize = DTYPES[self.problem.compute].itemsize
        if self._summed is not None:
            sizes.append(("pair_sums", heads * self._sums_of_head * itemsize))
        if self._bias is not None and not self._bias.whole:
            sizes.append(("bias_parts", heads * self._bias.length * itemsize))
        return sizes

    @property
    def after(self) -> Iterator[KernelLaunch]:
        """The launches, in order."""
        if self._summed is not None:
            shape = self.problem.operands[self._summed].shape
            entries = self.problem.batch if len(shape) == 1 else 1
            more = (("sums_of_head", self._sums_of_head), ("entries", entries))
            config = self._config("slope_gradient", self.problem.compute)
            yield KernelLaunch(replace(config, mask="full", features=()), prod(shape), more)
        if self._bias is not None:
            yield from self._of_bias(self._bias)
        if "sinks" in self.problem.wrt:
            config = self._config(
                "sink_gradient", DTYPES[self.problem.operands["sinks"].dtype].name
            )
            yield KernelLaunch(config, self.problem.heads_q, (("padded_rows", self.padded_rows),))

    @property
    def _bias(self) -> _Bias | None:
        """The bias, if its gradient is asked for and is not empty."""
        bias = self.problem.operands.get("bias")
        if bias is None or "bias" not in self.problem.wrt or 0 in bias.shape:
            return None
        batch, heads, rows, keys = bias.pairs
        alone = not {*self.problem.features} - {"bias", "sinks", "window"}
        if bias.entries is not None:
            alone &= batch == 1 or bias.entries[0] % bias.entries[1] == 0
            batch = self.problem.batch // bias.entries[1]
        length = self.problem.seqlen_kv if keys > 1 else self.problem.seqlen_q
        dtype = DTYPES[bias.dtype].name
        return _Bias(batch, heads, rows > 1, keys > 1, length, dtype, alone)

    def _of_bias(self, bias: _Bias) -> Iterator[KernelLaunch]:
        """Yield the kernel that sums dS, and the kernel that adds its partial sums."""
        problem = self.problem
        tile = self._bias_tile(bias)
        place = ("steps", "bias_gradient")
        constants = {**tile.constants(), "keeps_terms": int(bias.whole and bias.alone)}
        config = kernel_config(
            problem, self.limits, place, tile.arithmetic, constants, tile.footprint
        )
        of_bias = (("bias_batch", bias.batch), ("bias_heads", bias.heads))
        grid = launchable(self._bias_blocks(bias, tile), "the gradient of bias")
        rows = ("padded_rows", self.padded_rows)
        yield KernelLaunch(replace(config, output=bias.dtype), grid, (rows, *of_bias))
        if bias.whole:
            return
        reduced = self._config("reduce_bias", bias.dtype)
        single = not (bias.by_rows or bias.by_keys)
        more = (*reduced.constants, ("single", int(single)))
        reduced = replace(reduced, mask="full", features=(), constants=more)
        blocks = 1 if single else ceil_div(bias.length, reduced.threads)
        grid = launchable(bias.batch * bias.heads * blocks, "the gradient of bias")
        yield KernelLaunch(reduced, grid, (("length", bias.length), *of_bias))

    def _bias_tile(self, bias: _Bias) -> BiasTile:
        """Return the first tile that fits; with few blocks, one for blocks of many steps."""
        problem, kind = self.problem, (bias.by_rows or not bias.by_keys, bias.by_keys)
        tile = next(bias_tiles(problem, self.limits, *kind), None)
        if tile is None:
            raise UnsupportedError(
                f"the gradient of bias in {problem.storage} at head_dim "
                f"{problem.head_dim}/{problem.head_dim_v} needs more shared memory than the "
                f"{self.limits.shared_per_block:,} bytes of a block"
            )
        steps = problem.batch * problem.heads_q // (bias.batch * bias.heads)
        if bias.whole and self._bias_blocks(bias, tile) < self.limits.num_sms:
            return next(bias_tiles(problem, self.limits, *kind, few_blocks_of=steps))
        return tile

    def _bias_blocks(self, bias: _Bias, tile: BiasTile) -> int:
        """Return the number of thread blocks: one for each tile of the gradient or partial sum."""
        problem = self.problem
        heads = bias.batch * bias.heads if bias.whole else problem.batch * problem.heads_q
        rows = ceil_div(problem.seqlen_q, tile.row.block_q) if tile.by_rows else 1
        keys = ceil_div(problem.seqlen_kv, tile.row.block_kv) if tile.by_keys else 1
        return heads * rows * keys

    @property
    def _summed(self) -> str | None:
        """Name of the operand whose gradient the main kernel sums over pairs."""
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
        # The code does not depend on the other fields.
        config = replace(config, storage=storage, output=storage, head_dim=0, head_dim_v=0)
        return replace(config, copies="element", products="scalar", mma_depth=0)
