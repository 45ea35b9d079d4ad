"""Every test starts with ordinary signals and ends within a bound.

A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and whoever starts us may have
signals blocked. All of that is inherited by what tests start, and most of it survives exec.

A test that hangs fails and says where: an alarm raises in the main thread, again and again until the phase
(setup, call, teardown) has ended. `@pytest.mark.bound(seconds)` is for a test that may take longer. What an
alarm cannot interrupt is ended with its process by pytest's faulthandler_timeout.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from types import CoroutineType, FrameType
from typing import Any

import pytest
import trio

BOUND_SECONDS = 300.0
# If the exception was swallowed, or what it unwinds hangs again.
_AGAIN_SECONDS = 10.0
# Python ignores these itself, so that it gets an error instead; subprocess sets them right in its children.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def restore_signals() -> None:
    """As in a process started from a terminal: nothing blocked, nothing ignored but what Python ignores."""
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    restore_signals()
    config.addinivalue_line("markers", f"bound(seconds): may take longer than {BOUND_SECONDS:g} seconds")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with _bounded(item):
        return (yield)


@contextlib.contextmanager
def _bounded(item: pytest.Item) -> Iterator[None]:
    mark = item.get_closest_marker("bound")
    seconds: float = mark.args[0] if mark else BOUND_SECONDS
    armed = True

    def hangs(_: int, frame: FrameType | None) -> None:
        if armed:
            pytest.fail(f"still running after {seconds:g} seconds:\n{_where(frame)}")

    old = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        armed = False  # an alarm that has come already is not raised behind the test's back
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _where(frame: FrameType | None) -> str:
    """Where each thread and each of trio's tasks stands."""
    parts = ["".join(traceback.format_stack(frame))]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, other in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(other))}")
    with contextlib.suppress(RuntimeError):  # trio is not running
        root = trio.lowlevel.current_root_task()
        parts += [f"task {task.name}:\n{_coroutine(task.coro)}" for task in _tasks(root)]
    return "\n".join(parts)


def _tasks(task: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    if task is not None:
        yield task
        for nursery in task.child_nurseries:
            for child in nursery.child_tasks:
                yield from _tasks(child)


def _coroutine(awaited: Any) -> str:
    lines = []
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        frame = awaited.cr_frame
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        awaited = awaited.cr_await
    return "\n".join(lines)
