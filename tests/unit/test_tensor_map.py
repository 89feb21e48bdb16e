"""The driver's arguments when a tensor map is made; a fake driver answers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from cuflash.cuda import tensor_map
from cuflash.cuda.parameters import PARAMETERS, TENSOR_MAP
from cuflash.cuda.tensor_map import WORDS, TensorMapEncoder
from cuflash.errors import LaunchError
from cuflash.planning.problem import DTypeName


class FakeDriver:
    """Keeps its arguments, writes a number into each map and returns ``status``."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status = 0

    def encode(self, words: Any, dtype: int, rank: int, address: Any, *others: Any) -> int:
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = others
        self.asked.append(
            {
                "at": words.value,
                "dtype": dtype,
                "rank": rank,
                "address": address.value,
                "sizes": [*sizes],
                "strides": [*strides],
                "box": [*box],
                "steps": [*steps],
                "modes": (interleave, swizzle, promotion, fill),
            }
        )
        ctypes.memset(words.value, len(self.asked), 8 * WORDS)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(tensor_map, "_encode", lambda: fake.encode)
    return fake


def _encoder(
    shape: tuple[int, int, int, int] = (2, 1000, 4, 96),
    strides: tuple[int, int, int] = (1_000_000, 512, 128),
    dtype: DTypeName = "float16",
) -> TensorMapEncoder:
    return TensorMapEncoder(dtype, shape, strides, 112)


def test_a_map_says_columns_rows_heads_and_batch(driver: FakeDriver) -> None:
    """The innermost axis is first, as in the kernels' coordinates; strides are in bytes."""
    _encoder().map_of(4096)
    (asked,) = driver.asked
    assert (asked["rank"], asked["address"]) == (4, 4096)
    assert asked["sizes"] == [96, 1000, 4, 2]
    assert asked["strides"] == [1024, 256, 2_000_000]
    assert asked["box"] == [64, 112, 1, 1]
    assert asked["steps"] == [1, 1, 1, 1]
    # Not interleaved; swizzle of 128 bytes; 256 bytes into L2; zeros outside. CUDA Driver API,
    # CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
    assert asked["modes"] == (0, 3, 3, 0)


@pytest.mark.parametrize(("dtype", "number"), [("float16", 6), ("bfloat16", 9)])
def test_types_have_the_drivers_numbers(driver: FakeDriver, dtype: DTypeName, number: int) -> None:
    _encoder(dtype=dtype).map_of(4096)
    assert driver.asked[0]["dtype"] == number


@pytest.mark.parametrize("stride", [0, 3, -8, 1 << 50])
def test_an_axis_of_one_element_has_a_legal_stride(driver: FakeDriver, stride: int) -> None:
    for axis in range(3):
        shape, strides = [2, 1000, 4, 96], [1_000_000, 512, 128]
        shape[axis], strides[axis] = 1, stride
        _encoder(tuple(shape), tuple(strides)).map_of(4096)  # type: ignore[arg-type]
        asked = driver.asked[-1]
        assert 1 in asked["sizes"][1:]
        assert all(0 < s < 1 << 40 and s % 16 == 0 for s in asked["strides"])
        others = {1024, 256, 2_000_000} - {2 * [1_000_000, 512, 128][axis]}
        assert others < set(asked["strides"])


def test_maps_are_kept_by_address(driver: FakeDriver) -> None:
    encoder = _encoder()
    first, again, other = (encoder.map_of(address) for address in (4096, 4096, 8192))
    assert first is again
    assert [asked["address"] for asked in driver.asked] == [4096, 8192]
    assert (first == 0x0101010101010101).all()
    assert (other == 0x0202020202020202).all()
    assert _encoder().map_of(4096) is not first  # another tensor may have another shape


def test_an_address_may_be_any_integer(driver: FakeDriver) -> None:
    _encoder().map_of(np.uint64(4096))  # type: ignore[arg-type]
    assert driver.asked[0]["address"] == 4096


def test_so_many_are_kept_and_no_more(driver: FakeDriver) -> None:
    encoder = _encoder()
    addresses = range(4096, 4096 + 16 * 1000, 16)
    for address in addresses:
        encoder.map_of(address)
        assert len(encoder._kept) <= 256
    assert len(driver.asked) == len(addresses)
    before = [encoder.map_of(address) for address in addresses[-8:]]
    assert len(driver.asked) <= len(addresses) + 8
    assert all((row == row[0]).all() for row in before)


class AddressInWord(FakeDriver):
    """Writes the same words into every map, but in one word the address times a factor."""

    def __init__(self, word: int, factor: int = 1, also: int | None = None) -> None:
        super().__init__()
        self.word, self.factor, self.also = word, factor, also

    def encode(self, words: Any, dtype: int, rank: int, address: Any, *others: Any) -> int:
        status = super().encode(words, dtype, rank, address, *others)
        to = (ctypes.c_uint64 * WORDS).from_address(words.value)
        to[:] = [7] * WORDS
        to[self.word] = address.value * self.factor
        if self.also is not None:
            to[self.also] = address.value >> 8
        return status


_ADDRESSES = [4096, 1 << 40, 16, 3 << 33, 1 << 46, 4096 + 16, 0x7F12_3456_7890]


