"""How long a kill takes: from the signal until the runner has returned and no process is left."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import time
from pathlib import Path

from scripts.benches.caller import RUNNER, Caller, Unable, failed
from scripts.benches.rows import Row, Table

PIDS = 512
TASKS = 400
LIFETIME_SECONDS = 120.0  # of the plugins, and the longest wait for them

MANIFEST = """\
[plugin]
id = "endless"
version = "1.0.0"
name = "Endless"
description = "Does not end by itself."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "{command}"
args = {arguments}
"""

# Both plugins ignore SIGTERM and SIGINT, so that SIGKILL is needed. Both end by themselves after
# LIFETIME_SECONDS, in case the runner fails. The last argument is a mark by which they are found.
IDLE = """trap "" TERM INT; echo ready; exec sleep "$0" """

BOMB = f"""\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped automatically
until = time.monotonic() + {LIFETIME_SECONDS}

def task():
    os.close(begin)
    os.read(wait, 1)
    while time.monotonic() < until:
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(write_end, b".")
        except OSError:  # the limit; a refused fork costs as much as a successful one
            time.sleep(0.01)
    os._exit(0)

# Start all at once: otherwise the first would leave no room for the last. No task ends without a successor,
# so from here on their number is constant.
wait, begin = os.pipe()
read_end, write_end = os.pipe2(os.O_NONBLOCK)
os.set_blocking(read_end, True)
for number in range({TASKS}):
    if os.fork() == 0:
        task()
os.close(begin)
count = 0
while count < {TASKS}:
    count += len(os.read(read_end, {TASKS}))
os.write(1, b"ready\\n")
time.sleep({LIFETIME_SECONDS})
"""


def bench(caller: Caller, idles: int, bombs: int) -> list[Table]:
    idle = _manifest(caller, "idle", "/bin/sh", "-c", IDLE)
    script = caller.write("bomb/bomb.py", BOMB)
    bomb = _manifest(caller, "bomb", "/usr/bin/python3", "-ISE", script)
    rows = [
        Row("an idle plugin", "ms", [end(caller, idle) for _ in range(idles)], headline="end of a plugin"),
        Row(f"a fork bomb of {TASKS} tasks", "ms", [end(caller, bomb) for _ in range(bombs)]),
    ]
    about = (
        f"from two signals to the runner until it has returned and every process is gone; {idles} times, and "
        f"{bombs} times for the bomb; pids held by {_means(caller, idle)}"
    )
    return [Table("kill", "end", caller.name, about, rows)]


def _manifest(caller: Caller, name: str, command: str, *arguments: str) -> str:
    text = MANIFEST.format(command=command, arguments=json.dumps(arguments))
    return caller.write(f"{name}/nexo-plugin.toml", text)


def _means(caller: Caller, manifest: str) -> str:
    argv = [RUNNER, "explain", "--format", "json", "--pids", str(PIDS), manifest]
    limits = json.loads(caller.output_of(argv))["limits"]
    return next(str(limit["enforced_by"]) for limit in limits if limit["name"] == "pids")


def end(caller: Caller, manifest: str) -> float:
    """Start a plugin, wait until it is ready, kill it, and check that it has ended. Returns milliseconds."""
    # A number, because the idle plugin passes it to sleep; long enough to be unique.
    mark = f"{LIFETIME_SECONDS:.0f}.{secrets.randbits(64):020}"
    argv = [RUNNER, "exec", "--pids", str(PIDS), "--memory", "2G", manifest, "--", mark]
    # All of the plugin's processes inherit its stdout, so end of file means that the last of them has ended.
    read, write = os.pipe()
    with (
        open(read, "rb", buffering=0) as stdout,
        caller.start(argv, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE) as process,
    ):
        os.close(write)
        try:
            if not _readable(read) or stdout.read(6) != b"ready\n":
                process.kill()
                raise failed(argv, process.wait(), process.stderr.read() if process.stderr else b"")
            start = time.perf_counter()
            # Two different signals, because two of the same kind can be merged into one.
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            over = _readable(read) and stdout.read(1) == b""
            status = process.wait(LIFETIME_SECONDS)
            taken = time.perf_counter() - start
        except BaseException:
            process.kill()
            raise
    left = find_marked(mark)
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/runner-{process.pid}-*[0-9]")]
    if not over or left or groups:
        raise Unable(f"{manifest} was not killed: processes {left} and cgroups {groups} are left")
    # Of two pending signals, the kernel delivers the one with the lower number first.
    if status not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        raise Unable(f"{manifest} ended by itself, with status {status}")
    return taken * 1000


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], LIFETIME_SECONDS)[0])


def find_marked(mark: str) -> list[int]:
    """The living processes with `mark` among their arguments. A fork has its parent's arguments.

    Not for a living fork bomb, which makes processes faster than /proc can be listed.
    """
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended after the listing
            if mark.encode() in words:
                found.append(int(name))
    return found
