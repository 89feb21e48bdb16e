"""Registration of the handler with XLA, and its failures."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash

from .jax_case import jax

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
pytest.importorskip("numba", reason="Numba is not installed")
from cuflash.jax import native, site
from cuflash.jax.call import Call
from cuflash.jax.native import registration, registry, stamp
from cuflash.options import Options

from ..kit.native_frame import FakeXla


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ((0, 1), (0, 1)),
        ((0, 3), (0, 3)),
        ((0, 9), (0, 3)),  # XLA decides whether it accepts the older version
        ((1, 0), (-1, 0)),
    ],
)
def test_xla_is_told_the_version_that_is_spoken(
    version: tuple[int, int], answer: tuple[int, int]
) -> None:
    xla = FakeXla(registration._handler().ctypes, version)
    assert xla.ask() == (*answer, 1)


def test_an_xla_that_does_not_say_its_version_is_told_the_first() -> None:
    """XLA before jaxlib 0.8 asks without passing its functions, and accepts version 0.1 only."""
    xla = FakeXla(registration._handler().ctypes)
    assert xla.ask(has_api=False) == (0, 1, 1)
    assert xla.ask(has_api=False, frame_size=160)[:2] == (-1, 0)


@pytest.mark.parametrize("sizes", [{"frame_size": 160}, {"api_size": 80}])
def test_structures_of_another_size_are_refused(sizes: dict[str, int]) -> None:
    xla = FakeXla(registration._handler().ctypes)
    assert xla.ask(**sizes)[:2] == (-1, 0)


def test_what_is_not_asked_is_not_answered() -> None:
    """The handler ignores other extensions, and writes no field past the size of the structure."""
    xla = FakeXla(registration._handler().ctypes)
    assert xla.ask(extension_type=2) == (0, 0, 0)
    assert xla.ask(metadata_size=32) == (0, 3, 0)


def test_what_cannot_be_registered_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("version -1.0 is not supported")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refused)
    registration._registered.cache_clear()
    with pytest.warns(UserWarning, match=r"which is slower: version -1.0 is not supported"):
        assert not native.is_ready("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.is_ready("cuda")
        assert not site.Site(Call("forward", Options(layout="bshd")), "cuda").is_native
    registration._registered.cache_clear()


@pytest.mark.parametrize("missing", ["environment", "numba"])
def test_python_is_called_where_the_handler_cannot_be(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "numba":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setenv("CUFLASH_JAX_NATIVE", "0")
    assert not native.is_ready("cuda")


def test_the_stamp_is_of_all_that_is_compiled() -> None:
    """The stamp covers the handler and all sibling modules that it imports, except ``stamp``."""
    folder = Path(stamp.__file__).parent
    found, new = set(), {"handler"}
    while new:
        found |= new
        texts = "".join(folder.joinpath(f"{name}.py").read_text() for name in new)
        names = re.findall(r"^from \.(?: import)?[ ]?(\w+)", texts, re.MULTILINE)
        new = {*names} - found - {"stamp"}
    assert found == set(stamp._SOURCES)


def test_numbers_use_their_bits() -> None:
    """All 62 bits are used, so that calls do not share a number. A 0 would mean an empty slot."""
    numbers = [native.number_of(bytes([i])) for i in range(256)]
    assert all(0 < number < 1 << 62 for number in numbers)
    assert all(any(number >> bit & 1 for number in numbers) for bit in range(62))
    assert len({number % registry.SLOTS for number in numbers}) > 200


class _Watched:
    """The words of a registry, with slow reads and a list of the written values."""

    def __init__(self, words: Any) -> None:
        self.words, self.written = words, []

    def __getitem__(self, place: int) -> Any:
        found = self.words[place]
        time.sleep(0.01)
        return found

    def __setitem__(self, place: int, value: int) -> None:
        self.written.append(value)
        self.words[place] = value


def test_a_number_is_written_after_its_address() -> None:
    """The handler reads without a lock. Numbers of the same slot do not overwrite each other."""
    tables = registry.Registry()
    tables._words = watched = _Watched(tables._words)
    numbers = [5, 5 + registry.SLOTS, 5 + 2 * registry.SLOTS]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda number: tables.add(number, 8 * number, None), numbers))
    pairs = list(zip(watched.written[::2], watched.written[1::2], strict=True))
    assert sorted(pairs) == [(8 * number, number) for number in numbers]
    assert sorted(int(watched.words[2 * slot]) for slot in (5, 6, 7)) == numbers


def test_what_a_table_needs_lives_as_long_as_the_registry() -> None:
    kept = np.zeros(1)
    watched, tables = weakref.ref(kept), registry.Registry()
    tables.add(5, 8, kept)
    del kept
    gc.collect()
    assert watched() is not None


def test_a_full_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = registry.Registry()
    monkeypatch.setattr(registry, "SLOTS", 8)
    for number in range(1, 5):
        tables.add(number, 8, None)
        tables.add(number, 8, None)  # the same number takes no second slot
    with pytest.raises(cuflash.UnsupportedError, match="more than 4 different calls"):
        tables.add(5, 8, None)


def _another_handler() -> Any:
    """A second handler. The cached one must stay alive, because XLA may call it."""
    return registration._handler.__wrapped__()


def test_code_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code with another stamp is compiled again; if its stamp still differs, that is an error."""
    monkeypatch.setattr(registration, "STAMP", registration.STAMP + 2)
    with pytest.raises(RuntimeError, match="not the one of these sources"):
        _another_handler()


def test_without_a_cache_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba raises if no folder is writable, or if its stored code is broken."""
    import numba

    asked: list[bool] = []

    def refused(signature: Any, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'handle': no locator available")
        return compiled(signature)

    compiled = numba.cfunc
    monkeypatch.setattr(numba, "cfunc", refused)
    assert FakeXla(_another_handler().ctypes).ask() == (0, 3, 1)
    assert asked == [True, False]


def test_threads_that_ask_at_once_register_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA refuses a second handler of the same name."""
    asked: list[tuple[str, str]] = []

    def slowly(name: str, capsule: Any, platform: str) -> None:
        asked.append((name, platform))
        time.sleep(0.05)

    monkeypatch.setattr(jax.ffi, "register_ffi_target", slowly)
    registration._registered.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(native.is_ready, ["cuda"] * 4)] == [True] * 4
    assert asked == [(native.TARGET, "CUDA")]
    registration._registered.cache_clear()


def test_nothing_of_numba_is_loaded_before_it_is_needed() -> None:
    text = "import sys, cuflash.jax; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
