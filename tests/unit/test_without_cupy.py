"""The package imports, and computes on the host, without CuPy and without slow imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None  # an import of it raises ImportError
import numpy, cuflash
assert not cuflash.is_available()
q = numpy.ones((1, 3, 1, 4), numpy.float32)
assert (cuflash.attention(q, q, q) == 1).all()
try:
    cuflash.attention(q, q, q, backend="cuda")
except cuflash.BackendUnavailableError as error:
    assert "CuPy is not installed" in str(error) and "pip install" in str(error)
else:
    raise AssertionError("no error")
print("imported", sorted(m for m in ("rich", "argparse", "cupy", "jax") if sys.modules.get(m)))
"""


def test_it_imports_and_works_without_cupy(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CUPY], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported []"


_WITHOUT_A_CACHE = """
import numpy, cuflash
q = numpy.ones((1, 3, 1, 4), numpy.float32)
assert (cuflash.attention(q, q, q) == 1).all()
try:
    cuflash.attention(q, q, q, backend="cuda")
except cuflash.BackendUnavailableError as error:
    print(error)
"""


def test_it_works_where_cupy_cannot_make_its_folder(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")}
    command = [sys.executable, "-c", _WITHOUT_A_CACHE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    assert "CUPY_CACHE_DIR" in done.stdout


_SLOW = ("cupy", "jax", "rich", "matplotlib")
_QUICK = f"""
import sys
import cuflash
print(sorted(set({_SLOW}) & set(sys.modules)))
"""


def test_importing_it_imports_nothing_slow(root: Path) -> None:
    """CuPy is imported by the first call that needs it, and rich by the command line."""
    done = subprocess.run([sys.executable, "-c", _QUICK], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
