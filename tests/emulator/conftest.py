"""Compiles what the selected tests will run, beside the first of them; each in its own process."""

from __future__ import annotations

from functools import partial

import pytest

from .apart import apart
from .build import begin, compiler, emulate
from .rows import Row


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> None:
    if compiler() is None:
        return
    given = [getattr(item, "callspec", None) for item in request.session.items]
    rows = [spec.params.get("row") for spec in given if spec is not None]
    for row in dict.fromkeys(row for row in rows if isinstance(row, Row)):
        for config in row.runner.configs(row.cases()[0]):
            begin(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Every test in a child; a property runs its examples apart itself."""
    if getattr(pyfuncitem.obj, "is_hypothesis_test", False):
        return None
    if "here" in pyfuncitem.keywords:
        return None
    row = pyfuncitem.funcargs.get("row")
    if isinstance(row, Row):
        for config in row.runner.configs(row.cases()[0]):
            emulate(config)
    names = pyfuncitem._fixtureinfo.argnames
    apart(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    return True
