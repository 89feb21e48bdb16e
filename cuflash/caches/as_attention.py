"""Translates a call with caches into the arrays and keywords of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..arrays.spec import TensorSpec
from ..checks import CallProblem, describe
from ..errors import ArgumentTypeError, ArgumentValueError
from ..features.cached_keys import NAMES
from ..features.float8 import NAMES as SCALES
from ..options import BackendChoice, Options
from ..pipeline import CallPlan, plan_call
from .float8 import Numbers
from .given import Sizes
from .packed import ARGUMENT, OFFSETS, check_targets, with_batch_axis

__all__ = [
    "FEATURES",
    "OWN_NAMES",
    "TARGETS",
    "advances",
    "asked",
    "describe_attention",
    "of_packed",
    "own_names",
    "places_of",
    "plan_attention",
]

#: Arguments of attention, and their names in a call with caches.
OWN_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_kv": "cache_seqlens", OFFSETS: ARGUMENT}
#: Arrays that are passed to attention unchanged, in the order of its arguments.
FEATURES, TARGETS = ("alibi_slopes", "sinks"), ("out", "lse_out")


def advances(options: Options) -> bool:
    """Return whether each query is one position after the query before it."""
    window = options.keyword("window_size")
    return options.causal or (window is not None and window != (None, None))


def plan_attention(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    options: Options,
    scales: Numbers | None = None,
) -> CallPlan:
    """Return the plan of attention over caches, in their layout and on their device.

    Parameters
    ----------
    specs
        Descriptions by argument name: of ``q`` and the caches, of the arrays
        that locate entries, and of features and destinations.
    sizes, options
        The checked sizes and keywords.
    scales
        For float8 caches the scales that are numbers, not arrays; None for other caches.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, UnsupportedError
        As for attention, with the argument names of a call with caches.
    """
    given, words = _of_attention(specs, sizes, options, scales)
    with own_names():
        return plan_call("forward", tuple(given.items()), words, specs["k_cache"].device, True)


def describe_attention(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    options: Options,
    scales: Numbers | None = None,
) -> CallProblem:
    """Return the described call of attention, before it is planned."""
    with own_names():
        return describe("forward", *_of_attention(specs, sizes, options, scales))


def _of_attention(
    specs: Mapping[str, TensorSpec],
    sizes: Sizes,
    options: Options,
    scales: Numbers | None = None,
) -> tuple[dict[str, TensorSpec], Options]:
    """Return the arrays and keywords of attention."""
    given, where = {"q": specs["q"]}, specs["k_cache"].device
    if sizes.most_queries:
        check_targets(specs)
        options = replace(options, more=(*options.more, *of_packed(sizes)))
    if scales is not None and where is not None:
        options = replace(options, more=(*scales, *options.more))
    for name in ("k", "v"):
        cache = specs[f"{name}_cache"]
        shape = (sizes.batch, sizes.capacity, *cache.shape[2:])
        if scales is not None and where is None:  # the host converts float8 to numbers first
            cache = replace(specs["q"], shape=shape).contiguous()
        fits = cache.shape == shape or where is not None
        given[name] = cache if fits else replace(cache, shape=shape).contiguous()
    given |= {name: specs[name] for name in FEATURES if name in specs}
    given["seqused_kv"] = TensorSpec((sizes.batch,), "int32", (1,), 4, where)
    if where is not None:
        given |= {**places_of(specs), **{name: specs[name] for name in SCALES if name in specs}}
    given |= {name: specs[name] for name in TARGETS if name in specs}
    if sizes.most_queries:
        of_rows = ("q", *TARGETS)
        given |= {name: with_batch_axis(given[name]) for name in of_rows if name in given}
        given[OFFSETS] = specs[ARGUMENT]
    return given, asked(options, where)


def of_packed(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    """The keyword of attention that only packed queries have."""
    return (("most_queries", sizes.most_queries),) if sizes.most_queries else ()


def asked(options: Options, where: int | None) -> Options:
    """Return the keywords of attention over caches in this memory."""
    backend: BackendChoice = "numpy" if where is None else "cuda"
    return replace(options, layout="bshd", backend=backend, batch_invariant=True)


def places_of(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return descriptions of the arrays of :func:`~.device.places`, by attention's names."""
    found = {name: specs[name] for name in NAMES if name in specs}
    if "cache_batch_idx" in specs:
        entries = specs["cache_batch_idx"]
        found["page_table"] = replace(entries, shape=(*entries.shape, 1), strides=(1, 1))
    return found


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Give errors of attention the argument names of a call with caches."""
    try:
        yield
    except (ArgumentTypeError, ArgumentValueError) as error:
        name = OWN_NAMES.get(error.argument, error.argument)
        raise type(error)(name, error.got, error.expected) from error
