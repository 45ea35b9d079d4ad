"""Limits enforced with rlimits: open files, file size, locked memory, message queues, no core dumps.

They work the same on every machine, and a plugin cannot raise them.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Mapping

import pytest

from tests.limits.cage import SH, Box, Result, by_cgroup, enforced_by

KIB, MIB = 1 << 10, 1 << 20
OK = ("ok", "run", "")

WRITE = """
import errno, json, os
written, refused = 0, ""
with open("/tmp/file", "wb", buffering=0) as file:
    try:
        while written < {size}:
            written += file.write(bytes(min(65536, {size} - written)))
    except OSError as error:
        refused = errno.errorcode[error.errno]
print(json.dumps([written, os.path.getsize("/tmp/file"), refused]))
raise SystemExit({status})
"""

HOARD = """
import errno, json, os
try:
    while True:
        last = os.dup(0)
except OSError as error:
    os.close(last)  # Python needs one itself
    print(json.dumps([last, errno.errorcode[error.errno]]))
"""

LOCK = """
import ctypes, errno, json, mmap
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
memory = mmap.mmap(-1, {size} + 16 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
locked, refused = 0, ""
while locked < {size} + 16 * page:
    if libc.mlock(ctypes.c_void_p(start + locked), ctypes.c_size_t(page)):
        refused = errno.errorcode[ctypes.get_errno()]
        break
    locked += page
print(json.dumps([locked, refused]))
"""

QUEUES = """
import ctypes, errno, json, os
libc = ctypes.CDLL("libc.so.6", use_errno=True)
class Attributes(ctypes.Structure):
    _fields_ = [("fields", ctypes.c_long * 8)]
wanted = Attributes()
wanted.fields[1], wanted.fields[2] = 1, 1024  # one message of 1024 bytes
made, refused = 0, ""
while made < 64:
    name = f"/queue-{made}".encode()
    if libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(wanted)) < 0:
        refused = errno.errorcode[ctypes.get_errno()]
        break
    made += 1
print(json.dumps([made, refused]))
"""

# Every way to raise a limit: setrlimit and prlimit on itself, and prlimit on its parent.
RAISE = """
import json, os, resource
limits = {{}}
for name in {names}:
    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    tries = {{
        "soft": lambda: resource.setrlimit(kind, (hard + 1, hard)),
        "hard": lambda: resource.setrlimit(kind, (hard, hard + 1)),
        "no limit": lambda: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
        "prlimit": lambda: resource.prlimit(os.getpid(), kind, (hard, hard + 1)),
        "parent's": lambda: resource.prlimit(os.getppid(), kind, (hard, hard + 1)),
    }}
    worked = []
    for way, attempt in tries.items():
        try:
            attempt()
            worked.append(way)
        except (ValueError, OSError):
            pass
    after = resource.getrlimit(kind)
    control = max(0, hard - 1)
    resource.setrlimit(kind, (control, control))
    lowered = resource.getrlimit(kind) == (control, control)
    limits[name] = [soft, hard, worked, list(after), lowered]
