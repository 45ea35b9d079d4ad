"""A plugin's changes to the open files of its caller are undone."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from sandbox.streams.handover import restore_flags
from tests import elsewhere
from tests.conftest import Caller

SPOIL = """\
import fcntl, os, sys
for fd in (0, 1, 2):
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_APPEND | os.O_ASYNC)
for fd in (0, 1):
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)
os.write(1, b"spoilt\\n")
while not os.get_blocking(0):
    try:
        if not os.read(0, 1):
            break
    except BlockingIOError:
        import select
        select.select([0], [], [])
"""


def flags_of(fd: int) -> tuple[int, int]:
    return fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)


@pytest.mark.parametrize("own", [True, False], ids=["own", "another user's"])
def test_the_callers_pipes_after_a_run(runner_as: Caller, plugin_dir: Path, own: bool) -> None:
    if not own and os.geteuid() == runner_as.uid:
        pytest.skip("who runs the runner made the pipes, too")
    (plugin_dir / "spoil.py").write_text(SPOIL)
    server = {"command": "/usr/bin/python3", "args": ["-I", f"{plugin_dir}/spoil.py"]}
    server |= {"x-sandbox": {"read": [str(plugin_dir)]}}  # type: ignore[dict-item]
    manifest = plugin_dir / "mcp.json"
    manifest.write_text(json.dumps({"mcpServers": {"spoil": server}}))
    for path in plugin_dir.iterdir():
        path.chmod(0o644)
    in_r, in_w = os.pipe()
    out_r, out_w = os.pipe()
    fcntl.fcntl(out_w, fcntl.F_SETPIPE_SZ, 1 << 17)
    if own:
        for fd in (in_r, out_w):
            os.fchown(fd, runner_as.uid, -1)
    before = [flags_of(in_r), flags_of(out_w)]
    with runner_as.start("exec", "--policy", "dev", manifest, stdin=in_r, stdout=out_w) as running:
        with open(out_r, "rb", buffering=0, closefd=False) as said:
            running.stdout = said
            assert elsewhere.line(running) == b"spoilt\n"
        # The control: while it runs, they are as the plugin wants them. Of pipes that the runner may open its
        # flags are another matter: the plugin has open files of its own.
        now = [flags_of(in_r), flags_of(out_w)]
        changed = [(flags, 4096) for flags, _ in before]
        spoilt = now == changed if own else all(flags & os.O_NONBLOCK and size == 4096 for flags, size in now)
        os.close(in_w)
        running.stdout = None
        running.wait(30)
    assert spoilt, now
    assert [flags_of(in_r), flags_of(out_w)] == before
    for fd in (in_r, out_r, out_w):
        os.close(fd)


def test_changes_that_cannot_be_undone_are_left(tmp_path: Path) -> None:
    """A pipe that holds more than its former size, and one that was closed."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with restore_flags((read, write)):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 16)
        os.set_blocking(write, False)
        os.write(write, bytes(1 << 15))
    assert os.get_blocking(write)
    assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == 1 << 16
    os.close(read)
    os.close(write)


LOCK = """\
import fcntl, os, struct
fcntl.flock(1, fcntl.LOCK_EX)
fcntl.fcntl(2, fcntl.F_OFD_SETLK, struct.pack("hh4xqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
os.write(1, b"locked")
"""


@pytest.mark.parametrize("held_before", [False, True])
def test_locks_on_the_callers_files(
    runner_as: Caller, plugin_dir: Path, tmp_path: Path, held_before: bool
) -> None:
    (plugin_dir / "lock.py").write_text(LOCK)
    server = {"command": "/usr/bin/python3", "args": ["-I", f"{plugin_dir}/lock.py"]}
    manifest = plugin_dir / "mcp.json"
    manifest.write_text(
        json.dumps({"mcpServers": {"lock": {**server, "x-sandbox": {"read": [str(plugin_dir)]}}}})
    )
    for path in plugin_dir.iterdir():
        path.chmod(0o644)
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        if held_before:
            fcntl.flock(out, fcntl.LOCK_EX)
        with runner_as.start("exec", "--policy", "dev", manifest, stdout=out, stderr=err) as running:
            assert running.wait(30) == 0
        assert (tmp_path / "out").read_bytes() == b"locked"
        # Ours is kept; what the plugin took is free for others.
        for path in (tmp_path / "out", tmp_path / "err"):
            with open(path, "wb") as other:
                if held_before and path.name == "out":
                    with pytest.raises(BlockingIOError):
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                else:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_socket_shared_with_the_caller(runner_as: Caller, plugin_dir: Path) -> None:
    """For example a shell below sshd, which goes on using the socket."""
    (plugin_dir / "spoil.py").write_text("import os\nos.set_blocking(1, False)\nos.write(1, b'spoilt\\n')\n")
    server = {"command": "/usr/bin/python3", "args": ["-I", f"{plugin_dir}/spoil.py"]}
    server |= {"x-sandbox": {"read": [str(plugin_dir)]}}  # type: ignore[dict-item]
    manifest = plugin_dir / "mcp.json"
    manifest.write_text(json.dumps({"mcpServers": {"spoil": server}}))
    for path in plugin_dir.iterdir():
        path.chmod(0o644)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with runner_as.start("exec", "--policy", "dev", manifest, stdout=theirs) as running:
            assert running.wait(60) == 0
        assert ours.recv(100) == b"spoilt\n"  # the control: it was done
        assert theirs.getblocking() and os.get_blocking(theirs.fileno())
