"""The kernels that a plan can need, by architecture.

``rows`` have equal widths, every dtype, pass and mask; ``rare_rows`` pair every width of q and k
with every other width of v, and copy element by element. FlashAttention-3 has few tiles, so it has
a row for every tile that its table has for a length, and the name contains the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cuflash.errors import UnsupportedError
from cuflash.features.table import FEATURES
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.plan import Algorithm
from cuflash.planning.problem import DTYPES, AttentionProblem
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS
from cuflash.planning.tiles.fa3_tables import BACKWARD, BUCKETS, FORWARD

from ..architectures import LIMITS
from ..kit.backward_rows import widths_of
from ..turns import has_turn
from .featured import FEATURED, featured_problems
from .few import few_calls
from .few_rows import few_row_calls
from .parts import part_calls
from .short import short_calls
from .spills import MORE_SPILLS
from .split import SplitCall, split_calls

#: Architectures whose kernels of FlashAttention-2 are built within twelve days.
OFTEN = ("75", "90")

_OLDER: tuple[Algorithm, ...] = ("fa1", "fa2")  # they run on every architecture
_HALVES = ("float16", "bfloat16")

#: Keys and queries that give every multiprocessor work, and ones that do not.
LONG, SHORT = 300_000, 1000

#: The kernels of FlashAttention-3 that spill, and the bytes. ``bench/NOTES.md`` describes them at
#: windows, soft caps, ALiBi, bias and dropout. Also rare ones of FlashAttention-1, which spill more
#: than others may.
SPILLS = {
    "sm_90-fa3-backward-bfloat16-d192-causal-dv128-softcap-bfloat16-64x128": 8,
    "sm_90-fa3-forward-float16-d64-causal-softcap-float16-192x128": 8,
    "sm_90-fa3-backward-bfloat16-d64-band-128x128-ordered": 116,
    "sm_90-fa3-backward-bfloat16-d64-band-128x128-converts32-ordered": 116,
    "sm_90-fa3-backward-bfloat16-d128-causal-alibi-bfloat16-0-64x128": 24,
    "sm_90-fa3-backward-bfloat16-d128-full-alibi-bfloat16-1-64x128": 28,
    "sm_90-fa3-backward-bfloat16-d192-causal-dv128-alibi-bfloat16-1-64x128": 40,
    "sm_90-fa3-backward-bfloat16-d64-causal-alibi-bfloat16-0-128x128": 88,
    "sm_90-fa3-backward-bfloat16-d64-full-alibi-bfloat16-1-128x128-ordered": 260,
    "sm_90-fa3-backward-float16-d64-band-alibi-float16-1-128x128-converts32": 200,
    "sm_90-fa3-backward-bfloat16-d128-causal-bias-float32-bfloat16-1-1-64x128": 8,
    "sm_90-fa3-backward-bfloat16-d64-causal-bias-bfloat16-bfloat16-1-1-128x128": 52,
    "sm_90-fa3-backward-float16-d64-band-bias-float16-float16-0-0-128x128-converts32": 116,
    "sm_90-fa3-forward-bfloat16-d128-causal-bias-float32-bfloat16-1-1-192x80": 8,
    # With a mask the load role, which walks along lists, spills if there is no bias or order.
    "sm_90-fa3-backward-bfloat16-d128-causal-bias-float32-bfloat16-0-1"
    "-mask-bfloat16-1-1-64x128": 84,
    "sm_90-fa3-backward-bfloat16-d128-causal-mask-bfloat16-1-1-64x128-ordered": 152,
    "sm_90-fa3-backward-bfloat16-d128-full-mask-bfloat16-1-1-64x128": 52,
    "sm_90-fa3-backward-bfloat16-d192-full-dv128-mask-bfloat16-1-1-64x128": 44,
    "sm_90-fa3-backward-bfloat16-d256-causal-mask-bfloat16-1-1-64x64": 52,
    "sm_90-fa3-backward-bfloat16-d64-full-bias-bfloat16-bfloat16-1-1-mask-bfloat16-1-1-128x128": 12,
    "sm_90-fa3-backward-bfloat16-d64-full-mask-bfloat16-1-0-128x128": 32,
    "sm_90-fa3-backward-bfloat16-d64-full-mask-bfloat16-1-1-128x128": 16,
    "sm_90-fa3-backward-bfloat16-d96-causal-mask-bfloat16-1-1-64x128": 52,
    "sm_90-fa3-backward-float16-d128-full-mask-float16-1-1-64x128": 52,
    "sm_90-fa3-backward-float16-d64-causal-mask-float16-1-1-128x128": 16,
    "sm_90-fa3-forward-bfloat16-d128-causal-bias-float32-bfloat16-0-1-mask-bfloat16-1-1-128x128": 8,
    "sm_90-fa3-forward-bfloat16-d128-full-mask-bfloat16-0-1-192x80": 16,
    "sm_90-fa3-forward-bfloat16-d64-causal-mask-bfloat16-0-1-192x128": 16,
    "sm_90-fa3-forward-bfloat16-d64-full-bias-bfloat16-bfloat16-1-1-mask-bfloat16-1-1-192x128": 78,
    "sm_90-fa3-forward-bfloat16-d64-full-mask-bfloat16-1-1-192x128": 16,
    "sm_90-fa3-forward-bfloat16-d96-causal-mask-bfloat16-1-1-192x96": 28,
    "sm_90-fa3-forward-float16-d64-causal-mask-float16-1-1-192x128": 20,
    "sm_90-fa3-backward-bfloat16-d128-full-mask-bfloat16-1-1-dropout-64x128": 52,
    "sm_90-fa3-backward-bfloat16-d64-band-dropout-128x128-converts32-ordered": 80,
    "sm_90-fa3-backward-bfloat16-d64-causal-alibi-bfloat16-1-dropout-128x128": 52,
    "sm_90-fa3-backward-bfloat16-d64-full-mask-bfloat16-1-1-dropout-128x128": 80,
    "sm_90-fa3-backward-float16-d192-full-dv128-dropout-64x128": 32,
    "sm_90-fa3-forward-bfloat16-d64-full-bias-bfloat16-bfloat16-1-1-dropout-192x128": 16,
    "sm_90-fa3-forward-bfloat16-d64-full-mask-bfloat16-1-1-dropout-192x128": 16,
    **MORE_SPILLS,
}

_HEAD_DIMS = (*((d, d) for d in HEAD_DIM_BUCKETS), (192, 128))


def _problems() -> Iterator[AttentionProblem]:
    plain = AttentionProblem(
        "forward", 1, 2, 1, LONG, LONG, 64, 64, "float16", "float16", "full", 0.125, 0
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
    for operation, dtype in product(("forward", "backward"), _HALVES):
        yield replace(plain, operation=operation, storage=dtype, output="float32")
    for dtype, mask in product(_HALVES, ("full", "causal")):
        of = replace(plain, head_dim=256, head_dim_v=256, mask=mask, storage=dtype)
        yield replace(of, output=dtype, seqlen_q=SHORT, seqlen_kv=SHORT)
        yield replace(of, output="float32")
    for dtype, d in product(DTYPES, (64, 128)):
        of = replace(plain, operation="backward", storage=dtype, output=dtype, deterministic=True)
        yield replace(of, head_dim=d, head_dim_v=d, mask="causal")


def _fa3_problems() -> Iterator[AttentionProblem]:
    """Problems of every width, mask and dtype, with lengths for each row of the tables."""
    plain = _long()
    widths = (*((d, d) for d in BUCKETS), (192, 128))
    for (d, dv), mask, dtype in product(widths, ("full", "causal"), _HALVES):
        longest = {min(LONG, r.longest_causal if mask == "causal" else r.longest) for r in FORWARD}
        for length, output in product(sorted(longest - {0}), (dtype, "float32")):
            of = replace(plain, head_dim=d, head_dim_v=dv, mask=mask, storage=dtype)
            yield replace(of, output=output, seqlen_q=length, seqlen_kv=length)
    for row, mask, dtype in product(BACKWARD, ("full", "causal"), _HALVES):
        of = replace(_few(), operation="backward", mask=mask, storage=dtype, output=dtype)
        d, dv = widths_of(row)
        of = replace(of, head_dim=d, head_dim_v=dv)
        for deterministic, keys in product((False, True), (LONG, SHORT)):  # many tiles, and few
            yield replace(of, deterministic=deterministic, seqlen_kv=keys)
        if row.stays_until:  # tiles of two steps, in one block after the other
            yield replace(of, heads_kv=of.heads_q, seqlen_q=2 * row.block_q)
        if row.lengths[1]:  # many heads, whose tiles have no parts
            most = row.lengths[1]
            yield replace(of, batch=plain.batch, seqlen_q=most, seqlen_kv=most)


def _rare_fa3_problems() -> Iterator[AttentionProblem]:
    plain = replace(_long(), mask="causal")
    for d, dv in product(BUCKETS, BUCKETS):
        yield replace(plain, head_dim=d, head_dim_v=dv)


def _rare_problems() -> Iterator[AttentionProblem]:
    plain = next(_problems())
    for operation, dtype, d, dv in product(
        ("forward", "backward"), ("float16", "float32"), HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS
    ):
        of = replace(plain, operation=operation, storage=dtype, output=dtype)
        of = replace(of, head_dim=d, head_dim_v=dv, mask="causal")
        yield of if d != dv else replace(of, alignment="element")
    for operation, dtype, d in product(("forward", "backward"), DTYPES, (64, 128)):
        of = replace(plain, operation=operation, storage=dtype, output=dtype)
        yield replace(of, head_dim=d, head_dim_v=d, seqlen_q=SHORT, seqlen_kv=SHORT)


def _long() -> AttentionProblem:
    """The base problem, in the form for the copy engine; it fills any device."""
    return replace(next(_problems()), alignment="tensor_map", batch=1024)


def rows(architecture: str) -> dict[str, KernelConfig]:
    """Configurations of an architecture by a readable name, each machine code once."""
    found = _named(architecture, _problems(), _OLDER)
    found = _both(found, _named(architecture, _fa3_problems(), ("fa3",)))
    for algorithm in FEATURED if architecture == "90" else ():
        found = _both(
            found, _named(architecture, featured_problems(_long(), algorithm), (algorithm,))
        )
    for algorithm in ("fa2", "fa3") if architecture == "90" else ():
        calls = (call for call in split_calls(_few()) if call.algorithm == algorithm)
        found = _both(found, _named(architecture, calls, ()))
    if architecture in ("80", "90"):
        found = _both(found, _named(architecture, few_row_calls(_few()), ()))
    if architecture == "90":
        found = _both(found, _named(architecture, few_calls(_few()), ()))
        found = _both(found, _named(architecture, short_calls(_few()), ()))
        found = _both(found, _named(architecture, part_calls(_few()), ()))
    return found


def _few() -> AttentionProblem:
    """The base problem with few tiles."""
    return replace(_long(), batch=1)


def rare_rows(architecture: str) -> dict[str, KernelConfig]:
    """Configurations of rare calls, with names as in ``rows``."""
    older = _named(architecture, _rare_problems(), _OLDER)
    return _both(older, _named(architecture, _rare_fa3_problems(), ("fa3",)))


def _both(one: dict[str, KernelConfig], other: dict[str, KernelConfig]) -> dict[str, KernelConfig]:
    """Kernels of both generations; one name is one kernel, for sm_90 or for sm_90a."""
    shared = ((one[name], other[name]) for name in one.keys() & other.keys())
    assert all(replace(b, architecture=a.architecture) == a for a, b in shared)
    return one | other


def built_today(name: str, rare: bool = False) -> bool:
    """Whether an ordinary run builds this row today: over several days it builds every row.

    FlashAttention-3 in bfloat16 without features is built within six days.
    """
    architecture, generation = name.split("-")[:2]
    if rare:
        days = 120
    elif generation == "fa3":
        added = (*FEATURES, "kv_chunks", "packed_group", "float8")
        featured = any(f"-{feature}-" in f"{name}-" for feature in added)
        days = 18 if featured else 6 if "-bfloat16-" in name else 9
    elif architecture[3:] not in OFTEN or generation == "fa1":
        days = 40
    else:
        days = 12
    return has_turn(name, days)


def _named(
    architecture: str,
    problems: Iterator[AttentionProblem] | Iterator[SplitCall],
    algorithms: tuple[Algorithm, ...],
) -> dict[str, KernelConfig]:
    """Kernels by name: of problems under each algorithm, or of calls that name their own."""
    found: dict[KernelConfig, str] = {}
    for one in problems:
        calls = (one,) if isinstance(one, SplitCall) else (SplitCall(one, a) for a in algorithms)
        for call in calls:
            try:
                chosen = call.plan(LIMITS[architecture])
            except UnsupportedError:
                continue
            for launch in chosen.launches:
                name = _name(architecture, launch.config)
                if launch.config.kernel == "forward_few":
                    name += f"-{call.tag}" if call.tag else ""
                short = call.problem.seqlen_q == SHORT and launch.config.generation == "fa2"
                found.setdefault(launch.config, f"{name}-short" if short else name)
    named = {name: config for config, name in found.items()}
    assert len(named) == len(found), "two kernels have a name"
    return named


def _name(architecture: str, c: KernelConfig) -> str:
    parts = [f"sm_{architecture}", c.generation, c.kernel, c.storage]
    if c.output != c.storage:
        parts.append(f"to-{c.output}")
    if c.head_dim:
        parts += [f"d{c.head_dim}", c.mask]
    elif c.features:
        parts.append(c.mask)
    if c.head_dim != c.head_dim_v:
        parts.append(f"dv{c.head_dim_v}")
    if c.head_dim and c.copies == "element":
        parts.append("element")
    for feature in c.features:
        if feature.name != "window":  # which is in the mask
            parts += ["-".join([feature.name, *(str(value) for _, value in feature.constants)])]
    return "-".join([*parts, *_constants(c)])


def _constants(c: KernelConfig) -> list[str]:
    """The constants that tell its tile from others."""
    constants, parts = dict(c.constants), []
    if c.kernel == "merge":
        parts += [f"{constants['block_q']}x{constants['block_kv']}"]
        parts += ["shared"] * constants["shared_rows"] + ["in-order"] * constants["in_order"]
    summaries = "summarise_mask", "list_blocks"
    if "block_q" in constants and (c.generation == "fa3" or c.kernel in summaries):
        parts.append(f"{constants['block_q']}x{constants['block_kv']}")
    if c.kernel == "list_blocks":
        parts.append(f"of-{constants['block_queries']}x{constants['block_keys']}")
    if constants.get("kv_tiles_per_convert_block", 0) > 8:
        parts.append(f"converts{constants['kv_tiles_per_convert_block']}")
    if constants.get("ordered"):
        parts.append("ordered")
    if c.kernel == "list_items":
        parts.append(f"of-{constants['block']}")
    named = ("parted", "cut", "cut_last", "stays", "merges_chunks")
    named = ("rows_of_keys", "one_row") if c.kernel in summaries else named
    named = ("rows_of_keys", "last_first") if c.kernel == "list_items" else named
    parts += [name for name in named if constants.get(name)]
    if constants.get("packs_heads"):
        parts.append(f"packs-heads-{constants['rows']}")
    if c.kernel == "summarise_mask" and not constants["listed"]:
        parts.append("unlisted")
    if constants.get("turns"):  # statistics clears this many
        parts.append(f"clears{constants['turns']}")
    if c.kernel == "convert_dq":  # narrow and wide heads can have fragments of different height
        parts.append(f"m{constants['fragment_rows']}")
    return parts + ["waits"] * c.waits
