"""What every test shares: options, markers, and the account of GPU tests."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cuflash

from .emulator.build import KEPT
from .kit import few
from .kit.compare import REGISTRY
from .kit.filled import filled
from .kit.parts import parts_forced
from .kit.problem import register_profiles
from .levels import days_of_turn, is_long, is_quick
from .turns import has_turn

#: Without a GPU properties draw anew in every run; with one they are the same, as kernels are
#: compiled for them ahead.
register_profiles("ci" if cuflash.is_available() else "drawn")

#: Fewest GPU tests that a full run has; recorded so that tests cannot fall away unnoticed.
MINIMUM_GPU_TESTS = 1685
#: Skips that a GPU run may have: part of the reason they give.
LISTED_SKIPS: tuple[str, ...] = (
    "needs a second CUDA device",
    "PyTorch is not installed",
    "JAX is not installed",
    "JAX has no CUDA backend here",
    "Numba is not installed",
    "Numba's CUDA target cannot be loaded",  # followed by what is broken
    "Flax is not installed",
    "not on this device",  # followed by the library's own reason
)

#: What a process of ``-n`` is told under this name.
_WHOLE = "cuflash_whole_run"


#: Folders whose tests hold kernels to the truth, on problems much smaller than a device.
_OF_KERNELS = ("device", "emulator", "property", "tenant")


@pytest.fixture(autouse=True)
def _filled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of kernels have the tiles of full devices, but those of few tiles."""
    of_few = request.node.get_closest_marker("few_tiles") is not None
    if of_few or request.path.parent.name not in _OF_KERNELS:
        yield
        return
    with filled():
        yield


@pytest.fixture(scope="module")
def whole_groups() -> Iterator[None]:
    """No group of query heads is parted, and FlashAttention-3's gradients have no special tiles."""
    with parts_forced(1), few.any_lengths():
        yield


@pytest.fixture(scope="module")
def any_lengths() -> Iterator[None]:
    """FlashAttention-3's gradients have the tiles that take all lengths."""
    with few.any_lengths():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail without a GPU, on an unlisted skip, or with fewer GPU tests than recorded",
    )

    parser.addoption(
        "--part",
        action="store_true",
        help="other processes run other tests of the same run: compile nothing ahead",
    )
    parser.addoption(
        "--ratios",
        action="store_true",
        help="print the worst ratio of error to tolerance of every tensor, dtype and rule",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    seed = getattr(config.option, "hypothesis_seed", None)
    if terminalreporter.stats.get("failed") and seed is not None:
        terminalreporter.write_line(f"properties were drawn with --hypothesis-seed={seed}")
    for line in REGISTRY.report() if config.getoption("--ratios") else ():
        terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads it
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))
    if getattr(config.option, "numprocesses", None):
        if config.getoption("--ratios"):
            raise pytest.UsageError("--ratios: only without -n, in a single process")
        _share_emulated_kernels(config)
    config.addinivalue_line("markers", "here: not in a process of its own, in tests/emulator")
    config.addinivalue_line("markers", "in_turns(by, days): a whole run has each within days")
    config.addinivalue_line("markers", "long: left to CI; the default run has others")
    config.addinivalue_line("markers", "few_tiles: in tiles and chunks as few tiles have them")
    if config.getoption("--require-gpu") and not cuflash.is_available():
        raise pytest.UsageError("--require-gpu: CUDA cannot be used here")


def _share_emulated_kernels(config: pytest.Config) -> None:
    """Give the processes that ``-n`` starts one folder for the kernels that they compile."""
    if KEPT not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="cuflash-emulator-")
        os.environ[KEPT] = folder.name
        config.add_cleanup(lambda: os.environ.pop(KEPT))
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not cuflash.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    for item in filter(is_long, items):
        item.add_marker(pytest.mark.long)
    if "compile_all" not in (config.getoption("-m") or ""):
        whole = _is_whole_run(config)
        chosen = [item for item in items if _is_of_today(item, whole)]
        if whole and not (config.getoption("-m") or config.getoption("-k")):
            chosen = [item for item in chosen if not item.get_closest_marker("long")]
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that ``-n`` starts what its own arguments do not say."""
    node.workerinput[_WHOLE] = _is_whole_run(node.config)


def _is_whole_run(config: pytest.Config) -> bool:
    """Whether nobody named a folder, a file or a test."""
    told = getattr(config, "workerinput", {}).get(_WHOLE)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS if told is None else told


def _is_of_today(item: pytest.Item, whole: bool) -> bool:
    """Whether an ordinary run has a test.

    Of the kernels' builds it has those of the day; of what a test marks with the parameter that
    takes turns, of the emulator's rows, and of the files in ``levels.TURNS``, a whole run has a
    part, and the others on the next days. The quick set is in every run.
    """
    marker = item.get_closest_marker("compile_all")
    if marker is not None and not marker.kwargs["today"]:
        return False
    if not whole or is_quick(item.nodeid):
        return True
    turns = item.get_closest_marker("in_turns")
    if turns is not None:
        return has_turn(str(item.callspec.params[turns.kwargs["by"]]), turns.kwargs["days"])
    row = _emulated_row(item)
    if row is not None:
        kind = type(row).__module__  # rows of several kinds have the same names
        return has_turn(f"{kind}-{row.name}", row.days_of_turn)
    return cuflash.is_available() or has_turn(item.nodeid, days_of_turn(item))


def _emulated_row(item: pytest.Item) -> Any:
    """The parameter of an emulator's test that takes turns, if there is one."""
    if item.path.parent.name != "emulator" or not hasattr(item, "callspec"):
        return None
    asked = (item.callspec.params.get(name) for name in ("row", "kernels"))
    return next((one for one in asked if hasattr(one, "days_of_turn")), None)


class _GpuAccount:
    """Counts GPU tests and their skips, and fails the session where they fall short."""

    def __init__(self) -> None:
        self.ran = 0
        self.unlisted: list[str] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" not in report.keywords:
            return
        if report.when == "call" and not report.skipped:
            self.ran += 1
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            if not any(listed in reason for listed in LISTED_SKIPS):
                self.unlisted.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        options = session.config.option
        whole = options.markexpr == "gpu" and not options.keyword and not options.file_or_dir
        short = whole and self.ran < MINIMUM_GPU_TESTS
        if self.unlisted or short:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"GPU tests run: {self.ran} (recorded minimum {MINIMUM_GPU_TESTS}), "
            f"unlisted skips: {len(self.unlisted)}"
        )
        for line in self.unlisted:
            terminalreporter.write_line(f"  {line}")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--require-gpu"):
        session.config.pluginmanager.register(_GpuAccount())


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return Path(__file__).resolve().parent.parent
