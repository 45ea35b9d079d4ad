"""Memory of all processes together, with /tmp and /dev/shm, without swap. The report says "oom".

Without a cgroup an rlimit applies to each process on its own, and the report says the limit is degraded.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import vanished
from tests.limits.cage import SH, Box, Result, by_cgroup, enforced_by, rlimit_of, whole_group
from tests.tables import one_case

MIB = 1 << 20
OOM = ("crashed", "run", "oom")
OK = ("ok", "run", "")

HOG = "b = b'x' * (100 << 20)"

# The child takes too much. Its parent waits for it, then runs {then}.
ONLY_A_CHILD = """
import os, time
child = os.fork()
if child == 0:
    os._exit(len(b'x' * (100 << 20)) % 2)
_, status = os.waitpid(child, 0)
{then}
"""

FLOOD = """
import errno, json, os, sys
path, size = {path!r}, {size}
written, refused = 0, ""
with open(path, "wb", buffering=0) as file:
    while written < size:
        try:
            written += file.write(bytes(65536))
        except OSError as error:
            refused = errno.errorcode[error.errno]
            break
print(json.dumps([written, refused]))
"""

# Four children, each well within the limit. Together they exceed it.
TOGETHER = """
import mmap, os
part = 16 << 20
shared = mmap.mmap(-1, 4 * part) if {shared} else None
gate, open_gate = os.pipe()
ends = []
for number in range(4):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(open_gate)
        if shared is None:
            mine = b'x' * part
        else:
            for at in range(number * part, (number + 1) * part, 4096):
                shared[at] = 1
        os.write(write, b'.')
        os.read(gate, 1)  # keeps the memory until all children have theirs
        os._exit(0)
    os.close(write)
    ends.append(read)
print(b''.join(os.read(end, 1) for end in ends).decode(), flush=True)
"""


def check_limit(result: Result, box: Box, size: int) -> None:
    """Check the report's entry of the limit."""
    limit = result.limit("memory")
    expected = {
        "requested": size,
        "effective": size,
        "decided_by": "manifest",
        "enforced_by": enforced_by(box, "memory"),
        "degraded": not by_cgroup(box, "memory"),
    }
    assert {key: limit[key] for key in expected} == expected
    assert bool(limit["detail"]) == limit["degraded"]
    if by_cgroup(box, "memory"):
        assert limit["peak"] == result.usage["memory_peak"]
        assert 0 < limit["peak"] <= size * 1.05  # the kernel may exceed the limit a little
    else:
        assert limit["peak"] is None and result.usage["memory_peak"] is None
    assert result.exit["status"] == result.status
    assert not result.exit["kill_incomplete"] and result.exit["left"] == []


def check_oom(result: Result, box: Box, size: int) -> None:
    assert result.outcome == OOM
    assert result.hits == ["memory"]
    assert "ran out of memory" in result.err
    check_limit(result, box, size)
    assert result.usage["memory_peak"] > size / 2


def test_a_program_over_its_limit(box: Box) -> None:
    result = box.run(HOG, limits={"memory": "32M"})
    if by_cgroup(box, "memory"):
        check_oom(result, box, 32 * MIB)
        assert result.status == 128 + signal.SIGKILL
    else:
        assert "MemoryError" in result.err
        assert (result.status, result.outcome, result.hits) == (1, ("crashed", "run", "exit:1"), [])
        check_limit(result, box, 32 * MIB)


def test_a_program_within_its_limit(box: Box) -> None:
    # The control of the other tests: the same plugin with enough memory.
    result = box.run(HOG, limits={"memory": "160M"})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 160 * MIB)
    if by_cgroup(box, "memory"):
        assert result.usage["memory_peak"] >= 100 * MIB
    assert result.usage["max_rss"] >= 100 * MIB


def test_a_child_over_the_limit_while_the_program_ends(box: Box) -> None:
    """The report says "oom" because a child was killed, even if the program ends with status 0 before the
    kernel or the runner kills it."""
    for _ in range(3):
        result = box.run(ONLY_A_CHILD.format(then="os._exit(0)"), limits={"memory": "32M"})
        if by_cgroup(box, "memory"):
            check_oom(result, box, 32 * MIB)
            assert result.status in (0, 128 + signal.SIGKILL)
        else:
            assert (result.status, result.outcome, result.hits) == (0, OK, [])
            check_limit(result, box, 32 * MIB)


