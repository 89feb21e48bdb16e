"""One file mapped at two addresses: a write at one address also changes the other."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.arrays import mapped
from cuflash.arrays.mapped import Mappings
from cuflash.arrays.overlap import share_memory

LENGTH = 5000
_OUT = (1, 5, 2, 4)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "a file"
    path.write_bytes(bytes(4 * LENGTH))
    return path


@contextlib.contextmanager
def _known(how: str) -> Iterator[None]:
    """Find mappings in Linux's list ("listed"), or as on other systems ("remembered")."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "remembered":
            patch.setattr(mapped, "_MAPS", Path("/not/there"))
        elif not mapped._MAPS.exists():
            pytest.skip("this system does not list the mappings of a process")
        yield


@st.composite
def _parts(draw: st.DrawFn) -> list[tuple[int, int, slice]]:
    """Two mappings of the file: the first element, the number of elements, and a slice of them."""
    found = []
    for _ in range(2):
        offset = draw(st.integers(0, 1000) | st.sampled_from([1023, 1024, 2048]))
        length = draw(st.integers(1, LENGTH - offset))
        step = draw(st.integers(1, 4))
        found.append((offset, length, slice(draw(st.integers(0, length)), None, step)))
    return found


@given(parts=_parts(), modes=st.tuples(st.sampled_from(["r+", "r", "c"]), st.just("r+")))
@pytest.mark.parametrize("how", ["listed", "remembered"])
def test_two_memmaps_share_the_bytes_of_their_file(
    file: Path, how: str, parts: list[tuple[int, int, slice]], modes: tuple[str, str]
) -> None:
    views, bytes_of = [], []
    for (offset, length, part), mode in zip(parts, modes, strict=True):
        view = np.memmap(file, np.float32, mode, 4 * offset, (length,))[part]
        views += [view.view(np.ndarray)]
        bytes_of.append(set(range(offset, offset + length)[part]))
    with _known(how):
        share = share_memory(*views)
        assert share == share_memory(*views[::-1]) == bool(bytes_of[0] & bytes_of[1])


@pytest.mark.parametrize("how", ["listed", "remembered"])
def test_a_destination_in_the_file_of_an_input_is_refused(file: Path, how: str) -> None:
    first, second = (np.memmap(file, np.float32, "r+", shape=(LENGTH,)) for _ in range(2))
    q, same, behind = first[:40].reshape(_OUT), second[20:60], second[40:80].reshape(_OUT)
    k = np.ones(_OUT, np.float32)
    with _known(how):
        with pytest.raises(cuflash.ArgumentValueError, match="out: got memory that q uses"):
            cuflash.attention(q, k, k, out=same.reshape(_OUT), backend="numpy")
        assert not first.any()
        assert cuflash.attention(q, k, k, out=behind, backend="numpy") is behind
    assert first[40:80].all()
    first[:] = 0


@pytest.mark.parametrize("modes", ["cc", "cr", "rr"])
def test_mappings_that_do_not_change_the_file_are_apart(file: Path, modes: str) -> None:
    one, other, third = (np.memmap(file, np.float32, mode, shape=(40,)) for mode in (*modes, "r+"))
    assert not share_memory(one, other)
    assert share_memory(one, one[3:])
    assert share_memory(one, third)


def test_other_files_and_memory_of_no_file_are_apart(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(400))
    one, other = (np.memmap(f, np.uint8, "r+", shape=(400,)) for f in (file, tmp_path / "other"))
    anonymous = [np.frombuffer(mmap.mmap(-1, 400), np.uint8) for _ in range(2)]
    buffers = [np.frombuffer(bytearray(400), np.uint8) for _ in range(2)]
    arrays = [one, other, *anonymous, *buffers, np.zeros(400, np.uint8)]
    for i, a in enumerate(arrays):
        assert [share_memory(a, b) for b in arrays] == [i == j for j in range(len(arrays))]


@pytest.mark.skipif(not mapped._MAPS.exists(), reason="mappings are not listed by this system")
def test_mappings_that_numpy_did_not_make_are_known(file: Path) -> None:
    with open(file, "r+b") as opened:
        one, other = (np.frombuffer(mmap.mmap(opened.fileno(), 400), np.uint8) for _ in range(2))
    assert share_memory(one, other)
    assert not share_memory(one[:200], other[200:])


def test_memory_behind_a_mapping_is_not_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (np.frombuffer(bytearray(64), np.uint8) for _ in range(2))
    lines = [f"{a.ctypes.data:x}-{a.ctypes.data + 16:x} rw-s 0 fe:00 7 /f" for a in (one, other)]
    maps = SimpleNamespace(read_text=lambda *_: "\n".join(sorted(lines)))
    monkeypatch.setattr(mapped, "_MAPS", maps)
    assert share_memory(one[:16], other[:16])
    assert not share_memory(one[16:], other[16:])


@pytest.mark.skipif(not mapped._MAPS.exists(), reason="mappings are not listed by this system")
def test_the_list_of_mappings_is_read_once_and_only_if_need_be(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, reads = mapped._MAPS, []

    class Counted:
        def read_text(self, *options: str) -> str:
            reads.append(options)
            return maps.read_text(*options)

    monkeypatch.setattr(mapped, "_MAPS", Counted())
    mappings, plain = Mappings(), np.zeros(400, np.uint8)
    one, other = (np.memmap(file, np.uint8, "r+", shape=(400,)) for _ in range(2))
    assert not share_memory(plain, one, mappings)
    assert not reads
    for _ in range(3):
        assert share_memory(one, other, mappings)
    assert len(reads) == 1
    parts = np.memmap(file, np.float32, "r+", shape=(160,)).reshape(4, *_OUT)
    cuflash.attention(*parts[:3], out=parts[3], backend="numpy")
    assert len(reads) == 2
    parts[:] = 0
