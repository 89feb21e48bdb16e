"""Every kernel compiles to its recorded machine code, with instructions as planned."""

from __future__ import annotations

import datetime
import functools
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from cuflash.planning.kernel import KernelConfig

from .. import turns
from ..architectures import LIMITS
from .nvrtc import Built, build
from .record import nvrtc_version, read
from .rows import SPILLS, built_today, rare_rows, rows


@functools.cache
def _all_rows() -> dict[str, KernelConfig]:
    return {name: config for architecture in LIMITS for name, config in rows(architecture).items()}


@functools.cache
def _rare_rows() -> dict[str, KernelConfig]:
    named = (rare_rows(architecture).items() for architecture in LIMITS)
    return {name: c for items in named for name, c in items if name not in _all_rows()}


def _params() -> list[object]:
    today = {name: built_today(name) for name in _all_rows()}
    today |= {name: built_today(name, rare=True) for name in _rare_rows()}
    return [
        pytest.param(name, id=name, marks=pytest.mark.compile_all(today=now))
        for name, now in today.items()
    ]


class _Builds:
    """Builds of kernels, each made once; those of ``ahead`` start now, on a thread for each core.

    With pytest-xdist each process builds only the kernels of its own tests.
    """

    def __init__(self, ahead: Iterable[str]) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._begun = {name: self._begin(name) for name in ahead}

    def _begin(self, name: str) -> Future[Built]:
        return self._pool.submit(build, _all_rows().get(name) or _rare_rows()[name])

    def __getitem__(self, name: str) -> Future[Built]:
        if name not in self._begun:
            self._begun[name] = self._begin(name)
        return self._begun[name]


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> _Builds:
    """Builds of the selected rows."""
    if hasattr(request.config, "workerinput"):  # with pytest-xdist
        return _Builds(())
    given = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [spec.params.get("row") for spec in given if spec is not None]
    names = dict.fromkeys(row for row in wanted if isinstance(row, str))  # not other tests' rows
    return _Builds([name for name in names if name in _all_rows() or name in _rare_rows()])


@pytest.mark.parametrize("row", _params())
def test_kernel_compiles_within_its_record(row: str, builds: _Builds) -> None:
    """After a change of a kernel, ``python -m tests.compile.record`` updates the record.

    Changed machine code needs a new timing beside the old one in ``bench/NOTES.md``.
    """
    config = _all_rows().get(row) or _rare_rows()[row]
    built = builds[row].result()
    assert not built.warns, built.log
    assert built.registers * config.threads <= 65536
    if config.generation == "fa3" and config.kernel != "sum_parts":
        _check_hopper(config, built, SPILLS.get(row, 0))
    else:
        _check_instructions(config, built.ptx)
    record, version = read(), nvrtc_version()
    allowed = max(record.allowed(row, version, row in _rare_rows()), SPILLS.get(row, 0))
    assert built.local <= allowed, f"{built.local} bytes of local memory; {config}"
    assert built.code == (record.code(row, version) or built.code), "other machine code"


def test_the_record_holds_no_kernel_that_is_gone() -> None:
    gone = read().names - set(_all_rows()) - set(_rare_rows())
    assert not gone


def test_kernels_of_hopper_spill_no_more_than_is_listed() -> None:
    """The record says so of all of them; a day builds a part."""
    record = read()
    spilled = [
        (name, line.local)
        for lines in record.versions.values()
        for name, line in lines.items()
        if "-fa3-" in name and "-sum_parts-" not in name and line.local > SPILLS.get(name, 0)
    ]
    assert not spilled


def test_every_ordinary_row_is_recorded() -> None:
    """The newest version has all rows of the architectures that it has at all."""
    record = read()
    newest = max(record.versions, key=lambda version: [int(n) for n in version.split(".")])
    held = {name for name in _all_rows() if record.holds(name.split("-")[0], newest)}
    assert held
    assert not held - record.versions[newest].keys()


def test_every_row_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Date(datetime.date):
        @classmethod
        def today(cls) -> Date:
            return day

    monkeypatch.setattr(turns.datetime, "date", Date)
    left, rare = set(_all_rows()), set(_rare_rows())
    for number in range(120):
        day = Date.fromordinal(738_000 + number)
        left -= {name for name in left if built_today(name)} if number < 40 else set()
        rare -= {name for name in rare if built_today(name, rare=True)}
    assert not left
    assert not rare


