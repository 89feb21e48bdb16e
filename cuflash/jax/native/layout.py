"""The words of a launch table, which :mod:`.table` writes and :mod:`.handler` reads.

A word has 64 bits. A place is a number of words from the beginning of the table.
"""

from __future__ import annotations

import enum

__all__ = [
    "ARGUMENT",
    "BOX_WORDS",
    "NOTHING",
    "RESULT",
    "WORKSPACE",
    "WORKSPACE_ALIGNMENT",
    "Device",
    "Driver",
    "Kernel",
    "Map",
    "Patch",
    "Table",
    "Tensor",
]

#: The workspace begins at a multiple of this in its result.
WORKSPACE_ALIGNMENT = 256

#: Where the address of a tensor comes from.
ARGUMENT, RESULT, WORKSPACE, NOTHING = range(4)

#: Words that the sizes, strides, box and steps of a tensor map take.
BOX_WORDS = 4 + 3 + 2 + 2


class Table(enum.IntEnum):
    """The table itself."""

    arguments = 0
    results = enum.auto()  # with the workspace, which is the last
    has_workspace = enum.auto()
    has_stream = enum.auto()  # 0: on the CPU, whose calls have none
    wrong_call = enum.auto()  # place of a message
    no_device = enum.auto()
    no_stream = enum.auto()
    device_count = enum.auto()
    devices = enum.auto()  # place of the first
    driver = enum.auto()


class Tensor(enum.IntEnum):
    """The address of a tensor."""

    kind = 0
    number = enum.auto()  # of the argument or result; or bytes from the start of the workspace
    mask = enum.auto()  # bits that must be 0 in its address
    message = enum.auto()


class Device(enum.IntEnum):
    """The kernels and tensors of one device."""

    context = 0  # of the driver
    tensor_count = enum.auto()
    tensors = enum.auto()
    kernel_count = enum.auto()
    kernels = enum.auto()
    counter = enum.auto()  # address of the table's tile counter
    owner = enum.auto()  # the stream that uses it; 0: none yet
    counter_offset = enum.auto()  # of the counter in the workspace, for other streams; or -1
    failed_counter = enum.auto()


class Kernel(enum.IntEnum):
    """One launch."""

    function = 0
    grid = enum.auto()
    threads = enum.auto()
    shared_bytes = enum.auto()
    words = enum.auto()  # of its parameters
    template = enum.auto()
    pointer_count = enum.auto()
    pointers = enum.auto()  # patches: the number of a tensor
    part_count = enum.auto()
    parts = enum.auto()  # patches: bytes from the start of the workspace
    map_count = enum.auto()
    maps = enum.auto()
    counter_word = enum.auto()  # or -1
    overlaps = enum.auto()  # 1: it may begin before the kernel before it has ended
    refused = enum.auto()


class Patch(enum.IntEnum):
    """A word of the parameters, and the number of its value."""

    word = 0
    number = enum.auto()


class Map(enum.IntEnum):
    """A tensor map among the parameters."""

    word = 0
    tensor = 1
    kind = 2
    swizzle = 3
    promotion = 4
    sizes = 5  # and strides, box and steps after them
    refused = 5 + BOX_WORDS


class Driver(enum.IntEnum):
    """Addresses of the driver's functions."""

    launch = 0  # cuLaunchKernelEx
    encode = enum.auto()  # cuTensorMapEncodeTiled
    memset = enum.auto()  # cuMemsetD32Async
    is_capturing = enum.auto()  # cuStreamIsCapturing
    stream_context = enum.auto()  # cuStreamGetCtx
    current_context = enum.auto()  # cuCtxGetCurrent
    push_context = enum.auto()  # cuCtxPushCurrent
    pop_context = enum.auto()  # cuCtxPopCurrent
