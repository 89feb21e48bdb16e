"""``python -m cuflash compile``: its options and its output."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .calls_to_come import Calls
from .command_output import Console, describe
from .compile_ahead import compile_ahead, device_of, kernels_of
from .errors import CuflashError
from .features.block_mask import check_block
from .planning.device import DeviceLimits
from .planning.kernel import KernelConfig
from .planning.plan import ALGORITHMS
from .planning.problem import DTYPES, DTypeName
from .score_mod import ScoreMod

__all__ = ["add_compile", "block_of", "score_text"]

_HALVES: tuple[DTypeName, ...] = ("float16", "bfloat16")
_PASSES = ("forward", "backward")
_MASKS = ("full", "causal", "left", "band")
_PAIRS = ("qk", "q", "k", "1")
_BIASES = ("none", *(f"{axes}{of}" for of in ("", ":float32") for axes in _PAIRS))
_SINKS = ("none", "query", *DTYPES)
_DESCRIPTION = (
    "Compile the kernels of future calls into CuPy's cache (CUPY_CACHE_DIR), so that the first "
    "calls are quick. Options that take a list mean all combinations. Kernels do not depend on "
    "batch, number of heads and lengths, but the plan chooses the tile by them: by default all "
    "tiles that it may choose for these widths are compiled. The calls have contiguous arrays, and "
    "results in the dtype of the inputs."
)
_EXAMPLES = (
    "%(prog)s --head-dim 128 --dtype bfloat16",
    "%(prog)s --head-dim 64,192/128 --operation forward --seqlen 1/4096",
)


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the command, and the command."""
    parser.set_defaults(run=_run)
    describe(parser, _DESCRIPTION, *_EXAMPLES)

    def add(name: str, of: Callable[[str], object], default: str | None, told: str) -> None:
        metavar = name.rsplit("-", 1)[-1].upper()
        parser.add_argument(
            name, type=of, default=default, metavar=f"{metavar}[,{metavar}]", help=told
        )

    widths = "default %(default)s; 192/128 is 192 columns of q and k and 128 of v"
    add("--head-dim", _pairs, "64,128", widths)
    dtypes = f"of {', '.join(DTYPES)}; default {', '.join(_HALVES)} as far as the device has them"
    add("--dtype", _names(tuple(DTYPES)), None, dtypes)
    add("--operation", _names(_PASSES), ",".join(_PASSES), "default %(default)s")
    masks = "default %(default)s; left and band are windows, without and with a bound on the right"
    add("--mask", _names(_MASKS), "full,causal", masks)
    flags = "no, yes or both; default %(default)s"
    add("--softcap", _flags, "no", flags)
    texts = "body of a function of scores without arguments, 'return 0.5 * s;'; default none"
    parser.add_argument("--score-mod", type=score_text, metavar="TEXT", help=texts)
    add("--alibi", _flags, "no", f"{flags}; with and without the gradient of the slopes")
    biases = "default %(default)s; a bias along k differs from key to key, along q from query to "
    biases += "query, along qk both, along 1 neither; qk:float32 has this dtype"
    add("--bias", _names(_BIASES), "none", biases)
    arrays = "axes of boolean masks, as for a bias; default %(default)s"
    add("--mask-array", _names(("none", *_PAIRS)), "none", arrays)
    blocks = "queries and keys of a block of block masks, such as 128x64; default %(default)s"
    add("--block-mask", _blocks, "none", blocks)
    sinks = "default %(default)s; query is the dtype of q. Gradients include those of sinks"
    add("--sinks", _names(_SINKS), "none", sinks)
    add("--dropout", _flags, "no", flags)
    add("--used-lengths", _flags, "no", flags)
    add("--packed", _flags, "no", f"{flags}; packed sequences")
    lengths = "compile only for these lengths; 1/4096 is one query and 4096 keys"
    add("--seqlen", _pairs, None, lengths)
    _add_single(parser)


