"""What XLA calls in place of Python: an interpreter of launch tables, compiled by Numba.

XLA's foreign function interface, typed API: a handler is a C function that is
given a call frame. This one finds the table of its call, fills in the
parameters of every kernel, and launches them on XLA's stream. It allocates
nothing and waits for nothing, so XLA can capture it into a command buffer.

Nothing here is an address of this process: Numba keeps the machine code on disk.
"""

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
from .machine import (
    call,
    call_for_word,
    compiled,
    exchange,
    load,
    load32,
    place_of,
    room,
    store,
    store32,
)
from .limits import MOST_PARAMETERS, MOST_TENSORS, MOST_TEXT
from .registry import NO_TABLE, SLOT_BYTES, SLOTS
from .stamp import STAMP

__all__ = ["handle"]

_registry = place_of("cuflash_registry")
_parameters, _addresses = room(MOST_PARAMETERS), room(8 * MOST_TENSORS)
_text, _few_words = room(MOST_TEXT), room(128)

# Numba takes plain integers.
_WORD = 8
_TENSOR, _DEVICE, _KERNEL, _PATCH, _MAP = (
    _WORD * size for size in (len(Tensor), len(Device), len(Kernel), 2, int(Map.refused) + 1)
)


@compiled
def _of(record: int, field: int) -> int:
    return load(record + 8 * field)


@compiled
def _answer(frame: int, extension: int) -> int:
    """Tell XLA the version of its interface that is spoken here, and what may be done with it."""
    if load32(extension + xla.EXTENSION_TYPE) != xla.EXTENSION_METADATA:
        return 0
    metadata = load(extension + xla.METADATA_OF_EXTENSION)
    api = load(frame + xla.FRAME_API)
    major, minor = -1, 0  # a version that no XLA takes
    if load(frame) >= xla.FRAME_SIZE and api != 0 and load(api) >= xla.API_SIZE:
        version = load(api + xla.API_VERSION)
        if version & 0xFFFFFFFF == xla.MAJOR:
            major, minor = xla.MAJOR, min(version >> 32, xla.MINOR)
    store32(metadata + xla.METADATA_VERSION, major)
    store32(metadata + xla.METADATA_VERSION + 4, minor)
    if load(metadata) >= xla.METADATA_TRAITS + 4:
        store32(metadata + xla.METADATA_TRAITS, xla.ALLOWS_COMMAND_BUFFERS)
    return 0


@compiled
def _error(frame: int, text: int) -> int:
    """An error of XLA with the text that ends in a zero at an address."""
    given = _few_words()
    store(given, 32)
    store(given + 8, 0)
    store(given + 16, text)
    store(given + 24, xla.CODE_INTERNAL)
    return call_for_word(load(load(frame + xla.FRAME_API) + xla.API_ERROR_CREATE), given)


@compiled
def _failed(frame: int, message: int, number: int) -> int:
    """The same with a text of the table, and a number in decimal digits after it."""
    text, count = _text(), load(message)
    for i in range(count):
        store(text + 8 * i, load(message + 8 + 8 * i))
    digits, most = 1, 10
    while most <= number and digits < 18:
        digits, most = digits + 1, most * 10
    end = text + load(message + 8 + 8 * count)  # the length in bytes follows the words
    store(end, 0)
    store(end + 8, 0)
    store(end + 16, 0)
    rest = number
    for i in range(digits):
        place = end + digits - 1 - i
        store32(place, 48 + rest % 10 + (load32(place) & 0xFFFFFF00))
        rest //= 10
    return _error(frame, text)


@compiled
def _table_of(registry: int, key: int) -> int:
    """The table of a key, or 0."""
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
def _buffer(frame: int, side: int, number: int) -> int:
    """Address of the memory of an argument or a result."""
    return load(load(load(frame + side + xla.ITEMS) + 8 * number) + xla.BUFFER_DATA)


