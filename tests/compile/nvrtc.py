"""Compiles a configuration for any architecture, without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cuflash.cuda.compile import compile_options
from cuflash.cuda.source import find_sources, translation_unit
from cuflash.planning.kernel import KernelConfig


@dataclass(frozen=True)
class Built:
    """What ptxas said of a kernel."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    log: str
    ptx: str

    @property
    def local(self) -> int:
        """Bytes of local memory: the worst of stack and spills."""
        return max(self.stack, self.spill_stores, self.spill_loads)


def build(config: KernelConfig, jitter: bool = False) -> Built:
    """Compile with the options that CuPy would use on a device of this architecture.

    CuPy's own -arch comes after the one of ``compile_options`` for "sm_90a" and says "sm_90".
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
    return Built(int(registers[1]), *map(int, frame.groups()), log=log, ptx=ptx)
