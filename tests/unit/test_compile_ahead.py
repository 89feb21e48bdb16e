"""Which kernels are compiled ahead, and how. No GPU needed."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuflash import compile_ahead as ahead
from cuflash.compile_ahead import Calls, device_of, kernels_of
from cuflash.cuda import kernel_cache
from cuflash.errors import ArgumentValueError, BackendUnavailableError, UnsupportedError
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS

HALF = Calls(head_dims=((128, 128),), dtypes=("float16",))
#: Widths, dtype and what else plans have tiles of their own for.
KINDS = (
    HALF,
    replace(HALF, deterministic=True),
    replace(HALF, unaligned=True),
    replace(HALF, masks=("left", "band")),
    replace(HALF, head_dims=((64, 64),), masks=("left", "band")),
    replace(HALF, masks=("full", "causal", "band"), sinks=("query", "float32", None)),
    replace(HALF, head_dims=((64, 64),)),
    replace(HALF, head_dims=((192, 128),)),
    replace(HALF, dtypes=("float32",), head_dims=((256, 256),)),
    replace(HALF, dtypes=("float64",), head_dims=((64, 64),), deterministic=True),
)


def _any_problem(calls: Calls, rng: random.Random) -> AttentionProblem:
    """Of such calls: any batch, heads, group and lengths."""
    keys, queries = (int(2 ** rng.uniform(0, 17)) for _ in range(2))
    queries = rng.choice((keys, queries, 1))
    heads, group = int(2 ** rng.uniform(0, 5)), rng.choice((1, 1, 2, 3, 8, 32))
    mask, storage = rng.choice(calls.masks), calls.dtypes[0]
    problem = AttentionProblem(
        operation=rng.choice(calls.operations),
        batch=int(2 ** rng.uniform(0, 5)),
        heads_q=heads * group,
        heads_kv=heads,
        seqlen_q=queries,
        seqlen_kv=keys,
        head_dim=calls.head_dims[0][0],
        head_dim_v=calls.head_dims[0][1],
        storage=storage,
        output=storage,
        mask=mask,
        scale=0.1,
        q_offset=keys - queries if mask in ("causal", "band") else 0,
        # The last query sees a key.
        q_first=rng.randint(-queries, keys - queries) if mask in ("left", "band") else 0,
        alignment="element" if calls.unaligned else "tensor_map",
        deterministic=calls.deterministic,
    )
    sinks = rng.choice(calls.sinks)
    dtype = storage if sinks == "query" else sinks
    if dtype is None:
        return with_features(problem, {}, {})
    if problem.operation == "backward":
        problem = replace(problem, wrt=("q", "k", "v", "sinks"))
    return with_features(problem, {}, {"sinks": Operand("sinks", dtype, (heads * group,))})


@pytest.mark.parametrize("architecture", ["75", "80", "90", "120"])
def test_whatever_the_lengths_and_heads_the_kernels_are_there(architecture: str) -> None:
    limits, rng = LIMITS[architecture], random.Random(7)
    for calls in KINDS:
        listed = set(kernels_of(calls, limits))
        for _ in range(300):
            problem = _any_problem(calls, rng)
            for launch in plan(problem, limits).launches:
                assert launch.config in listed, (problem, launch.config)


@pytest.mark.parametrize("mask", ["left", "band"])
def test_windows_of_any_width_have_their_kernels_at_lengths_that_are_given(mask: Any) -> None:
    calls = replace(HALF, head_dims=((64, 64),), masks=(mask,), seqlens=((8192, 8192),))
    listed, kinds = set(kernels_of(calls, LIMITS["90"])), set()
    some = replace(_any_problem(calls, random.Random(7)), batch=2, heads_q=32, heads_kv=32)
    some = replace(some, seqlen_q=8192, seqlen_kv=8192, q_offset=0)
    for window in (1, 64, 128, 512, 1023, 1024, 1280, 1281, 8000):
        first = 8192 - window - (8191 if mask == "band" else 0)
        for operation in ("forward", "backward"):
            problem = replace(some, operation=operation, q_first=first)
            needed = {launch.config for launch in plan(problem, LIMITS["90"]).launches}
            assert needed <= listed, window
            kinds |= needed
    assert kinds <= listed
    assert len([kernel for kernel in kinds if kernel.kernel == "backward"]) == 2
    assert len([kernel for kernel in kinds if kernel.kernel == "forward"]) == 2


def test_sinks_of_a_dtype_that_no_call_takes_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="sinks: got float64 for float16; expected"):
        kernels_of(replace(HALF, sinks=("float64",)), LIMITS["90"])


def test_one_query_of_many_heads_on_many_keys_has_its_kernels_too() -> None:
    """They ask for the most counters, of a kernel that hardly any other problem needs."""
    some = _any_problem(HALF, random.Random(7))
    problem = replace(some, operation="backward", mask="full", q_offset=0, batch=22)
    problem = replace(problem, heads_q=52, heads_kv=52, seqlen_q=6, seqlen_kv=69985)
    needed = {launch.config for launch in plan(problem, LIMITS["90"]).launches}
    assert needed <= set(kernels_of(HALF, LIMITS["90"]))


@pytest.mark.parametrize("lengths", [(18, 10709), (512, 512), (8192, 8192)], ids=str)
def test_whether_blocks_share_keys_depends_on_heads_that_nobody_gave(
    lengths: tuple[int, int],
) -> None:
    some = _any_problem(HALF, random.Random(7))
    calls = replace(HALF, operations=("backward",), masks=("causal",), seqlens=(lengths,))
    listed = set(kernels_of(calls, LIMITS["90"]))
    asked = {"operation": "backward", "mask": "causal", "q_offset": lengths[1] - lengths[0]}
    asked |= {"seqlen_q": lengths[0], "seqlen_kv": lengths[1]}
    kinds = set()
    for batch, heads_q, heads_kv in ((1, 2, 1), (1, 64, 2), (1, 64, 1), (90, 64, 2), (9, 7, 7)):
        heads = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv}
        chosen = plan(replace(some, **asked, **heads), LIMITS["90"])
        kinds.add(len(chosen.launches))
        assert {launch.config for launch in chosen.launches} <= listed, heads
    assert len(kinds) == 2, "with parts and without"


def test_each_kernel_is_listed_once_and_no_more_than_some_call_needs() -> None:
    listed = kernels_of(HALF, LIMITS["90"])
    assert len(set(listed)) == len(listed)
    assert {kernel.generation for kernel in listed} == {"fa3", "steps"}
    (only,) = kernels_of(
        replace(HALF, operations=("forward",), masks=("full",), seqlens=((4096, 4096),)),
        LIMITS["90"],
    )
    assert (only.generation, only.kernel, only.mask) == ("fa3", "forward", "full")


def test_both_sides_of_every_length_of_the_tables_are_asked_for() -> None:
    keys = {length for _, length in ahead._telling_lengths()}
    assert {512, 513, 1023, 1024, 1535, 1536, 2048, 2049} <= keys
    assert all((1, length) in ahead._telling_lengths() for length in keys)


@pytest.mark.parametrize(("head_dim", "unaligned"), [(128, True), (65, False), (65, True)])
def test_rows_of_any_address_are_copied_by_elements(head_dim: int, unaligned: bool) -> None:
    calls = replace(HALF, head_dims=((head_dim, head_dim),), unaligned=unaligned)
    main = [k for k in kernels_of(calls, LIMITS["90"]) if k.generation != "steps"]
    assert {k.copies for k in main} == {"element"}
    assert {k.generation for k in main} == {"fa2"}


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_named_algorithm_is_taken(algorithm: Any) -> None:
    listed = kernels_of(replace(HALF, algorithm=algorithm), LIMITS["90"])
    assert {kernel.generation for kernel in listed} == {algorithm, "steps"}


def test_what_no_device_or_call_can_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float32"):
        kernels_of(replace(HALF, dtypes=("float16", "float32"), algorithm="fa3"), LIMITS["90"])
    with pytest.raises(ArgumentValueError, match=r"head_dim: got 257; expected 1 to 256"):
        kernels_of(replace(HALF, head_dims=((64, 257),)), LIMITS["90"])
    with pytest.raises(ArgumentValueError, match=r"seqlen: got 0; expected 1 to"):
        kernels_of(replace(HALF, seqlens=((0, 5),)), LIMITS["90"])


def test_without_a_gpu_it_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BackendUnavailableError("there is no CUDA device")

    monkeypatch.setattr(ahead, "require_device", refuse)
    for architecture in (None, "sm_90"):
        with pytest.raises(BackendUnavailableError, match=r"no CUDA device.*CUPY_CACHE_DIR"):
            device_of(architecture)


def test_an_architecture_is_one_of_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [LIMITS["80"], LIMITS["90"], LIMITS["90"]]
    monkeypatch.setattr(ahead, "require_device", lambda: 2)
    monkeypatch.setattr(ahead, "device_count", lambda: 3)
    monkeypatch.setattr(ahead.DeviceLimits, "query", there.__getitem__)
    assert device_of() == 2
    assert {device_of(name) for name in ("sm_90", "sm_90a", "90", "9.0")} == {2}
    assert device_of("sm_80") == 0
    with pytest.raises(UnsupportedError, match=r"sm_120, there is sm_90, sm_80.*CUPY_CACHE_DIR"):
        device_of("sm_120")
    with pytest.raises(ArgumentValueError, match=r"arch: got 'hopper'"):
        device_of("hopper")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of CuPy's, and no compiler."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr(ahead, "require_toolchain", lambda: None)
    return tmp_path / "cache"


def test_kernels_are_compiled_side_by_side_and_counted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, told = threading.Barrier(3), []
    cache.mkdir()
    for name in ("0", "1"):
        (cache / f"{name}.cubin").write_text("old")

    def build(kernel: Any, device: int) -> None:
        meeting.wait(10)  # raises unless three wait together
        assert device == 5
        if kernel == 0:  # which was damaged, while 1 is there
            (cache / "0.cubin").write_text("new")
        if kernel == 2:
            (cache / "2.cubin").write_text("new")
            (cache / "2.cubin.cu").write_text("its source")

    monkeypatch.setattr(ahead, "compile_kernel", build)
    kernels: Any = [0, 1, 2]
    outcome = ahead.compile_ahead(kernels, 5, told.append, threads=3)
    assert sorted(told) == kernels
    assert (outcome.kernels, outcome.compiled, outcome.found) == (3, 2, 1)
    assert outcome.folder == cache


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_is_under_way_ends_and_nothing_else_begins(
    cache: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    begun, ended, slow = [], [], threading.Event()

    def build(kernel: int, device: int) -> None:
        begun.append(kernel)
        if kernel == 0:
            slow.wait(0.3)
        elif kernel == 1 and not interrupted:
            raise UnsupportedError("refused")
        elif kernel > 1:
            slow.wait(0.1)
        ended.append(kernel)

    def told(kernel: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "compile_kernel", build)
    kernels: Any = list(range(40))
    with pytest.raises(KeyboardInterrupt if interrupted else UnsupportedError):
        ahead.compile_ahead(kernels, 0, told, threads=2)
    count = len(begun)
    assert count < 10
    assert len(ended) == count - (not interrupted)
    slow.wait(0.3)
    assert len(begun) == count


def test_a_cache_that_keeps_nothing_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "compile_kernel", lambda *_: pytest.fail("compiled"))
    kernels: Any = [0]
    cache.write_text("a file where the folder should be")
    with pytest.raises(ArgumentValueError, match=r"CUPY_CACHE_DIR: got .*cache \("):
        ahead.compile_ahead(kernels, 0, print)
    cache.unlink()
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with pytest.raises(ArgumentValueError, match="CUPY_CACHE_IN_MEMORY"):
        ahead.compile_ahead(kernels, 0, print)


def test_a_folder_without_room_for_files_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert kernel_cache.require_kernel_cache() == cache
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(kernel_cache.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ArgumentValueError, match=r"CUPY_CACHE_DIR.*Permission denied"):
        kernel_cache.require_kernel_cache()


def test_the_folder_is_the_one_that_cupy_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    used = compiler._kernel_cache_backend._cache_dir  # decided when CuPy was imported
    assert kernel_cache.kernel_cache_folder() == Path(used)
