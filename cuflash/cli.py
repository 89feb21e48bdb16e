"""The command line: ``python -m cuflash info | explain | compile | demo``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .arrays.spec import LAYOUTS
from .block_mask import BlockMask
from .compile_command import add_compile, block_of, score_text
from .demo import PRESETS, Options, plans, run
from .demo.options import DTYPES as DEMO_DTYPES
from .errors import ArgumentValueError, CuflashError
from .explanation import explain
from .info import info
from .planning.plan import ALGORITHMS
from .planning.problem import DTYPES, Operation
from .tensors import QKV, differentiable

__all__ = ["main"]

_ALGORITHMS = ("auto", *sorted(ALGORITHMS))
_BACKENDS = ("auto", "cuda", "numpy")
#: What NumPy needs to be quick at the demo on a CPU; read when a process starts. Its products
#: are too short for threads, which wait for each other many times longer than they compute as
#: soon as another program wants a core; and glibc would give memory back at every step.
_THREADS = "OPENBLAS_NUM_THREADS"
_QUICK = {
    _THREADS: "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.

    Returns
    -------
    int
        The exit code: 0 if all is well, 1 if the demo's evidence falls short,
        2 for what cannot be done, 130 if interrupted.

    Raises
    ------
    SystemExit
        From argparse, with code 2 for wrong arguments and 0 for ``--help``
        and ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    command: Callable[[argparse.Namespace], int] = given.run
    try:
        return command(given)
    except CuflashError as error:
        print(f"cuflash {given.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cuflash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    told = commands.add_parser("info", help="versions, devices, kernel cache and environment")
    told.set_defaults(run=_info)
    _add_explain(commands.add_parser("explain", help="what a call would run, and why"))
    add_compile(commands.add_parser("compile", help="fill the kernel cache before the first calls"))
    _add_demo(commands.add_parser("demo", help="train a transformer on the text of Python's help"))
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_explain)
    parser.add_argument("--batch", type=int, help="default 1")
    parser.add_argument("--seqlen-q", type=int, default=4096, help="default %(default)s")
    parser.add_argument("--seqlen-kv", type=int, help="default that of q")
    parser.add_argument("--heads-q", type=int, help="default 16")
    parser.add_argument("--heads-kv", type=int, help="default those of q")
    parser.add_argument("--head-dim", type=int, default=128, help="default %(default)s")
    parser.add_argument("--head-dim-v", type=int, help="default that of q")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="default %(default)s")
    parser.add_argument("--causal", action="store_true")
    _add_features(parser)
    parser.add_argument("--q-offset", type=int, help="position of query 0 among the keys")
    parser.add_argument("--layout", choices=LAYOUTS, default="bshd", help="default %(default)s")
    parser.add_argument(
        "--operation", choices=("forward", "backward", "both"), default="both", help="default both"
    )
    parser.add_argument(
        "--wrt",
        type=lambda text: tuple(text.split(",")),
        default=QKV,
        metavar="NAME[,NAME]",
        help=f"gradients that are asked for: of {', '.join(differentiable())}; default q,k,v",
    )
    parser.add_argument("--deterministic", action="store_true", help="gradients of the same bits")
    parser.add_argument("--blocks", type=int, nargs=2, metavar=("Q", "KV"))
    told = "keys that one thread block walks, forward; 0: all; default: as the plan finds best"
    parser.add_argument("--kv-chunk", type=int, metavar="N", help=told)
    parser.add_argument("--compile", action="store_true", help="also compile; report registers")
    _add_selection(parser, "auto")


def _add_features(parser: argparse.ArgumentParser) -> None:
    told = "keys that a query sees before and after its own; none: all of them"
    sides = ("LEFT", "RIGHT")
    parser.add_argument("--window-size", type=_side, nargs=2, metavar=sides, help=told)
    parser.add_argument("--softcap", type=float, help="what scores approach; default no cap")
    told = "a function of scores without arguments: 'return 0.5 * s;'"
    parser.add_argument("--score-mod", type=score_text, metavar="TEXT", help=told)
    told = "with ALiBi; slopes by head, or by batch entry and head"
    parser.add_argument("--alibi-slopes", choices=("heads", "batch"), help=told)
    parser.add_argument(
        "--bias",
        type=_axes,
        metavar="AXES[:DTYPE]",
        help="with a bias of these axes of b, h, q and k (1: of none), by default of q's dtype; "
        "hqk is one for each head, query and key",
    )
    told = "with a boolean mask of these axes"
    parser.add_argument("--mask-array", type=_letters, metavar="AXES", help=told)
    told = "with a block mask of these blocks"
    parser.add_argument("--block-mask", type=block_of, metavar="BQxBKV", help=told)
    told = "with sinks; of this dtype, by default that of q"
    parser.add_argument("--sinks", nargs="?", const="", metavar="DTYPE", help=told)
    parser.add_argument("--dropout-p", type=float, help="the part of the weights that is dropped")
    parser.add_argument("--dropout-seed", type=int, help="default 0, where weights are dropped")
    for name, rows in (("q", "queries"), ("kv", "keys")):
        told = f"of every batch entry some {rows} count, the first ones"
        parser.add_argument(f"--seqused-{name}", action="store_true", help=told)
        of, told = (lambda text: (int(text) + 1,)), "so many are packed; both, with --layout shd"
        parser.add_argument(f"--cu-seqlens-{name}", type=of, metavar="SEQUENCES", help=told)


def _side(text: str) -> int | None:
    """A side of a window: ``"none"`` or a number of keys."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_demo)
    told = "what the others default to"
    parser.add_argument("--size", choices=PRESETS, default="small", help=told)
    for name in ("steps", "batch", "seqlen", "layers", "heads", "head-dim", "seed", "compared"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=DEMO_DTYPES, help="of q, k and v")
    told = "also write text, with a cache and without: 200 bytes, or so many"
    parser.add_argument("--generate", type=int, nargs="?", const=200, metavar="BYTES", help=told)
    _add_selection(parser, None)


