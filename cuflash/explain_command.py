"""``python -m cuflash explain``: its options and its output."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from typing import Any

from rich.text import Text

from .arrays.spec import LAYOUTS, LayoutName
from .block_mask import BlockMask
from .command_output import Console, add_json, describe, print_json
from .compile_command import block_of, score_text
from .errors import ArgumentValueError
from .explain_command_caches import (
    CACHE_OPERATIONS,
    add_caches,
    arrays_of_caches,
    refuse_caches,
)
from .explained import Explanation
from .explanation import explain
from .plan_ahead import PlannedOperation
from .planning.plan import ALGORITHMS
from .planning.problem import DTYPES, AttentionProblem
from .tensors import QKV, differentiable

__all__ = ["add_explain", "add_selection"]

_ALGORITHMS = ("auto", *sorted(ALGORITHMS))
_BACKENDS = ("auto", "cuda", "numpy")
_OPERATIONS = ("forward", "backward", "both", *CACHE_OPERATIONS)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the command, and the command."""
    parser.set_defaults(run=_run)
    describe(
        parser,
        "Show what a call of these sizes would run and why: forward and backward, or over caches.",
        "%(prog)s --causal --heads-q 32 --heads-kv 8 --dtype bfloat16",
        "%(prog)s --operation kvcache --seqlen-kv 8192 --page-size 16 --json",
    )
    _add_sizes(parser)
    parser.add_argument("--causal", action="store_true")
    _add_features(parser)
    parser.add_argument("--q-offset", type=int, help="position of query 0 among the keys")
    parser.add_argument("--layout", choices=LAYOUTS, help="default bshd")
    told = "default both, which is forward and backward; kvcache: attention_with_kvcache, by "
    told += "default a step that decodes one token of every entry; append: append_kv"
    parser.add_argument("--operation", choices=_OPERATIONS, default="both", help=told)
    parser.add_argument(
        "--wrt",
        type=lambda text: tuple(text.split(",")),
        default=QKV,
        metavar="NAME[,NAME]",
        help=f"requested gradients, of {', '.join(differentiable())}; default q,k,v",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="gradients with the same bits in every run"
    )
    parser.add_argument("--blocks", type=int, nargs=2, metavar=("Q", "KV"))
    told = "keys that one thread block processes, forward; 0: all; by default the plan chooses"
    parser.add_argument("--kv-chunk", type=int, metavar="N", help=told)
    parser.add_argument("--compile", action="store_true", help="also compile; report registers")
    add_json(parser)
    add_selection(parser, "auto")
    add_caches(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="default 1")
    parser.add_argument("--seqlen-q", type=int, help="default 4096, and 1 with kvcache")
    told = "default as --seqlen-q; with caches the slots of an entry, default 4096"
    parser.add_argument("--seqlen-kv", type=int, help=told)
    parser.add_argument("--heads-q", type=int, help="default 16")
    parser.add_argument("--heads-kv", type=int, help="default as --heads-q")
    parser.add_argument("--head-dim", type=int, default=128, help="default %(default)s")
    parser.add_argument("--head-dim-v", type=int, help="default as --head-dim")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="default %(default)s")