def _add_single(parser: argparse.ArgumentParser) -> None:
    """Add the options that take no list."""
    parser.add_argument("--algorithm", choices=("auto", *sorted(ALGORITHMS)), default="auto")
    parser.add_argument(
        "--deterministic", action="store_true", help="gradients of calls with deterministic=True"
    )
    parser.add_argument(
        "--unaligned",
        action="store_true",
        help="arrays whose rows begin at any address, not at multiples of 16 bytes",
    )
    parser.add_argument(
        "--arch",
        help="such as sm_90; default that of the current device. CuPy's cache takes only kernels "
        "for devices of this machine",
    )
    parser.add_argument(
        "--threads", type=_positive, help="compiling threads; default one for each processor"
    )


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    """``"64,192/128"`` is ``((64, 64), (192, 128))``."""
    pairs = []
    for part in text.split(","):
        first, slash, second = part.partition("/")
        try:
            pairs.append((int(first), int(second if slash else first)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is neither 64 nor 192/128") from None
    return tuple(dict.fromkeys(pairs))


def _blocks(text: str) -> tuple[tuple[int, int] | None, ...]:
    """``"none,128x64"`` is ``(None, (128, 64))``."""
    return tuple(None if part == "none" else block_of(part) for part in text.split(","))


def block_of(text: str) -> tuple[int, int]:
    """Queries and keys of a block: ``"128x64"`` is ``(128, 64)``.

    Raises
    ------
    argparse.ArgumentTypeError
        If a block mask cannot have such blocks.
    """
    try:
        return check_block("block", [*map(int, text.split("x"))])
    except (ValueError, TypeError):
        expected = "queries and keys of a block, multiples of 64, such as 128x64"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


def _names(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        parts = tuple(dict.fromkeys(text.split(",")))
        for part in parts:
            if part not in choices:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(choices)}")
        return parts

    return names


def _flags(text: str) -> tuple[bool, ...]:
    return tuple(name == "yes" for name in _names(("no", "yes"))(text))


def score_text(text: str) -> ScoreMod:
    """A score function without arguments, from its text."""
    try:
        return ScoreMod(text)
    except CuflashError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _or_none(names: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(None if name == "none" else name for name in names)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _run(given: argparse.Namespace) -> int:
    device = device_of(given.arch)
    limits = DeviceLimits.query(device)
    kernels = kernels_of(_calls(given, limits), limits)
    console = Console()
    with _progress(console, len(kernels)) as told:
        outcome = compile_ahead(kernels, device, told, given.threads)
    line = (
        f"{outcome.kernels} kernels for {limits.name} ({limits.architecture}): {outcome.compiled} "
        f"compiled, {outcome.found} there already, {outcome.seconds:.1f} s; in {outcome.folder}"
    )
    console.print(Text(line), soft_wrap=True)
    return 0


def _calls(given: argparse.Namespace, limits: DeviceLimits) -> Calls:
    halves = _HALVES if limits.compute_capability >= (8, 0) else _HALVES[:1]
    return Calls(
        head_dims=given.head_dim,
        dtypes=given.dtype or halves,
        operations=given.operation,
        masks=given.mask,
        softcap=given.softcap,
        score_mod=(given.score_mod,),
        alibi=given.alibi,
        bias=_or_none(given.bias),
        mask_array=_or_none(given.mask_array),
        block_mask=given.block_mask,
        sinks=_or_none(given.sinks),
        dropout=given.dropout,
        used_lengths=given.used_lengths,
        packed=given.packed,
        algorithm=given.algorithm,
        deterministic=given.deterministic,
        unaligned=given.unaligned,
        seqlens=given.seqlen,
    )


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[KernelConfig], None]]:
    """Yield a function of each kernel that moves a bar on a terminal, or else prints a line."""
    if not console.is_terminal:
        numbers = iter(range(1, total + 1))
        yield lambda kernel: console.print(
            Text(f"{next(numbers)}/{total} {_name(kernel)}"), soft_wrap=True
        )
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda kernel: bar.update(task, advance=1, description=_name(kernel))


def _name(kernel: KernelConfig) -> str:
    """Return a name of a kernel that users recognise."""
    words = [f"{kernel.generation}/{kernel.kernel}", kernel.storage]
    if kernel.head_dim:  # shared by all widths and masks otherwise
        widths = dict.fromkeys((kernel.head_dim, kernel.head_dim_v))
        words += ["/".join(map(str, widths)), kernel.mask]
    for feature in kernel.features:
        words += [feature.name, *(str(value) for _, value in feature.constants)]
    constants = dict(kernel.constants)
    if "block_q" in constants:
        words.append(f"{constants['block_q']}x{constants['block_kv']}")
    return " ".join(words)