@compiled
def _workspace_of(frame: int, table: int) -> int:
    if _of(table, Table.has_workspace) == 0:
        return 0
    begin = _buffer(frame, xla.RETS, _of(table, Table.results) - 1)
    return (begin + WORKSPACE_ALIGNMENT - 1) // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT


@compiled
def _find_tensors(frame: int, table: int, workspace: int, addresses: int) -> int:
    """Write the address of every tensor; an error if one is not aligned as planned."""
    record = table + 8 * _of(table, Table.tensors)
    for i in range(_of(table, Table.tensor_count)):
        kind, number = _of(record, Tensor.kind), _of(record, Tensor.number)
        address = 0
        if kind == ARGUMENT:
            address = _buffer(frame, xla.ARGS, number)
        elif kind == RESULT:
            address = _buffer(frame, xla.RETS, number)
        elif kind == WORKSPACE:
            address = workspace + number
        if address & _of(record, Tensor.mask):
            return _failed(frame, table + 8 * _of(record, Tensor.message), address)
        store(addresses + 8 * i, address)
        record += _TENSOR
    return 0


@compiled
def _device_of(table: int, context: int) -> int:
    """What runs in a context of the driver, or 0."""
    device = table + 8 * _of(table, Table.devices)
    for _ in range(_of(table, Table.device_count)):
        if _of(device, Device.context) == context:
            return device
        device += _DEVICE
    return 0


@compiled
def _counter_of(table: int, device: int, stream: int, workspace: int, place: int) -> int:
    """Write the address of a tile counter that is 0 when the next kernel runs; CUDA's error.

    That of the table belongs to the first stream that draws from it, whose
    launches run one after the other. Other streams and graphs have one in the
    workspace, which is set to 0 in their order.
    """
    driver = table + 8 * _of(table, Table.driver)
    offset = _of(device, Device.counter_offset)
    if offset < 0:
        return 0
    status = _few_words()
    store(status, 0)
    failed = call(_of(driver, Driver.is_capturing), (stream, status))
    if failed:
        return failed
    if load32(status) == 0:
        owner = exchange(device + 8 * Device.owner, 0, stream)
        if owner == 0 or owner == stream:
            store(place, _of(device, Device.counter))
            return 0
    store(place, workspace + offset)
    return call(_of(driver, Driver.memset), (workspace + offset, 0, 1, stream))


@compiled
def _fill_maps(table: int, kernel: int, addresses: int, words: int, place: int) -> int:
    """Write the tensor maps of a kernel; CUDA's error, and the text for it."""
    driver = table + 8 * _of(table, Table.driver)
    one = table + 8 * _of(kernel, Kernel.maps)
    for _ in range(_of(kernel, Kernel.map_count)):
        address = load(addresses + 8 * _of(one, Map.tensor))
        sizes = one + 8 * Map.sizes
        failed = call(
            _of(driver, Driver.encode),
            (
                words + 8 * _of(one, Map.word),
                _of(one, Map.kind),
                4,
                address,
                sizes,
                sizes + 8 * 4,
                sizes + 8 * (4 + 3),
                sizes + 8 * (4 + 3 + 2),
                0,  # not interleaved
                3,  # rows of 128 bytes are swizzled
                3,  # L2 fetches 256 bytes
                0,  # zeros outside
            ),
        )
        if failed:
            store(place, table + 8 * _of(one, Map.refused))
            return failed
        one += _MAP
    return 0


@compiled
def _fill(
    table: int, kernel: int, addresses: int, workspace: int, counter: int, words: int, place: int
) -> int:
    """Write the parameters of a kernel; CUDA's error, and the text for it."""
    template = table + 8 * _of(kernel, Kernel.template)
    for i in range(_of(kernel, Kernel.words)):
        store(words + 8 * i, load(template + 8 * i))
    patch = table + 8 * _of(kernel, Kernel.pointers)
    for _ in range(_of(kernel, Kernel.pointer_count)):
        store(words + 8 * _of(patch, Patch.word), load(addresses + 8 * _of(patch, Patch.value)))
        patch += _PATCH
    patch = table + 8 * _of(kernel, Kernel.parts)
    for _ in range(_of(kernel, Kernel.part_count)):
        store(words + 8 * _of(patch, Patch.word), workspace + _of(patch, Patch.value))
        patch += _PATCH
    if _of(kernel, Kernel.counter_word) >= 0:
        store(words + 8 * _of(kernel, Kernel.counter_word), counter)
    return _fill_maps(table, kernel, addresses, words, place)


