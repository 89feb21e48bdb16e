"""Finds the CUDA sources and writes the translation unit of a configuration."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import VARIABLES, Environment
from ..errors import ToolchainError, UnsupportedError
from ..features.device import DevicePart
from ..planning.kernel import KernelConfig
from ..planning.problem import DTYPES, ELEMENTS
from .parameters import ParameterStruct, parameters_of, struct_of

__all__ = ["Sources", "find_sources", "include_closure", "source_digest", "translation_unit"]

#: The file that marks a folder as the CUDA sources.
MARKER = "params.cuh"
#: The header of the instruction by which a kernel waits for the kernel before.
_WAIT = "ptx/dependent_launch.cuh"

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def find_sources() -> Path:
    """The folder of the CUDA sources.

    It is ``CUFLASH_CUDA_SRC`` if that is set, else ``cuda_src`` inside the
    package (installed from a wheel), else beside the package (a checkout).

    Raises
    ------
    ToolchainError
        If they are in none of these places.
    """
    asked = Environment.read().cuda_src
    package = Path(__file__).resolve().parent.parent
    places = [Path(asked)] if asked else [package / "cuda_src", package.parent / "cuda_src"]
    for place in places:
        if (place / MARKER).is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise ToolchainError(
        f"the CUDA sources were not found: looked for {MARKER} in {looked}; reinstall cuflash, "
        f"or set {VARIABLES['cuda_src'][0]} to the folder"
    )


def include_closure(root: Path, entry: Path) -> list[Path]:
    """The file ``entry`` and all files that it includes, sorted by name."""
    root = root.resolve()
    name = entry.resolve().relative_to(root).as_posix()
    return [root / name for name in Sources(root).closure(name)]


def source_digest(root: Path, generation: str, kernel: str) -> str:
    """Digest of a kernel's include closure: it changes whenever the kernel may have changed.

    CuPy's disk cache compares the text that it compiles and not the included files, so this digest
    is part of the text.
    """
    return Sources(root).digest(generation, kernel)


class Sources:
    """The CUDA sources as they are now: each file is read at most once.

    Names are strings, because ``Path`` is slow and the first call of a process waits for the files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: dict[str, _File] = {}

    def digest(self, generation: str, kernel: str, headers: Iterable[str] = ()) -> str:
        """The same as :func:`source_digest`, with further headers."""
        files = self.closure(f"{generation}/{kernel}.cu")
        for header in headers:
            files |= self.closure(header)
        return _digest(tuple(sorted(files.items())))

    def digest_of(self, config: KernelConfig) -> str:
        """Digest of all files that make up a configuration's kernel."""
        headers = [feature.device.header for feature in config.features if feature.device.header]
        headers += [_WAIT] * config.waits
        return self.digest(config.generation, config.kernel, headers)

    def changed(self) -> bool:
        """Whether any file that was read has changed since."""
        now = Sources(self.root)
        try:
            return any(then.differs(now._file(name)) for name, then in self._seen.items())
        except (OSError, UnicodeDecodeError):  # the file is gone, or half written
            return True

    def closure(self, entry: str) -> dict[str, _File]:
        """The file ``entry`` and all files that it includes, by name, sorted."""
        found: dict[str, _File] = {}
        waiting = [entry]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._file(name)
                waiting += found[name].includes
        return {name: found[name] for name in sorted(found)}

    def _file(self, name: str) -> _File:
        """A file; read again only if its times, inode or size differ from the last reading."""
        if name not in self._seen:
            path = os.path.join(self.root, name)
            stat = os.stat(path)
            mark = stat.st_ino, stat.st_ctime_ns, stat.st_size
            self._seen[name] = _read(path, name, stat.st_mtime_ns, mark)
        return self._seen[name]


@dataclass(frozen=True, eq=False)
class _File:
    """A source file as it was at some time."""

    data: bytes
    includes: tuple[str, ...]  # names, from the root
    time: int  # of its last change

    def differs(self, other: _File) -> bool:
        """Whether it was edited in between.

        An edit that restores the text counts too: a compiler may have read the text in between.
        """
        return (self.time, self.data) != (other.time, other.data)


@functools.lru_cache(maxsize=32)
def _digest(files: tuple[tuple[str, _File], ...]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + b"\0" + file.data + b"\0")
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=512)
def _read(path: str, name: str, time: int, mark: tuple[int, ...]) -> _File:
    del mark  # a part of the cache's key: it distinguishes texts of the same time
    with open(path, "rb") as file:
        data = file.read()
    folder = posixpath.dirname(name)
    beside = (posixpath.join(folder, other) for other in _INCLUDE.findall(data.decode()))
    return _File(data, tuple(map(posixpath.normpath, beside)), time)


def translation_unit(
    config: KernelConfig, root: Path, jitter: bool = False, digest: str | None = None
) -> str:
    """The text that NVRTC compiles: constants, the kernel's file, its entry.

    With ``jitter`` every barrier operation of a pipelined kernel is delayed at random. ``digest``
    is that of the sources, if the caller has it.
    """
    digest = digest or Sources(root).digest_of(config)
    return "\n".join(
        [
            f"// {config.generation}/{config.kernel}.cu, sources {digest}",
            f'#include "{config.generation}/{config.kernel}.cu"',
            *(_header(feature.device) for feature in config.features),
            *[f'#include "{_WAIT}"'] * config.waits,
            "",
            *_params_lines(config),
            "",
            "struct Config {",
            *(f"  {line}" for line in _config_lines(config, jitter)),
            "};",
            "",
            *_layout_assertions(struct_of(config)),
            "",
            'extern "C" __global__ '
            f"__launch_bounds__({config.threads}, {config.blocks_per_sm}) void",
            f"{config.entry}(const __grid_constant__ Config::Params params) {{",
            *["  cuflash::ptx::wait_for_kernel_before();"] * config.waits,
            f"  cuflash::{config.generation}::{config.kernel}<Config>(params);",
            "}",
            "",
        ]
    )