def _add_selection(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument("--algorithm", choices=_ALGORITHMS, default=default)
    parser.add_argument("--backend", choices=_BACKENDS, default=default)


def _info(given: argparse.Namespace) -> int:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for section in info().sections:
        for name, value in section.items():
            table.add_row(name, Text(value))
        table.add_section()
    Console().print(table)
    return 0


def _explain(given: argparse.Namespace) -> int:
    both: tuple[Operation, ...] = ("forward", "backward")
    operations = [name for name in both if given.operation in (name, "both")]
    explanations = [_explained(given, operation) for operation in operations]
    Console().print(Text("\n\n".join(explanations)), soft_wrap=True)
    return 0


def _explained(given: argparse.Namespace, operation: Operation) -> str:
    seed = given.dropout_seed
    selects = operation == "backward" or given.operation == "forward"  # which refuses it
    return str(
        explain(
            *_shapes(given),
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
            layout=given.layout,
            deterministic=given.deterministic,
            backend=given.backend,
            algorithm=given.algorithm,
            blocks=None if given.blocks is None else tuple(given.blocks),
            kv_chunk=given.kv_chunk if given.operation != "both" or not selects else None,
            compile=given.compile,
        )
    )


def _shapes(given: argparse.Namespace) -> list[tuple[int, ...]]:
    """The shapes of q, k and v in the layout that was asked for."""
    for name, axis in (("batch", "b"), ("heads_q", "h"), ("heads_kv", "h")):
        if axis not in given.layout and getattr(given, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentValueError(option, str(getattr(given, name)), f"a layout with {axis!r}")
    batch = 1 if given.batch is None else given.batch
    heads_q = 16 if given.heads_q is None else given.heads_q
    heads_kv = heads_q if given.heads_kv is None else given.heads_kv
    seqlen_kv = given.seqlen_q if given.seqlen_kv is None else given.seqlen_kv
    head_dim_v = given.head_dim if given.head_dim_v is None else given.head_dim_v
    tensors = (
        {"b": batch, "s": given.seqlen_q, "h": heads_q, "d": given.head_dim},
        {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": given.head_dim},
        {"b": batch, "s": seqlen_kv, "h": heads_kv, "d": head_dim_v},
    )
    return [tuple(sizes[axis] for axis in given.layout) for sizes in tensors]


def _slopes(given: argparse.Namespace) -> tuple[int, ...] | None:
    """The shape of slopes that was asked for."""
    if given.alibi_slopes is None:
        return None
    sizes = dict(zip(given.layout, _shapes(given)[0], strict=True))
    batch, heads = sizes.get("b", 1), sizes.get("h", 1)
    return (heads,) if given.alibi_slopes == "heads" else (batch, heads)


def _axes(text: str) -> tuple[str, str]:
    """``"hqk:float32"`` is ``("hqk", "float32")``."""
    axes, _, dtype = text.partition(":")
    return _letters(axes), dtype


def _letters(axes: str) -> str:
    """Axes of an array of pairs, each once."""
    if axes != "1" and (not axes or not set(axes) <= set("bhqk") or len(set(axes)) < len(axes)):
        raise argparse.ArgumentTypeError(f"{axes!r} is neither 1 nor some of b, h, q and k")
    return axes


def _bias(given: argparse.Namespace) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of the bias that was asked for."""
    if given.bias is None:
        return None
    axes, dtype = given.bias
    return _of_pairs(given, axes), dtype or given.dtype


def _of_pairs(given: argparse.Namespace, axes: str) -> tuple[int, ...]:
    """The shape of an array of pairs that has these axes."""
    q, k, _ = (dict(zip(given.layout, shape, strict=True)) for shape in _shapes(given))
    sizes = {"b": q.get("b", 1), "h": q.get("h", 1), "q": q["s"], "k": k["s"]}
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def _demo(given: argparse.Namespace) -> int:
    chosen = {
        field.name: getattr(given, field.name)
        for field in fields(Options)
        if getattr(given, field.name, None) is not None
    }
    options = replace(PRESETS[given.size], **chosen)
    if _THREADS not in os.environ and plans(options)["forward"].backend == "numpy":
        command = [sys.executable, "-m", __package__, *given.arguments]
        return subprocess.run(command, env={**os.environ, **_QUICK}, check=False).returncode
    return 0 if run(options) else 1
