"""Every test starts with default signal handling and ends within a time limit.

A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and the parent process may have
blocked signals. The processes of tests inherit all of that, and most of it survives exec.

A test that hangs fails and says where: an alarm raises in the main thread, repeatedly until the phase (setup,
call, teardown) has ended. `@pytest.mark.bound(seconds)` is for a test that may take longer. If an alarm
cannot interrupt a test, pytest's faulthandler_timeout ends the process.
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
# The alarm repeats, because the exception may be swallowed or the cleanup may hang.
_AGAIN_SECONDS = 10.0
# Python itself ignores these to get errors instead. subprocess restores them in its children.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def restore_signals() -> None:
    """Unblock all signals and ignore none but those that Python ignores, as if started from a terminal."""
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
        armed = False  # an alarm that is already pending must not raise after the test
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        _leave_trio()


def _leave_trio() -> None:
    """An alarm mostly comes while trio waits for events. Then trio does not notice that it has ended, and
    would refuse every later run in this process."""
    if trio.lowlevel.in_trio_run():
        trio._core._run.GLOBAL_RUN_CONTEXT.__dict__.clear()
        signal.set_wakeup_fd(-1)


def _where(frame: FrameType | None) -> str:
    """The stack of each thread and of each trio task."""
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
