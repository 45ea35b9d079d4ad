"""Deleted files, found in the processes that hold them. Every holder is a real process."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.tables import one_case

MIB = 1 << 20


def searched(pids: list[int]) -> dict[str, Any]:
    """The findings of a search. Also run in other processes."""
    from sandbox.limits.deleted_files import search_deleted_files

    steps = search_deleted_files(pids)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        files, unseen, blind = end.value
        return {"files": [file._asdict() for file in files], "unseen": unseen, "blind": blind}


# Each holds one deleted file of a megabyte in its working directory, in a way of its own.
HEAD = """
import ctypes, os, socket, sys, threading, time
libc = ctypes.CDLL(None)
def named(name="gone"):
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"x" * (1 << 20))
    return fd
def deleted(name="gone"):
    fd = named(name)
    os.unlink(name)
    return fd
def mapped(fd, length=1 << 20):
    libc.mmap(None, ctypes.c_size_t(length), 3, 1, fd, ctypes.c_long(0))  # Python's own keeps a descriptor
def ready():
    print("ready", flush=True)
    time.sleep(600)
def thread(act):
    threading.Thread(target=act, daemon=True).start()
"""
OPEN = "fd = deleted()\nready()"
READ_ONLY = "named(); fd = os.open('gone', os.O_RDONLY); os.close(3); os.unlink('gone')\nready()"
NEVER_NAMED = "fd = os.open('.', os.O_TMPFILE | os.O_RDWR)\nos.write(fd, b'x' * (1 << 20))\nready()"
MAPPED = "fd = deleted()\nmapped(fd)\nos.close(fd)\nready()"
MAPPED_IN_PART = MAPPED.replace("mapped(fd)", f"mapped(fd, {mmap.PAGESIZE})")
INHERITED = "fd = deleted()\nif os.fork():\n    os.close(fd)\n    time.sleep(600)\nready()"
# CLONE_FILES: from then on the thread has a table of its own.
THREAD = "def act():\n    libc.unshare(0x400)\n    deleted()\n    ready()\nthread(act)\ntime.sleep(600)"
# The main thread ends, the process does not.
HEADLESS = """
def act():
    while open(f'/proc/{os.getpid()}/stat').read().rpartition(') ')[2][0] != 'Z':
        time.sleep(0.01)
    fd = deleted()
    mapped(fd)
    MAPPED_ONLY
    ready()
thread(act)
libc.syscall({'aarch64': 93, 'x86_64': 60}[os.uname().machine], 0)
"""


@contextlib.contextmanager
def holder(program: str, place: Path, prefix: tuple[str, ...] = ()) -> Iterator[list[int]]:
    """A process that holds a file, and its children."""
    with subprocess.Popen(
        [*prefix, "/usr/bin/python3", "-c", HEAD + program], cwd=place, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        pids = [process.pid]
        try:
            assert elsewhere.line(process) == b"ready\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            pids += [int(pid) for pid in children.split()]
            yield pids
        finally:
            for pid in pids:
                os.kill(pid, 9)


def found_in(place: Path, found: dict[str, Any]) -> list[dict[str, Any]]:
    return [file for file in found["files"] if (file["path"] or "").startswith(str(place))]


@pytest.fixture
def place(plugin_dir: Path) -> Path:
    folder = plugin_dir / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


# --- As root, all of it is seen -----------------------------------------------------------------------------


@pytest.mark.needs("root")
@one_case(
    "program",
    [
        pytest.param(OPEN, id="open"),
        pytest.param(READ_ONLY, id="open for reading"),
        pytest.param(NEVER_NAMED, id="never named"),
        pytest.param(MAPPED, id="mapped"),
        pytest.param(MAPPED_IN_PART, id="mapped in part"),
        pytest.param(INHERITED, id="inherited"),
        pytest.param(THREAD, id="in a thread's own table"),
        pytest.param(HEADLESS.replace("MAPPED_ONLY", ""), id="without a main thread"),
    ],
)
def test_a_deleted_file_is_found_once(place: Path, program: str) -> None:
    with holder(program, place) as pids:
        found = searched(pids)
        [file] = found_in(place, found)
        assert file["device"] == place.stat().st_dev
        assert file["taken"] == file["length"] == MIB
        assert not found["unseen"] and not found["blind"]


@pytest.mark.needs("root")
def test_a_mapping_without_a_main_thread_is_estimated(place: Path) -> None:
    """Its size cannot be read any more, but it is not missed."""
    with holder(HEADLESS.replace("MAPPED_ONLY", "os.close(fd)"), place) as pids:
        [file] = found_in(place, searched(pids))
        assert file["device"] is None and file["taken"] == MIB


def test_a_file_with_a_name_is_not_counted(place: Path) -> None:
    for program in ("fd = named()\nready()", "fd = named()\nmapped(fd)\nready()"):
        with holder(program, place) as pids:
            assert found_in(place, searched(pids)) == []


@pytest.mark.needs("root")
def test_another_name_keeps_a_file_in_its_folder(place: Path) -> None:
    program = "fd = named(); os.link('gone', 'kept'); os.unlink('gone'); mapped(fd, 4096)\nready()"
    with holder(program, place) as pids:
        assert found_in(place, searched(pids)) == []


@pytest.mark.needs("root")
def test_a_path_too_long_for_the_kernel_hides_nothing(place: Path) -> None:
    program = "for _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)\n" + OPEN
    with holder(program, place) as pids:
        files = [file for file in searched(pids)["files"] if file["path"] is None]
        assert [file["taken"] for file in files] == [MIB]
    subprocess.run(["rm", "-rf", place], check=True)
    place.mkdir()


def test_many_threads_share_one_table(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared table is read once, by kcmp. Without kcmp it is read forty times, and the file is found
    once."""
    program = "for _ in range(39): thread(lambda: time.sleep(600))\n" + OPEN
    read: list[str] = []
    listdir = os.listdir

    def watched(path: str) -> list[str]:
        if path.endswith("/fd"):
            read.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", watched)
    with holder(program, place) as pids:
        assert len(found_in(place, searched(pids))) == 1
        assert len(read) == 1
        monkeypatch.setattr("sandbox.limits.deleted_files._KCMP", {})
        assert len(found_in(place, searched(pids))) == 1
        assert len(read) == 1 + 40


