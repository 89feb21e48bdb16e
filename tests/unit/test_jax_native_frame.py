"""The handler's offsets in XLA's structures, compared with the header of this jaxlib."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .jax_case import jax

pytest.importorskip("cuflash.jax", reason="JAX is not installed")
from cuflash.jax.native import frame

#: The C expression for each number of ``cuflash/jax/native/frame.py``.
_MEANT = {
    "EXTENSION": "offsetof(XLA_FFI_CallFrame, extension_start)",
    "FRAME_API": "offsetof(XLA_FFI_CallFrame, api)",
    "FRAME_CONTEXT": "offsetof(XLA_FFI_CallFrame, ctx)",
    "FRAME_STAGE": "offsetof(XLA_FFI_CallFrame, stage)",
    "ARGS": "offsetof(XLA_FFI_CallFrame, args)",
    "RETS": "offsetof(XLA_FFI_CallFrame, rets)",
    "ATTRS": "offsetof(XLA_FFI_CallFrame, attrs)",
    "FRAME_SIZE": "XLA_FFI_CallFrame_STRUCT_SIZE",
    "COUNT": "offsetof(XLA_FFI_Args, size)",
    "ITEMS": "offsetof(XLA_FFI_Args, args)",
    "ATTRIBUTES": "offsetof(XLA_FFI_Attrs, attrs)",
    "BUFFER_DATA": "offsetof(XLA_FFI_Buffer, data)",
    "SCALAR_VALUE": "offsetof(XLA_FFI_Scalar, value)",
    "EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "API_VERSION": "offsetof(XLA_FFI_Api, api_version.major_version)",
    "API_ERROR_CREATE": "offsetof(XLA_FFI_Api, XLA_FFI_Error_Create)",
    "API_STREAM_GET": "offsetof(XLA_FFI_Api, XLA_FFI_Stream_Get)",
    "API_SIZE": "offsetof(XLA_FFI_Api, XLA_FFI_Stream_Get) + sizeof(void*)",
    "CODE_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
    "EXTENSION_TYPE": "offsetof(XLA_FFI_Metadata_Extension, extension_base.type)",
    "METADATA_OF_EXTENSION": "offsetof(XLA_FFI_Metadata_Extension, metadata)",
    "EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "METADATA_VERSION": "offsetof(XLA_FFI_Metadata, api_version.major_version)",
    "METADATA_TRAITS": "offsetof(XLA_FFI_Metadata, traits)",
    "ALLOWS_COMMAND_BUFFERS": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
}
#: The C expressions for other numbers that the handler uses.
_GIVEN = {
    "offsetof(XLA_FFI_Rets, size)": frame.COUNT,
    "offsetof(XLA_FFI_Rets, rets)": frame.ITEMS,
    "offsetof(XLA_FFI_Error_Create_Args, message)": 16,
    "offsetof(XLA_FFI_Error_Create_Args, errc)": 24,
    "offsetof(XLA_FFI_Stream_Get_Args, ctx)": 16,
    "offsetof(XLA_FFI_Stream_Get_Args, stream)": 24,
    "XLA_FFI_Stream_Get_Args_STRUCT_SIZE": 32,
    "sizeof(XLA_FFI_Error_Create_Args)": 32,
    "XLA_FFI_API_MAJOR": frame.MAJOR,
}


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ to compile with")
def test_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    of_version = {"MAJOR", "MINOR", "MINOR_WITHOUT_API"}
    assert set(_MEANT) | of_version == set(frame.__all__)
    numbers = {said: getattr(frame, name) for name, said in _MEANT.items()} | _GIVEN
    lines = [f'static_assert({said} == {n}, "{said} is not {n}");' for said, n in numbers.items()]
    source = tmp_path / "held.cc"
    source.write_text("\n".join(['#include "xla/ffi/api/c_api.h"', *lines]))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", jax.ffi.include_dir(), str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
