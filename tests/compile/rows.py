"""The kernels that a plan can ask for, by architecture.

``rows`` are those of equal widths, every dtype, pass and mask; ``rare_rows``
pair every width of q and k with every other of v, and copy element by element.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cuflash.errors import UnsupportedError
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import plan
from cuflash.planning.problem import DTYPES, AttentionProblem
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS

from ..architectures import LIMITS

#: Built by every run; the others take turns, a third of them a day.
ALWAYS = ("75", "80", "86", "90")
OTHERS = tuple(name for name in LIMITS if name not in ALWAYS)

_HEAD_DIMS = (*((d, d) for d in HEAD_DIM_BUCKETS), (192, 128))


def todays_architectures() -> tuple[str, ...]:
    """The architectures an ordinary run builds."""
    today = datetime.date.today().toordinal()
    return (*ALWAYS, *(name for i, name in enumerate(OTHERS) if i % 3 == today % 3))


def _problems() -> Iterator[AttentionProblem]:
    plain = AttentionProblem(
        "forward", 1, 2, 1, 1000, 1000, 64, 64, "float16", "float16", "full", 0.125, 0
    )
    for operation, dtype, (d, dv), mask in product(
        ("forward", "backward"), DTYPES, _HEAD_DIMS, ("full", "causal")
    ):
        yield replace(
            plain,
            operation=operation,
            storage=dtype,
            output=dtype,
            head_dim=d,
            head_dim_v=dv,
            mask=mask,
        )
    for operation, dtype in product(("forward", "backward"), DTYPES):
        yield replace(plain, operation=operation, storage=dtype, output=dtype, alignment="element")
    for operation, dtype in product(("forward", "backward"), ("float16", "bfloat16")):
        yield replace(plain, operation=operation, storage=dtype, output="float32")


def _rare_problems() -> Iterator[AttentionProblem]:
    plain = next(_problems())
    for operation, dtype, d, dv in product(
        ("forward", "backward"), ("float16", "float32"), HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS
    ):
        of = replace(plain, operation=operation, storage=dtype, output=dtype)
        of = replace(of, head_dim=d, head_dim_v=dv, mask="causal")
        yield of if d != dv else replace(of, alignment="element")


def rows(architecture: str) -> dict[str, KernelConfig]:
    """Configurations of an architecture by a readable name, each machine code once."""
    return _named(architecture, _problems())


def rare_rows(architecture: str) -> dict[str, KernelConfig]:
    """The same of what few calls ask for."""
    return _named(architecture, _rare_problems())


def built_today(name: str) -> bool:
    """Whether an ordinary run builds this rare row: each takes its turn within sixty days."""
    return zlib.crc32(name.encode()) % 60 == datetime.date.today().toordinal() % 60


def _named(architecture: str, problems: Iterator[AttentionProblem]) -> dict[str, KernelConfig]:
    found: dict[KernelConfig, str] = {}
    for problem in problems:
        for algorithm in ("fa1",):
            try:
                chosen = plan(problem, LIMITS[architecture], algorithm=algorithm)
            except UnsupportedError:
                continue
            for launch in chosen.launches:
                found.setdefault(launch.config, _name(architecture, launch.config))
    return {name: config for config, name in found.items()}


def _name(architecture: str, c: KernelConfig) -> str:
    parts = [f"sm_{architecture}", c.generation, c.kernel, c.storage]
    if c.output != c.storage:
        parts.append(f"to-{c.output}")
    if c.head_dim:
        parts += [f"d{c.head_dim}", c.mask]
    if c.head_dim != c.head_dim_v:
        parts.append(f"dv{c.head_dim_v}")
    if c.head_dim and c.copies == "element":
        parts.append("element")
    return "-".join(parts)
