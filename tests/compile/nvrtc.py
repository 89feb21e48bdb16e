"""Compiles a configuration for any architecture, without a GPU."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

from cuflash.cuda.compile import compile_options
from cuflash.cuda.source import find_sources, translation_unit
from cuflash.planning.kernel import KernelConfig


@dataclass(frozen=True)
class Built:
    """ptxas' numbers for a kernel."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    log: str
    ptx: str
    code: str  # a hash of the machine code

    @property
    def local(self) -> int:
        """Bytes of local memory: the larger of stack and spills."""
        return max(self.stack, self.spill_stores, self.spill_loads)

    @property
    def warns(self) -> bool:
        """Whether the compiler warns of the kernel."""
        return "warning" in self.log.lower()


def build(config: KernelConfig, jitter: bool = False) -> Built:
    """Compile with the options that CuPy would use on a device of this architecture.

    For "sm_90a", CuPy adds its own -arch, "sm_90", after the one of ``compile_options``.
    """
    from cupy._core import core
    from cupy.cuda import nvrtc

    root = find_sources()
    options = (
        *core.assemble_cupy_compiler_options(()),
        *compile_options(config, root),
        f"-arch={config.architecture.rstrip('a')}",
        "-ftz=true",
        "--ptxas-options=-v",
    )
    text = translation_unit(config, root, jitter)
    program = nvrtc.createProgram(text, f"{config.entry}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        ptx = nvrtc.getPTX(program).decode()
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise AssertionError(f"{config}: {nvrtc.getProgramLog(program)}") from error
    finally:
        log = nvrtc.getProgramLog(program)
        nvrtc.destroyProgram(program)
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert registers, log
    assert frame, log
    return Built(
        int(registers[1]), *map(int, frame.groups()), log=log, ptx=ptx, code=hash_of_text(cubin)
    )


def hash_of_text(cubin: bytes) -> str:
    """The first 16 digits of SHA-256 over the machine code: every ``.text`` section, by name.

    Names, constants and debugging information of the ELF file are left out, so that a comment or
    another digest of the sources changes nothing.
    """
    code = hashlib.sha256()
    for name, section in sorted(_sections(cubin).items()):
        if name.startswith(".text"):
            code.update(section)
    return code.hexdigest()[:16]


def _sections(elf: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit little-endian ELF file (System V ABI, chapter 4)."""
    assert elf[:6] == b"\x7fELF\x02\x01", elf[:6]
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    names = headers[of_names][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        start = names + name
        content = b"" if kind == _NO_CONTENT else elf[offset : offset + length]
        found[elf[start : elf.index(b"\0", start)].decode()] = content
    return found


_NO_CONTENT = 8  # SHT_NOBITS: memory that the file only names