#: Types of ``Config`` that only one feature may replace, with their definitions in a plain kernel.
_SINGLE = {
    "Lengths": "FixedLengths",
    "Weights": "AllWeights",
    "Chunks": "WholeRows",
    "Keys": "KeysInRows",
    "Stored": "StoredAsComputed",
}
#: Types that list the features' parts, for kernels that handle scores or rows.
_CHAINS = {"Score": "ScoreChain", "Rows": "RowChain"}
_FORWARD = ("forward", "forward_few")
_BACKWARD = ("backward", "backward_few", "backward_short")
_WITH_CHAINS = (*_FORWARD, *_BACKWARD, "statistics", "bias_gradient", "merge")
_WITH_WEIGHTS = (*_FORWARD, *_BACKWARD, "bias_gradient")
_WITH_CHUNKS = (*_FORWARD, "merge")
_WITH_STORED = (("fa3", "forward"), ("fa2", "forward_few"), ("steps", "append_kv"))


def _header(part: DevicePart) -> str:
    """The line that includes a feature's header, or the header's text."""
    return part.text or f'#include "{part.header}"'


def _seams(config: KernelConfig) -> dict[str, str]:
    """The types of ``Config`` that features can change."""
    added: dict[str, list[str]] = {}
    for feature in config.features:
        names = {
            name: ELEMENTS[value].cuda if value in ELEMENTS else str(value)
            for name, value in feature.constants
        }
        for seam, kind in feature.device.seams:
            wraps = "{before}" in kind
            if seam not in _SINGLE | _CHAINS or (seam in _SINGLE and seam in added and not wraps):
                raise UnsupportedError(f"{config.entry}: {feature.name} cannot have {seam} too")
            before = added.get(seam, ["cuflash::" + _SINGLE[seam]])[-1] if wraps else ""
            added.setdefault(seam, []).append("cuflash::" + kind.format(**names, before=before))
    types = {name: added.get(name, ["cuflash::" + kind])[-1] for name, kind in _SINGLE.items()}
    if config.kernel not in _WITH_WEIGHTS:
        del types["Weights"]
    if config.kernel not in _WITH_CHUNKS:
        del types["Chunks"]
    if config.kernel not in _FORWARD:
        del types["Keys"]
    if (config.generation, config.kernel) not in _WITH_STORED:
        del types["Stored"]
    if config.kernel in _WITH_CHAINS:
        for name, chain in _CHAINS.items():
            types[name] = f"cuflash::{chain}<{', '.join(added.get(name, []))}>"
    return types


def _config_lines(config: KernelConfig, jitter: bool) -> list[str]:
    types = {
        "Storage": config.storage,
        "Compute": config.compute,
        "Output": config.output,
        "Statistics": config.statistics,
    }
    lines = [f"using {name} = {DTYPES[dtype].cuda};" for name, dtype in types.items()]
    lines += ["using Params = ::Params;"]
    lines += [f"using {name} = {kind};" for name, kind in _seams(config).items()]
    if config.kernel != "delta":
        lines += [
            f"static constexpr auto mask = cuflash::MaskKind::{config.mask};",
            f"static constexpr auto copies = cuflash::CopyKind::{config.copies};",
            "static constexpr auto workspace_copies = "
            f"cuflash::CopyKind::{config.workspace_copies};",
            f"static constexpr auto products = cuflash::ProductKind::{config.products};",
        ]
    numbers = {
        "architecture": re.sub(r"\D", "", config.architecture),
        "head_dim": config.head_dim,
        "head_dim_v": config.head_dim_v,
        "mma_depth": config.mma_depth,
        "shared_bytes": config.shared_bytes,
        **dict(config.constants),
    }
    lines += [f"static constexpr int {name} = {value};" for name, value in numbers.items()]
    lines.append(f"static constexpr bool jitter = {str(jitter).lower()};")
    return lines


def _params_lines(config: KernelConfig) -> list[str]:
    """The structure that a launch passes: the plain one, with the features' parameters."""
    plain = parameters_of(config.generation, config.kernel).name
    if not config.features:
        return [f"using Params = cuflash::{plain};"]
    blocks = [f"  cuflash::{f.device.struct} {f.name};" for f in config.features]
    return [f"struct Params : cuflash::{plain} {{", *blocks, "};"]


def _layout_assertions(struct: ParameterStruct) -> list[str]:
    """Assertions that the launch structure matches the one that the host packs.

    NVRTC before 13.1 has no offsetof; __INTADDR__ is its building block.
    """
    return [
        f'static_assert(sizeof(Params) == {struct.dtype.itemsize}, "{struct.name}: size");',
        *(
            f"static_assert(__INTADDR__(&((Params*)0)->{path}) == {offset}, "
            f'"{struct.name}.{path}");'
            for path, offset in struct.offsets()
        ),
    ]