def _add_features(parser: argparse.ArgumentParser) -> None:
    told = "number of keys that a query sees before and after its position; none: no bound"
    sides = ("LEFT", "RIGHT")
    parser.add_argument("--window-size", type=_side, nargs=2, metavar=sides, help=told)
    parser.add_argument("--softcap", type=float, help="bound of the scores; default no cap")
    told = "a function of scores without arguments, such as 'return 0.5 * s;'"
    parser.add_argument("--score-mod", type=score_text, metavar="TEXT", help=told)
    told = "a call with ALiBi; slopes by head, or by batch entry and head"
    parser.add_argument("--alibi-slopes", choices=("heads", "batch"), help=told)
    parser.add_argument(
        "--bias",
        type=_axes,
        metavar="AXES[:DTYPE]",
        help="a call with a bias that differs along these axes: letters of b, h, q and k, or 1 for "
        "none of them; hqk has a number for each head, query and key. The default dtype is q's",
    )
    told = "a call with a boolean mask that differs along these axes, as for --bias"
    parser.add_argument("--mask-array", type=_letters, metavar="AXES", help=told)
    told = "a call with a block mask of these blocks"
    parser.add_argument("--block-mask", type=block_of, metavar="BQxBKV", help=told)
    told = "a call with sinks of this dtype, by default that of q"
    parser.add_argument("--sinks", nargs="?", const="", metavar="DTYPE", help=told)
    parser.add_argument("--dropout-p", type=float, help="fraction of the weights that is dropped")
    parser.add_argument("--dropout-seed", type=int, help="default 0, if weights are dropped")
    for name, rows in (("q", "queries"), ("kv", "keys")):
        told = f"a call whose batch entries use only their first {rows}"
        parser.add_argument(f"--seqused-{name}", action="store_true", help=told)
        told = "number of packed sequences; give both options, with --layout shd"
        parser.add_argument(f"--cu-seqlens-{name}", type=_sequences, metavar="SEQUENCES", help=told)


def _sequences(text: str) -> tuple[int]:
    """The shape of the offsets of this many sequences."""
    try:
        return (int(text) + 1,)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of sequences") from None


def _side(text: str) -> int | None:
    """One side of a window: ``"none"`` or a number of keys."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def add_selection(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Give a parser the options that choose the backend and the algorithm."""
    parser.add_argument("--algorithm", choices=_ALGORITHMS, default=default)
    parser.add_argument("--backend", choices=_BACKENDS, default=default)


def _run(given: argparse.Namespace) -> int:
    both: tuple[PlannedOperation, ...] = ("forward", "backward")
    operations = both if given.operation == "both" else (given.operation,)
    if given.json:
        print_json({operation: _report(given, operation) for operation in operations})
        return 0
    explanations = [str(_explained(given, operation)) for operation in operations]
    Console().print(Text("\n\n".join(explanations)), soft_wrap=True)
    return 0


