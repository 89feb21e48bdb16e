"""The kernels of a pass, and the digest of all their sources."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuflash.cuda.source import find_sources, include_closure
from cuflash.features.table import every_feature

__all__ = [
    "KERNELS",
    "KERNELS_OF_LENGTHS",
    "SAME_CODE",
    "digest",
    "digest_now",
    "features_of",
    "is_current",
    "kernels_of",
]

#: Pairs of digests of earlier and later sources that were compared and make the same machine code.
#: A row keeps the digest with which it was measured; ``only`` and ``but`` say to which rows a pair
#: applies.
SAME_CODE = Path(__file__).with_name("same_code.json")

#: Folder and file of every kernel of a pass.
KERNELS = {
    ("fa1", "forward"): (("fa1", "forward"),),
    ("fa1", "backward"): (("steps", "delta"), ("fa1", "backward")),
    ("fa2", "forward"): (("fa2", "forward"),),
    ("fa2", "backward"): (
        ("steps", "statistics"),
        ("fa2", "backward"),
        ("steps", "convert_dq"),
    ),
    ("fa3", "forward"): (("fa3", "forward"),),
    ("fa3", "backward"): (
        ("steps", "statistics"),
        ("fa3", "backward"),
        ("steps", "convert_dq"),
        ("fa3", "sum_parts"),
    ),
}

#: The kernels that passes without features have in place of the main one for some lengths.
KERNELS_OF_LENGTHS = {
    ("fa3", "backward"): (("fa3", "backward_few"), ("fa3", "backward_short")),
}

#: The kernels that a feature adds to a pass, for every generation.
FEATURE_KERNELS = {
    ("dbias", "backward"): (("steps", "bias_gradient"),),
    ("sinks", "backward"): (("steps", "sink_gradient"),),
    ("packed_lengths", "forward"): (("steps", "list_items"),),
    ("packed_lengths", "backward"): (("steps", "list_items"),),
    ("split_keys", "forward"): (("steps", "merge"),),
}

#: The kernels that a feature adds to both passes of one generation.
GENERATION_KERNELS = {
    ("mask", "fa3"): (("steps", "summarise_mask"),),
    ("split_keys", "fa2"): (("fa2", "forward_few"),),
}

#: Headers that a feature adds to the kernels of one generation, besides the feature's own header.
FEATURE_HEADERS = {
    ("bias", "fa3"): ("features/bias_staged.cuh",),
    ("mask", "fa3"): ("features/mask_packed.cuh",),
    ("split_keys", "fa2"): ("features/kv_chunks.cuh", "features/packed_group.cuh"),
    ("split_keys", "fa3"): ("features/kv_chunks.cuh", "features/packed_group.cuh"),
}

#: Comments and assertions, which make no code.
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|static_assert\(.*?\);", re.DOTALL)


def digest(root: Path, algorithm: str, op: str, features: Sequence[str] = ()) -> str:
    """A digest of a pass, or of ``forward and backward``; it changes if a kernel may have changed.

    Comments, assertions and white space do not count: they make no code. The headers and kernels of
    the given features do count.
    """
    passes = op.split(" and ")
    kernels = [kernel for one in passes for kernel in KERNELS[algorithm, one]]
    if not features:
        kernels += [k for one in passes for k in KERNELS_OF_LENGTHS.get((algorithm, one), ())]
    kernels += [k for one in passes for f in features for k in kernels_of(f, algorithm, one)]
    entries = [f"{folder}/{name}.cu" for folder, name in kernels]
    found = hashlib.sha256()
    devices = {feature.name: feature.device for feature in every_feature()}
    own = [devices[f] for f in features if f in devices]
    headers = [part.header for part in own if part is not None]
    headers += [header for f in features for header in FEATURE_HEADERS.get((f, algorithm), ())]
    for entry in (*entries, *headers):
        for path in include_closure(root, root / entry):
            words = _NO_CODE.sub(" ", path.read_text()).split()
            found.update("\0".join([path.name, *words, ""]).encode())
    return found.hexdigest()[:16]


def kernels_of(feature: str, algorithm: str, op: str) -> tuple[tuple[str, str], ...]:
    """Folder and file of every kernel that a feature adds to a pass of a generation."""
    of_pass = FEATURE_KERNELS.get((feature, op), ())
    return (*of_pass, *GENERATION_KERNELS.get((feature, algorithm), ()))


@functools.cache
def _same_code() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(SAME_CODE.read_text(encoding="utf-8")))


def is_current(root: Path, algorithm: str, op: str, row: Mapping[str, Any]) -> bool:
    """Whether a row was measured with these sources, or with sources of the same machine code."""
    now = digest(root, algorithm, op, features_of(row))
    return row["sources"] == now or any(
        (same["algorithm"], same["op"], same["of"], same["as"])
        == (algorithm, op, row["sources"], now)
        and all(row.get(name) == value for name, value in same["only"].items())
        and not any(row.get(name) == value for name, value in same["but"].items())
        for same in _same_code()
    )


def digest_now(algorithm: str, op: str, features: Sequence[str] = ()) -> str:
    """The digest of the sources that this process compiles."""
    return digest(find_sources(), algorithm, op, features)


def features_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The features of a row that change code, in the order of a case's ``sources``."""
    options = row.get("options", {})
    names = ("window", "softcap", "alibi", "bias", "dbias", "mask", "sinks", "dropout")
    names = (*names, "block_mask", "score_mod", "packed_lengths")
    names = (*names, "used_lengths", "split_keys", "cached_keys", "float8")
    keywords = {"window": "window_size", "dropout": "dropout_p", "packed_lengths": "lengths"}
    keywords |= {"used_lengths": "kvcache", "split_keys": "rotated", "cached_keys": "page_size"}
    return tuple(n for n in names if options.get(keywords.get(n, n)))
