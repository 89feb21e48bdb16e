"""Launches the kernels of a table one after the other, for the handler."""

from __future__ import annotations

from . import frame as xla
from .layout import (
    ARGUMENT,
    RESULT,
    WORKSPACE,
    WORKSPACE_ALIGNMENT,
    Device,
    Driver,
    Kernel,
    Map,
    Patch,
    Table,
    Tensor,
)
from .limits import MOST_PARAMETERS, MOST_TENSORS
from .machine import call, compiled, exchange, load, load32, room, store
from .said import failed_with

__all__ = ["of", "run_kernels"]

_parameters, _addresses = room(MOST_PARAMETERS), room(8 * MOST_TENSORS)
_few_words = room(256)

# Bytes of the records, as plain integers for Numba.
_TENSOR, _KERNEL, _PATCH, _MAP = (
    8 * size for size in (len(Tensor), len(Kernel), len(Patch), Map.refused + 1)
)


@compiled
def of(record: int, field: int) -> int:
    """Return a field of a record of the table."""
    return load(record + 8 * field)


@compiled
def _buffer(frame: int, side: int, number: int) -> int:
    """Return the address of the memory of an argument or a result."""
    return load(load(load(frame + side + xla.ITEMS) + 8 * number) + xla.BUFFER_DATA)


@compiled
def _workspace_of(frame: int, table: int) -> int:
    if of(table, Table.has_workspace) == 0:
        return 0
    begin = _buffer(frame, xla.RETS, of(table, Table.results) - 1)
    return (begin + WORKSPACE_ALIGNMENT - 1) // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT


@compiled
def _find_tensors(frame: int, table: int, device: int, workspace: int, addresses: int) -> int:
    """Write the address of every tensor; return an error if one is not aligned as planned."""
    record = table + 8 * of(device, Device.tensors)
    for i in range(of(device, Device.tensor_count)):
        kind, number = of(record, Tensor.kind), of(record, Tensor.number)
        address = 0
        if kind == ARGUMENT:
            address = _buffer(frame, xla.ARGS, number)
        elif kind == RESULT:
            address = _buffer(frame, xla.RETS, number)
        elif kind == WORKSPACE:
            address = workspace + number
        if address & of(record, Tensor.mask):
            return failed_with(frame, table + 8 * of(record, Tensor.message), address)
        store(addresses + 8 * i, address)
        record += _TENSOR
    return 0


@compiled
def _counter_of(table: int, device: int, stream: int, workspace: int, place: int) -> int:
    """Write the address of a tile counter that is 0 when the next kernel runs; return CUDA's error.

    The counter of the table belongs to the first stream that uses it, whose
    launches run one after the other. Other streams and graphs use a counter in the
    workspace, which a memset on the stream sets to 0.
    """
    driver = table + 8 * of(table, Table.driver)
    offset = of(device, Device.counter_offset)
    if offset < 0:
        return 0
    status = _few_words()
    store(status, 0)
    failed = call(of(driver, Driver.is_capturing), (stream, status))
    if failed:
        return failed
    if load32(status) == 0:
        owner = exchange(device + 8 * Device.owner, 0, stream)
        if owner == 0 or owner == stream:
            store(place, of(device, Device.counter))
            return 0
    store(place, workspace + offset)
    return call(of(driver, Driver.memset), (workspace + offset, 0, 1, stream))


@compiled
def _fill_maps(table: int, kernel: int, addresses: int, words: int, place: int) -> int:
    """Write the tensor maps of a kernel; return CUDA's error, and write where its text is."""
    driver = table + 8 * of(table, Table.driver)
    one = table + 8 * of(kernel, Kernel.maps)
    for _ in range(of(kernel, Kernel.map_count)):
        address = load(addresses + 8 * of(one, Map.tensor))
        sizes = one + 8 * Map.sizes
        failed = call(
            of(driver, Driver.encode),
            (
                words + 8 * of(one, Map.word),
                of(one, Map.kind),
                4,
                address,
                sizes,
                sizes + 8 * 4,
                sizes + 8 * (4 + 3),
                sizes + 8 * (4 + 3 + 2),
                0,  # not interleaved
                of(one, Map.swizzle),
                of(one, Map.promotion),
                0,  # zeros outside
            ),
        )
        if failed:
            store(place, table + 8 * of(one, Map.refused))
            return failed
        one += _MAP
    return 0


@compiled
def _fill(
    table: int, kernel: int, addresses: int, workspace: int, counter: int, words: int, place: int
) -> int:
    """Write the parameters of a kernel; return CUDA's error, and write where its text is."""
    template = table + 8 * of(kernel, Kernel.template)
    for i in range(of(kernel, Kernel.words)):
        store(words + 8 * i, load(template + 8 * i))
    patch = table + 8 * of(kernel, Kernel.pointers)
    for _ in range(of(kernel, Kernel.pointer_count)):
        store(words + 8 * of(patch, Patch.word), load(addresses + 8 * of(patch, Patch.number)))
        patch += _PATCH
    patch = table + 8 * of(kernel, Kernel.parts)
    for _ in range(of(kernel, Kernel.part_count)):
        store(words + 8 * of(patch, Patch.word), workspace + of(patch, Patch.number))
        patch += _PATCH
    if of(kernel, Kernel.counter_word) >= 0:
        store(words + 8 * of(kernel, Kernel.counter_word), counter)
    return _fill_maps(table, kernel, addresses, words, place)


@compiled
def _launch(table: int, kernel: int, stream: int, words: int) -> int:
    """Launch a kernel with these parameters, and return CUDA's error."""
    config = _few_words()
    store(config, of(kernel, Kernel.grid) | 1 << 32)
    store(config + 8, 1 | of(kernel, Kernel.threads) << 32)
    store(config + 16, 1 | 1 << 32)
    store(config + 24, of(kernel, Kernel.shared_bytes))
    store(config + 32, stream)
    # The one attribute that a launch may have; see cuda/overlap.py.
    attribute = config + 56
    store(attribute, 6)
    store(attribute + 8, 1)
    store(config + 40, attribute * of(kernel, Kernel.overlaps))
    store(config + 48, of(kernel, Kernel.overlaps))
    parameters = attribute + 72
    store(parameters, words)
    driver = table + 8 * of(table, Table.driver)
    function = of(kernel, Kernel.function)
    return call(of(driver, Driver.launch), (config, function, parameters, 0))


@compiled
def run_kernels(frame: int, table: int, device: int, stream: int) -> int:
    """Launch all kernels in the current context; return 0, or the address of an error."""
    workspace = _workspace_of(frame, table)
    addresses, words, place = _addresses(), _parameters(), _few_words()
    failure = _find_tensors(frame, table, device, workspace, addresses)
    if failure:
        return failure
    store(place, 0)
    failed = _counter_of(table, device, stream, workspace, place)
    if failed:
        return failed_with(frame, table + 8 * of(device, Device.failed_counter), failed)
    counter = load(place)
    kernel = table + 8 * of(device, Device.kernels)
    for _ in range(of(device, Device.kernel_count)):
        store(place, table + 8 * of(kernel, Kernel.refused))
        failed = _fill(table, kernel, addresses, workspace, counter, words, place)
        if failed == 0:
            failed = _launch(table, kernel, stream, words)
        if failed:
            return failed_with(frame, load(place), failed)
        kernel += _KERNEL
    return 0
