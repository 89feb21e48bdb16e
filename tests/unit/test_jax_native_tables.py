"""Launch tables and their numbers: which calls share a table, and how the handler finds it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.features.score_text import NumpyFunction, ScoreText
from cuflash.jax import attention, site
from cuflash.jax import device as on_device
from cuflash.jax.native import registration, registry, table

from ..kit.native_frame import FakeXla
from .jax_case import cpu_mesh, draw, jax, jnp
from .native_case import KV, Native, Q, fake_device, two

__all__ = ["fake_device", "two"]


@pytest.fixture
def made(two: Native, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Register tables of the fake driver where the handler looks.

    The returned list gets an entry for each table that is made.
    """
    asked: list[int] = []

    def addresses() -> list[int]:
        asked.append(1)
        return two.driver.addresses

    monkeypatch.setattr(on_device, "tables", registration.tables)
    monkeypatch.setattr(on_device, "driver_functions", addresses)
    monkeypatch.setattr(site, "is_ready", lambda platform: True)
    return asked


def test_tables_whose_numbers_meet_in_one_slot_are_told_apart(two: Native) -> None:
    """The first number takes the last slot; the others take slots from the start of the list."""
    last = registry.SLOTS - 1
    two.add(algorithm="fa2")
    for number in range(last, 9 * registry.SLOTS, registry.SLOTS):
        registration.tables.add(number, two.table.address, two.table)
        assert number in registration.tables
        places = [1 << 20] * 3, [1 << 21] * len(two.results)
        assert two.xla.call(number, *places) == 0
    assert two.xla.call(last + 9 * registry.SLOTS, *places) == FakeXla.FAILURE


def _lowered(function: Any, *arrays: Any) -> str:
    traced = jax.jit(function).trace(*arrays)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_a_computation_for_cuda_calls_the_handler(made: list[int]) -> None:
    """Equal calls have the same number; other shapes, dtypes, keywords and passes have others."""
    q, k, v = draw(Q, KV, KV, dtype="float16")

    def numbers(function: Any, *arrays: Any) -> list[str]:
        text = _lowered(function, *arrays)
        assert "xla_buffer_python" not in text
        assert text.count("@cuflash_launch_table") == text.count("table = ")
        return [part.split()[0] for part in text.split("table = ")[1:]]

    (first,) = numbers(attention, q, k, v)
    assert numbers(lambda *qkv: attention(*qkv) * 2, q, k, v) == [first]
    assert len(set(numbers(jax.grad(lambda *x: attention(*x).sum()), q, k, v))) == 2
    (other,) = numbers(lambda *qkv: attention(*qkv, is_causal=True), q, k, v)
    (narrow,) = numbers(attention, *(x.astype("bfloat16") for x in (q, k, v)))
    (longer,) = numbers(attention, q, jnp.concatenate([k, k], 1), jnp.concatenate([v, v], 1))
    every = {first, other, narrow, longer}
    assert len(every) == 4
    assert all(int(number) in registration.tables for number in every)


def _added(two: Native, **options: Any) -> int:
    """The number of a forward pass's table."""
    arrays = [jax.ShapeDtypeStruct(shape, np.float16) for shape in (Q, KV, KV)]
    return int(two.add(algorithm="fa2", **options).registered(arrays))


def test_a_number_is_made_of_no_addresses(two: Native, made: list[int]) -> None:
    """A score function may hold a NumPy function, whose address differs between processes."""
    texts = [
        ScoreText("return score;", numpy=NumpyFunction(function))
        for function in (lambda score: score, lambda score: score + 0)
    ]
    assert len({_added(two, more=(("score_mod", text),)) for text in texts}) == 1


def test_a_table_is_made_once(two: Native, made: list[int]) -> None:
    assert _added(two) == _added(two)
    assert len(made) == 1


@pytest.mark.parametrize("taken", [False, True])
def test_a_divided_computation_is_never_taken_from_another_process(
    made: list[int], monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """The launch tables of a divided computation are made in the process that compiles it.

    If JAX may take a compiled computation from another process, the computation gets a Python
    callback: JAX compiles a computation with a callback in every process.
    """
    monkeypatch.setattr(site, "_NATIVE", {"cpu"})
    monkeypatch.setitem(site._PREPARE, "cpu", on_device.prepare_device)
    sharding = jax.sharding.NamedSharding(cpu_mesh(2, 2), jax.sharding.PartitionSpec("x"))
    q, k, v = (jax.ShapeDtypeStruct(shape, np.float16, sharding=sharding) for shape in (Q, KV, KV))
    flag = "jax_remove_custom_partitioning_ptr_from_cache_key"
    jax.config.update(flag, taken)
    try:
        lowered = jax.jit(lambda *qkv: attention(*qkv, scale=0.5)).lower(q, k, v)
    finally:
        jax.config.update(flag, False)
    assert "CustomSPMDPartitioning" in lowered.as_text()
    assert len(lowered._lowering.compile_args["host_callbacks"]) == taken


def test_what_does_not_fit_into_a_table_is_refused_or_cut(
    two: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long message loses its beginning, so that there is room for the number at its end."""
    monkeypatch.setattr(table, "MOST_TEXT", 64)
    two.add(algorithm="fa2")
    two.fails("at ", q=1)
    assert len(two.xla.errors[0][0]) <= 64 - 32 + 1
    monkeypatch.setattr(table, "MOST_TENSORS", 3)
    with pytest.raises(cuflash.UnsupportedError, match=r"more than 3 arrays under jax\.jit"):
        two.add(algorithm="fa2")


def test_what_a_device_needs_lives_as_long_as_its_table(
    two: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's counter is an example: nothing else refers to it."""
    counters: list[Any] = []

    def new_counter(device: int) -> Any:
        counter = np.zeros(1, np.int32)
        counters.append(weakref.ref(counter))
        return SimpleNamespace(data=SimpleNamespace(ptr=1 << 40), memory=counter)

    monkeypatch.setattr(on_device, "new_counter", new_counter)
    two.add(algorithm="fa3")
    gc.collect()
    assert [counter() is not None for counter in counters] == [True, True]