print(json.dumps(limits))
"""


def check_limit(result: Result, name: str, value: int, effective: int | None = None) -> None:
    limit = result.limit(name)
    assert limit["requested"] == value
    assert limit["effective"] == (value if effective is None else effective)
    assert (limit["enforced_by"], limit["degraded"], limit["peak"]) == ("rlimit", False, None)
    assert result.exit["status"] == result.status


def at_most(limits: Mapping[str, int]) -> Callable[[], None]:
    """A preexec_fn that gives the runner itself these hard limits."""

    def lower() -> None:
        for kind, value in limits.items():
            resource.setrlimit(getattr(resource, kind), (value, value))

    return lower


# --- file size ----------------------------------------------------------------------------------------------


def test_the_size_of_a_file(box: Box) -> None:
    # Larger than the limit: it ends the plugin.
    result = box.run(SH + "exec head -c 2097152 /dev/zero > /tmp/file\n", limits={"file_size": "1M"})
    assert result.status == 128 + signal.SIGXFSZ
    assert (result.outcome, result.hits) == (("crashed", "run", "file_size"), ["file_size"])
    check_limit(result, "file_size", MIB)
    # Python ignores SIGXFSZ and gets EFBIG. A plugin that handles it has its own exit status.
    result = box.run(WRITE.format(size=2 * MIB, status=3), limits={"file_size": "1M"})
    assert result.printed == [MIB, MIB, "EFBIG"]
    assert (result.status, result.outcome, result.hits) == (3, ("crashed", "run", "exit:3"), [])
    check_limit(result, "file_size", MIB)
    # Exactly as large.
    result = box.run(WRITE.format(size=MIB, status=0), limits={"file_size": "1M"})
    assert result.printed == [MIB, MIB, ""]
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    assert result.usage["written"] >= MIB
    # Too small for the cage: the manifest is refused, or the plugin runs. bwrap must not fail with an unclear
    # error.
    result = box.run("pass", limits={"file_size": 1})
    assert result.outcome in (OK, ("manifest_invalid", "manifest", "limit_value"))


# --- open files ---------------------------------------------------------------------------------------------


def test_open_files(box: Box) -> None:
    """The highest descriptor is the last one below the limit."""
    for number in (16, 40):
        result = box.run(HOARD, limits={"open_files": number})
        assert result.printed == [number - 1, "EMFILE"]
        assert (result.status, result.outcome, result.hits) == (0, OK, [])
        check_limit(result, "open_files", number)


def test_limits_by_default(box: Box) -> None:
    code = "import json, resource\nprint(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), locked]))"
    locking = LOCK.format(size=64 * KIB)
    assert box.run(f"{locking}\n{code}").printed == [[1024, 4096], 64 * KIB]


# --- locked memory and message queues -----------------------------------------------------------------------


def test_locked_memory(box: Box) -> None:
    result = box.run(LOCK.format(size=128 * KIB), limits={"locked_memory": "128K"})
    locked, refused = result.printed
    assert locked == 128 * KIB and refused in ("ENOMEM", "EPERM", "EAGAIN")
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, "locked_memory", 128 * KIB)


def test_message_queues(box: Box) -> None:
    assert box.run(QUEUES).printed == [0, "EMFILE"], "the default is none"
    few = box.run(QUEUES, limits={"message_queues": "8K"})
    made, refused = few.printed
    assert 0 < made < 8 and refused == "EMFILE"
    assert (few.status, few.outcome, few.hits) == (0, OK, [])
    check_limit(few, "message_queues", 8 * KIB)
    more = box.run(QUEUES, limits={"message_queues": "32K"})
    assert made < more.printed[0] < 32 and more.printed[1] == "EMFILE"


# --- core dumps ---------------------------------------------------------------------------------------------


def test_no_core_dumps(box: Box) -> None:
    code = (
        "import os, resource\nprint(list(resource.getrlimit(resource.RLIMIT_CORE)), flush=True)\nos.abort()"
    )
    result = box.run(code)
    assert result.printed == [0, 0]
    assert result.status == 128 + signal.SIGABRT
    assert result.outcome == ("crashed", "run", "signal:6")


# --- limits cannot be raised --------------------------------------------------------------------------------


def test_a_plugin_cannot_raise_its_limits(box: Box) -> None:
    limits: dict[str, object] = {
        "open_files": 64,
        "file_size": "1M",
        "locked_memory": "128K",
        "message_queues": "8K",
        "memory": "64M",
        "pids": 20,
        "cpu_time": "5s",
    }
    expected = {
        "RLIMIT_NOFILE": 64,
        "RLIMIT_FSIZE": MIB,
        "RLIMIT_MEMLOCK": 128 * KIB,
        "RLIMIT_MSGQUEUE": 8 * KIB,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": 5,
        "RLIMIT_DATA": 64 * MIB,
        "RLIMIT_NPROC": 20,
    }
    if by_cgroup(box, "memory"):
        del expected["RLIMIT_DATA"]
    if enforced_by(box, "pids") != "RLIMIT_NPROC":
        del expected["RLIMIT_NPROC"]
    result = box.run(RAISE.format(names=list(expected)), limits=limits)
    assert (result.status, result.outcome) == (0, OK), result.err
    for name, (soft, hard, worked, after, lowered) in result.printed.items():
        # RLIMIT_NPROC also counts the cage's processes. RLIMIT_CPU is only a backstop for the cgroup.
        spare = {"RLIMIT_NPROC": 3, "RLIMIT_CPU": 2}.get(name, 0)
        assert expected[name] <= soft <= hard <= expected[name] + spare, name
        assert worked == [] and after == [soft, hard], f"{name} could be raised: {worked}"
        assert lowered, f"{name}: setrlimit does not work at all"


# --- limits of the runner itself ----------------------------------------------------------------------------


OWN = {
    "open_files": ("RLIMIT_NOFILE", 256),
    "locked_memory": ("RLIMIT_MEMLOCK", 64 * KIB),
    "message_queues": ("RLIMIT_MSGQUEUE", 16 * KIB),
    "file_size": ("RLIMIT_FSIZE", 512 * KIB),
}
TELL_LIMITS = "import json, resource as r\nprint(json.dumps([r.getrlimit(getattr(r, k)) for k in {kinds}]))"


def test_a_plugin_gets_no_more_than_the_runner_has(box: Box) -> None:
    own = dict(OWN.values())
    asked = {name: 1024 * KIB if value > 1024 else 1024 for name, (_, value) in OWN.items()}
    result = box.run(TELL_LIMITS.format(kinds=list(own)), limits=asked, preexec_fn=at_most(own))
    assert result.outcome == OK
    assert result.printed == [[value, value] for value in own.values()]
    for name, (_, value) in OWN.items():
        check_limit(result, name, asked[name], effective=value)


# The runner's own limit, what is asked for, and what the plugin gets.
IN_PLACE = {
    "memory": ("RLIMIT_DATA", 256 * MIB, 512 * MIB, 256 * MIB),
    "pids": ("RLIMIT_NPROC", 203, 1000, 200),  # the cage has three
    "cpu_time": ("RLIMIT_CPU", 100, 200, 100),
}


def test_an_rlimit_in_place_of_a_cgroup_is_no_higher_than_the_runners(box: Box) -> None:
    used = {name: row for name, row in IN_PLACE.items() if enforced_by(box, name) == row[0]}
    if not used:
        pytest.skip("here cgroups, or nothing, enforce these")
    own = {kind: value for kind, value, _, _ in used.values()}
    asked: dict[str, object] = {name: row[2] for name, row in used.items()}
    result = box.run(TELL_LIMITS.format(kinds=list(own)), limits=asked, preexec_fn=at_most(own))
    assert result.outcome == OK and result.printed == [[value, value] for value in own.values()]
    for name, (_, _, requested, effective) in used.items():
        assert result.limit(name)["requested"] == requested
        assert result.limit(name)["effective"] == effective