@pytest.mark.parametrize("kernel", ["statistics", "convert_dq"])
def test_all_of_hopper_changes_nothing_of_the_steps(kernel: str) -> None:
    """FlashAttention-3's passes compile their steps for sm_90a, the older passes for sm_90."""
    config = next(
        c
        for c in _all_rows().values()
        if (c.architecture, c.generation, c.kernel) == ("sm_90a", "steps", kernel)
    )
    whole, plain = build(config), build(replace(config, architecture="sm_90"))
    assert ".target sm_90a" in whole.ptx
    assert _code(whole.ptx) == _code(plain.ptx)
    assert (whole.registers, whole.local) == (plain.registers, plain.local)


def _code(ptx: str) -> str:
    """The text from the first function on."""
    return ptx[ptx.index(".visible .entry") :]


@pytest.mark.parametrize(
    ("kernel", "constants", "counters"),
    [
        ("forward", {}, 0),
        ("backward_few", {}, 0),
        ("backward_short", {}, 0),
        (
            "backward",
            {"ordered": 0, "kv_tiles_per_convert_block": 0},
            1,
        ),  # counts tiles whose sums of dQ are cleared
        ("backward", {"ordered": 0, "zero_bytes": 512}, 1),  # with serial score tiles
        ("backward", {"ordered": 1, "kv_tiles_per_convert_block": 0}, 2),  # and turns to add dQ
        ("backward", {"ordered": 0, "kv_tiles_per_convert_block": 8}, 2),  # or tiles added to dQ
        ("backward", {"ordered": 1, "kv_tiles_per_convert_block": 8}, 3),
        ("backward", {"ordered": 1, "kv_tiles_per_convert_block": 8, "parted": 1}, 3),
    ],
)
def test_jitter_and_an_end_to_waiting_are_compiled_in_where_they_are_asked_for(
    kernel: str, constants: dict[str, int], counters: int
) -> None:
    """Every wait for an mbarrier or a counter is jittered and ends in a trap, so no test hangs."""
    config = next(
        c
        for c in _all_rows().values()
        if (c.generation, c.kernel) == ("fa3", kernel)
        and constants.items() <= dict(c.constants).items()
    )
    late = build(config, jitter=True)
    plain, tested = build(config).ptx, late.ptx
    assert not re.search(r"C75\d\d", late.log), late.log  # jitter serialises no product
    assert "trap;" not in plain
    assert tested.count("nanosleep") > plain.count("nanosleep")
    assert tested.count("ld.acquire.gpu") >= counters
    waits = tested.count("mbarrier.try_wait") + counters
    assert tested.count("trap;") >= waits > 0


#: Instructions of FlashAttention-3, and older ones that it must not use.
_HOPPER = (
    "wgmma.commit_group",
    "cp.async.bulk.tensor.4d",
    "mbarrier.try_wait",
    "prefetch.tensormap",
    "bar.sync",
)
#: More instructions of the backward pass: the copy engine loads lse and delta, and dS is
#: transposed on its way to shared memory, where products read it.
_TRANSPOSED = "stmatrix.sync.aligned.m8n8.x4.trans"
_BACKWARD = ("cp.async.bulk.shared::cluster.global", _TRANSPOSED, "fence.proxy.async")
#: Clears the sums of dQ for later blocks. Kernels with ``Config::stays`` do not have it.
_CLEARS = "cp.async.bulk.global.shared::cta.bulk_group"
_OLDER = ("mma.sync", "ldmatrix", "cp.async.cg", "cp.async.ca", "nanosleep")


