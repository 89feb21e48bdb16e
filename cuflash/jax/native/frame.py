"""Offsets in bytes of the fields of XLA's C structures that a handler reads.

XLA: ``xla/ffi/api/c_api.h``, API version 0.1 and later. New fields are added
after the existing ones; every structure begins with its size.
"""

from __future__ import annotations

__all__ = [
    "ALLOWS_COMMAND_BUFFERS",
    "API_ERROR_CREATE",
    "API_SIZE",
    "API_STREAM_GET",
    "API_VERSION",
    "ARGS",
    "ATTRIBUTES",
    "ATTRS",
    "BUFFER_DATA",
    "CODE_INTERNAL",
    "COUNT",
    "EXECUTE",
    "EXTENSION",
    "EXTENSION_METADATA",
    "EXTENSION_TYPE",
    "FRAME_API",
    "FRAME_CONTEXT",
    "FRAME_SIZE",
    "FRAME_STAGE",
    "ITEMS",
    "MAJOR",
    "METADATA_OF_EXTENSION",
    "METADATA_TRAITS",
    "METADATA_VERSION",
    "MINOR",
    "MINOR_WITHOUT_API",
    "RETS",
    "SCALAR_VALUE",
]

#: The version that this file was written for: older ones have the same fields.
MAJOR, MINOR = 0, 3
#: The minor version for an XLA that does not give its own version: jaxlib before 0.8.
MINOR_WITHOUT_API = 1

#: XLA_FFI_CallFrame, and the least size of a frame with all of these fields.
EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_STAGE = 8, 16, 24, 32
ARGS, RETS, ATTRS = 40, 80, 120
FRAME_SIZE = 168
#: XLA_FFI_Args and XLA_FFI_Rets; the attributes have names before the items.
COUNT, ITEMS = 16, 32
ATTRIBUTES = 40
#: XLA_FFI_Buffer and XLA_FFI_Scalar.
BUFFER_DATA, SCALAR_VALUE = 24, 8
#: XLA_FFI_ExecutionStage.
EXECUTE = 3

#: XLA_FFI_Api: its version (major and minor in one word), and two of its functions.
API_VERSION, API_ERROR_CREATE, API_STREAM_GET = 32, 48, 80
API_SIZE = 88
#: XLA_FFI_Error_Code.
CODE_INTERNAL = 13

#: XLA_FFI_Metadata_Extension: with it XLA asks a handler for its metadata at registration.
EXTENSION_TYPE, METADATA_OF_EXTENSION = 8, 24
EXTENSION_METADATA = 1
#: XLA_FFI_Metadata.
METADATA_VERSION, METADATA_TRAITS = 24, 32
ALLOWS_COMMAND_BUFFERS = 1