def test_a_program_that_ends_before_the_runner_reacts(box: Box) -> None:
    """The runner is stopped, so that only the kernel acts. It sees everything at once when it continues."""
    code = "print('ready', flush=True)\ninput()\n" + ONLY_A_CHILD.format(then="os._exit(0)")
    with box.running(code, limits={"memory": "32M"}) as running:
        init = running.family["init"]
        running.process.send_signal(signal.SIGSTOP)
        try:
            running.say("now")
            assert vanished({init}, 60)
        finally:
            running.process.send_signal(signal.SIGCONT)
    result = running.result
    assert result is not None
    if by_cgroup(box, "memory"):
        check_oom(result, box, 32 * MIB)
        # v2 kills the whole cgroup. On v1 the program survives and ends with status 0.
        code_and_status = (137, None) if enforced_by(box, "memory") == "cgroup v2" else (0, 0)
        assert (result.status, result.exit["code"]) == code_and_status
        assert result.exit["ended_by"] == "limit"
    else:
        assert (result.status, result.outcome, result.hits) == (0, OK, [])


def test_a_child_over_the_limit_while_the_program_continues(box: Box) -> None:
    then = "if os.WIFSIGNALED(status):\n    time.sleep(1000)"
    result = box.run(ONLY_A_CHILD.format(then=then), limits={"memory": "32M"})
    if by_cgroup(box, "memory"):
        check_oom(result, box, 32 * MIB)
        assert result.status == 128 + signal.SIGKILL
    else:  # the child got a MemoryError, and nothing was killed
        assert "MemoryError" in result.err
        assert (result.status, result.outcome, result.hits) == (0, OK, [])


def test_a_program_that_keeps_starting_children_over_the_limit(box: Box) -> None:
    """On v1 the kernel kills only the children, so the runner has to end the program."""
    if not by_cgroup(box, "memory"):
        pytest.skip("no cgroup enforces memory here")
    code = "import os\nwhile True:\n    if os.fork() == 0:\n        " + HOG + "\n    os.wait()"
    result = box.run(code, limits={"memory": "32M"})
    check_oom(result, box, 32 * MIB)
    assert result.status == 128 + signal.SIGKILL


@one_case(("limit", "path"), [("tmp", "/tmp/flood"), ("shm", "/dev/shm/flood")])
def test_a_tmpfs_counts_as_memory(box: Box, limit: str, path: str) -> None:
    result = box.run(FLOOD.format(path=path, size=100 * MIB), limits={"memory": "32M", limit: "64M"})
    if by_cgroup(box, "memory"):
        check_oom(result, box, 32 * MIB)
    else:
        assert result.printed == [64 * MIB, "ENOSPC"]
        assert (result.status, result.outcome, result.hits) == (0, OK, [])
        check_limit(result, box, 32 * MIB)


@one_case(("limit", "path"), [("tmp", "/tmp/flood"), ("shm", "/dev/shm/flood")])
def test_a_tmpfs_has_a_size_of_its_own(box: Box, limit: str, path: str) -> None:
    result = box.run(FLOOD.format(path=path, size=100 * MIB), limits={"memory": "64M", limit: "8M"})
    assert result.printed == [8 * MIB, "ENOSPC"]
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 64 * MIB)
    mount = result.limit(limit)
    assert mount["requested"] == mount["effective"] == 8 * MIB
    assert (mount["enforced_by"], mount["degraded"]) == ("size of the mount", False)


@one_case("shared", [False, True], ids=["each its own", "shared among them"])
def test_many_processes_share_the_limit(box: Box, shared: bool) -> None:
    result = box.run(TOGETHER.format(shared=shared), limits={"memory": "48M"})
    if by_cgroup(box, "memory"):
        check_oom(result, box, 48 * MIB)
        assert "...." not in result.out
    else:
        assert (result.status, result.outcome, result.hits) == (0, OK, [])
        assert result.out == "....\n"
        check_limit(result, box, 48 * MIB)
        assert (
            "for each process separately, and shared memory is not counted"
            in result.limit("memory")["detail"]
        )


