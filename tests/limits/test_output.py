"""A plugin's stderr, with an exact limit on its bytes and lines, and without one."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import signal
import subprocess
import threading
from pathlib import Path

from tests.limits.cage import Box, Result, Running
from tests.tables import one_case, wait_for

OUTPUT = ("crashed", "run", "output")
KILLED = 128 + signal.SIGKILL
MIB = 1 << 20

# Writes until it is killed or has written all. The runner's own messages contain no Q.
FLOOD = """
import os
left = {size}
while left:
    left -= os.write({fd}, b'Q' * min(left, 65536))
"""


def relayed(result: Result) -> str:
    """The plugin's stderr, without the runner's own message at the end."""
    text, _, own = result.err.partition("runner: ")
    assert not own or own.startswith("crashed: "), result.err
    return text


def stderr_report(result: Result) -> dict[str, object]:
    return dict(result.report["stderr"])


def check_output_limit(result: Result, limit: str) -> bool:
    assert (result.status, result.outcome, result.hits) == (KILLED, OUTPUT, [limit]), result
    assert result.exit["ended_by"] == "limit" and result.exit["forced"]
    assert f"{limit} limit" in result.message and result.message in result.err
    assert not result.exit["kill_incomplete"]
    return True


# --- a flood -----------------------------------------------------------------------------------------------


def test_more_bytes_than_the_limit(box: Box) -> None:
    result = box.run(FLOOD.format(size=1 << 30, fd=2), limits={"output": 300_000})
    assert check_output_limit(result, "output")
    assert relayed(result) == "Q" * 300_000
    limit = result.limit("output")
    assert (limit["requested"], limit["effective"]) == (300_000, 300_000)
    assert (limit["enforced_by"], limit["degraded"]) == ("runner", False)
    # The runner read more than that, and dropped it.
    assert 300_000 < limit["peak"] < 300_000 + MIB
    assert stderr_report(result)["bytes"] == limit["peak"]
    assert stderr_report(result)["dropped"] == limit["peak"] - 300_000
    assert stderr_report(result)["lines"] == 0
    tail = stderr_report(result)["tail"]
    assert isinstance(tail, str) and 1000 < len(tail) <= 8192 and set(tail) == {"Q"}


def test_more_lines_than_the_limit(box: Box) -> None:
    code = "import sys\nfor number in range(10**6): print('line', number, file=sys.stderr)\n"
    result = box.run(code, limits={"output_lines": 500})
    assert check_output_limit(result, "output_lines")
    assert relayed(result) == "".join(f"line {number}\n" for number in range(500))
    tail = stderr_report(result)["tail"]
    assert isinstance(tail, str) and tail.startswith("line ") and tail.endswith("line 499\n")
    assert result.limit("output_lines")["peak"] > 500


@one_case(
    ("limits", "over"),
    [
        ({"output": 20}, None),
        ({"output": 19}, "output"),
        ({"output_lines": 4}, None),
        ({"output_lines": 3}, "output_lines"),
        ({"output": 20, "output_lines": 4}, None),
        # The limit that is reached first counts, even within one write.
        ({"output": 14, "output_lines": 3}, "output"),
        ({"output": 16, "output_lines": 3}, "output_lines"),
    ],
    ids=str,
)
def test_exactly_the_limit_and_one_more(box: Box, limits: dict[str, object], over: str | None) -> None:
    said = "1234\n" * 4
    result = box.run(f"import os, time\nos.write(2, {said.encode()!r})\ntime.sleep(0.1)\n", limits=limits)
    if over is None:
        assert (result.status, result.outcome[0], result.hits) == (0, "ok", [])
        assert result.err == said
        assert stderr_report(result) == {"bytes": 20, "lines": 4, "dropped": 0, "tail": said}
    else:
        # The plugin may end with status 0 before the runner reads. The report still says it wrote too much.
        assert (result.outcome, result.hits) == (OUTPUT, [over])
        assert relayed(result) == said[: 15 if over == "output_lines" else int(str(limits["output"]))]


def test_the_runners_memory_does_not_grow_with_the_output(box: Box) -> None:
    """200 MiB pass through the runner."""
    code = f"""
import os, sys
print('ready', flush=True)
input()
{FLOOD.format(size=200 * MIB, fd=2)}
print('done', flush=True)
input()
"""
    with open("/dev/null", "wb") as sink, box.running(code, "--limit", "output=1G", stderr=sink) as running:
        before = peak_rss(running)
        running.say("go")
        assert running.line() == "done"
        # By now the runner has relayed all but what is still in the pipe.
        assert peak_rss(running) - before < 8 * MIB
        running.say("end")
        result = running.end()
    assert (result.status, stderr_report(result)["bytes"], stderr_report(result)["dropped"]) == (
        0,
        200 * MIB,
        0,
    )


def peak_rss(running: Running) -> int:
    for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("no VmHWM")


@one_case(
    "options",
    [
        ("--limit", "output=1G"),
        (),
    ],
    ids=["limited", "not limited"],
)
def test_a_caller_that_does_not_read(box: Box, options: tuple[str, ...]) -> None:
    """Neither the plugin nor the runner can write. The deadline applies all the same."""
    folder = box.plugin(FLOOD.format(size=1 << 30, fd=2))
    streams = {"stdin": subprocess.DEVNULL}
    with box._started(folder, (*options, "--deadline", "2s"), None, streams) as running:
        assert running.process.wait(60.0) == 124


# --- what is relayed ---------------------------------------------------------------------------------------


@one_case("limits", [{}, {"output": 10**9}, {"output_lines": 10**9}], ids=str)
def test_arbitrary_bytes_are_relayed_unchanged(box: Box, limits: dict[str, object]) -> None:
    seed = random.Random(11)
    data = bytes(seed.getrandbits(8) for _ in range(300_001)) + b"\r\n\0\xff\x1b[31mno end"
    source = box.folder / "data"
    source.write_bytes(data)
    source.chmod(0o644)
    # In pieces of every size, from several processes.
    code = f"""