@compiled
def _launch(table: int, kernel: int, stream: int, words: int) -> int:
    """CUDA's error of a launch with these parameters."""
    config = _few_words()
    store(config, _of(kernel, Kernel.grid) | 1 << 32)
    store(config + 8, 1 | _of(kernel, Kernel.threads) << 32)
    store(config + 16, 1 | 1 << 32)
    store(config + 24, _of(kernel, Kernel.shared_bytes))
    store(config + 32, stream)
    store(config + 40, 0)  # no attributes
    store(config + 48, 0)
    parameters = config + 64
    store(parameters, words)
    driver = table + 8 * _of(table, Table.driver)
    function = _of(kernel, Kernel.function)
    return call(_of(driver, Driver.launch), (config, function, parameters, 0))


@compiled
def _run(frame: int, table: int, device: int, stream: int) -> int:
    """Launch all kernels in the current context."""
    workspace = _workspace_of(frame, table)
    addresses, words, place = _addresses(), _parameters(), _few_words()
    failure = _find_tensors(frame, table, workspace, addresses)
    if failure:
        return failure
    store(place, 0)
    failed = _counter_of(table, device, stream, workspace, place)
    if failed:
        return _failed(frame, table + 8 * _of(device, Device.failed_counter), failed)
    counter = load(place)
    kernel = table + 8 * _of(device, Device.kernels)
    for _ in range(_of(device, Device.kernel_count)):
        store(place, table + 8 * _of(kernel, Kernel.refused))
        failed = _fill(table, kernel, addresses, workspace, counter, words, place)
        if failed == 0:
            failed = _launch(table, kernel, stream, words)
        if failed:
            return _failed(frame, load(place), failed)
        kernel += _KERNEL
    return 0


@compiled
def _stream_of(frame: int, table: int, place: int) -> int:
    """Write XLA's stream; XLA's error."""
    store(place, 0)
    if _of(table, Table.has_stream) == 0:
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
        return _error(frame, load(registry + SLOT_BYTES * SLOTS + 8 * NO_TABLE))
    counts = load(frame + xla.ARGS + xla.COUNT), load(frame + xla.RETS + xla.COUNT)
    if counts[0] != _of(table, Table.arguments) or counts[1] != _of(table, Table.results):
        return _failed(frame, table + 8 * _of(table, Table.wrong_call), counts[0])
    place, driver = _few_words(), table + 8 * _of(table, Table.driver)
    failure = _stream_of(frame, table, place)
    if failure:
        return failure
    stream, before = load(place), place + 8
    failed = call(_of(driver, Driver.stream_context), (stream, place))
    if failed == 0:
        failed = call(_of(driver, Driver.current_context), (before,))
    if failed:
        return _failed(frame, table + 8 * _of(table, Table.no_stream), failed)
    context = load(place)
    device = _device_of(table, context)
    if device == 0:
        return _failed(frame, table + 8 * _of(table, Table.no_device), 0)
    if load(before) == context:
        return _run(frame, table, device, stream)
    failed = call(_of(driver, Driver.push_context), (context,))
    if failed:
        return _failed(frame, table + 8 * _of(table, Table.no_stream), failed)
    failure = _run(frame, table, device, stream)
    call(_of(driver, Driver.pop_context), (place,))
    return failure


def handle(frame: int) -> int:
    """What XLA calls: 0, or the address of an error.

    A frame of no size is ours: it brings the address of the registry, and is
    answered with the stamp of the code.
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
