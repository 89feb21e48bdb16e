"""Call frames as XLA makes them, from their C structures, and a driver that keeps a record.

XLA: ``xla/ffi/api/c_api.h``, written down here independently, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cuflash.jax.native.layout import Driver

__all__ = ["FakeDriver", "FakeXla", "structure"]

_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_int64


def structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A structure of XLA's interface that begins with its size and a list of extensions."""
    first = [("struct_size", _SIZE), ("extension_start", _POINTER)]
    return type(name, (ctypes.Structure,), {"_fields_": [*first, *fields.items()]})


Version = structure("Version", major=_INT, minor=_INT)
_FUNCTIONS = ("error_create", "error_message", "error_destroy", "register", "stream_get")
Api = structure(
    "Api", version=Version, internal=_POINTER, **dict.fromkeys((*_FUNCTIONS, "type"), _POINTER)
)
Buffer = structure("Buffer", dtype=_INT, data=_POINTER, rank=_LONG, dims=_POINTER)
List = structure("List", count=_LONG, types=_POINTER, items=_POINTER)
Attributes = structure("Attributes", count=_LONG, types=_POINTER, names=_POINTER, items=_POINTER)
Frame = structure(
    "Frame",
    api=_POINTER,
    context=_POINTER,
    stage=_INT,
    args=List,
    rets=List,
    attrs=Attributes,
    future=_POINTER,
)
ErrorCreate = structure("ErrorCreate", message=ctypes.c_char_p, code=_INT)
StreamGet = structure("StreamGet", context=_POINTER, stream=_POINTER)


class Scalar(ctypes.Structure):
    """XLA_FFI_Scalar."""

    _fields_ = (("dtype", _INT), ("value", _POINTER))


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, which has no list of extensions."""

    _fields_ = (("struct_size", _SIZE), ("version", Version), ("traits", ctypes.c_uint32))


class Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("size", _SIZE), ("type", _INT), ("next", _POINTER), ("metadata", _POINTER))


class FakeXla:
    """XLA's side: its functions, its stream, and what the handler told it."""

    STREAM, FAILURE = 77 << 32, 99 << 40

    def __init__(self, handler: Callable[[int], int], version: tuple[int, int] = (0, 3)) -> None:
        self.handler = handler
        self.errors: list[tuple[str, int]] = []
        self.stream: int | None = self.STREAM  # None: XLA reports an error instead
        self.kept: list[Any] = []
        self.api = Api(struct_size=ctypes.sizeof(Api), version=Version(24, None, *version))
        word = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
        self._functions = word(self._error_create), word(self._stream_get)
        create, get = (ctypes.cast(f, _POINTER).value for f in self._functions)
        self.api.error_create, self.api.stream_get = create, get

    def _error_create(self, given: int) -> int:
        error = ErrorCreate.from_address(given)
        assert error.struct_size == 32
        self.errors.append((error.message.decode(), error.code))
        return self.FAILURE

    def _stream_get(self, given: int) -> int:
        asked = StreamGet.from_address(given)
        assert (asked.struct_size, asked.context) == (32, 5)
        if self.stream is None:
            return self.FAILURE + 1
        asked.stream = self.stream
        return 0

    def call(
        self, number: int, arguments: Sequence[int], results: Sequence[int], stage: int = 3
    ) -> int:
        """The return value of the handler for buffers at these addresses."""
        return self.handler(self.frame(number, arguments, results, stage))

    def frame(
        self, number: int, arguments: Sequence[int], results: Sequence[int], stage: int = 3
    ) -> int:
        """The address of a call's frame, which lives as long as this object."""
        value = ctypes.c_uint64(number)
        scalar = Scalar(9, ctypes.addressof(value))
        pointers = (_POINTER * 1)(ctypes.addressof(scalar))
        lists = [self._list(addresses) for addresses in (arguments, results)]
        frame = Frame(
            struct_size=168,
            api=ctypes.addressof(self.api),
            context=5,
            stage=stage,
            args=lists[0],
            rets=lists[1],
            attrs=Attributes(48, None, 1, None, None, ctypes.addressof(pointers)),
        )
        self.kept += [value, scalar, pointers, frame]
        return ctypes.addressof(frame)

    def _list(self, addresses: Sequence[int]) -> Any:
        buffers = [Buffer(struct_size=48, data=address) for address in addresses]
        pointers = (_POINTER * len(buffers))(*map(ctypes.addressof, buffers))
        self.kept += [buffers, pointers]
        return List(40, None, len(buffers), None, ctypes.addressof(pointers))

    def ask(
        self,
        frame_size: int = 168,
        api_size: int | None = None,
        has_api: bool = True,
        extension_type: int = 1,
        metadata_size: int = 36,
    ) -> tuple[int, int, int]:
        """The version and the traits that the handler reports when it is registered."""
        self.api.struct_size = ctypes.sizeof(Api) if api_size is None else api_size
        metadata = Metadata(struct_size=metadata_size)
        extension = Extension(24, extension_type, None, ctypes.addressof(metadata))
        frame = Frame(
            struct_size=frame_size,
            extension_start=ctypes.addressof(extension),
            api=ctypes.addressof(self.api) if has_api else None,
        )
        assert self.handler(ctypes.addressof(frame)) == 0
        return metadata.version.major, metadata.version.minor, metadata.traits


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("x", "y", "z", "threads", "ty", "tz", "shared")),
        ("stream", _POINTER),
        ("attributes", _POINTER),
        ("count", ctypes.c_uint32),
    )


