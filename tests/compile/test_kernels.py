"""Every kernel compiles: spills within the record, instructions as planned."""

from __future__ import annotations

import functools
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cuflash.planning.kernel import KernelConfig
from cuflash.planning.problem import DTYPES

from ..architectures import LIMITS
from .nvrtc import Built, build
from .rows import built_today, rare_rows, rows, todays_architectures

#: Bytes of local memory that a kernel may use, by kernel, storage and bucket; the others none.
#: Seen with NVRTC 13.5 on all architectures and 13.0 on sm_90: 8 to 116 bytes, which are a few
#: long-lived scalars beside accumulators that nearly fill the registers, where the next smaller
#: tile would cost more traffic; and 32 or 64 in the forward pass of buckets 16 and 32, the whole
#: output tile, which the compiler indexes by the warp.
LOCAL_ALLOWANCE = {
    **{("forward", dtype, d): 64 for dtype in DTYPES for d in (16, 32)},
    **{("forward", dtype, d): 64 for dtype in ("float16", "bfloat16") for d in (64, 128, 192, 256)},
    ("forward", "float64", 256): 16,
    **{("backward", dtype, d): 64 for dtype in ("float16", "bfloat16") for d in (96, 128)},
    **{("backward", dtype, d): 128 for dtype in ("float16", "bfloat16") for d in (64, 192, 256)},
    **{("backward", "float64", d): 16 for d in (192, 256)},
}
#: The same for what few calls ask for (seen: 214 at most, NVRTC 13.5, sm_75, 80 and 90).
RARE_ALLOWANCE = 256

_TODAY = todays_architectures()


@functools.cache
def _all_rows() -> dict[str, KernelConfig]:
    return {name: config for architecture in LIMITS for name, config in rows(architecture).items()}


@functools.cache
def _rare_rows() -> dict[str, KernelConfig]:
    named = (rare_rows(architecture).items() for architecture in LIMITS)
    return {name: c for items in named for name, c in items if name not in _all_rows()}


def _params() -> list[object]:
    today = {name: name.split("-")[0][3:] in _TODAY for name in _all_rows()}
    today |= {name: built_today(name) for name in _rare_rows()}
    return [
        pytest.param(name, id=name, marks=pytest.mark.compile_all(today=now))
        for name, now in today.items()
    ]


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> dict[str, Future[Built]]:
    """Builds of the selected rows, under way in as many threads as there are cores."""
    wanted = [
        item.callspec.params["row"]
        for item in request.session.items
        if hasattr(item, "callspec") and "row" in item.callspec.params
    ]
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    every = {**_all_rows(), **_rare_rows()}
    return {name: pool.submit(build, every[name]) for name in dict.fromkeys(wanted)}


@pytest.mark.parametrize("row", _params())
def test_kernel_compiles_within_its_allowance(row: str, builds: dict[str, Future[Built]]) -> None:
    config = _all_rows().get(row) or _rare_rows()[row]
    built = builds[row].result()
    allowed = LOCAL_ALLOWANCE.get((config.kernel, config.storage, config.head_dim), 0)
    allowed = RARE_ALLOWANCE if row in _rare_rows() else allowed
    assert built.local <= allowed, f"{built.local} bytes of local memory; {config}"
    assert built.registers * config.threads <= 65536
    assert "warning" not in built.log.lower(), built.log
    _check_instructions(config, built.ptx)


def _check_instructions(config: KernelConfig, ptx: str) -> None:
    """The products run on the unit that the plan named, the copies as it named them."""
    if config.kernel == "delta":
        return
    expected = {16: "m16n8k16", 8: "m16n8k8", 4: "m8n8k4"}.get(config.mma_depth)
    found = set(re.findall(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))
    assert found == ({expected} if expected else set())
    assert ("ldmatrix" in ptx) == (config.products in ("tensor_cores", "tf32"))
    asynchronous = "asynchronous" in (config.copies, config.workspace_copies)
    has_workspace_copies = config.kernel == "forward"
    if config.copies == "asynchronous" or (asynchronous and has_workspace_copies):
        assert "cp.async.cg" in ptx
    else:
        assert "cp.async" not in ptx