import os, random
data = open({str(source)!r}, 'rb').read()
rand = random.Random(3)
at = 0
while at < len(data):
    size = rand.choice((1, 7, 4096, 5000, 70000))
    pid = os.fork() if rand.random() < 0.2 else None
    if pid:
        os.waitpid(pid, 0)
    else:
        piece = data[at:at + size]
        while piece: piece = piece[os.write(2, piece):]
        if pid == 0: os._exit(0)
    at += size
os._exit(5)
"""
    result = box.run(code, limits=limits, read=(str(source),), policy=_reading(source))
    assert (result.status, result.hits) == (5, [])
    assert result.err.encode("utf-8", "surrogateescape") == data


def _reading(path: Path) -> str:
    from tests.limits.cage import policy

    return policy(read=(str(path),))


IDENTITY = """
import json, os
print(json.dumps([[os.fstat(fd).st_dev, os.fstat(fd).st_ino, os.isatty(fd)] for fd in (1, 2)]), flush=True)
"""


def identity(fd: int) -> list[object]:
    return [os.fstat(fd).st_dev, os.fstat(fd).st_ino, os.isatty(fd)]


@one_case("limits", [{}, {"output": 1000}, {"output_lines": 10}], ids=str)
def test_which_files_stdout_and_stderr_are(box: Box, limits: dict[str, object]) -> None:
    """stdout is the caller's own file. So is stderr without a limit, and with --tty it may be a terminal."""
    read, write = os.pipe()
    ours, theirs = pty.openpty()
    try:
        box.run(IDENTITY, "--tty", limits=limits, stdout=write, stderr=theirs)
        stdout, stderr = json.loads(os.read(read, 65536))
        assert stdout == identity(write)
        if not limits:
            assert stderr == identity(theirs) and stderr[2] is True
        else:
            assert stderr != identity(theirs) and stderr[2] is False
    finally:
        for fd in (read, write, ours, theirs):
            os.close(fd)


def test_stdout_and_unlimited_stderr_are_not_counted(box: Box) -> None:
    """stdout, and stderr without a limit, which is not reported either."""
    result = box.run(FLOOD.format(size=30 * MIB, fd=1), limits={"output": 10, "output_lines": 1})
    assert (result.status, result.hits, len(result.out)) == (0, [], 30 * MIB)
    assert stderr_report(result) == {"bytes": 0, "lines": 0, "dropped": 0, "tail": ""}
    result = box.run(FLOOD.format(size=MIB, fd=2))
    assert (result.status, len(result.err), result.report["stderr"]) == (0, MIB, None)


# --- output of a plugin that has ended already -------------------------------------------------------------

WRITES_AND_ENDS = """
import os
print('ready', flush=True)
input()
os.write(2, b'1234\\n' * 4)
os._exit(0)
"""


def run_while_stopped(box: Box, *options: str) -> Result:
    """Stop the runner, let the plugin write and end, then continue the runner."""
    with box.running(WRITES_AND_ENDS, *options) as running:
        init = os.pidfd_open(running.family["init"])
        running.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{running.process.pid}/stat")
        assert wait_for(lambda: status.read_text().rpartition(") ")[2].startswith("T"))
        running.say("go")
        assert select.select([init], [], [], 60)[0]
        os.close(init)
        running.process.send_signal(signal.SIGCONT)
        return running.end()


def test_output_before_the_end_is_relayed_up_to_the_limit(box: Box) -> None:
    result = run_while_stopped(box, "--limit", "output=1M")
    assert (result.status, result.outcome[0], result.err) == (0, "ok", "1234\n" * 4)
    assert stderr_report(result) == {"bytes": 20, "lines": 4, "dropped": 0, "tail": "1234\n" * 4}
    for limit, relayed_bytes in {"output=7": 7, "output_lines=3": 15}.items():
        result = run_while_stopped(box, "--limit", limit)
        assert relayed(result) == ("1234\n" * 4)[:relayed_bytes]
        assert (result.outcome, result.hits) == (OUTPUT, [limit.partition("=")[0]])
    # The control: without a limit.
    assert run_while_stopped(box).err == "1234\n" * 4


# --- a slow reader -----------------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything(box: Box) -> None:
    """It slows the plugin down. Nothing is lost, and the runner's memory does not grow."""
    code = "import os\nprint('ready', flush=True)\n" + FLOOD.format(size=2 * MIB, fd=2)
    said = 0
    with box.running(code, "--limit", "output=1G") as running:
        assert running.process.stderr is not None
        errors = running.process.stderr.fileno()
        before = peak_rss(running)
        done = threading.Event()
        while part := os.read(errors, 50_000):
            said += len(part)
            if running.process.poll() is None and said < MIB:
                assert peak_rss(running) - before < 8 * MIB
            done.wait(0.002)
        result = running.end()
    assert (result.status, said) == (0, 2 * MIB)
