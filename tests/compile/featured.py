"""Representative kernels with features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cuflash.features.score_text import SLOTS, ScoreText
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.decision import Algorithm
from cuflash.planning.problem import AttentionProblem, DTypeName, MaskKind
from cuflash.tensors import QKV, differentiable

__all__ = ["FEATURED", "TEXTS", "featured_problems"]

#: Functions of scores: one of the scores alone, and one of positions and an array.
TEXTS = {
    "score-cap": ScoreText("return p.cap * tanh(s / p.cap);", (("cap", False, (50.0).hex()),)),
    "score-table": ScoreText("return s + p.table(head, i + offset - j);", arrays=("table",)),
}

#: For each algorithm: dtype, widths, mask, whether dq is summed in order, and features joined by
#: "+". A feature is the dtype of sinks; "softcap"; "alibi", or "dalibi" with the gradient of its
#: slopes; "bias:" and its axes of q and k, with its gradient; "mask:" and the axes of a boolean
#: mask; "blocks:" and the size of a block of a block mask; "lengths" of queries and keys; "packed";
#: "dropout"; or "score-cap" or "score-table", which are texts.
FEATURED: dict[Algorithm, list[tuple[DTypeName, int, int, MaskKind, bool, str]]] = {
    "fa1": [
        ("float16", 64, 64, "band", False, ""),
        ("float16", 64, 64, "causal", False, "float32"),
        ("float16", 64, 64, "causal", False, "softcap"),
        ("float16", 64, 64, "causal", False, "dalibi"),
        ("float16", 64, 64, "causal", False, "bias:qk"),
        ("float16", 64, 64, "causal", False, "mask:qk"),
        ("float16", 64, 64, "causal", False, "blocks:128x128"),
        ("float16", 64, 64, "causal", False, "dropout"),
        ("float32", 64, 64, "full", False, "dropout"),
        ("float16", 64, 64, "causal", False, "score-cap"),
        ("float16", 64, 64, "causal", False, "lengths"),
        ("float16", 64, 64, "causal", False, "packed"),
    ],
    "fa2": [
        ("float16", 64, 64, "band", False, ""),
        ("float16", 64, 64, "left", True, ""),
        ("bfloat16", 128, 128, "band", True, ""),
        ("float32", 64, 64, "band", False, ""),
        ("float64", 64, 64, "left", False, ""),
        ("float16", 64, 64, "causal", False, "float16"),
        ("float64", 64, 64, "band", False, "float64"),
        ("float16", 64, 64, "causal", True, "softcap"),
        ("bfloat16", 128, 128, "full", False, "softcap"),
        ("float32", 64, 64, "causal", False, "softcap"),
        ("float64", 64, 64, "full", False, "softcap"),
        ("float16", 64, 64, "causal", True, "dalibi"),
        ("bfloat16", 128, 128, "full", False, "alibi"),
        ("float32", 64, 64, "causal", False, "dalibi"),
        ("float16", 64, 64, "causal", False, "bias:qk"),
        ("bfloat16", 128, 128, "full", False, "bias:k:float32"),
        ("float32", 64, 64, "full", False, "bias:q"),
        ("float64", 256, 256, "causal", False, "bias:qk"),
        ("float16", 64, 64, "causal", False, "mask:qk"),
        ("bfloat16", 128, 128, "full", False, "mask:k"),
        ("float32", 64, 64, "full", False, "mask:q"),
        ("float64", 256, 256, "causal", False, "mask:qk"),
        ("float16", 64, 64, "full", False, "bias:qk+mask:qk"),
        ("float16", 64, 64, "causal", False, "blocks:128x128"),
        ("bfloat16", 128, 128, "full", True, "blocks:128x128"),
        ("float32", 64, 64, "full", False, "blocks:64x64"),
        ("float16", 64, 64, "full", False, "mask:qk+blocks:64x128"),
        ("float16", 64, 64, "causal", False, "dropout"),
        ("bfloat16", 128, 128, "full", True, "dropout"),
        ("float32", 64, 64, "full", False, "dropout"),
        ("float64", 256, 256, "causal", False, "dropout"),
        ("float16", 64, 64, "full", False, "bias:qk+dropout"),
        ("float16", 128, 128, "causal", False, "softcap+dalibi+dropout"),
        ("float16", 64, 64, "causal", True, "score-table"),
        ("bfloat16", 128, 128, "full", False, "score-cap"),
        ("float32", 64, 64, "causal", False, "score-cap"),
        ("float64", 64, 64, "full", False, "score-table"),
        ("float16", 64, 64, "causal", False, "lengths"),
        ("bfloat16", 128, 128, "band", True, "lengths"),
        ("float32", 64, 64, "full", False, "lengths"),
        ("float64", 256, 256, "causal", False, "lengths"),
        ("float16", 64, 64, "full", False, "dalibi+lengths"),
        ("float16", 64, 64, "causal", False, "float32+lengths"),
        ("float16", 64, 64, "causal", False, "packed"),
        ("bfloat16", 128, 128, "band", True, "packed"),
        ("float32", 64, 64, "full", False, "packed"),
        ("float16", 64, 64, "causal", False, "float32+packed"),
    ],
    "fa3": [
        ("bfloat16", 64, 64, "band", False, ""),
        ("bfloat16", 64, 64, "left", False, ""),
        ("bfloat16", 64, 64, "band", True, ""),
        ("bfloat16", 128, 128, "band", False, ""),
        ("bfloat16", 128, 128, "left", True, ""),
        ("bfloat16", 192, 128, "band", False, ""),
        ("bfloat16", 256, 256, "band", True, ""),
        ("bfloat16", 64, 64, "causal", False, "float32"),
        ("bfloat16", 128, 128, "causal", False, "bfloat16"),
        ("bfloat16", 256, 256, "band", False, "float32"),
        ("bfloat16", 64, 64, "full", False, "softcap"),
        ("bfloat16", 64, 64, "causal", True, "softcap"),
        ("bfloat16", 64, 64, "band", False, "softcap"),
        ("bfloat16", 96, 96, "causal", False, "softcap"),
        ("bfloat16", 128, 128, "full", False, "softcap"),
        ("bfloat16", 128, 128, "causal", True, "softcap"),
        ("bfloat16", 192, 128, "causal", False, "softcap"),
        ("bfloat16", 192, 192, "full", False, "softcap"),
        ("bfloat16", 256, 256, "causal", False, "softcap"),
        ("float16", 64, 64, "causal", False, "softcap"),
        ("float16", 128, 128, "causal", False, "softcap"),
        ("bfloat16", 64, 64, "causal", False, "alibi"),
        ("bfloat16", 64, 64, "full", True, "dalibi"),
        ("bfloat16", 96, 96, "causal", False, "dalibi"),
        ("bfloat16", 128, 128, "causal", False, "alibi"),
        ("bfloat16", 128, 128, "full", False, "dalibi"),
        ("bfloat16", 192, 128, "causal", False, "dalibi"),
        ("bfloat16", 256, 256, "causal", False, "dalibi"),
        ("float16", 64, 64, "band", False, "dalibi"),
        ("bfloat16", 64, 64, "causal", False, "bias:qk"),
        ("bfloat16", 64, 64, "full", False, "bias:k"),
        ("bfloat16", 96, 96, "causal", False, "bias:qk"),
        ("bfloat16", 128, 128, "causal", False, "bias:qk:float32"),
        ("bfloat16", 128, 128, "full", True, "bias:qk"),
        ("bfloat16", 192, 128, "causal", False, "bias:qk"),
        ("bfloat16", 256, 256, "causal", False, "bias:qk"),
        ("float16", 64, 64, "band", False, "bias:1"),
        ("bfloat16", 64, 64, "full", False, "mask:qk"),
        ("bfloat16", 64, 64, "causal", False, "mask:k"),
        ("bfloat16", 64, 64, "full", False, "mask:q"),
        ("bfloat16", 96, 96, "causal", False, "mask:qk"),
        ("bfloat16", 128, 128, "full", False, "mask:qk"),
        ("bfloat16", 128, 128, "causal", True, "mask:qk"),
        ("bfloat16", 128, 128, "full", False, "mask:k"),
        ("bfloat16", 192, 128, "full", False, "mask:qk"),
        ("bfloat16", 192, 192, "causal", False, "mask:k"),
        ("bfloat16", 256, 256, "causal", False, "mask:qk"),
        ("bfloat16", 64, 64, "full", False, "bias:qk+mask:qk"),
        ("bfloat16", 128, 128, "causal", False, "bias:k:float32+mask:qk"),
        ("float16", 64, 64, "causal", False, "mask:qk"),
        ("float16", 128, 128, "full", False, "mask:qk"),
        ("bfloat16", 64, 64, "full", False, "blocks:128x128"),
        ("bfloat16", 64, 64, "causal", False, "blocks:64x64"),
        ("bfloat16", 96, 96, "full", False, "blocks:128x128"),
        ("bfloat16", 96, 96, "causal", False, "blocks:128x64"),
        ("bfloat16", 128, 128, "full", False, "blocks:128x128"),
        ("bfloat16", 128, 128, "causal", False, "blocks:64x64"),
        ("bfloat16", 128, 128, "full", True, "blocks:128x128"),
        ("bfloat16", 192, 128, "full", False, "blocks:128x128"),
        ("bfloat16", 192, 192, "causal", False, "blocks:128x64"),
        ("bfloat16", 256, 256, "full", False, "blocks:128x128"),
        ("bfloat16", 64, 64, "full", False, "bias:qk+blocks:128x128"),
        ("bfloat16", 128, 128, "full", False, "mask:qk+blocks:128x128"),
        ("bfloat16", 128, 128, "causal", False, "blocks:128x128+dropout"),
        ("float16", 64, 64, "causal", False, "blocks:128x128"),
        ("bfloat16", 64, 64, "full", False, "dropout"),
        ("bfloat16", 64, 64, "causal", False, "dropout"),
        ("bfloat16", 64, 64, "band", True, "dropout"),
        ("bfloat16", 96, 96, "causal", False, "dropout"),
        ("bfloat16", 128, 128, "full", False, "dropout"),
        ("bfloat16", 128, 128, "causal", True, "dropout"),
        ("bfloat16", 192, 128, "causal", False, "dropout"),
        ("bfloat16", 192, 192, "full", False, "dropout"),
        ("bfloat16", 256, 256, "causal", False, "dropout"),
        ("bfloat16", 64, 64, "causal", False, "softcap+dropout"),
        ("bfloat16", 128, 128, "causal", False, "softcap+dropout"),
        ("bfloat16", 64, 64, "causal", False, "dalibi+dropout"),
        ("bfloat16", 128, 128, "full", False, "dalibi+dropout"),
        ("bfloat16", 64, 64, "full", False, "bias:qk+dropout"),
        ("bfloat16", 128, 128, "causal", False, "bias:k:float32+dropout"),
        ("bfloat16", 64, 64, "full", False, "mask:qk+dropout"),
        ("bfloat16", 128, 128, "full", False, "mask:qk+dropout"),
        ("bfloat16", 128, 128, "causal", False, "float32+dropout"),
        ("float16", 64, 64, "causal", False, "dropout"),
        ("float16", 192, 128, "full", False, "dropout"),
        ("bfloat16", 64, 64, "full", False, "score-cap"),
        ("bfloat16", 64, 64, "causal", False, "score-table"),
        ("bfloat16", 64, 64, "band", True, "score-cap"),
        ("bfloat16", 96, 96, "causal", False, "score-cap"),
        ("bfloat16", 128, 128, "full", False, "score-cap"),
        ("bfloat16", 128, 128, "causal", False, "score-cap"),
        ("bfloat16", 128, 128, "causal", False, "score-table"),
        ("bfloat16", 192, 128, "causal", False, "score-table"),
        ("bfloat16", 192, 192, "full", False, "score-cap"),
        ("bfloat16", 256, 256, "causal", False, "score-table"),
        ("float16", 64, 64, "full", False, "score-table"),
        ("float16", 128, 128, "causal", False, "score-cap"),
        ("bfloat16", 128, 128, "full", False, "score-table+mask:qk"),
        ("bfloat16", 64, 64, "causal", False, "score-cap+dropout"),
        ("bfloat16", 256, 256, "causal", False, "score-cap+dropout"),
        ("bfloat16", 128, 128, "full", False, "score-table+bias:qk"),
        ("bfloat16", 128, 128, "causal", False, "score-cap+alibi"),
        ("bfloat16", 64, 64, "full", False, "lengths"),
        ("bfloat16", 64, 64, "causal", False, "lengths"),
        ("bfloat16", 64, 64, "band", True, "lengths"),
        ("bfloat16", 96, 96, "causal", False, "lengths"),
        ("bfloat16", 128, 128, "full", False, "lengths"),
        ("bfloat16", 128, 128, "causal", False, "lengths"),
        ("bfloat16", 128, 128, "causal", True, "lengths"),
        ("bfloat16", 192, 128, "causal", False, "lengths"),
        ("bfloat16", 192, 192, "full", False, "lengths"),
        ("bfloat16", 256, 256, "causal", False, "lengths"),
        ("float16", 64, 64, "causal", False, "lengths"),
        ("float16", 128, 128, "full", False, "lengths"),
        ("bfloat16", 128, 128, "causal", False, "dalibi+lengths"),
        ("bfloat16", 64, 64, "full", False, "bias:qk+lengths"),
        ("bfloat16", 128, 128, "full", False, "mask:qk+lengths"),
        ("bfloat16", 64, 64, "causal", False, "dropout+lengths"),
        ("bfloat16", 128, 128, "causal", False, "bfloat16+lengths"),
        ("bfloat16", 64, 64, "full", False, "packed"),
        ("bfloat16", 64, 64, "causal", False, "packed"),
        ("bfloat16", 64, 64, "band", True, "packed"),
        ("bfloat16", 96, 96, "causal", False, "packed"),
        ("bfloat16", 128, 128, "full", True, "packed"),
        ("bfloat16", 128, 128, "causal", False, "packed"),
        ("bfloat16", 192, 128, "causal", False, "packed"),
        ("bfloat16", 256, 256, "causal", False, "packed"),
        ("float16", 64, 64, "causal", False, "packed"),
        ("bfloat16", 128, 128, "causal", False, "alibi+packed"),
        ("bfloat16", 64, 64, "causal", False, "dropout+packed"),
        ("bfloat16", 128, 128, "causal", False, "bfloat16+packed"),
    ],
}


#: The number of packed sequences, counting the rows after the last one as a sequence.
_SEQUENCES = 4

#: Features without arrays.
_KEYWORDS = {
    "softcap": (("softcap", 50.0),),
    "dropout": (("dropout_p", 0.1), ("dropout_seed", 1)),
    **{name: (("score_mod", text),) for name, text in TEXTS.items()},
}


def featured_problems(plain: AttentionProblem, algorithm: Algorithm) -> Iterator[AttentionProblem]:
    """The problems of an algorithm, each in both passes; ``plain`` gives their other fields."""
    plain = replace(plain, q_first=-plain.seqlen_kv // 2)
    for dtype, d, dv, mask, deterministic, feature in FEATURED[algorithm]:
        of = replace(plain, head_dim=d, head_dim_v=dv, mask=mask, storage=dtype, output=dtype)
        words = [*filter(None, feature.split("+"))]
        of = replace(of, sequences=_SEQUENCES * ("packed" in words))
        keywords = {name: value for word in words for name, value in _KEYWORDS.get(word, ())}
        for word in words:
            if word.startswith("blocks:"):
                queries, keys = map(int, word.removeprefix("blocks:").split("x"))
                of = replace(of, block=(queries, keys))
                keywords["block_mask"] = of.block
        arrays = (_operands(of, word) for word in words if word not in _KEYWORDS)
        operands = {operand.name: operand for several in arrays for operand in several}
        if "score-table" in words:
            operands[SLOTS[0]] = Operand(SLOTS[0], "float32", (of.heads_q, 2 * of.seqlen_kv))
        yield with_features(of, keywords, {n: _of_entries(of, o) for n, o in operands.items()})
        wrt = (
            QKV
            if feature.startswith("alibi")
            else (*QKV, *(n for n in operands if n in differentiable()))
        )
        of = replace(of, operation="backward", deterministic=deterministic, wrt=wrt)
        yield with_features(of, keywords, operands)
    for width in (64, 128) if algorithm == "fa3" else ():  # a narrow window
        of = replace(plain, head_dim=width, head_dim_v=width, mask="band", q_first=-127)
        of = with_features(replace(of, storage="bfloat16", output="bfloat16"), {}, {})
        yield of
        for deterministic in (False, True):
            yield replace(of, operation="backward", deterministic=deterministic)


def _of_entries(problem: AttentionProblem, operand: Operand) -> Operand:
    """An array with an entry for each batch entry; a shared bias has its own kernels."""
    own = operand.name == "bias"
    return replace(operand, shape=(problem.batch, *operand.shape[1:])) if own else operand


def _operands(problem: AttentionProblem, feature: str) -> tuple[Operand, ...]:
    """The arrays of a feature as ``FEATURED`` names it."""
    if feature == "packed":
        return tuple(Operand(f"cu_seqlens_{of}", "int32", (_SEQUENCES,)) for of in ("q", "kv"))
    if feature == "lengths":
        return tuple(Operand(f"seqused_{of}", "int32", (problem.batch,)) for of in ("q", "kv"))
    return (_operand(problem, feature),)


def _operand(problem: AttentionProblem, feature: str) -> Operand:
    if feature.endswith("alibi"):
        return Operand("alibi_slopes", problem.compute, (problem.heads_q,))
    if feature.startswith("blocks:"):
        return Operand("block_mask", "bool", (1, 1, problem.q_blocks, problem.kv_blocks))
    name, *axes_and_dtype = feature.split(":")
    if not axes_and_dtype:
        return Operand("sinks", feature, (problem.heads_q,))
    axes, *dtype_of = axes_and_dtype
    lengths = {"q": problem.seqlen_q, "k": problem.seqlen_kv}
    shape = (1, 1, *(size if axis in axes else 1 for axis, size in lengths.items()))
    own = "bool" if name == "mask" else problem.storage
    return Operand(name, *(*dtype_of, own)[:1], shape)
