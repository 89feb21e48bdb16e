"""``python -m cuflash explain`` with caches: its options, and the arrays that they describe."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import ArgumentValueError

__all__ = ["CACHE_OPERATIONS", "add_caches", "arrays_of_caches", "refuse_caches"]

#: The operations with caches.
CACHE_OPERATIONS = ("kvcache", "append")
_CAPACITY = 4096


def add_caches(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that only operations with caches take."""
    group = parser.add_argument_group("caches, with --operation kvcache or append")
    told = "slots of a page; an entry has as many pages as --seqlen-kv needs; default no pages"
    group.add_argument("--page-size", type=int, metavar="N", help=told)
    told = "tokens to append to every entry, 0: none; default as --seqlen-q, and 1 with append"
    group.add_argument("--new-tokens", type=int, metavar="N", help=told)
    told = "dtype of the caches; default --dtype"
    group.add_argument("--cache-dtype", choices=("float8_e4m3fn",), help=told)
    told = "rotate all columns of queries and new keys"
    group.add_argument("--rotary", action="store_true", help=told)


def refuse_caches(given: argparse.Namespace) -> None:
    """Refuse the options of caches for an operation without caches.

    Raises
    ------
    ArgumentValueError
        Naming the option.
    """
    _refuse(given, ("page_size", "new_tokens", "cache_dtype", "rotary"))


def arrays_of_caches(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``explain`` that describe arrays, of an operation with caches.

    Raises
    ------
    ArgumentValueError
        If an option is not of the operation, or no size.
    """
    appends_only = given.operation == "append"
    _refuse(given, ("cu_seqlens_q", *(("seqlen_q", "heads_q") if appends_only else ())))
    batch, queries = _or(given.batch, 1), _or(given.seqlen_q, 1)
    heads_q = _or(given.heads_q, 16)
    heads_kv, new = _or(given.heads_kv, heads_q), _or(given.new_tokens, queries)
    table, caches = _caches(given, batch)
    arrays: dict[str, Any] = {"cache_seqlens": "int32", "page_table": table}
    dims = given.head_dim, _or(given.head_dim_v, given.head_dim)
    for name, dim in zip("kv", dims, strict=True):
        arrays[f"{name}_cache"] = (*caches, heads_kv, dim)
        if new or appends_only:
            arrays[name] = (batch, new, heads_kv, dim)
    if not appends_only:
        arrays["q"] = (batch, queries, heads_q, given.head_dim)
    if given.cache_dtype is not None:  # any scales: kernels do not depend on their numbers
        arrays |= {"cache_dtype": given.cache_dtype, "k_scale": 1.0, "v_scale": 1.0}
    if given.rotary:
        positions = caches[1] * (1 if table is None else table[1])
        tables = dict.fromkeys(("rotary_cos", "rotary_sin"), (positions, given.head_dim // 2))
        arrays |= {**tables, "rotary_interleaved": False}
    return arrays


def _caches(
    given: argparse.Namespace, batch: int
) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """The shape of the page table, and the first two axes of a cache."""
    capacity, slots = _or(given.seqlen_kv, _CAPACITY), given.page_size
    if capacity < 0:
        raise ArgumentValueError("--seqlen-kv", str(capacity), "0 or more slots of an entry")
    if slots is None:
        return None, (batch, capacity)
    if slots < 1:
        raise ArgumentValueError("--page-size", str(slots), "1 or more slots of a page")
    pages = -(-capacity // slots)
    return (batch, pages), (batch * pages, slots)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _refuse(given: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Refuse options that the operation does not take."""
    for name in names:
        value = getattr(given, name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            said = f"nothing: --operation {given.operation} has none"
            raise ArgumentValueError(option, str(value), said)
