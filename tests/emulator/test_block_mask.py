"""Block masks on the emulated device, through the public functions, against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import BlockMask, reference
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Algorithm

from ..kit.arena import Arena
from .build import compiler, emulate
from .device import emulated_device, on_device
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: How far results of a dtype may be from the reference, of their largest number.
_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
_Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Row:
    """A call with a block mask, and what else it has."""

    algorithm: Algorithm
    dtype: str
    block: tuple[int, int]
    lengths: tuple[int, int] = (300, 400)
    heads: tuple[int, int] = (2, 1)
    width: int = 64
    axes: str = "1h"  # of the batch and the heads, those that the blocks have
    batch: int = 1
    shown: float = 0.4
    architecture: str = "90"
    deterministic: bool = False
    more: _Arrays = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.algorithm, self.dtype, "x".join(map(str, self.block)), f"d{self.width}"]
        words += [self.axes, "ordered" * self.deterministic, self.architecture, *self.more]
        return "-".join(filter(None, words))

    def arrays(self) -> _Arrays:
        random = np.random.default_rng(list(self.name.encode()))
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        (rows, keys), (heads_q, heads_kv) = self.lengths, self.heads
        shapes = {"q": (rows, heads_q), "k": (keys, heads_kv), "v": (keys, heads_kv)}
        shapes |= {"dout": (rows, heads_q)}
        made = {
            name: random.standard_normal((self.batch, *shape, self.width)).astype(dtype)
            for name, shape in shapes.items()
        }
        blocks = [-(-n // b) for n, b in zip(self.lengths, self.block, strict=True)]
        own = (self.batch if "b" in self.axes else 1, heads_q if "h" in self.axes else 1)
        shown = random.random((*own, *blocks)) < self.shown
        shown[..., 0, :] = False  # queries that see nothing
        shown[..., -1] = False  # keys that nothing sees
        return made | {"block_mask": BlockMask(shown, self.block)}

    def results(self, x: _Arrays) -> _Arrays:
        """Of both passes on the emulator."""
        given = {**{name: x[name] for name in ("q", "k", "v", "block_mask")}, **self.more}
        options = {"algorithm": self.algorithm, "backend": "cuda"}
        with host_cupy(self.architecture) as host:
            out, lse = host.call(cuflash.attention, **given, **options, return_lse=True)
            options |= {"deterministic": self.deterministic}
            saved = {"dout": x["dout"], "out": out, "lse": lse}
            grads = host.call(cuflash.attention_backward, **saved, **given, **options)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    def expected(self, x: _Arrays) -> _Arrays:
        given = {**{name: x[name] for name in ("q", "k", "v", "block_mask")}, **self.more}
        out, lse = reference.attention(**given)
        grads = reference.attention_backward(x["dout"], **given)[:3]
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    def check(self, found: _Arrays, expected: _Arrays) -> None:
        dead = np.isinf(expected["lse"])
        assert dead.any()
        for name, got in found.items():
            true = np.where(np.isinf(expected[name]), 0, expected[name])
            if name == "lse":
                np.testing.assert_array_equal(np.isinf(got), dead)
                got = np.where(dead, 0, got)
            limit = _TOLERANCE[self.dtype] * np.abs(true).max()
            np.testing.assert_allclose(got.astype(float), true, rtol=0, atol=limit, err_msg=name)


_MASK = np.random.default_rng(1).random((300, 400)) < 0.7
_BIAS = np.random.default_rng(2).standard_normal((300, 400)).astype(np.float16)
_SLOPES = np.array([0.1, -0.2], np.float32)
ROWS = (
    _Row("fa1", "float16", (128, 128)),
    _Row("fa1", "float32", (64, 64), more={"causal": True}),
    _Row("fa1", "float64", (128, 64), heads=(4, 2), batch=2, axes="b1", lengths=(150, 200)),
    _Row("fa2", "float16", (128, 128), axes="11"),
    _Row("fa2", "float16", (64, 64), heads=(4, 2), batch=2, axes="bh", lengths=(200, 333)),
    _Row("fa2", "bfloat16", (64, 128), architecture="80", more={"causal": True}),
    _Row("fa2", "float32", (64, 64), more={"mask": _MASK}),
    _Row("fa2", "float16", (64, 64), deterministic=True),
    _Row("fa2", "float16", (64, 128), width=256, lengths=(130, 200)),
    _Row("fa3", "float16", (128, 128)),
    _Row("fa3", "bfloat16", (64, 64), heads=(4, 2), batch=2, axes="b1", lengths=(200, 333)),
    _Row("fa3", "float16", (64, 128), more={"causal": True}),
    _Row("fa3", "float16", (192, 64), more={"window_size": (90, 40)}),
    _Row("fa3", "float16", (128, 128), deterministic=True),
    _Row("fa3", "float16", (64, 64), deterministic=True, width=96),
    _Row("fa3", "bfloat16", (128, 128), width=128, heads=(4, 1), axes="1h"),
    _Row("fa3", "float16", (64, 64), width=128, more={"dropout_p": 0.3, "dropout_seed": 5}),
    _Row("fa3", "float16", (128, 64), width=192),
    _Row("fa3", "float16", (64, 64), width=256, lengths=(140, 200)),
    _Row("fa3", "float16", (64, 128), more={"mask": _MASK}),
    _Row("fa3", "float16", (128, 128), more={"mask": _MASK[:1], "softcap": 3.0}),
    _Row("fa3", "float16", (128, 64), more={"mask": _MASK[:, :1]}),
    _Row("fa3", "float16", (64, 64), more={"bias": _BIAS}),
    _Row("fa3", "float16", (128, 128), more={"alibi_slopes": _SLOPES}),
)
_params = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
#: Of these no tile lies in two blocks, and hidden ones are left out in either pass.
_LEFT_OUT = [r for r in ROWS if r.block == (128, 128) and not (r.deterministic or r.more)]


@_params
def test_against_the_reference(row: _Row) -> None:
    x = row.arrays()
    row.check(row.results(x), row.expected(x))


@pytest.mark.parametrize("row", _LEFT_OUT, ids=lambda row: row.name)
def test_hidden_blocks_are_never_read(row: _Row) -> None:
    """Keys that nothing sees, and queries that see nothing, may hold anything."""
    x = row.arrays()
    expected = row.expected(x)
    keys = (row.lengths[1] - 1) // row.block[1] * row.block[1]
    for name in ("k", "v"):
        x[name][:, keys:] = np.nan
    for name in ("q", "dout"):
        x[name][:, : row.block[0]] = np.nan
    row.check(row.results(x), expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("shown", [False, True])
def test_blocks_that_are_all_alike(algorithm: Algorithm, shown: bool) -> None:
    """All True they change nothing but the order of roundings; all False leave zeros."""
    row = _Row(algorithm, "float16", (128, 128))
    x = row.arrays()
    x["block_mask"] = BlockMask(np.full((1, 1, 3, 4), shown), row.block)
    found = row.results(x)
    if shown:
        del x["block_mask"]
        out, lse = reference.attention(x["q"], x["k"], x["v"])
        grads = reference.attention_backward(x["dout"], x["q"], x["k"], x["v"])
        for got, true in zip(found.values(), (out, lse, *grads), strict=True):
            limit = 4e-3 * np.abs(true).max()
            np.testing.assert_allclose(got.astype(float), true, rtol=0, atol=limit)
        return
    assert (found.pop("lse") == -np.inf).all()
    for name, array in found.items():
        assert (array == 0).all(), name


def _bits(blocks: Any, tiles: tuple[int, int], row: _Row, by_keys: bool) -> np.ndarray:
    """(entry, head, row of tiles, word, 2) of a mask of pairs."""
    pairs = np.repeat(np.repeat(blocks, row.block[0], 2), row.block[1], 3)
    pairs = pairs[:, :, : row.lengths[0], : row.lengths[1]]
    found = np.array(
        [
            [
                [part.any((2, 3)), part.all((2, 3))]
                for j in range(0, row.lengths[1], tiles[1])
                for part in [pairs[:, :, i : i + tiles[0], j : j + tiles[1]]]
            ]
            for i in range(0, row.lengths[0], tiles[0])
        ]
    )  # q tile, kv tile, kind, entry, head
    found = found.transpose(3, 4, 1, 0, 2) if by_keys else found.transpose(3, 4, 0, 1, 2)
    words = -(-found.shape[3] // 32)
    whole = np.zeros((*found.shape[:3], 32 * words, 2), np.uint64)
    whole[:, :, :, : found.shape[3]] = found
    powers = (np.uint64(1) << np.arange(32, dtype=np.uint64))[:, None]
    return (whole.reshape(*found.shape[:3], words, 32, 2) * powers).sum(4).astype(np.uint32)


def _alone(config: KernelConfig) -> Any:
    """The kernel that makes the bits, and no other one."""
    return emulate(config) if config.kernel == "list_blocks" else lambda *_: None


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("block", "lengths"),
    [((64, 64), (300, 400)), ((128, 128), (500, 5000)), ((192, 320), (9000, 700))],
    ids=str,
)
def test_bits_of_tiles(operation: Any, block: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Which tiles show something, and which show all: what kernels walk along, against NumPy."""
    row = _Row("fa3", "float16", block, lengths, axes="1h", shown=0.6)
    blocks = row.arrays()["block_mask"].blocks
    by_keys = operation == "backward"
    x = {"q": np.zeros((1, lengths[0], 2, 64), np.float16)}
    x |= {name: np.zeros((1, lengths[1], 1, 64), np.float16) for name in "kv"}
    x |= {"out": x["q"], "dout": x["q"], "dq": x["q"], "dk": x["k"], "dv": x["v"]}
    x |= {"lse": np.zeros((1, 2, lengths[0]), np.float32), "block_mask": blocks}
    with emulated_device("90", _alone):
        qkv, given = [on_device(x[name]) for name in "qkv"], on_device(blocks)
        ready = cuflash.prepare(
            *qkv, operation=operation, algorithm="fa3", block_mask=BlockMask(given, block)
        )
        workspace = Arena(np, "nan").workspace(ready.workspace_bytes)
        pointers = {name: x[name].ctypes.data for name in set(ready.tensors) & x.keys()}
        ready.run(pointers, workspace=workspace.ctypes.data)
    tile = ready.plan.tile
    expected = _bits(blocks, (tile.block_q, tile.block_kv), row, by_keys)
    (buffer,) = (b for b in ready.plan.workspace if b.name == "block_bits")
    assert buffer.nbytes == expected.nbytes
    found = workspace[buffer.offset : buffer.offset + buffer.nbytes].view(np.uint32)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)