def _report(given: argparse.Namespace, operation: PlannedOperation) -> dict[str, Any]:
    """An explanation in the types of JSON, with its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = _explained(given, operation)
    names = ("backend", "algorithm", "device", "reason", "block_q", "block_kv", "workspace_bytes")
    return {
        "problem": _problem(said.problem),
        **{name: getattr(said, name) for name in names},
        "kernels": [asdict(kernel) for kernel in said.kernels],
        "copies": list(said.copies),
        "not_taken": [{"algorithm": name, "reason": why} for name, why in said.not_taken],
        "warnings": [str(one.message) for one in warned],
    }


def _problem(problem: AttentionProblem) -> dict[str, Any]:
    sizes = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
    return {
        "text": str(problem),
        "operation": problem.operation,
        "dtype": problem.storage,
        **{name: getattr(problem, name) for name in sizes},
        "mask": problem.mask,
        "q_first": problem.q_first if problem.has_first else None,
        "q_offset": problem.q_offset if problem.has_last else None,
        "features": list(problem.features),
        "arrays": {
            name: {"dtype": operand.dtype, "shape": list(operand.shape)}
            for name, operand in problem.operands.items()
        },
        "wrt": list(problem.wrt) if problem.operation == "backward" else [],
    }


def _explained(given: argparse.Namespace, operation: PlannedOperation) -> Explanation:
    seed = given.dropout_seed
    # With "both" the forward pass gets no wrt. A forward pass alone gets it, and refuses it.
    selects = operation == "backward" or given.operation != "both"
    return explain(
        **_arrays(given),
        operation=operation,
        dtype=given.dtype,
        causal=given.causal,
        window_size=None if given.window_size is None else tuple(given.window_size),
        softcap=given.softcap,
        score_mod=given.score_mod,
        alibi_slopes=_slopes(given),
        bias=_bias(given),
        mask=None if given.mask_array is None else _of_pairs(given, given.mask_array),
        block_mask=given.block_mask and BlockMask("bool", given.block_mask),
        sinks=given.dtype if given.sinks == "" else given.sinks,
        dropout_p=given.dropout_p,
        dropout_seed=0 if given.dropout_p and seed is None else seed,
        seqused_q="int32" if given.seqused_q else None,
        seqused_kv="int32" if given.seqused_kv else None,
        cu_seqlens_q=given.cu_seqlens_q,
        cu_seqlens_kv=given.cu_seqlens_kv,
        wrt=given.wrt if selects else QKV,
        q_offset=given.q_offset,
        layout=given.layout if given.operation in CACHE_OPERATIONS else _layout(given),
        deterministic=given.deterministic,
        backend=given.backend,
        algorithm=given.algorithm,
        blocks=None if given.blocks is None else tuple(given.blocks),
        kv_chunk=given.kv_chunk if given.operation != "both" or not selects else None,
        compile=given.compile,
    )


def _arrays(given: argparse.Namespace) -> dict[str, Any]:
    """What describes q, k, v and caches."""
    if given.operation in CACHE_OPERATIONS:
        return arrays_of_caches(given)
    refuse_caches(given)
    return dict(zip(QKV, _shapes(given), strict=True))


def _layout(given: argparse.Namespace) -> LayoutName:
    return given.layout or "bshd"


def _shapes(given: argparse.Namespace) -> list[tuple[int, ...]]:
    """The shapes of q, k and v in the requested layout."""
    layout = _layout(given)
    for name, axis in (("batch", "b"), ("heads_q", "h"), ("heads_kv", "h")):
        if axis not in layout and getattr(given, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentValueError(option, str(getattr(given, name)), f"a layout with {axis!r}")
    batch = 1 if given.batch is None else given.batch
    heads_q = 16 if given.heads_q is None else given.heads_q
    heads_kv = heads_q if given.heads_kv is None else given.heads_kv
    seqlen_q = 4096 if given.seqlen_q is None else given.seqlen_q
    seqlen_kv = seqlen_q if given.seqlen_kv is None else given.seqlen_kv
    head_dim_v = given.head_dim if given.head_dim_v is None else given.head_dim_v
    tensors = (
        {"b": batch, "s": seqlen_q, "h": heads_q, "d": given.head_dim},
        {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": given.head_dim},
        {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": head_dim_v},
    )
    return [tuple(sizes[axis] for axis in layout) for sizes in tensors]


def _slopes(given: argparse.Namespace) -> tuple[int, ...] | None:
    """The shape of the requested slopes."""
    if given.alibi_slopes is None:
        return None
    sizes = dict(zip(_layout(given), _shapes(given)[0], strict=True))
    batch, heads = sizes.get("b", 1), sizes.get("h", 1)
    return (heads,) if given.alibi_slopes == "heads" else (batch, heads)


def _axes(text: str) -> tuple[str, str]:
    """``"hqk:float32"`` is ``("hqk", "float32")``."""
    axes, _, dtype = text.partition(":")
    return _letters(axes), dtype


def _letters(axes: str) -> str:
    """The axes of an array of pairs, each once."""
    if axes != "1" and (not axes or not set(axes) <= set("bhqk") or len(set(axes)) < len(axes)):
        told = f"{axes!r} is neither 1 nor letters of b, h, q and k, each at most once"
        raise argparse.ArgumentTypeError(told)
    return axes


def _bias(given: argparse.Namespace) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the requested bias."""
    if given.bias is None:
        return None
    axes, dtype = given.bias
    return _of_pairs(given, axes), dtype or given.dtype


def _of_pairs(given: argparse.Namespace, axes: str) -> tuple[int, ...]:
    """The shape of an array of pairs with these axes."""
    q, k, _ = (dict(zip(_layout(given), shape, strict=True)) for shape in _shapes(given))
    sizes = {"b": q.get("b", 1), "h": q.get("h", 1), "q": q["s"], "k": k["s"]}
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())
