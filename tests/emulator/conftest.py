"""Compiles the kernels of the selected tests ahead, and runs each test in its own process."""

from __future__ import annotations

from functools import partial

import pytest

from cuflash.planning.kernel import KernelConfig

from ..kit.filled import filled
from .apart import apart
from .build import begin, compiler, emulate
from .call import Kernels
from .lengths import Kernels as KernelsOfLengths
from .rows import Row
from .session import configs_of


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> None:
    if compiler() is not None:
        with filled():
            _begin(request)


def _begin(request: pytest.FixtureRequest) -> None:
    given = [getattr(item, "callspec", None) for item in request.session.items]
    kernels = [spec.params.get("kernels") for spec in given if spec is not None]
    for one in dict.fromkeys(
        one for one in kernels if isinstance(one, (Kernels, KernelsOfLengths))
    ):
        for config in _configs(one):
            begin(config)
    rows = [spec.params.get("row") for spec in given if spec is not None]
    for row in dict.fromkeys(row for row in rows if isinstance(row, Row)):
        for config in row.runner.configs(row.cases()[0]):
            begin(config)


def _configs(one: object) -> set[KernelConfig]:
    if isinstance(one, KernelsOfLengths):
        return one.configs
    return configs_of(one) if isinstance(one, Kernels) else set()


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest, _filled: None) -> None:
    """Wait for the kernels of a test: its child has no thread that compiles."""
    spec = getattr(request.node, "callspec", None)
    asked = [] if spec is None else [spec.params.get(name) for name in ("row", "kernels")]
    for one in asked:
        configs = one.runner.configs(one.cases()[0]) if isinstance(one, Row) else _configs(one)
        for config in configs:
            emulate(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run every test in a child process; a property runs its own examples in children."""
    if getattr(pyfuncitem.obj, "is_hypothesis_test", False):
        return None
    if "here" in pyfuncitem.keywords:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    apart(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    return True