def _written(encoder: TensorMapEncoder, address: int) -> Any:
    """A map that the encoder writes into an array."""
    room = np.zeros(WORDS, np.uint64)
    encoder.write(np.uint64(address), room)  # type: ignore[arg-type]
    return room


@pytest.mark.parametrize("word", [0, 5, WORDS - 1])
def test_the_driver_is_asked_no_more_than_it_takes_to_know(
    monkeypatch: pytest.MonkeyPatch, word: int
) -> None:
    driver = AddressInWord(word)
    monkeypatch.setattr(tensor_map, "_encode", lambda: driver.encode)
    encoder = _encoder()
    for address in _ADDRESSES:
        expected = np.full(WORDS, 7, np.uint64)
        expected[word] = address
        assert (_written(encoder, address) == expected).all()
    assert [asked["address"] for asked in driver.asked] == _ADDRESSES[:4]


def test_a_less_aligned_address_is_left_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's words for such an address are unknown."""
    driver = AddressInWord(0)
    monkeypatch.setattr(tensor_map, "_encode", lambda: driver.encode)
    encoder = _encoder()
    for address in (512, 1024, 4096, 1 << 40, 1536, 1 << 41, 528, 768):
        assert _written(encoder, address)[0] == address
    assert [asked["address"] for asked in driver.asked] == [512, 1024, 4096, 1 << 40, 528, 768]


@pytest.mark.parametrize(
    "driver", [AddressInWord(0, factor=2), AddressInWord(3, also=4)], ids=["scaled", "twice"]
)
def test_the_driver_is_asked_where_an_address_is_not_just_a_word(
    monkeypatch: pytest.MonkeyPatch, driver: AddressInWord
) -> None:
    monkeypatch.setattr(tensor_map, "_encode", lambda: driver.encode)
    encoder = _encoder()
    maps = [_written(encoder, address) for address in _ADDRESSES]
    assert [asked["address"] for asked in driver.asked] == _ADDRESSES
    assert len({tuple(words) for words in maps}) == len(_ADDRESSES)


@pytest.mark.parametrize("driver", [AddressInWord(5), AddressInWord(0, factor=2)])
def test_a_map_is_the_same_wherever_it_is_put(
    monkeypatch: pytest.MonkeyPatch, driver: AddressInWord
) -> None:
    """It replaces zeros or another map, before and after the address word is known."""
    monkeypatch.setattr(tensor_map, "_encode", lambda: driver.encode)
    encoder, other = _encoder(), _encoder()
    room = np.zeros(WORDS + 2, np.uint64)
    for address in [*_ADDRESSES, 4104, *_ADDRESSES]:
        encoder.write(address, room[1:-1])
        assert (room[1:-1] == other.map_of(address)).all()
        assert (room[0], room[-1]) == (0, 0)


def test_what_the_driver_refuses_is_not_made_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AddressInWord(0)
    monkeypatch.setattr(tensor_map, "_encode", lambda: driver.encode)
    encoder = _encoder()
    for address in _ADDRESSES:
        _written(encoder, address)
    driver.status = 1
    with pytest.raises(LaunchError, match="0x1008"):
        encoder.map_of(4104)
    with pytest.raises(LaunchError, match="0x1008"):
        encoder.write(4104, np.zeros(WORDS, np.uint64))


def test_a_map_is_where_the_driver_wants_it(driver: FakeDriver) -> None:
    """It is at a multiple of 64 bytes and has the kernel's size; nothing beyond is written."""
    encoder = _encoder()
    kept = [encoder.map_of(address) for address in range(0, 16 * 64, 16)]
    for words, asked in zip(kept, driver.asked, strict=True):
        assert asked["at"] % 64 == 0
        assert words.ctypes.data == asked["at"]
        assert (words.dtype, words.shape, words.nbytes) == (np.uint64, (16,), TENSOR_MAP.itemsize)
        start, end = words.ctypes.data, words.ctypes.data + words.nbytes
        room = words.base
        assert isinstance(room, np.ndarray)
        assert room.ctypes.data <= start
        assert end <= room.ctypes.data + room.nbytes


def test_a_refusal_says_what_was_asked_and_is_not_kept(driver: FakeDriver) -> None:
    driver.status = 1
    encoder = _encoder()
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"\[96, 1000, 4, 2\].*2000000.*0x1008.*error 1"):
            encoder.map_of(4104)
    assert len(driver.asked) == 2
    driver.status = 0
    assert encoder.map_of(4104) is encoder.map_of(4104)


@pytest.mark.parametrize(
    ("kernel", "mapped"), [("forward", ("q", "k", "v")), ("backward", ("q", "k", "v", "dout"))]
)
def test_the_parameters_are_as_long_as_the_compiler_makes_them(
    kernel: str, mapped: tuple[str, ...]
) -> None:
    """Maps are aligned to 64 bytes, as the driver wants them, so the size is a multiple of 64."""
    struct = PARAMETERS["fa3", kernel]
    offsets = dict(struct.offsets())
    assert struct.dtype.itemsize % 64 == 0
    assert struct.dtype.itemsize - (offsets["shape.q_offset"] + 4) < 64
    places = [offsets[f"{name}_map.opaque"] for name in mapped]
    assert places == [128 * i for i in range(len(mapped))]
    plain = [s for key, s in PARAMETERS.items() if key[0] != "fa3"]
    assert all(not any(name.endswith("_map") for name in s.dtype.names or ()) for s in plain)