def test_a_search_leaves_nothing_to_the_collector() -> None:
    """It runs every second while a plugin lives, with the garbage collector off."""
    from sandbox.limits import deleted_files

    def searched(times: int) -> int:
        gc.collect()
        gc.disable()
        try:
            for _ in range(times):
                for _ in deleted_files.search_deleted_files([os.getpid()]):
                    pass
            return gc.collect()
        finally:
            gc.enable()

    searched(1)
    assert searched(100) < 100


def test_an_ended_process_holds_nothing() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    assert searched([process.pid]) == {"files": [], "unseen": False, "blind": False}


# --- What cannot be seen is told ----------------------------------------------------------------------------

IN_FLIGHT = (
    "a, b = socket.socketpair()\nfd = deleted()\nsocket.send_fds(a, [b'x'], [fd])\nos.close(fd)\nready()"
)
IN_A_QUEUE = """
listening = socket.socket(socket.AF_UNIX); listening.bind('door'); listening.listen()
calling = socket.socket(socket.AF_UNIX); calling.connect('door')
fd = deleted(); socket.send_fds(calling, [b'x'], [fd]); os.close(fd)
ready()
"""
RECEIVED = IN_FLIGHT.replace("os.close(fd)", "os.close(fd); socket.recv_fds(b, 1, 1)")


@pytest.mark.parametrize(
    "program", [pytest.param(IN_FLIGHT, id="sent"), pytest.param(IN_A_QUEUE, id="sent and not accepted")]
)
def test_descriptors_in_a_socket_are_unseen(place: Path, program: str) -> None:
    with holder(program, place) as pids:
        found = searched(pids)
        assert found["unseen"] and found_in(place, found) == []


def test_descriptors_that_were_received_are_seen(place: Path) -> None:
    with holder(RECEIVED, place) as pids:
        found = searched(pids)
        assert not found["unseen"] and len(found_in(place, found)) == 1


def test_processes_we_may_not_inspect(runner_as_user: Caller, place: Path) -> None:
    """Other users cannot inspect a process of root. If no process can be inspected, `blind` is true."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with holder(OPEN, place) as theirs, holder(OPEN, place, runner_as_user.prefix) as own:
        nothing = {"files": [], "unseen": False, "blind": True}
        assert elsewhere.run(runner_as_user, searched, theirs) == nothing
        found = elsewhere.run(runner_as_user, searched, theirs + own)
        assert found["unseen"] and not found["blind"]
        assert len(found_in(place, found)) == 1
        assert not elsewhere.run(runner_as_user, searched, own)["unseen"]


@pytest.mark.needs("user")
def test_without_root_a_mapping_is_estimated_by_its_length(runner_as_user: Caller, place: Path) -> None:
    with holder(MAPPED, place, runner_as_user.prefix) as pids:
        [file] = found_in(place, elsewhere.run(runner_as_user, searched, pids))
        assert file["device"] is None and file["taken"] == MIB
    with holder(MAPPED_IN_PART, place, runner_as_user.prefix) as pids:
        [file] = found_in(place, elsewhere.run(runner_as_user, searched, pids))
        assert file["device"] is None and file["taken"] == mmap.PAGESIZE
