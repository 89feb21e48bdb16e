"""Writes ``cuda_src/ptx/wgmma``: a wgmma names every accumulator, so each width needs its own text.

Run it after a change of ``WIDTHS`` or of the text: ``python tools/write_wgmma.py``.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

#: Columns of the accumulators for which there is a file.
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
FOLDER = Path(__file__).resolve().parent.parent / "cuda_src" / "ptx" / "wgmma"

_HEAD = """\
// wgmma with {width} columns. Written by tools/write_wgmma.py; see ../wgmma.cuh.
// clang-format off
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::ptx {{
"""
_SHARED = """
// d = a b, or d += a b with `accumulate`; {ptx}, both operands in shared memory.
template <bool transpose_a, bool transpose_b>
__device__ inline void wgmma({cuda}, float (&d)[{fragments}][2][2], unsigned long long a,
                             unsigned long long b, bool accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{flag}, 0;\\n"
{instruction}
    "%{a}, %{b}, p, 1, 1, %{ta}, %{tb};\\n}}\\n"
{accumulators}
    : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transpose_a), "n"(transpose_b));
}}
"""
_REGISTERS = """
// d += a b; {ptx}, a in registers.
template <bool transpose_b>
__device__ inline void wgmma({cuda}, float (&d)[{fragments}][2][2], const unsigned (&a)[4],
                             unsigned long long b) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
{instruction}
    "{{%{a}, %{a1}, %{a2}, %{a3}}}, %{b}, p, 1, 1, %{tb};\\n}}\\n"
{accumulators}
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transpose_b));
}}
"""


def text(width: int) -> str:
    """The file of one width."""
    parts = [_HEAD.format(width=width)]
    for cuda, ptx in (("__half", "f16"), ("__nv_bfloat16", "bf16")):
        parts += [
            _function(_SHARED, width, cuda, ptx, 2),
            _function(_REGISTERS, width, cuda, ptx, 4),
        ]
    return "".join([*parts, "\n}  // namespace cuflash::ptx\n"])


def _function(template: str, width: int, cuda: str, ptx: str, operands: int) -> str:
    count = width // 2
    names = ", ".join(f"%{i}" for i in range(count))
    first, *rest = textwrap.wrap(names, 88)
    opening = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{ptx}.{ptx} "
    lines = [f'    "{opening}"', *(f'    "{line} "' for line in ["{" + first, *rest])]
    lines[-1] = lines[-1][:-2] + '}, "'
    elements = [
        f'"+f"(d[{n}][{group}][{which}])'
        for n in range(width // 8)
        for group in range(2)
        for which in range(2)
    ]
    rows = [", ".join(elements[i : i + 4]) for i in range(0, count, 4)]
    accumulators = "    : " + ",\n      ".join(rows)
    b = count + (1 if operands == 2 else 4)
    return template.format(
        cuda=cuda,
        ptx=ptx,
        fragments=width // 8,
        instruction="\n".join(lines),
        accumulators=accumulators,
        a=count,
        a1=count + 1,
        a2=count + 2,
        a3=count + 3,
        b=b,
        flag=b + 1,
        ta=b + 2,
        tb=b + 3 if operands == 2 else b + 1,
    )


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        (FOLDER / f"n{width}.cuh").write_text(text(width), encoding="utf-8")


if __name__ == "__main__":
    main()
