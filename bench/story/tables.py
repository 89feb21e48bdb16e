"""The blocks on the papers' claims, from stored rows: sentences, tables, charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..documents import CHARTS
from ..markdown import table
from ..stored import Row
from .charts import FILES
from .device import datasheet
from .share import UNITS
from .speed import GENERATIONS, STANDARD
from .stored import name_of, of_part, pass_of, share_of

__all__ = ["BLOCKS", "render"]

#: The papers' statements about their own kernels, as a share of the data sheet's rate.
SAID = {
    ("forward", "cuflash fa1"): "30 to 50 % on an A100",
    ("forward", "cuflash fa2"): "50 to 73 % on an A100, 35 % on an H100",
    ("forward", "cuflash fa3"): "75 % on an H100",
    ("backward", "cuflash fa1"): "25 to 35 % on an A100",
    ("backward", "cuflash fa2"): "up to 63 % on an A100",
}
OURS = tuple(f"cuflash {name}" for name in GENERATIONS)


#: The first sentence of a block.
LEADS = {
    "speed": (
        "**Speed** in the papers' setting: 16,384 tokens in all, and heads that have 2,048 columns "
        "together. FlashAttention-1 runs a head on one multiprocessor. Where that leaves "
        'multiprocessors idle, it has a second line, "filled", with one head for each '
        "multiprocessor. The papers' shares are those of their own GPUs, not of an H200."
    ),
    "memory": (
        "**Extra memory** is what a call takes from CuPy's pool besides its inputs and results. "
        "Standard attention keeps P, a square matrix. The peak of its forward pass is three such "
        "squares: CuPy multiplies 16-bit batches in float32, so it needs P and a float32 square, "
        "which is twice as large."
    ),
    "io": (
        "**The IO theorem.** FlashAttention-1 reads Q, and reads and writes O, l and m, once for "
        "each of T_c blocks of keys, so more shared memory means fewer bytes. A head moves `2Nd*s "
        "+ T_c (Nd*s + 8Nd + 16N)` bytes at s bytes an element, less what the first pass need not "
        "read. The counts are the bytes that the kernel's own loops load and store; its last pass "
        "writes the rounded output and one number a row. Standard attention is counted as CuPy "
        "computes it, with one kernel for each operation. FlashAttention-2 and 3 are counted as "
        "if there were no cache: every tile of queries reads all of K and V. In fact L2 serves "
        "most of these reads."
    ),
    "share": (
        "**Where the time goes**: the rate of every pass as a share of the peak, and how busy it "
        "keeps each unit, from the hardware counters over all kernels of the pass."
    ),
}


def render(block: str) -> str:
    """A block; empty without rows."""
    part = block.removeprefix("story-")
    rows = of_part(part)
    told = _RENDER[part](rows) if rows else ""
    return f"{LEADS[part]}\n\n{told}" if told else ""


def _head(rows: Sequence[Row], what: str) -> str:
    first = rows[0]
    return f"{first['gpu']}, {first.get('dtype', 'float16')}, {what}, {first['date']}\n"


def _images(part: str, alt: str) -> list[str]:
    return [f"![{alt}]({CHARTS}/{file})\n" for file in FILES[part]]


def _labels(rows: Sequence[Row]) -> list[str]:
    """Standard attention, the generations, then the others."""
    found = dict.fromkeys(map(name_of, rows))
    known = (STANDARD, *OURS[:1], f"{OURS[0]}, filled", *OURS[1:])
    first = [name for name in known if name in found]
    return first + [name for name in found if name not in first]


def _speed(rows: Sequence[Row]) -> str:
    peak = datasheet(rows[0]["gpu"])
    places = [(dim, causal) for dim in (64, 128) for causal in (False, True)]
    body = []
    for op in ("forward", "backward"):
        for name in _labels(rows):
            of = [r for r in rows if (r["op"], name_of(r)) == (op, name) and r["tflops"]]
            best = [
                max((r["tflops"] for r in of if (r["head_dim"], r["causal"]) == place), default=0)
                for place in places
            ]
            if any(best):
                share = share_of(max(best), peak)
                cells = [f"{rate:.0f}" if rate else "" for rate in best]
                body.append([op, name, *cells, share, SAID.get((op, name), "")])
    header = ["pass", "", *(f"{dim} {'causal' if c else 'full'}" for dim, c in places)]
    header += ["of the datasheet" + (f"'s {peak:.0f}" if peak else ""), "the papers say"]
    told = "TFLOP/s at the best of the lengths 512 to 16384, with the same number of tokens at each"
    skipped = [row for row in rows if row["skipped"]]
    parts = [_head(rows, told), *_images("speed", "TFLOP/s over the length"), table(header, body)]
    parts += [_skips(skipped)] if skipped else []
    return "\n".join(parts)


def _skips(rows: Sequence[Row]) -> str:
    lines = [
        f"{row['label']}, {pass_of(row)}, seqlen {row['seqlen']}: {row['skipped']}" for row in rows
    ]
    return "Not measured: " + "; ".join(dict.fromkeys(lines)) + ".\n"


def _memory(rows: Sequence[Row]) -> str:
    done = "forward and backward"
    lengths = sorted({row["seqlen"] for row in rows})
    body = []
    for name in _labels(rows):
        for one in ("forward", done):
            of = {
                r["seqlen"]: r["extra_bytes"]
                for r in rows
                if (r["label"], r["pass"]) == (name, one) and r["extra_bytes"] is not None
            }
            cells = [_mib(of[n]) if n in of else "" for n in lengths]
            body.append([name, one, *cells, _growth(of)])
    header = ["", "pass", *map(str, lengths), "twice the length takes"]
    first = rows[0]
    what = f"{first['heads']} heads, head_dim {first['head_dim']}, MiB besides inputs and results"
    skipped = [row for row in rows if row["skipped"]]
    parts = [_head(rows, what), *_images("memory", "extra memory"), table(header, body)]
    parts += [_skips(skipped)] if skipped else []
    return "\n".join(parts)


def _mib(nbytes: int) -> str:
    size = nbytes / 2**20
    return "0" if nbytes == 0 else f"{size:.0f}" if size >= 10 else f"{size:.2g}"


def _growth(of: dict[int, int]) -> str:
    """The memory at the longest length divided by the memory at half that length."""
    longest = max(of, default=0)
    half = of.get(longest // 2)
    return f"{of[longest] / half:.1f} times" if half else ""


def _io(rows: Sequence[Row]) -> str:
    order = (STANDARD, *OURS)
    counted = sorted(
        (row for row in rows if row["skipped"] is None),
        key=lambda r: (order.index(r["label"]), r["head_dim"], r["seqlen"], *_tile(r)),
    )
    if not counted:
        return _head(rows, "no counters") + "\n" + _skips(rows)
    first = [row for row in counted if row["label"] == OURS[0]]
    ratios = [_ratio(row) for row in first]
    told = "GB per head of device memory, read and written, by the hardware counters"
    parts = [_head(rows, told), *_images("io", "bytes of device memory")]
    if ratios:
        parts.append(
            f"FlashAttention-1 moves {_range(ratios)} times what its loops count, over "
            f"{len(ratios)} tiles.\n"
        )
    tiled = [row for row in counted if row["label"] in OURS[1:]]
    if tiled:
        once = [row["dram_read"] / row["once_read"] for row in tiled]
        parts.append(
            f"FlashAttention-2 and 3 read {_range(once)} times what reading Q, K and V once "
            "takes.\n"
        )
    parts.append(table(_IO_HEADER, [_io_line(row) for row in counted]))
    skipped = [row for row in rows if row["skipped"]]
    parts += [_skips(skipped)] if skipped else []
    return "\n".join(parts)


_IO_HEADER = (
    *("", "head_dim", "seqlen", "heads", "tile", "shared memory"),
    *("read", "read, by count", "written", "written, by count", "by the paper, both"),
    *("each array once, both", "moved to counted"),
    *("through L2", "L2 hits", "ms"),
)


def _range(ratios: Sequence[float]) -> str:
    """The least and the most; one figure if both print alike."""
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def _tile(row: Row) -> tuple[int, int]:
    """The key by which rows are sorted: the budget (none is 0), then the keys of a block."""
    return (row["budget"] or 0, row["blocks"][1] if row["blocks"] else 0)


def _ratio(row: Row) -> float:
    moved = row["dram_read"] + row["dram_write"]
    return float(moved / (row["count_read"] + row["count_write"]))


def _io_line(row: Row) -> list[str]:
    def gigabytes(nbytes: float | None) -> str:
        return "" if nbytes is None else f"{nbytes / row['heads'] / 1e9:.3g}"

    through = None if row["l2_read"] is None else row["l2_read"] + (row["l2_write"] or 0)
    tile = "x".join(map(str, row["blocks"])) if row["blocks"] else ""
    shared = f"{row['shared_bytes'] / 1024:.0f} KiB" if row["shared_bytes"] else ""
    shared += f" of {row['budget'] // 1024}" if row["budget"] else ""
    return [
        row["label"],
        str(row["head_dim"]),
        str(row["seqlen"]),
        str(row["heads"]),
        tile,
        shared,
        gigabytes(row["dram_read"]),
        gigabytes(row["count_read"]),
        gigabytes(row["dram_write"]),
        gigabytes(row["count_write"]),
        gigabytes(row["paper_read"] + row["paper_write"]),
        gigabytes(row["once_read"] + row["once_write"]),
        f"{_ratio(row):.2f}",
        gigabytes(through),
        f"{row['l2_hit_percent']:.0f} %",
        f"{row['ms']:.1f}",
    ]


_UNIT_NAMES = {
    "tensor": "tensor cores",
    "exponentials": "exponentials",
    "fma": "FMA",
    "alu": "ALU",
    "issue": "issue slots",
    "shared": "shared memory",
    "l2": "L2",
    "dram": "device memory",
}


def _share(rows: Sequence[Row]) -> str:
    products = [row for row in rows if row["op"] == "product"]
    kernels = [row for row in rows if row["op"] != "product"]
    if not kernels or not products:
        return ""
    product, peak = products[0], rows[0]["datasheet_tflops"]
    units = [unit for unit in UNITS if any(row.get(unit) is not None for row in kernels)]
    body = [
        [
            row["label"],
            row["op"],
            str(row["head_dim"]),
            f"{row['tflops']:.0f}",
            share_of(row["tflops"], peak),
            share_of(row["tflops"], product["tflops"]),
            *("" if row.get(unit) is None else f"{row[unit]:.0f} %" for unit in units),
        ]
        for row in kernels
    ]
    header = ["", "pass", "head_dim", "TFLOP/s", "of the datasheet", "of cuBLAS"]
    header += [_UNIT_NAMES[unit] for unit in units]
    first = kernels[0]
    what = f"seqlen {first['seqlen']}, no mask; {product['label']}: {product['tflops']:.0f} TFLOP/s"
    reasons = dict.fromkeys(row["no_counters"] for row in kernels if row["no_counters"])
    parts = [_head(rows, what), *(_images("share", "how busy each unit is") if units else [])]
    parts.append(table(header, body))
    parts += [f"Without counters: {'; '.join(reasons)}.\n"] if reasons else []
    return "\n".join(parts)


_RENDER: dict[str, Any] = {"speed": _speed, "memory": _memory, "io": _io, "share": _share}
#: The blocks.
BLOCKS = tuple(f"story-{part}" for part in _RENDER)
