"""Compiling, memory, streams, threads and bad calls on the device."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import calls
from cuflash.cuda import compile as compiling

from ..kit.badcalls import BAD_CALLS, good_call, make
from .common import same_gradients, skip_without


@pytest.mark.parametrize(("algorithm", "more"), [("fa1", 0), ("fa2", 3), ("fa3", 1)])
def test_fifty_lengths_compile_once(
    cp: Any, problem: dict[str, Any], algorithm: str, more: int
) -> None:
    """Two exceptions: FlashAttention-2 has smaller tiles at a few lengths, and the group of one
    query is packed.
    """
    skip_without(algorithm)
    cuflash.attention(**problem, algorithm=algorithm)
    before = len(compiling._kernels)
    for length in range(1, 300, 6):
        q = problem["q"][:, :length]
        cuflash.attention(q, problem["k"], problem["v"], algorithm=algorithm)
    assert len(compiling._kernels) <= before + more


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_memory_grows_with_the_sequence_not_its_square(cp: Any, operation: str) -> None:
    peaks = []
    for seqlen in (4096, 8192, 16384):
        q = cp.ones((1, seqlen, 2, 64), np.float16)
        out, lse = cuflash.attention(q, q, q, return_lse=True)
        pool = cp.cuda.MemoryPool()  # an empty pool of its own
        with cp.cuda.using_allocator(pool.malloc):
            if operation == "forward":
                cuflash.attention(q, q, q)
            else:
                cuflash.attention_backward(out, q, q, q, out, lse)
        peaks.append(pool.total_bytes())
        square = 2 * seqlen**2 * 2  # bytes of the scores of two heads in float16
        assert 0 < peaks[-1] < square / 4
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[2] <= 2.1 * peaks[1]


@pytest.mark.parametrize(("algorithm", "asked"), [("fa1", False), ("fa2", True), ("fa3", True)])
def test_repeats_are_bit_equal(
    cp: Any, problem: dict[str, Any], algorithm: str, asked: bool
) -> None:
    skip_without(algorithm)
    forward: dict[str, Any] = {"causal": True, "algorithm": algorithm, "return_lse": True}
    backward = {"causal": True, "algorithm": algorithm, "deterministic": asked}
    out, lse = cuflash.attention(**problem, **forward)
    given = (out, *problem.values(), out, lse)
    grads = cuflash.attention_backward(*given, **backward)
    for _ in range(50):
        again, lse_again = cuflash.attention(**problem, **forward)
        assert bool((again == out).all())
        assert bool((lse_again == lse).all())
        others = cuflash.attention_backward(*given, **backward)
        assert same_gradients(others, grads, ordered=True)


def test_work_is_on_the_current_stream(cp: Any, problem: dict[str, Any]) -> None:
    expected = cuflash.attention(**problem).get()
    cp.cuda.Device().synchronize()
    spin = cp.RawKernel(
        'extern "C" __global__ void spin(long long n) '
        "{ long long t = clock64(); while (clock64() - t < n) {} }",
        "spin",
    )
    stream = cp.cuda.Stream(non_blocking=True)
    late = {name: cp.zeros_like(array) for name, array in problem.items()}
    cp.cuda.Device().synchronize()
    with stream:
        spin((1,), (1,), (np.int64(200_000_000),))
        for name, array in problem.items():
            late[name][...] = array
        out = cuflash.attention(**late)
    assert not stream.done
    stream.synchronize()
    assert np.array_equal(out.get(), expected)


def test_eight_threads_on_streams_of_their_own(cp: Any, problem: dict[str, Any]) -> None:
    expected = cuflash.attention(**problem, causal=True).get()
    faults: list[str] = []

    def work() -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                out = cuflash.attention(**problem, causal=True)
                stream.synchronize()
                if not np.array_equal(out.get(), expected):
                    faults.append("different")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_sixteen_threads_first_calling_compile_once(
    cp: Any, problem: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = compiling._build

    def spy(config: Any, *rest: Any) -> Any:
        built.append(config.kernel)
        return build(config, *rest)

    monkeypatch.setattr(compiling, "_build", spy)
    monkeypatch.setattr(compiling, "_kernels", compiling._Once())
    calls.forget()
    answers: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: answers.append(cuflash.attention(**problem).get()))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["forward"]
    assert len(answers) == 16
    assert all(np.array_equal(a, answers[0]) for a in answers)


def test_five_hundred_bad_calls_leave_a_good_one_right(cp: Any) -> None:
    given = {op: good_call(cp, op) for op in ("forward", "backward")}
    good = {op: make(call) for op, call in given.items()}
    rng, calls = np.random.default_rng(7), [bad for bad in BAD_CALLS if not bad.host_only]
    before = len(compiling._kernels)
    for number in rng.integers(0, len(calls), 500):
        bad = calls[number]
        call = dict(given[bad.operation])
        bad.break_it(call, cp)
        with pytest.raises(bad.error) as caught:
            make(call)
        assert bad.is_said_by(caught.value), (bad.name, caught.value)
    assert len(compiling._kernels) == before
    assert bool((make(good_call(cp)) == good["forward"]).all())
    for got, expected in zip(make(good_call(cp, "backward")), good["backward"], strict=True):
        assert bool((got == expected).all())


@pytest.mark.parametrize(
    ("algorithm", "function"), [("fa2", "exponentiate_tile"), ("fa3", "load_role")]
)
def test_a_broken_source_raises_with_the_log_and_mends(
    problem: dict[str, Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    function: str,
) -> None:
    import shutil

    from cuflash.cuda.source import find_sources

    skip_without(algorithm)
    problem["algorithm"] = algorithm
    expected, broken = cuflash.attention(**problem), function.replace("_", "")
    folder = shutil.copytree(find_sources(), tmp_path / "cuda_src")
    kernel = folder / algorithm / "forward.cu"
    text = kernel.read_text()
    assert f"{function}(" in text
    kernel.write_text(text.replace(f"{function}(", f"{broken}("))
    monkeypatch.setenv("CUFLASH_CUDA_SRC", str(folder))
    calls.forget()
    with pytest.raises(cuflash.CompileError, match=f"(?s)block_kv.*{broken}"):
        cuflash.attention(**problem)
    kernel.write_text(text)
    assert bool((cuflash.attention(**problem) == expected).all())
    monkeypatch.undo()
    calls.forget()


def test_out_of_memory_passes_through_and_leaks_nothing(cp: Any, problem: dict[str, Any]) -> None:
    expected = cuflash.attention(**problem)
    big = cp.ones((1, 2**17, 4, 64), np.float16)
    pool = cp.cuda.MemoryPool()
    pool.set_limit(size=big.nbytes // 2)
    refused = False
    with cp.cuda.using_allocator(pool.malloc):
        try:
            cuflash.attention(big, big, big)
        except cp.cuda.memory.OutOfMemoryError:  # pytest.raises would keep its frames alive
            refused = True
    assert refused
    assert pool.used_bytes() == 0
    assert bool((cuflash.attention(**problem) == expected).all())


def test_ten_thousand_calls_do_not_grow(cp: Any) -> None:
    q = cp.ones((1, 16, 1, 16), np.float16)
    for _ in range(100):
        cuflash.attention(q, q, q)
    pool = cp.get_default_memory_pool()
    total, kernels = pool.total_bytes(), len(compiling._kernels)
    for _ in range(10_000):
        cuflash.attention(q, q, q)
    cp.cuda.Device().synchronize()
    assert pool.total_bytes() == total
    assert len(compiling._kernels) == kernels


def test_arrays_of_another_device_run_there(cp: Any, problem: dict[str, Any]) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    expected = cuflash.attention(**problem).get()
    with cp.cuda.Device(1):
        there = {name: cp.asarray(array.get()) for name, array in problem.items()}
    out = cuflash.attention(**there)
    assert out.device.id == 1
    assert cp.cuda.Device().id == 0
    assert np.array_equal(out.get(), expected)


def test_gradients_of_another_device_run_there(cp: Any, problem: dict[str, Any]) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    out, lse = cuflash.attention(**problem, return_lse=True)
    expected = cuflash.attention_backward(out, *problem.values(), out, lse, dlse=lse)
    with cp.cuda.Device(1):
        there = [cp.asarray(array.get()) for array in (out, *problem.values(), out, lse)]
    grads = cuflash.attention_backward(*there, dlse=there[-1])
    assert cp.cuda.Device().id == 0
    assert all(got.device.id == 1 for got in grads)
    host = [[array.get() for array in each] for each in (grads, expected)]
    assert same_gradients(*host, ordered=False)


def test_compiled_registers_are_reported(problem: dict[str, Any]) -> None:
    said = cuflash.explain(*problem.values(), operation="backward", compile=True)
    names = ["steps/statistics", f"{said.algorithm}/backward", "steps/convert_dq"]
    # In fa3 several blocks share each of so few tiles.
    names += ["fa3/sum_parts"] * (said.algorithm == "fa3")
    assert [kernel.name for kernel in said.kernels] == names
    assert all(16 <= (kernel.registers or 0) <= 255 for kernel in said.kernels)
    assert "registers" in str(said)