def test_a_kill_is_not_reported_as_oom(box: Box) -> None:
    result = box.run(SH + "kill -9 $$\n", limits={"memory": "32M"})
    assert (result.status, result.outcome) == (128 + signal.SIGKILL, ("crashed", "run", "signal:9"))
    assert result.hits == []
    result = box.run(SH + "sh -c 'kill -9 $$'\nexit 0\n", limits={"memory": "32M"})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])


def test_another_plugin_is_not_affected(box: Box) -> None:
    beside = "print('ready', flush=True)\ninput()\nprint(len(b'x' * (20 << 20)), flush=True)\ninput()"
    with box.running(beside, name="beside", limits={"memory": "48M"}) as running:
        hog = box.run(HOG, limits={"memory": "48M"})
        assert hog.outcome == (OOM if by_cgroup(box, "memory") else ("crashed", "run", "exit:1"))
        running.say("now you")
        assert running.line() == str(20 * MIB)
        running.say("thanks")
        result = running.end()
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 48 * MIB)


def test_the_kernel_has_the_limit(box: Box) -> None:
    """Read on the host while the plugin runs. The kernel rounds to pages, and the report says so."""
    asked = 40_000_001
    page = os.sysconf("SC_PAGE_SIZE")
    waits = "print('ready', flush=True)\ninput()"
    with box.running(waits, limits={"memory": asked}) as running:
        if by_cgroup(box, "memory"):
            group = running.group("memory")
            taken = _limits_in(group)
        else:
            taken = {"memory": rlimit_of(running.pid, "Max data size")}
        running.say("thanks")
        result = running.end()
    assert result.outcome == OK
    assert result.limit("memory")["requested"] == asked
    assert result.limit("memory")["effective"] == taken["memory"]
    if by_cgroup(box, "memory"):
        assert taken["memory"] == asked // page * page
        assert taken["with swap"] in (taken["memory"], None)
        assert taken["with swap"] is not None or _no_swap()
        whole = whole_group(group)
        assert whole.name.startswith("runner-") and not whole.exists()
    else:
        assert taken["memory"] == asked


def _limits_in(group: Path) -> dict[str, int | None]:
    def number(name: str) -> int | None:
        try:
            return int((group / name).read_text())
        except FileNotFoundError:
            return None

    if (group / "memory.max").exists():
        swap, most = number("memory.swap.max"), number("memory.max")
        assert most is not None and (group / "memory.oom.group").read_text() == "1\n"
        return {"memory": most, "with swap": None if swap is None else most + swap}
    return {"memory": number("memory.limit_in_bytes"), "with swap": number("memory.memsw.limit_in_bytes")}


def _no_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) < 2


# Fills connections to itself until there is enough in all of them. How much fits into one depends on the
# machine: half a megabyte with the default net.core.wmem_max.
SOCKETS = """
import json, socket, time
held, sent, server = [], 0, socket.socket()
server.bind(("127.0.0.1", 0))
server.listen(5)
while sent < {enough} and len(held) < 400:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    client.connect(server.getsockname())
    held += [client, server.accept()[0]]
    client.setblocking(False)
    for _ in range(4):
        try:
            sent += client.send(b"x" * (1 << 20))
        except OSError:
            time.sleep(0.002)
    print(json.dumps(sent), flush=True)
while sent >= {enough} and {waits}:
    time.sleep(1)
"""


def test_socket_buffers_count_as_memory(box: Box) -> None:
    if not by_cgroup(box, "memory"):
        pytest.skip("no cgroup enforces memory here")
    # The kernel refuses it more, or the runner ends it: whenever it looks, so it does not end by itself.
    result = box.run(SOCKETS.format(enough=64 * MIB, waits=True), limits={"memory": "32M"})
    assert result.printed > 0 and (result.printed < 64 * MIB or result.outcome == OOM)
    control = box.run(SOCKETS.format(enough=64 * MIB, waits=False), limits={"memory": "1G"})
    assert control.printed >= 64 * MIB and control.outcome == OK
