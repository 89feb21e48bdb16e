"""Threads that share the tasks of a call, each with a single-threaded BLAS.

NumPy's BLAS would spread every small product over all cores and wait for the slowest one: a thread
that loses its core delays the others thousands of times a call. Whole tasks do not wait for each
other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import numpy as np

from ..planning.cores import usable_cores
from .blas import one_blas_thread

__all__ = ["Task", "run_tasks"]

Task = Callable[[], None]


class _Job:
    """The tasks of one call; any free thread takes the next one."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks: Iterator[Task] = iter(tasks)
        self._change = threading.Condition()
        self._helping = 0
        self._error: BaseException | None = None
        self._interrupt: BaseException | None = None

    def work(self) -> None:
        """Run tasks in the caller's thread until none is left."""
        while (task := self._take(0)) is not None:
            task()
            del task  # releases the arrays that it holds

    def help(self) -> None:
        """Run tasks in another thread; an error ends the job and is kept for the caller."""
        while (task := self._take(1)) is not None:
            error: BaseException | None = None
            try:
                with np.errstate(all="ignore"):
                    task()
            except BaseException as caught:
                error = caught
            del task
            self._helped(error)

    def finish(self) -> None:
        """Start no further task, and return when no helper is running one.

        Raises
        ------
        BaseException
            The error of a helper's task, or the interrupt of the wait; raised afterwards.
        """
        while True:
            try:
                with self._change:
                    self._tasks = iter(())
                    self._change.wait_for(lambda: not self._helping)
                break
            except BaseException as caught:  # helpers still write to the caller's arrays
                self._interrupt = caught
        error = self._interrupt or self._error
        if error is not None:
            raise error

    def _take(self, helping: int) -> Task | None:
        with self._change:
            task = next(self._tasks, None)
            if task is not None:
                self._helping += helping
            return task

    def _helped(self, error: BaseException | None) -> None:
        with self._change:
            self._helping -= 1
            if error is not None:
                self._tasks = iter(())
                self._error = self._error or error
            self._change.notify_all()


class _Helpers:
    """Threads that live as long as the process and work for any caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._count = 0

    def offer(self, job: _Job, count: int) -> None:
        """Let at most ``count`` helpers join a job when they are free.

        There are fewer if the system gives no more threads; the caller works anyway.
        """
        with self._lock:
            while self._count < count:
                name = f"cuflash-{self._count + 1}"
                try:
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                except RuntimeError:
                    break
                self._count += 1
        for _ in range(min(count, self._count)):
            self._queue.put(job)

    def _serve(self) -> None:
        while True:
            job = self._queue.get()
            job.help()
            del job


_helpers = _Helpers()


def _forget_helpers() -> None:
    """Reset the helpers in a forked child, which has none of the threads."""
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def run_tasks(tasks: Iterable[Task], threads: int) -> None:
    """Run independent tasks in order, in this thread and in helpers.

    Returns, or raises, only when no task is running. Tasks are created one by one, as they are
    taken.

    Parameters
    ----------
    tasks
        Functions without arguments that write to disjoint memory.
    threads
        The number of concurrent tasks; fewer if the caller gave BLAS fewer threads.

    Raises
    ------
    BaseException
        The first error of a task, also KeyboardInterrupt; no further task starts.
    """
    with one_blas_thread() as allowed, np.errstate(all="ignore"):
        job = _Job(tasks)
        # The plan may be older than the number of cores that the process may use now.
        helpers = min(threads, allowed, usable_cores()) - 1 if threads > 1 else 0
        try:
            if helpers > 0:
                _helpers.offer(job, helpers)
            job.work()
        finally:
            job.finish()
