"""A broken CuPy does not affect NumPy calls, whatever is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash.cuda import available

#: Ways to break an installed CuPy: the content of its ``__init__.py``, and the message.
BROKEN = {
    "RuntimeError": ("raise RuntimeError('no such thing')", "RuntimeError: no such thing"),
    "AttributeError": ("import sys; sys.nothing", "AttributeError: module 'sys' has no"),
    "SyntaxError": ("this is no Python", "SyntaxError: invalid syntax"),
    "ImportError": ("from sys import nothing", "ImportError: cannot import name 'nothing'"),
    "ModuleNotFoundError": ("import cupy_nothing", "ModuleNotFoundError: No module named"),
    "OSError": ("raise OSError(28, 'No space left')", "CUPY_CACHE_DIR"),
    "KeyError": ("{}['PATH']", "KeyError: 'PATH'"),
    "half a module": ("ndarray = None", "AttributeError: module 'cupy' has no attribute 'cuda'"),
    "no device count": (
        "class cuda:\n class runtime:\n  is_hip = False; CUDARuntimeError = KeyError",
        "could not ask for devices (AttributeError: ",
    ),
    "an empty folder": (None, "AttributeError: module 'cupy' has no attribute 'cuda'"),
}

_PROGRAM = """
import numpy, cuflash
assert cuflash.__file__.startswith({root!r})
assert not cuflash.is_available()
for _ in range(2):
    q = numpy.ones((1, 3, 1, 4), numpy.float32)
    out, pullback = cuflash.attention_vjp(q, q, q)
    assert (out == 1).all()
    assert all(isinstance(grad, numpy.ndarray) for grad in pullback(out))
assert cuflash.explain(q, q, q).backend == "numpy"
assert cuflash.info().cuda in str(cuflash.info())
print(cuflash.info().cuda)

class Foreign:
    __cuda_array_interface__ = dict(typestr="<f4", shape=(1, 3, 1, 4), data=(4096, False))

for name, call in [
    ('backend="cuda"', lambda: cuflash.attention(q, q, q, backend="cuda")),
    ("k is in CUDA memory, which", lambda: cuflash.attention(q, Foreign(), q)),
    ('backend="cuda"', lambda: cuflash.prepare((3, 4), (3, 4), (3, 4), dtype="float32")),
]:
    try:
        call()
    except cuflash.BackendUnavailableError as error:
        assert str(error).startswith(name + " cannot be used: "), error
        assert str(error).split(": ", 1)[1] == cuflash.info().cuda.split(": ", 1)[1], error
    else:
        raise AssertionError("no error")
"""


@pytest.mark.parametrize("name", BROKEN)
def test_numpy_calls_work_beside_it(name: str, root: Path, tmp_path: Path) -> None:
    source, expected = BROKEN[name]
    (tmp_path / "cupy").mkdir()
    if source is not None:
        (tmp_path / "cupy" / "__init__.py").write_text(source)
    done = subprocess.run(
        # Python would find an installed CuPy before the empty folder, so the program hides it.
        [sys.executable, "-c", _HIDE_CUPY + _PROGRAM.format(root=str(root))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stdout.count("\n") == 1
    assert "not installed" not in done.stdout


#: Python takes an empty folder for a package only if it finds no whole package of that name. This
#: finder looks for CuPy only in the folder of the test.
_HIDE_CUPY = """
import importlib.machinery, os, sys

class First(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "cupy":
            return super().find_spec(name, [os.environ["PYTHONPATH"].split(os.pathsep)[0]])
        return None

sys.meta_path.insert(0, First)
"""


def _reason(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> str | None:
    """The library's reason if the import of CuPy raises ``error``."""
    real = __import__

    def importing(name: str, *others: object) -> object:
        if name == "cupy":
            raise error
        return real(name, *others)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("builtins.__import__", importing)
        return available._why_not.__wrapped__()


_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@given(
    kind=st.sampled_from(
        [
            *(RuntimeError, AttributeError, ImportError, OSError, KeyError, SyntaxError),
            *(TypeError, ValueError, MemoryError, RecursionError, AssertionError, LookupError),
            *(NotImplementedError, Exception, UserWarning, StopIteration, ModuleNotFoundError),
        ]
    ),
    text=_TEXT,
)
@example(kind=ImportError, text="\n=====\nFailed to import CuPy.\n\nOriginal error:\n  x\n=====\n")
def test_whatever_its_import_raises_is_the_reason(kind: type[Exception], text: str) -> None:
    said = _reason(pytest.MonkeyPatch(), kind(text))
    assert said is not None
    assert said.startswith(f"CuPy could not be imported ({kind.__name__}: ")
    assert "not installed" not in said
    assert "===" not in said
    assert "\n" not in said


@settings(max_examples=10)
@given(name=st.sampled_from(["cupy_backends", "numpy.random", "cupy.cuda", "fastrlock"]))
def test_only_a_cupy_that_is_not_found_is_not_installed(name: str) -> None:
    patch = pytest.MonkeyPatch()
    inside = _reason(patch, ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert inside is not None
    assert "not installed" not in inside
    itself = _reason(patch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert itself is not None
    assert itself.startswith("CuPy is not installed (No module named 'cupy'): pip install")
    assert "'cuflash[cuda13]', or '.[cuda13]' in a checkout" in itself


def test_an_interrupt_is_not_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        _reason(monkeypatch, KeyboardInterrupt())
