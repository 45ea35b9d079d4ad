"""`--quick`: only the tests that launch nothing.

A test launches if it uses a caller fixture or the leak check of the whole machine, needs something of the
machine, or is marked `launches`. A test might launch without declaring it. So no process of a quick run can
make a namespace, which every launch does: a test that tries gets EPERM and a note. An emulator (qemu-user)
has no seccomp filters: there the run only says so at its end.

A quick run also uses a fifth of the hypothesis examples, and every run without `--all` at most 100 of each
property.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

from sandbox.seccomp import syscalls
from sandbox.seccomp.bpf import ALLOW, ERRNO

_FIXTURES = {"runner_as", "runner_as_root", "runner_as_user", "machine_as_before", "peers"}
_MARKS = ("launches", "machine", "needs")

# All CLONE_NEW flags but that of time namespaces, which only unshare takes.
_NEW_NAMESPACES = 0x7E020000
_NEW_TIME = 0x80
_PR_GET_SECCOMP = 21
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_EXAMPLES_RATIO = 0.2
_EXAMPLES_MOST = 100

_NOTE = (
    "A quick run cannot make namespaces: the kernel returns EPERM."
    " If this test launches something, mark it @pytest.mark.launches"
)

_NO_FILTER = (
    "Tests of this quick run could make namespaces: there are no seccomp filters here, as in an emulator."
    " Whether a test launches something without saying so, a run on a real machine tells."
)
_IS_FILTERED = pytest.StashKey[bool]()


def launches(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _FIXTURES) or any(item.get_closest_marker(mark) for mark in _MARKS)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "launches: starts processes in namespaces of their own; not in --quick"
    )
    # xdist workers inherit the filter.
    if config.getoption("--quick") and not hasattr(config, "workerinput"):
        config.stash[_IS_FILTERED] = has_filters()
        if has_filters():
            forbid_namespaces()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.stash.get(_IS_FILTERED, True):
        terminalreporter.line(_NO_FILTER, yellow=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    test: Any = getattr(item, "function", None)
    # hypothesis has no public way to change the settings of a test that sets its own.
    settings = getattr(test, "_hypothesis_internal_use_settings", None)
    if settings is None or item.config.getoption("--all") or hasattr(test, "_examples"):
        return
    test._examples = settings.max_examples  # parameters share the function
    if item.config.getoption("--quick"):
        fewer = max(1, round(settings.max_examples * _EXAMPLES_RATIO))
    else:
        fewer = min(settings.max_examples, _EXAMPLES_MOST)
    test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=fewer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and item.config.getoption("--quick") and has_filters():
        report.sections.append(("--quick", _NOTE))
    return report


@functools.cache
def has_filters() -> bool:
    """Whether a process here can have a seccomp filter. qemu-user refuses even to be asked."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0)


needs_filters = pytest.mark.skipif(
    not has_filters(), reason="needs a kernel that takes seccomp filters: an emulator has none"
)


def forbid_namespaces() -> None:
    """Install a seccomp filter for this process and all its children. It cannot be removed."""
    numbers = syscalls.load(os.uname().machine)
    load, equal, bits, ret = 0x20, 0x15, 0x45, 0x06
    refuse = ERRNO | errno.EPERM
    program = [
        (load, 0, 0, 0),
        (equal, 4, 0, numbers["clone"]),
        (equal, 5, 0, numbers["unshare"]),
        # A filter cannot read clone3's flags. libc falls back to clone.
        (equal, 0, 1, numbers["clone3"]),
        (ret, 0, 0, ERRNO | errno.ENOSYS),
        (ret, 0, 0, ALLOW),
        (load, 0, 0, 16),  # clone: low half of the first argument
        (bits, 3, 2, _NEW_NAMESPACES),
        (load, 0, 0, 16),  # unshare
        (bits, 1, 0, _NEW_NAMESPACES | _NEW_TIME),
        (ret, 0, 0, ALLOW),
        (ret, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for may_gain_privileges in (True, False):  # without CAP_SYS_ADMIN a filter needs no_new_privs
        if not may_gain_privileges:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) == 0:
            return
    code_ = ctypes.get_errno()
    raise OSError(code_, f"a seccomp filter cannot be installed: {os.strerror(code_)}")
