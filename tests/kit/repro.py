"""The line that reproduces a case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .strides import CONTIGUOUS, Strides

__all__ = ["line_of", "read"]

#: Fields of a case by their words in its line.
_WORDS = {
    "B": "batch",
    "Hq": "heads_q",
    "Hk": "heads_kv",
    "Sq": "seqlen_q",
    "Sk": "seqlen_kv",
    "D": "head_dim",
    "Dv": "head_dim_v",
    **{name: name for name in ("dtype", "causal", "q_offset", "scale", "layout", "seed", "values")},
    **{name: name for name in ("window", "sinks", "softcap", "alibi", "bias", "mask", "dropout")},
    "used": "used",
    "written": "written",
}


def line_of(case: Any, strides: Iterable[tuple[str, Strides]]) -> str:
    """The line that :func:`read` reads back; ``strides`` by tensor name."""
    words = []
    for key, name in _WORDS.items():
        value = getattr(case, name)
        if value is not None and value is not False and value != "":
            words.append(f"{key}={'yes' if value is True else value}")
    words += [f"{name}:{recipe}" for name, recipe in strides if recipe != CONTIGUOUS]
    return " ".join(words)


def read(line: str, kinds: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Strides]]:
    """Fields of a case, with the given types, and the strides of its tensors."""
    given: dict[str, Any] = {}
    recipes: dict[str, Strides] = {}
    for word in line.split():
        key, mark, text = word.partition("=" if "=" in word else ":")
        if mark == ":":
            recipes[key] = Strides.parse(text)
            continue
        name = _WORDS[key]
        of_kind = {"i": int, "f": float, "s": str, "b": lambda word: word == "yes"}
        given[name] = of_kind[kinds[name][0]](text)
    return given, recipes
