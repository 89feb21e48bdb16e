"""The handler that XLA calls instead of Python: it runs launch tables, compiled by Numba.

In the typed API of XLA's foreign function interface, a handler is a C function of
a call frame. The handler here finds the table of its call, fills in the parameters
of every kernel, and launches the kernels on XLA's stream. It allocates nothing and
waits for nothing, so XLA can capture it into a command buffer.

The code has no address of this process, since Numba keeps the machine code on disk.
"""

from __future__ import annotations

from . import frame as xla
from .launching import of, run_kernels
from .layout import Device, Driver, Table
from .machine import call, call_for_word, compiled, load, load32, place_of, room, store, store32
from .registry import NO_TABLE, SLOT_BYTES, SLOTS
from .said import error_of, failed_with
from .stamp import STAMP

__all__ = ["handle"]

_registry = place_of("cuflash_registry")
_few_words = room(128)

#: Bytes of a record.
_DEVICE = 8 * len(Device)


@compiled
def _answer(frame: int, extension: int) -> int:
    """Write the interface version of the handler, and that command buffers are allowed."""
    if load32(extension + xla.EXTENSION_TYPE) != xla.EXTENSION_METADATA:
        return 0
    metadata = load(extension + xla.METADATA_OF_EXTENSION)
    api = load(frame + xla.FRAME_API)
    major, minor = -1, 0  # a version that every XLA refuses
    if load(frame) >= xla.FRAME_SIZE and api == 0:
        major, minor = xla.MAJOR, xla.MINOR_WITHOUT_API
    elif load(frame) >= xla.FRAME_SIZE and load(api) >= xla.API_SIZE:
        version = load(api + xla.API_VERSION)
        if version & 0xFFFFFFFF == xla.MAJOR:
            major, minor = xla.MAJOR, min(version >> 32, xla.MINOR)
    store32(metadata + xla.METADATA_VERSION, major)
    store32(metadata + xla.METADATA_VERSION + 4, minor)
    if load(metadata) >= xla.METADATA_TRAITS + 4:
        store32(metadata + xla.METADATA_TRAITS, xla.ALLOWS_COMMAND_BUFFERS)
    return 0


@compiled
def _table_of(registry: int, key: int) -> int:
    """Return the table of a key, or 0."""
    slot = key % SLOTS
    for _ in range(SLOTS):
        place = registry + SLOT_BYTES * slot
        found = load(place)
        if found == key:
            return load(place + 8)
        if found == 0:
            return 0
        slot = (slot + 1) % SLOTS
    return 0


@compiled
def _device_of(table: int, context: int) -> int:
    """Return the record of the device with a context of the driver, or 0."""
    device = table + 8 * of(table, Table.devices)
    for _ in range(of(table, Table.device_count)):
        if of(device, Device.context) == context:
            return device
        device += _DEVICE
    return 0


@compiled
def _stream_of(frame: int, table: int, place: int) -> int:
    """Write XLA's stream; return XLA's error."""
    store(place, 0)
    if of(table, Table.has_stream) == 0:
        return 0
    given = place + 16
    store(given, 32)
    store(given + 8, 0)
    store(given + 16, load(frame + xla.FRAME_CONTEXT))
    store(given + 24, 0)
    failure = call_for_word(load(load(frame + xla.FRAME_API) + xla.API_STREAM_GET), given)
    store(place, load(given + 24))
    return failure


@compiled
def _execute(frame: int, registry: int) -> int:
    """Run the table that the call names."""
    number = load(load(load(frame + xla.ATTRS + xla.ATTRIBUTES)) + xla.SCALAR_VALUE)
    table = _table_of(registry, load(number))
    if table == 0:
        return error_of(frame, load(registry + SLOT_BYTES * SLOTS + 8 * NO_TABLE))
    counts = load(frame + xla.ARGS + xla.COUNT), load(frame + xla.RETS + xla.COUNT)
    if counts[0] != of(table, Table.arguments) or counts[1] != of(table, Table.results):
        return failed_with(frame, table + 8 * of(table, Table.wrong_call), counts[0])
    place, driver = _few_words(), table + 8 * of(table, Table.driver)
    failure = _stream_of(frame, table, place)
    if failure:
        return failure
    stream, before = load(place), place + 8
    failed = call(of(driver, Driver.stream_context), (stream, place))
    if failed == 0:
        failed = call(of(driver, Driver.current_context), (before,))
    if failed:
        return failed_with(frame, table + 8 * of(table, Table.no_stream), failed)
    context = load(place)
    device = _device_of(table, context)
    if device == 0:
        return failed_with(frame, table + 8 * of(table, Table.no_device), 0)
    if load(before) == context:
        return run_kernels(frame, table, device, stream)
    failed = call(of(driver, Driver.push_context), (context,))
    if failed:
        return failed_with(frame, table + 8 * of(table, Table.no_stream), failed)
    failure = run_kernels(frame, table, device, stream)
    call(of(driver, Driver.pop_context), (place,))
    return failure


def handle(frame: int) -> int:
    """Handle a call of XLA; return 0, or the address of an error.

    A frame of size 0 comes from :mod:`.registration`: it holds the address of the
    registry, and the handler returns the stamp of its code.
    """
    if load(frame) == 0:
        store(_registry(), load(frame + 8))
        return STAMP
    extension = load(frame + xla.EXTENSION)
    if extension != 0:
        return _answer(frame, extension)
    if load32(frame + xla.FRAME_STAGE) != xla.EXECUTE:
        return 0
    return _execute(frame, load(_registry()))
