"""Partial results of rows more than 2^31 elements apart, in a workspace with holes."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.planning import fa2
from cuflash.planning.kernel import KernelConfig

from .build import compiler, emulate
from .device import emulated_device, on_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: More than 2^30 rows in three chunks of keys.
_BATCH, _ROWS, _KEYS, _WIDTH, _CHUNK = 2**24 + 7, 64, 150, 16, 64
_CHUNKS = -(-_KEYS // _CHUNK)


def test_parts_of_chunks_have_offsets_of_64_bits() -> None:
    """All entries share their memory; only the blocks of the first entry and a few more run."""
    rng = np.random.default_rng(1)
    shapes = ((_ROWS, 1, _WIDTH), (_KEYS, 1, _WIDTH), (_KEYS, 1, _WIDTH))
    x = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    given = [on_device(np.broadcast_to(one, (_BATCH, *one.shape))) for one in x]
    blocks: dict[str, int] = {}

    def make(config: KernelConfig) -> Callable[..., None]:
        kernel = emulate(config)
        return lambda grid, *rest: kernel(min(grid, blocks[config.kernel]), *rest)

    few_heads = mock.patch.object(fa2, "head_group_of", return_value=5)
    with emulated_device("90", make), few_heads, tempfile.TemporaryFile() as file:
        ready = cuflash.prepare(*given, algorithm="fa2", blocks=(64, 64), kv_chunk=_CHUNK)
        main, merge = ready.plan.launches
        blocks["forward"] = _CHUNKS * dict(main.arguments)["head_group"]  # one tile each
        blocks["merge"] = _ROWS
        assert merge.grid > _ROWS
        outputs = 2 * _BATCH * _ROWS * _WIDTH  # bytes before the workspace
        start = -(-outputs // 256) * 256
        file.truncate(start + ready.workspace_bytes)
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        pointers = dict(zip("qkv", (one.data.ptr for one in given), strict=True))
        pointers |= {"out": whole.ctypes.data}
        ready.run(pointers, workspace=whole.ctypes.data + start)
        out, _ = cuflash.reference.attention(*(one[None] for one in x))
        found = whole[: 2 * _ROWS * _WIDTH].view(np.float16).reshape(_ROWS, 1, _WIDTH)
        assert abs(found - out[0]).max() < 2**-8
        for part in ready.plan.workspace:
            size = part.nbytes // 4 // _CHUNKS
            own = whole[start + part.offset :][: part.nbytes].view(np.float32)
            assert (_CHUNKS - 1) * size > 2**31
            for chunk in range(_CHUNKS):
                first = own[chunk * size :][: _ROWS * (size // (_BATCH * _ROWS))]
                assert first.all(), f"{part.name} of chunk {chunk} is elsewhere"