def _check_hopper(config: KernelConfig, built: Built, spills: int = 0) -> None:
    """The instructions are those of Hopper, and ptxas kept the design."""
    c = dict(config.constants)
    keeps = config.kernel in ("backward_few", "backward_short")  # blocks that keep queries
    backward = keeps or config.kernel == "backward"
    needed = _HOPPER + _BACKWARD if backward else _HOPPER
    across = backward and not keeps and c["block_kv"] % 64 > 0  # scores are queries x keys
    if across:
        needed = tuple(name for name in needed if name != _TRANSPOSED)
        # dS is stored as it is; dK and dV are transposed, unless all blocks store float32
        assert (_TRANSPOSED in built.ptx) == (not c["parted"] or c["cut_last"] > 0)
    clears = backward and not keeps and not c["stays"]
    assert [name for name in needed if name not in built.ptx] == []
    assert (_CLEARS in built.ptx) == clears
    in_memory = backward and config.kernel != "backward_short"
    sums = {"red.relaxed.gpu.global.add.v4.f32"} if in_memory else set()  # of dQ, four at a time
    sums |= {"red.release.gpu.global.add.s32"} if clears else set()  # counts cleared sums
    assert set(re.findall(r"\bred\.[\w.]+", built.ptx)) == sums
    older = {"nanosleep"} if clears else set()  # between two reads of a counter
    of_pairs = not keeps and c["operand_bytes"] == 2 and c["operand_rows"] == c["block_q"]
    # Warps load a bias, or P.
    older |= {"ldmatrix"} if across or (of_pairs and not backward) else set()
    assert {name for name in _OLDER if name in built.ptx} == older
    pairs = {"float16": "f16.f16", "bfloat16": "bf16.bf16"}[config.storage]
    products = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16\.[\w.]+)", built.ptx))
    assert products == {f"m64n{n}k16.f32.{pairs}" for n in _columns(config)}
    moved = set(re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (\d+)", built.ptx))
    assert moved == {("dec", str(c["load_registers"])), ("inc", str(c["math_registers"]))}
    # ptxas only warns if it serialises products or ignores a setmaxnreg.
    assert not re.search(r"C75\d\d", built.log), built.log
    assert built.local <= spills, built.log
    # The load role must free enough registers, or the roles that take them wait for ever.
    warpgroups = 2 if backward else c["block_q"] // 64
    assert config.threads == 128 * (warpgroups + 1)
    held = c["load_registers"] + warpgroups * c["math_registers"]
    assert held <= built.registers * (warpgroups + 1)


def _columns(config: KernelConfig) -> set[int]:
    """The numbers of columns of the products: of scores, then of out or of gradients."""
    c = dict(config.constants)
    if config.kernel == "forward":
        return {c["block_kv"], config.head_dim_v}
    # Scores have a column for each query, or each key. The warpgroups divide the rows of dQ, or its
    # columns.
    d = config.head_dim
    if config.kernel == "backward" and c["block_kv"] % 64:  # gradients have a row for each column
        return {c["block_kv"], 64, d - 64}
    if config.kernel == "backward_short":  # each warpgroup has other rows of dQ
        return {c["block_q"], d, config.head_dim_v}
    of_dq = {(128, 128): {d}, (64, 128): {d // 2}, (64, 64): {128, d - 128}}
    return {c["block_q"], d, config.head_dim_v, *of_dq[c["block_q"], c["block_kv"]]}


def _check_instructions(config: KernelConfig, ptx: str) -> None:
    """The instructions of products and copies are those of the plan."""
    found = set(re.findall(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))
    multiplies = config.generation != "steps" or config.kernel == "bias_gradient"
    if not multiplies or config.kernel == "sum_parts":
        assert not found
        assert "cp.async" not in ptx
        return
    assert found == _matrix_instructions(config)
    assert ("ldmatrix" in ptx) == (config.products in ("tensor_cores", "tf32"))
    kinds = {config.copies}
    if (config.generation, config.kernel) in (("fa1", "forward"), ("fa2", "backward")):
        kinds.add(config.workspace_copies)  # for what other tiles or kernels wrote
    assert ("cp.async.cg" in ptx) == ("asynchronous" in kinds)
    assert ("cp.async" in ptx) == ("asynchronous" in kinds)
    ordered = bool(dict(config.constants).get("ordered"))
    assert ("ld.acquire.gpu" in ptx) == ordered
    if (config.generation, config.kernel) == ("fa2", "backward"):
        assert re.search(r"\bred\.", ptx)


def _matrix_instructions(config: KernelConfig) -> set[str]:
    """The matrix instructions of the products."""
    if config.mma_depth == 0:
        return set()
    return {{16: "m16n8k16", 8: "m16n8k8", 4: "m8n8k4"}[config.mma_depth]}