class FakeDriver:
    """CUDA's driver: every function returns the error that it is set to.

    Attributes
    ----------
    asked
        Names of the called functions, in order.
    overlapped
        Whether each launch may begin before the one before it has ended, in order.
    failing
        The error of a function, by its name.
    """

    CONTEXT = 3 << 30

    def __init__(self, launch: Callable[..., None], encode: Callable[..., Any]) -> None:
        self.launch_kernel, self.encode_map = launch, encode
        self.asked: list[str] = []
        self.failing: dict[str, int] = {}
        self.raised: list[BaseException] = []
        self.overlapped: list[bool] = []  # whether each launch may begin early
        self.contexts = [self.CONTEXT]  # of the calling thread; the last is current
        self.stream_context = self.CONTEXT
        self.capturing: set[int] = set()
        self.capture_status = 1  # of these
        self.set_to: list[tuple[int, ...]] = []
        self._functions = [self._function(one.name) for one in Driver]

    @property
    def addresses(self) -> list[int]:
        """The addresses of the functions, in the order of a launch table."""
        return [ctypes.cast(function, _POINTER).value or 0 for function in self._functions]

    def _function(self, name: str) -> Any:
        method, words = getattr(self, f"_{name}"), _ARGUMENTS[name]

        def called(*given: Any) -> int:
            self.asked.append(name)
            if name in self.failing:
                return self.failing[name]
            try:
                method(*(number or 0 for number in given))
            except BaseException as error:  # nothing passes through C
                self.raised.append(error)
                return 999
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *words)(called)

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> None:
        one = LaunchConfig.from_address(config)
        assert (one.y, one.z, one.ty, one.tz) == (1, 1, 1, 1)
        assert (bool(one.attributes), extra) == (one.count == 1, 0)
        if one.count:
            words = (ctypes.c_int64 * 2).from_address(one.attributes)
            assert [*words] == [6, 1]  # programmatic stream serialization, allowed
        self.overlapped.append(bool(one.count))
        block = one.threads, 1, 1
        self.launch_kernel(function, one.x, 1, 1, *block, one.shared, one.stream, parameters, 0)

    def _encode(self, to: int, kind: int, rank: int, address: int, *more: Any) -> None:
        assert to % 64 == 0
        sizes, strides, box, steps = (
            (width * count).from_address(place)
            for width, count, place in zip(
                (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32),
                (4, 3, 4, 4),
                more,
                strict=False,
            )
        )
        where = ctypes.c_void_p(to), kind, rank, ctypes.c_void_p(address)
        self.encode_map(*where, sizes, strides, box, steps, *more[4:])

    def _memset(self, address: int, value: int, count: int, stream: int) -> None:
        self.set_to.append((address, value, count, stream))

    def _is_capturing(self, stream: int, status: int) -> None:
        ctypes.c_int32.from_address(status).value = (
            self.capture_status if stream in self.capturing else 0
        )

    def _stream_context(self, stream: int, to: int) -> None:
        ctypes.c_uint64.from_address(to).value = self.stream_context

    def _current_context(self, to: int) -> None:
        ctypes.c_uint64.from_address(to).value = self.contexts[-1] if self.contexts else 0

    def _push_context(self, context: int) -> None:
        self.contexts.append(context)

    def _pop_context(self, to: int) -> None:
        ctypes.c_uint64.from_address(to).value = self.contexts.pop()


#: Arguments of the driver's functions.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "launch": (_POINTER,) * 4,
    "encode": (_POINTER, _INT, ctypes.c_uint32, *[_POINTER] * 5, *[_INT] * 4),
    "memset": (_POINTER, ctypes.c_uint32, _SIZE, _POINTER),
    "is_capturing": (_POINTER, _POINTER),
    "stream_context": (_POINTER, _POINTER),
    "current_context": (_POINTER,),
    "push_context": (_POINTER,),
    "pop_context": (_POINTER,),
}
