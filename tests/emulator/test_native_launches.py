"""``cuflash.jax.attention`` through the handler of launch tables: the kernels run on the CPU.

Computations for the CPU stand for those on CUDA: XLA calls the handler, which
calls a driver whose launches are emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .device import _encode_map, emulated_device

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with"),
    pytest.mark.here,
]

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("numba", reason="Numba is not installed")

from cuflash.jax import attention, device, native, site  # noqa: E402
from cuflash.jax.native import registration, table  # noqa: E402

from ..kit.native_frame import FakeDriver  # noqa: E402

CASE = Case(2, 4, 2, 70, 104, 64, 64, "float16", seed=3)
CAUSAL = replace(CASE, causal=True, q_offset=0)
#: A case for each way in which a launch table describes an address.
CASES = [
    ("fa1", CAUSAL),
    ("fa1", replace(CASE, softcap=9.0)),
    ("fa2", CASE),
    ("fa2", replace(CASE, mask="bhqk")),
    ("fa2", replace(CASE, sinks="float32")),
    ("fa3", CASE),
    ("fa3", CAUSAL),
    ("fa3", replace(CASE, bias="bhqk")),
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The emulated driver, which computations for the CPU reach by the handler."""
    import cupy

    made = FakeDriver(lambda *numbers: cupy.cuda.driver.launchKernel(*numbers), _encode_map)
    own = registration.Registry()
    made.contexts = []  # as in a thread of XLA that has not called CUDA
    counters: list[np.ndarray] = []

    def counter(_: int) -> Any:
        counters.append(np.zeros(1, np.int32))
        return SimpleNamespace(data=SimpleNamespace(ptr=counters[-1].ctypes.data))

    def without_stream(*given: Any) -> Any:
        return table.LaunchTable(*given, has_stream=False)

    for owner, name, value in (
        (device, "_devices", lambda: [0]),
        (device, "context_of", lambda _: FakeDriver.CONTEXT),
        (device, "driver_functions", lambda: made.addresses),
        (device, "new_counter", counter),
        (device, "LaunchTable", without_stream),
        (device, "tables", own),
        (site, "_NATIVE", {"cpu"}),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setitem(site._PREPARE, "cpu", device.prepare_device)
    assert native.is_ready("cpu")
    registration.tell(own)
    jax.clear_caches()
    yield made
    jax.clear_caches()
    registration.tell(registration.tables)
    for number in counters:
        assert number == 0, "the counter of tiles is not 0 after a launch"
    assert not made.raised, made.raised
    assert made.contexts == []


def _keywords(case: Case) -> dict[str, Any]:
    return {
        "is_causal": case.causal,
        "q_offset": case.q_offset,
        "scale": case.scale,
        "softcap": case.softcap,
        "return_lse": True,
    }


def _run(case: Case, x: dict[str, np.ndarray], **keywords: Any) -> dict[str, np.ndarray]:
    """Every result of a case, from one compiled computation."""
    taken = ["q", "k", "v", *case.operands]
    made = ["dq", "dk", "dv", *(f"d{name}" for name in case.operands if name != "mask")]

    def both(given: dict[str, Any], dout: Any, dlse: Any) -> Any:
        fixed = {name: array for name, array in given.items() if name == "mask"}

        def of(moving: dict[str, Any]) -> Any:
            others = {**moving, **fixed}
            q, k, v = (others.pop(name) for name in "qkv")
            return attention(q, k, v, **others, **keywords)

        results, pull = jax.vjp(of, {n: a for n, a in given.items() if n not in fixed})
        (gradients,) = pull((dout, dlse))
        return results, {f"d{name}": gradient for name, gradient in gradients.items()}

    given = {name: jax.numpy.asarray(x[name]) for name in taken}
    (out, lse), gradients = jax.jit(both)(given, x["dout"], x["dlse"])
    results = {"out": out, "lse": lse, **{name: gradients[name] for name in made}}
    return {name: np.asarray(array) for name, array in results.items()}


@pytest.mark.parametrize(("algorithm", "case"), CASES)
def test_both_passes_of_compiled_computations(
    driver: FakeDriver, algorithm: str, case: Case
) -> None:
    x = arrays(case, "q", "k", "v", "dout", "dlse", *case.operands)
    truth = judge(case, x)
    keywords = {**_keywords(case), "algorithm": algorithm}
    with emulated_device("90", num_sms=1 if algorithm == "fa3" else None):
        results = _run(case, x, **keywords)
    for name, array in results.items():
        compare(truth, name, array).check()
    assert driver.asked.count("launch") >= 2
    assert driver.asked.count("push_context") == driver.asked.count("pop_context") == 2
    assert ("encode" in driver.asked) == (algorithm == "fa3")


def test_a_computation_runs_again_with_other_numbers(driver: FakeDriver) -> None:
    """One table serves other buffers; its tile counter is 0 again."""
    case = CAUSAL
    every = [arrays(replace(case, seed=seed), "q", "k", "v", "dout", "dlse") for seed in (4, 5)]
    with emulated_device("90", num_sms=1):
        run = jax.jit(lambda *qkv: attention(*qkv, **_keywords(case), algorithm="fa3"))
        for x in (*every, every[0]):
            out, _ = run(*(x[name] for name in "qkv"))
            compare(judge(case, x), "out", np.asarray(out)).check()
    assert "memset" not in driver.asked


def test_what_the_driver_refuses_is_an_error_of_jax(driver: FakeDriver) -> None:
    case, x = CASE, arrays(CASE, "q", "k", "v")
    driver.failing["launch"] = 701
    with (
        emulated_device("90"),
        pytest.raises(Exception, match="launch was refused: CUDA error 701"),
    ):
        jax.block_until_ready(attention(*x.values(), **_keywords(case), algorithm="fa2"))


def test_a_computation_of_the_handler_cannot_be_serialised(driver: FakeDriver) -> None:
    """It has no callback, so JAX itself would not refuse."""
    serialise = pytest.importorskip("jax.experimental.serialize_executable").serialize
    x = arrays(CASE, "q", "k", "v")
    with emulated_device("90"):
        run = jax.jit(lambda *qkv: attention(*qkv, **_keywords(CASE), algorithm="fa2"))
        compiled = run.lower(*x.values()).compile()
    with pytest.raises(cuflash.UnsupportedError, match="cannot be serialised: its kernels are"):
        serialise(compiled)
