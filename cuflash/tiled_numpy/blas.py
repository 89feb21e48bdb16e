"""Holds NumPy's BLAS at one thread while calls of this library run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["one_blas_thread"]


class _Setting:
    """The number of threads of NumPy's BLAS.

    The setting belongs to the process, so the first of several concurrent calls saves it and the
    last one restores it. The saved number is kept until it is restored, so a call that is
    interrupted anywhere leaves nothing behind. The libraries are looked up once: NumPy's BLAS is
    loaded before any call, and stays loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[object] = set()
        self._libraries: list[Any] | None = None
        self._saved: list[int] | None = None

    def enter(self, call: object) -> int:
        """Set it to one; return the number of threads that the caller allows."""
        with self._lock:
            if self._libraries is None:
                self._libraries = _libraries()
            if self._saved is None:
                self._saved = [library.get_num_threads() for library in self._libraries]
            if not self._calls:
                self._set([1] * len(self._saved))
            self._calls.add(call)
            return min(self._saved) if self._saved else os.cpu_count() or 1

    def leave(self, call: object) -> None:
        """Restore it if no other call is running.

        Raises
        ------
        KeyboardInterrupt
            After the number is restored.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._lock:
                    self._calls.discard(call)
                    if not self._calls:
                        self._restore()
                break
            except KeyboardInterrupt as caught:
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    def restore_in_child(self) -> None:
        """Reset it in a forked child, which has none of the other threads' calls."""
        self._lock = threading.Lock()
        self._calls = set()
        self._restore()

    def _restore(self) -> None:
        if self._saved is not None:
            self._set(self._saved)
            self._saved = None

    def _set(self, numbers: list[int]) -> None:
        saved_numbers = self._saved or ()
        for library, saved, number in zip(
            self._libraries or (), saved_numbers, numbers, strict=True
        ):
            if saved != 1:
                library.set_num_threads(number)
                _release(library)


def _release(library: Any) -> None:
    """Let any thread set the number next.

    From threadpoolctl 3.8 on OpenBLAS's number belongs to the thread that set it first, until the
    thread ends. But the call that ends last restores it, and may be another thread's.
    """
    release = getattr(library, "clear_controlling_thread", None)
    if release is not None:
        release()


def _libraries() -> list[Any]:
    """Controllers of NumPy's BLAS: the library beside NumPy, else every BLAS of the process."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    package = os.path.dirname(np.__file__)
    own = [one for one in found if str(one.filepath).startswith((package, f"{package}.libs"))]
    return own or list(found)


_setting = _Setting()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_setting.restore_in_child)


@contextlib.contextmanager
def one_blas_thread() -> Iterator[int]:
    """Hold NumPy's BLAS at one thread; yield the number that the caller had set.

    If no BLAS can be set, as with Apple's, the number is that of the cores.
    """
    call = object()
    try:
        yield _setting.enter(call)
    finally:
        _setting.leave(call)
