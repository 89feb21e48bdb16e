"""The parameter structures of ``cuda_src/params.cuh`` as NumPy dtypes.

Every generated translation unit asserts the sizes and offsets given here, so a difference between
the two sides is a compile error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..features.device import TENSOR_MAP
from ..planning.kernel import KernelConfig

__all__ = ["PARAMETERS", "ParameterStruct", "fields_of", "parameters_of", "struct_of"]

_POINTER = np.dtype(np.uint64)

TENSOR = np.dtype(
    [
        ("data", _POINTER),
        ("batch_stride", np.int64),
        ("row_stride", np.int64),
        ("head_stride", np.int64),
    ],
    align=True,
)

ROW_VECTOR = np.dtype(
    [
        ("data", _POINTER),
        ("batch_stride", np.int64),
        ("head_stride", np.int64),
        ("row_stride", np.int64),
    ],
    align=True,
)

#: An array that broadcasts.
PAIRS = np.dtype(
    [
        ("data", _POINTER),
        ("batch_stride", np.int64),
        ("head_stride", np.int64),
        ("row_stride", np.int64),
        ("column_stride", np.int64),
    ],
    align=True,
)

#: Structures with strides.
STRIDED = (TENSOR, ROW_VECTOR, PAIRS)

SHAPE_FIELDS = (
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_kv",
    "head_dim",
    "head_dim_v",
    "q_offset",
)
SHAPE = np.dtype([(name, np.int32) for name in SHAPE_FIELDS], align=True)


#: Fields that are not pointers, lengths or counts.
_NUMBERS: dict[str, type] = {"scale": np.float64, "factor": np.float32}


def fields_of(dtype: np.dtype[np.void]) -> dict[str, tuple[np.dtype[np.void], int]]:
    """Dtype and byte offset of every field; empty for a plain dtype."""
    return {name: (field[0], field[1]) for name, field in (dtype.fields or {}).items()}


@dataclass(frozen=True)
class ParameterStruct:
    """One structure that a kernel takes by value."""

    name: str
    dtype: np.dtype[np.void]

    def offsets(self) -> Iterator[tuple[str, int]]:
        """Path and byte offset of every number in it."""
        for name, (inner, offset) in fields_of(self.dtype).items():
            if inner.names is None:
                yield name, offset
            for part, (_, further) in fields_of(inner).items():
                yield f"{name}.{part}", offset + further


def _struct(
    name: str,
    tensors: tuple[str, ...],
    vectors: tuple[str, ...],
    rest: tuple[str, ...],
    maps: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    pairs: tuple[str, ...] = (),
) -> ParameterStruct:
    fields: list[tuple[str, np.dtype[np.void] | type]] = [(m, TENSOR_MAP) for m in maps]
    fields += [(t, TENSOR) for t in tensors]
    fields += [(v, ROW_VECTOR) for v in vectors]
    fields += [(p, PAIRS) for p in pairs]
    fields += [(r, _NUMBERS.get(r, np.uint64)) for r in rest]
    fields += [("shape", SHAPE), *((name, np.uint64) for name in last)]
    dtype = np.dtype(fields, align=True)
    return ParameterStruct(name, _padded(dtype, 64) if maps else dtype)


def _padded(dtype: np.dtype[np.void], alignment: int) -> np.dtype[np.void]:
    """The same structure, padded for a member of this alignment."""
    fields = fields_of(dtype)
    size = -(-dtype.itemsize // alignment) * alignment
    offsets = [offset for _, offset in fields.values()]
    formats = [kind for kind, _ in fields.values()]
    return np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": size})


#: The structure of each kernel, by its folder and file in ``cuda_src``.
PARAMETERS = {
    ("fa1", "forward"): _struct(
        "Fa1ForwardParams",
        ("q", "k", "v", "out"),
        ("lse",),
        ("out_accumulator", "row_max", "row_sum", "scale", "factor"),
    ),
    ("fa1", "backward"): _struct(
        "Fa1BackwardParams",
        ("q", "k", "v", "dout", "dq", "dk", "dv"),
        ("lse",),
        ("delta", "dq_accumulator", "scale", "factor"),
    ),
    ("fa2", "forward"): _struct(
        "Fa2ForwardParams", ("q", "k", "v", "out"), ("lse",), ("scale", "factor", "head_group")
    ),
    ("fa2", "forward_few"): _struct(
        "Fa2ForwardFewParams",
        ("q", "k", "v", "out"),
        ("lse",),
        ("scale", "factor", "head_group"),
        last=("chunk_tiles", "heads_of_block", "parts"),
    ),
    ("fa2", "backward"): _struct(
        "Fa2BackwardParams",
        ("q", "k", "v", "dout", "dk", "dv"),
        (),
        (
            *("row_lse", "delta", "dq_accumulator", "turns"),
            *("scale", "factor", "head_group", "padded_rows"),
        ),
    ),
    ("fa3", "forward"): _struct(
        "Fa3ForwardParams",
        ("out",),
        ("lse",),
        ("tile_counter", "scale", "head_group"),
        maps=("q_map", "k_map", "v_map"),
    ),
    ("fa3", "backward"): _struct(
        "Fa3BackwardParams",
        ("dk", "dv", "dq"),
        (),
        (
            *("row_lse", "delta", "dq_accumulator", "turns"),
            *("scale", "head_group", "padded_rows", "ahead", "convert_lag"),
        ),
        maps=("q_map", "k_map", "v_map", "dout_map"),
        last=("parts", "padded_keys", "dk_parts", "dv_parts", "whole_tiles"),
    ),
    ("fa3", "backward_few"): _struct(
        "Fa3BackwardFewParams",
        ("dk", "dv"),
        (),
        ("row_lse", "delta", "dq_accumulator", "scale", "padded_rows", "kv_splits"),
        maps=("q_map", "k_map", "v_map", "dout_map"),
    ),
    ("fa3", "backward_short"): _struct(
        "Fa3BackwardShortParams",
        ("dq", "dk", "dv"),
        (),
        ("row_lse", "delta", "scale", "padded_rows"),
        maps=("q_map", "k_map", "v_map", "dout_map"),
    ),
    ("fa3", "sum_parts"): _struct(
        "SumPartsParams",
        ("dk", "dv"),
        (),
        ("dk_parts", "dv_parts", "parts", "padded_keys"),
        last=("whole_tiles",),
    ),
    ("steps", "delta"): _struct("DeltaParams", ("out", "dout"), ("dlse",), ("delta",)),
    ("steps", "statistics"): _struct(
        "StatisticsParams",
        ("out", "dout"),
        ("lse", "dlse"),
        ("row_lse", "delta", "dq_accumulator", "turns", "padded_rows", "cleared"),
    ),
    ("steps", "sink_gradient"): _struct(
        "SinkGradientParams", (), ("lse", "dlse"), ("delta", "dsinks", "padded_rows")
    ),
    ("steps", "slope_gradient"): _struct(
        "SlopeGradientParams", (), (), ("pair_sums", "dalibi_slopes", "sums_of_head", "entries")
    ),
    ("steps", "bias_gradient"): _struct(
        "BiasGradientParams",
        ("q", "k", "v", "dout"),
        ("lse",),
        (
            *("delta", "bias_parts", "scale", "factor"),
            *("padded_rows", "bias_batch", "bias_heads"),
        ),
        pairs=("dbias",),
    ),
    ("steps", "summarise_mask"): _struct(
        "SummariseMaskParams", (), (), ("tile_bits", "pair_bits", "mask_heads"), pairs=("mask",)
    ),
    ("steps", "list_blocks"): _struct(
        "ListBlocksParams",
        (),
        (),
        ("block_bits", "block_heads", "block_words"),
        pairs=("block_mask",),
    ),
    ("steps", "merge"): _struct("MergeParams", ("out",), ("lse",), ()),
    ("steps", "list_items"): _struct(
        "ListItemsParams",
        (),
        (),
        (
            *("cu_seqlens_q", "cu_seqlens_kv", "q_begins", "kv_begins"),
            *("q_items", "kv_items", "entries"),
        ),
        last=("query_offsets", "seqused_kv"),
    ),
    ("steps", "append_kv"): _struct(
        "AppendKvParams",
        ("k", "v", "k_cache", "v_cache", "q", "q_rotated"),
        (),
        (
            *("cache_seqlens", "page_table", "cache_batch_idx", "rotary_seqlens"),
            *("rotary_cos", "rotary_sin", "overflow", "lengths_after", "table_stride"),
            *("capacity", "page_size", "entries", "rotates", "rotary_rows", "rotary_pairs"),
            *("rotary_interleaved", "queries_advance"),
        ),
    ),
    ("steps", "merge_states"): _struct(
        "MergeStatesParams",
        ("out_before", "out_now", "out"),
        ("lse_before", "lse_now", "lse"),
        (),
    ),
    ("steps", "reduce_bias"): _struct(
        "ReduceBiasParams",
        (),
        (),
        ("bias_parts", "length", "bias_batch", "bias_heads"),
        pairs=("dbias",),
    ),
    ("steps", "convert_dq"): _struct(
        "ConvertParams", ("dq",), (), ("dq_accumulator", "scale", "padded_rows")
    ),
}


def parameters_of(generation: str, kernel: str) -> ParameterStruct:
    """The structure that a kernel takes."""
    return PARAMETERS[generation, kernel]


def struct_of(config: KernelConfig) -> ParameterStruct:
    """The kernel's structure, followed by the parameters of each of its features.

    In C++ it derives from the plain structure, whose offsets do not change.
    """
    plain = parameters_of(config.generation, config.kernel)
    if not config.features:
        return plain
    fields = fields_of(plain.dtype)
    names, formats = [*fields], [kind for kind, _ in fields.values()]
    offsets, end = [offset for _, offset in fields.values()], plain.dtype.itemsize
    for feature in config.features:
        block = feature.device.block
        offset = -(-end // feature.device.alignment) * feature.device.alignment
        names.append(feature.name)
        formats.append(block)
        offsets.append(offset)
        end = offset + block.itemsize
    with_maps = any(feature.device.alignment == 64 for feature in config.features)
    alignment = 64 if with_maps or any(kind == TENSOR_MAP for kind in formats) else 8
    size = -(-end // alignment) * alignment
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
    return ParameterStruct(plain.name, dtype)
