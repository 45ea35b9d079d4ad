"""Stderr that is counted on its way: exact to the byte, and otherwise as without the runner between."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.streams.relay import Relay
from tests import elsewhere
from tests.bounds import BOUND_SECONDS
from tests.conftest import Caller

BUFFER = 64 << 10
PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


# --- both ends ---------------------------------------------------------------------------------------------


def turn(relay: Relay, *others: int, wait: float = 0.0) -> tuple[str | None, dict[int, int]]:
    """One round of a loop like the runner's. Returns the relay's answer, and the ready descriptors."""
    poll = select.poll()
    wanted = {**dict.fromkeys(others, select.POLLIN), **relay.interest()}
    for fd, events in wanted.items():
        poll.register(fd, events)
    ready = dict(poll.poll(min(wait, max(0.0, relay.due - time.monotonic())) * 1000))
    return relay.look(ready, time.monotonic()), ready


def settle(relay: Relay) -> str | None:
    """Rounds until nothing is ready."""
    while True:
        verdict, ready = turn(relay)
        if not ready:
            return verdict


def watch(relay: Relay, process: subprocess.Popen[bytes]) -> tuple[str | None, int]:
    """Rounds until a limit is reached or the process has ended. Returns the limit, and the number of
    rounds."""
    pidfd = os.pidfd_open(process.pid)
    try:
        rounds = 0
        while True:
            rounds += 1
            verdict, ready = turn(relay, pidfd, wait=60.0)
            if verdict or pidfd in ready:
                return verdict, rounds
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def plugin(relay: Relay, *argv: str, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose stderr the relay carries."""
    process = subprocess.Popen(argv, stderr=relay.end, **popen)
    relay.release()
    with process:
        try:
            yield process
        except BaseException:
            relay.close()
            raise
        finally:
            process.kill()


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


class Reader:
    """A thread that reads the sink to its end, at a given speed."""

    def __init__(self, fd: int, size: int = 1 << 20) -> None:
        self.data = b""
        self._fd, self._size = fd, size
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        parts = []
        with contextlib.suppress(OSError):  # EIO: the last writer of a terminal is gone
            while part := os.read(self._fd, self._size):
                parts.append(part)
        self.data = b"".join(parts)

    def end(self) -> bytes:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.data


def read_exactly(fd: int, count: int) -> bytes:
    """A terminal passes written bytes on at a time of its own."""
    data = b""
    while len(data) < count:
        data += os.read(fd, count - len(data))
    return data


class Sink(NamedTuple):
    fd: int  # for the relay
    other: int  # for who reads


def pipe_sink(tmp_path: Path) -> Sink:
    read, write = os.pipe()
    return Sink(write, read)


def fifo_sink(tmp_path: Path) -> Sink:
    os.mkfifo(tmp_path / "fifo")
    read = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(read, True)
    return Sink(os.open(tmp_path / "fifo", os.O_WRONLY), read)


def socket_sink(tmp_path: Path) -> Sink:
    ours, theirs = socket.socketpair()
    return Sink(ours.detach(), theirs.detach())


def terminal_sink(tmp_path: Path) -> Sink:
    master, slave = os.openpty()
    tty.setraw(slave)
    return Sink(slave, master)


def file_sink(tmp_path: Path) -> Sink:
    path = tmp_path / "file"
    return Sink(os.open(path, os.O_WRONLY | os.O_CREAT), os.open(path, os.O_RDONLY))


SINKS = [pipe_sink, fifo_sink, socket_sink, terminal_sink, file_sink]
MakeSink = Callable[[Path], Sink]


@pytest.fixture
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sink]:
    """A pipe, unless parametrized otherwise."""
    ends = getattr(request, "param", pipe_sink)(tmp_path)
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):  # closed by the test
            os.close(fd)


every_sink = pytest.mark.parametrize("sink", SINKS, indirect=True)
every_read_sink = pytest.mark.parametrize(
    "sink", [make for make in SINKS if make is not file_sink], indirect=True
)


def fill(fd: int) -> bytes:
    """Fill the sink by another description: a pipe is filled, a terminal stopped."""
    if os.isatty(fd):
        termios.tcflow(fd, termios.TCOOFF)
        return b""
    rival = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            count += os.write(rival, b"." * 4096)
    os.close(rival)
    return b"." * count


def free(sink: Sink, filling: bytes) -> None:
    if os.isatty(sink.fd):
        termios.tcflow(sink.fd, termios.TCOON)
    assert read_exactly(sink.other, len(filling)) == filling


# --- exact -------------------------------------------------------------------------------------------------


def allowed(data: bytes, size: int | None, lines: int | None) -> tuple[bytes, str | None]:
    """The rule, byte by byte."""
    passed = bytearray()
    newlines = 0
    for byte in data:
        if size is not None and len(passed) >= size:
            return bytes(passed), "output"
        if lines is not None and newlines >= lines:
            return bytes(passed), "output_lines"
        passed.append(byte)
        newlines += byte == ord("\n")
    return bytes(passed), None


@settings(deadline=None, max_examples=300)
@given(
    chunks=st.lists(
        st.lists(st.sampled_from([b"\n", b"a", b"\0", b"\xff"]), min_size=1, max_size=12).map(b"".join),
        max_size=12,
    ),
    size=st.none() | st.integers(0, 80),
    lines=st.none() | st.integers(0, 25),
    looks=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_exactly_the_limit_however_it_is_cut(
    chunks: list[bytes], size: int | None, lines: int | None, looks: list[bool]
) -> None:
    read, write = os.pipe()
    relay = Relay(write, size=size, lines=lines)
    verdict = None
    for chunk, look in zip(chunks, looks, strict=False):
        os.write(relay.end, chunk)
        if look:
            verdict = settle(relay)
    assert relay.finish(60)
    os.close(write)
    data = b"".join(chunks)
    passed, limit = allowed(data, size, lines)
    assert os.read(read, 1 << 16) == passed
    os.close(read)
    assert relay.exceeded == limit
    assert verdict in (None, limit)
    assert (relay.passed, relay.tail) == (len(passed), passed)
    assert len(passed) + relay.dropped == relay.bytes <= len(data)
    assert relay.bytes == len(data) or limit
    assert relay.lines == data[: relay.bytes].count(b"\n")


@pytest.mark.parametrize("step", [1, 7, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_exact_with_a_process_that_writes_in_steps(sink: Sink, step: int, over: int) -> None:
    size = 3000 if step == 1 else 200_000
    script = f"import os\nfor n in range(0, {size + over}, {step}):\n"
    script += f" data = b'x' * min({step}, {size + over} - n)\n while data: data = data[os.write(2, data):]"
    reader = Reader(sink.other)
    relay = Relay(sink.fd, size=size, lines=None)
    with plugin(relay, PYTHON, "-c", script) as process:
        verdict, _ = watch(relay, process)
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == b"x" * min(size, size + over)
    assert (verdict or relay.exceeded) == ("output" if over > 0 else None)
    assert relay.dropped == (relay.bytes - size if over > 0 else 0)


def test_the_last_line_that_is_allowed_is_whole_and_nothing_follows(sink: Sink) -> None:
    reader = Reader(sink.other)
    relay = Relay(sink.fd, size=None, lines=1000)
    with plugin(relay, *sh("yes a line >&2")) as process:
        verdict, _ = watch(relay, process)
        assert verdict == "output_lines"
        assert process.poll() is None
    relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == b"a line\n" * 1000
    assert relay.look({}, time.monotonic()) == "output_lines"  # it stays so


def test_peaks_are_of_the_limits_that_are_set() -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    seen = []
    for size, lines in [(None, None), (10, None), (None, 10), (10, 10)]:
        relay = Relay(null, size=size, lines=lines)
        os.write(relay.end, b"a\nb\nc")
        relay.finish(60)
        seen.append(relay.peaks())
    os.close(null)
    assert seen == [{}, {"output": 5}, {"output_lines": 2}, {"output": 5, "output_lines": 2}]


def test_a_plugin_that_ended_before_the_first_look(sink: Sink) -> None:
    relay = Relay(sink.fd, size=4, lines=None)
    with plugin(relay, *sh("printf 0123456789 >&2")) as process:
        process.wait()
    assert relay.look({}, time.monotonic()) is None
    assert relay.finish(60)
    assert relay.exceeded == "output"
    assert os.read(sink.other, 100) == b"0123"


# --- as if nobody stood between ----------------------------------------------------------------------------


@every_sink
def test_byte_for_byte(sink: Sink, tmp_path: Path) -> None:
    data = bytes(range(256)) * 64 + b"\xed\xa0\x80\xff\0\r\n" + os.urandom(1 << 20)
    (tmp_path / "data").write_bytes(data)
    is_file = os.path.isfile(f"/proc/self/fd/{sink.fd}")
    reader = None if is_file else Reader(sink.other)  # a file is read when it is complete
    relay = Relay(sink.fd, size=len(data), lines=data.count(b"\n") + 1)
    with plugin(relay, *sh(f"cat {tmp_path}/data >&2; exit 5")) as process:
        verdict, _ = watch(relay, process)
        assert process.wait() == 5
    assert relay.finish(60)
    assert os.get_blocking(sink.fd)  # the caller's description is as it was
    os.close(sink.fd)
    assert (reader or Reader(sink.other)).end() == data
    assert (verdict, relay.exceeded, relay.dropped) == (None, None, 0)
    assert (relay.bytes, relay.passed) == (len(data), len(data))
    assert relay.tail == data[-8192:]


def test_the_plugins_end_blocks_and_neither_end_is_inherited(sink: Sink) -> None:
    relay = Relay(sink.fd, size=1, lines=None)
    assert os.get_blocking(relay.end)
    read = next(iter(relay.interest()))
    assert not os.get_inheritable(relay.end) and not os.get_inheritable(read)
    relay.close()
    relay.close()
    assert (relay.interest(), relay.end) == ({}, -1)


def test_a_file_is_written_at_the_shared_offset(tmp_path: Path) -> None:
    """As with 2>&1: both have one offset."""
    path = tmp_path / "log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT)
    relay = Relay(log, size=None, lines=100)
    os.write(log, b"one\n")
    os.write(relay.end, b"two\n")
    settle(relay)
    os.write(log, b"three\n")
    os.write(relay.end, b"four\n")
    assert relay.finish(60)
    os.close(log)
    assert path.read_text() == "one\ntwo\nthree\nfour\n"


def test_a_full_disk_loses_the_output_and_does_not_end_the_plugin() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    relay = Relay(full, size=1 << 20, lines=None)
    with plugin(relay, *sh("for i in 1 2 3; do echo $i >&2; done; exit 3")) as process:
        assert watch(relay, process)[0] is None
        assert process.wait() == 3
    assert relay.finish(60)
    os.close(full)
    assert (relay.bytes, relay.passed, relay.dropped, relay.tail) == (6, 0, 6, b"")


@pytest.mark.parametrize("make", [pipe_sink, terminal_sink])
def test_a_read_only_sink_is_not_reopened_for_writing(make: MakeSink, tmp_path: Path) -> None:
    ends = make(tmp_path)
    given = os.open(
        f"/proc/self/fd/{ends.other if make is pipe_sink else ends.fd}", os.O_RDONLY | os.O_NOCTTY
    )
    relay = Relay(given, size=100, lines=None)
    os.write(relay.end, b"hello")
    assert relay.finish(60)
    assert (relay.bytes, relay.passed, relay.dropped) == (5, 0, 5)
    assert not select.select([ends.other], [], [], 0)[0]
    for fd in (given, *ends):
        os.close(fd)


@pytest.mark.machine
def test_a_new_terminal_is_not_made_by_writing_to_a_master() -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    before = set(os.listdir("/dev/pts"))
    relay = Relay(master, size=100, lines=None)
    assert set(os.listdir("/dev/pts")) == before
    os.write(relay.end, b"typed")
    assert relay.finish(60)
    assert read_exactly(slave, 5) == b"typed"
    os.close(master)
    os.close(slave)


# --- a reader that is slow, or stuck -----------------------------------------------------------------------


def test_a_sink_that_nobody_reads_stops_the_plugin_and_loses_nothing(sink: Sink) -> None:
    relay = Relay(sink.fd, size=1 << 30, lines=None)
    os.set_blocking(relay.end, False)  # so that the test sees what would block a plugin
    data = os.urandom(1 << 20)
    written = 0
    while True:
        try:
            written += os.write(relay.end, data[written : written + 4096])
        except BlockingIOError:
            before = relay.bytes
            settle(relay)
            if relay.bytes == before:
                break
    assert 3 * BUFFER - 4096 <= written <= 3 * BUFFER  # our pipe, our buffer, the sink
    assert relay.passed == BUFFER
    assert turn(relay)[1] == {}  # nothing to do until somebody reads
    reader = Reader(sink.other, size=1000)
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == data[:written]


def test_small_writes_fill_a_pipe_as_densely_as_without_the_relay(sink: Sink) -> None:
    """A caller may wait for the end before it reads: the output that fits into its pipe must still fit."""
    relay = Relay(sink.fd, size=1 << 20, lines=None)
    for _ in range(1000):
        os.write(relay.end, b"a log line\n")
        settle(relay)
    assert relay.passed == 11_000
    assert relay.finish(0)
    assert read_exactly(sink.other, 11_000) == b"a log line\n" * 1000


@pytest.mark.parametrize("sink", [terminal_sink], indirect=True)
def test_a_terminal_with_little_room_takes_a_part(sink: Sink) -> None:
    """poll reports it as ready with room for one character; a larger write would block."""
    relay = Relay(sink.fd, size=1 << 20, lines=None)
    data = os.urandom(BUFFER)
    os.write(relay.end, data)
    settle(relay)
    assert 0 < relay.passed < len(data)
    reader = Reader(sink.other)
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == data


@every_read_sink
def test_slow_reader_and_process(sink: Sink, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "data").write_bytes(data)
    relay = Relay(sink.fd, size=len(data), lines=None)
    with plugin(relay, *sh(f"cat {tmp_path}/data >&2")) as process:
        settle(relay)
        reader = Reader(sink.other, size=100)
        assert watch(relay, process)[0] is None
        assert process.wait() == 0
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == data


@pytest.mark.parametrize("sink", [pipe_sink, fifo_sink, terminal_sink], indirect=True)
def test_a_sink_that_was_filled_after_the_poll(sink: Sink) -> None:
    """The plugin's own stdout may be the same pipe, so the plugin can choose this moment."""
    relay = Relay(sink.fd, size=100, lines=None)
    (read,) = (fd for fd, events in relay.interest().items() if events == select.POLLIN)
    filling = fill(sink.fd)
    os.write(relay.end, b"late")
    relay.look({read: select.POLLIN}, 0.0)
    ((fd, events),) = ((fd, events) for fd, events in relay.interest().items() if fd != read)
    assert events == select.POLLOUT
    assert relay.due == math.inf
    # Stale: it was ready when it was polled.
    assert relay.look({fd: select.POLLOUT}, 100.0) is None
    assert (relay.passed, relay.dropped) == (0, 0)
    # A sink that says so again and again would keep the loop spinning: it is left alone for a moment.
    assert 100.0 < relay.due <= 101.0
    assert relay.interest().get(fd, 0) == 0
    relay.look({}, relay.due)
    assert relay.due == math.inf
    assert relay.interest()[fd] == select.POLLOUT
    free(sink, filling)
    assert turn(relay, wait=60.0)[1] == {fd: select.POLLOUT}
    assert relay.passed == 4
    assert read_exactly(sink.other, 4) == b"late"
    assert relay.finish(60)


def test_a_stopped_terminal_waits_without_spinning_and_goes_on() -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    relay = Relay(slave, size=1 << 20, lines=None)
    (read,) = relay.interest()
    with plugin(relay, *sh("echo before >&2; read line; echo after >&2"), stdin=subprocess.PIPE) as process:
        while relay.passed < 7:
            turn(relay, wait=60.0)
        termios.tcflow(slave, termios.TCOOFF)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        verdict, rounds = watch(relay, process)
        assert verdict is None
        assert rounds <= 3  # what it wrote, the end of the pipe, its own end; never the terminal
        assert process.wait() == 0
    assert turn(relay)[1].keys() <= {read}  # at most that the pipe has ended
    assert turn(relay)[1] == {}
    assert (relay.bytes, relay.passed) == (13, 7)
    # Also told that it is ready, when it was stopped in between.
    (fd,) = (fd for fd, events in relay.interest().items() if events == select.POLLOUT)
    relay.look({fd: select.POLLOUT}, 0.0)
    assert relay.passed == 7
    termios.tcflow(slave, termios.TCOON)
    assert relay.finish(60)
    assert read_exactly(master, 13) == b"before\nafter\n"
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("sink", [pipe_sink, fifo_sink, terminal_sink], indirect=True)
@pytest.mark.parametrize("stuck", [True, False])
def test_finish_gives_up_on_a_reader_that_never_reads(sink: Sink, stuck: bool) -> None:
    if stuck:
        fill(sink.fd)
    relay = Relay(sink.fd, size=1 << 20, lines=None)
    os.write(relay.end, b"unread")
    assert relay.finish(0.05 if stuck else 60) is not stuck
    assert (relay.bytes, relay.passed, relay.dropped) == ((6, 0, 6) if stuck else (6, 6, 0))


@pytest.mark.parametrize("sink", [socket_sink], indirect=True)
def test_finish_gives_up_on_a_socket_too(sink: Sink) -> None:
    relay = Relay(sink.fd, size=1 << 30, lines=None)
    os.set_blocking(relay.end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(relay.end, b"x" * 4096)
            settle(relay)
    assert relay.finish(0.05) is False
    assert 0 < relay.passed < relay.bytes == relay.passed + relay.dropped


def test_finish_is_bounded_while_a_process_outside_still_writes() -> None:
    """A plugin may have sent its stderr to a process outside its cage."""
    null = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(null, size=None, lines=1)
    with plugin(relay, *sh("exec cat /dev/zero >&2")) as process:
        assert relay.finish(0.2)
        assert process.wait() == -signal.SIGPIPE
    os.close(null)


# --- a reader that is gone ---------------------------------------------------------------------------------

SPEAKS_WHEN_TOLD = "import os, sys; sys.stdin.read(1); os.write(2, b'x'); os._exit(0)"


def speak(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"!")
    process.stdin.close()


@pytest.mark.parametrize("sink", [pipe_sink, socket_sink], indirect=True)
@pytest.mark.parametrize("relayed", [True, False])
def test_the_first_write_after_the_reader_closed_is_fatal(sink: Sink, relayed: bool) -> None:
    argv = (PYTHON, "-c", "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); " + SPEAKS_WHEN_TOLD)
    if relayed:
        relay = Relay(sink.fd, size=100, lines=None)
        with plugin(relay, *argv, stdin=subprocess.PIPE) as process:
            os.close(sink.other)
            turn(relay, wait=60.0)  # woken by it
            assert relay.interest() == {}
            speak(process)
            assert watch(relay, process) == (None, 1)
            ended = process.wait()
        assert relay.finish(60)
    else:
        with subprocess.Popen(argv, stderr=sink.fd, stdin=subprocess.PIPE) as process:
            os.close(sink.other)
            speak(process)
            ended = process.wait()
    assert ended == -signal.SIGPIPE


@every_read_sink
def test_a_reader_that_closes_in_the_middle(sink: Sink) -> None:
    is_terminal = os.isatty(sink.fd)
    relay = Relay(sink.fd, size=1 << 20 if is_terminal else None, lines=None)
    with plugin(relay, *sh("exec yes >&2")) as process:
        while relay.passed < 10_000:
            turn(relay, wait=60.0)
            os.read(sink.other, 4096)
        os.close(sink.other)
        verdict, _ = watch(relay, process)
        if is_terminal:  # a write there fails, and yes would have ended; but without a signal
            assert verdict == "output"
        else:
            assert process.wait() == -signal.SIGPIPE
    assert relay.finish(60)
    assert relay.passed >= 10_000


def test_a_named_pipe_may_find_another_reader(tmp_path: Path) -> None:
    ends = fifo_sink(tmp_path)
    relay = Relay(ends.fd, size=100, lines=None)
    os.write(relay.end, b"one")
    settle(relay)
    assert os.read(ends.other, 100) == b"one"
    os.close(ends.other)
    settle(relay)
    again = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.write(relay.end, b"two")
    assert relay.finish(60)
    assert os.read(again, 100) == b"two"
    os.close(ends.fd)
    os.close(again)


# --- somebody else's sink ----------------------------------------------------------------------------------


def relay_to_foreign(fd: int) -> list[Any]:
    """A sink inherited from root that we may not open."""
    import os
    import select

    from sandbox.streams.relay import Relay

    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK))
        return ["it can be opened"]
    except PermissionError:
        pass
    relay = Relay(fd, size=1 << 30, lines=None)
    os.set_blocking(relay.end, False)
    data = bytes(range(256)) * 1200
    written = 0
    while True:
        try:
            written += os.write(relay.end, data[written : written + 4096])
        except BlockingIOError:
            before = relay.bytes
            # All of it, always: ready when it was polled, and full since.
            for _ in range(100):
                relay.look(dict.fromkeys(relay.interest(), select.POLLIN | select.POLLOUT), 1e9)
                relay.look({}, 1e10)
            if relay.bytes == before:
                break
    stuck = [relay.passed, os.get_blocking(fd)]
    print("full", flush=True)  # noqa: T201 -- now somebody reads
    return [*stuck, written, relay.finish(60), relay.passed]


@pytest.mark.needs("root", "user")
def test_a_pipe_of_another_user(runner_as_user: Caller) -> None:
    read, write = os.pipe()
    process = elsewhere.start(runner_as_user, relay_to_foreign, write, pass_fds=(write,))
    os.close(write)
    with process:
        try:
            assert elsewhere.line(process) == b"full\n"
            reader = Reader(read)
            passed, blocking, written, taken, finally_passed = json.loads(elsewhere.line(process))
        except BaseException:
            process.kill()
            raise
    assert (passed, blocking, taken) == (BUFFER, True, True)
    assert 3 * BUFFER - 4096 <= written == finally_passed
    assert reader.end() == (bytes(range(256)) * 1200)[:written]
    os.close(read)


def lose_foreign(fd: int) -> list[Any]:
    import os
    import select
    import sys
    import time

    from sandbox.streams.relay import Relay

    relay = Relay(fd, size=100, lines=None)
    os.write(relay.end, b"hello")
    before = list(relay.interest())
    relay.look({before[0]: select.POLLIN}, 0.0)
    print(relay.passed, flush=True)  # noqa: T201
    sys.stdin.read()  # the reader is gone
    poll = select.poll()
    for each, events in relay.interest().items():
        poll.register(each, events)
    relay.look(dict(poll.poll(30000)), time.monotonic())
    try:
        os.write(relay.end, b"more")
    except BrokenPipeError:
        return ["broken"]
    return ["not broken"]


@pytest.mark.needs("root", "user")
def test_a_pipe_of_another_user_without_a_reader(runner_as_user: Caller) -> None:
    read, write = os.pipe()
    process = elsewhere.start(runner_as_user, lose_foreign, write, pass_fds=(write,), stdin=subprocess.PIPE)
    os.close(write)
    with process:
        try:
            assert elsewhere.line(process) == b"5\n"
            assert os.read(read, 100) == b"hello"
            os.close(read)
            assert process.stdin is not None
            process.stdin.close()
            assert json.loads(elsewhere.line(process)) == ["broken"]
        except BaseException:
            process.kill()
            raise


def relay_after_su(fd: int) -> list[Any]:
    """At a terminal that belongs to the user who logged in first, and is our controlling terminal."""
    import fcntl
    import os
    import select
    import termios

    from sandbox.streams.relay import Relay

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        return ["it can be opened"]
    except PermissionError:
        pass
    relay = Relay(fd, size=100, lines=None)
    (read,) = relay.interest()
    termios.tcflow(fd, termios.TCOOFF)
    os.write(relay.end, b"hello")
    relay.look({read: select.POLLIN}, 0.0)
    (sink,) = (each for each, events in relay.interest().items() if events == select.POLLOUT)
    relay.look({sink: select.POLLOUT}, 0.0)
    stopped = relay.passed
    termios.tcflow(fd, termios.TCOON)
    return [sink != fd, stopped, relay.finish(60), relay.passed]


@pytest.mark.needs("root", "user")
def test_a_terminal_of_another_user_after_su(runner_as_user: Caller) -> None:
    master, slave = os.openpty()
    tty.setraw(slave)
    os.fchmod(slave, 0o620)
    process = elsewhere.start(
        runner_as_user, relay_after_su, slave, pass_fds=(slave,), start_new_session=True
    )
    with process:
        try:
            assert json.loads(elsewhere.line(process)) == [True, 0, True, 5]
        except BaseException:
            process.kill()
            raise
    assert read_exactly(master, 5) == b"hello"
    os.close(master)
    os.close(slave)


# --- a pipe that ends --------------------------------------------------------------------------------------


def test_a_plugin_that_closes_its_stderr_does_not_keep_the_loop_spinning(sink: Sink) -> None:
    relay = Relay(sink.fd, size=100, lines=None)
    script = "echo bye >&2; exec 2>&-; echo closed; read line"
    with plugin(relay, *sh(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert elsewhere.line(process) == b"closed\n"
        rounds = 0
        while relay.interest():
            assert turn(relay, wait=60.0)[1]
            rounds += 1
        assert rounds <= 2  # what it said, and that the pipe has ended
        assert relay.passed == 4
        speak(process)
        assert watch(relay, process) == (None, 1)
    assert relay.finish(60)


def test_a_pipe_that_ends_while_the_sink_is_full_does_not_spin(sink: Sink) -> None:
    fill(sink.fd)
    relay = Relay(sink.fd, size=1 << 20, lines=None)
    with plugin(relay, *sh(f"head -c {BUFFER} /dev/zero >&2; exec 2>&-; exit 4")) as process:
        _, rounds = watch(relay, process)
        assert process.wait() == 4
    for _ in range(3):
        _, ready = turn(relay)
        rounds += 1
        if not ready:
            break
    assert ready == {}
    assert rounds <= 2 + BUFFER // 4096 + 3  # a read for each write of head at most
    assert relay.finish(0) is False


@pytest.mark.usefixtures("nothing_left")
def test_a_grandchild_that_keeps_stderr_blocks_nothing(sink: Sink) -> None:
    relay = Relay(sink.fd, size=100, lines=None)
    script = "sleep 1000 <&- >&- & echo $!; echo said >&2"
    with plugin(relay, *sh(script), stdout=subprocess.PIPE) as process:
        daemon = int(elsewhere.line(process))
        assert watch(relay, process)[0] is None
        process.wait()
        assert relay.finish(BOUND_SECONDS * 2)  # does not wait for the end of the pipe
    assert os.read(sink.other, 100) == b"said\n"
    os.kill(daemon, signal.SIGKILL)


# --- floods ------------------------------------------------------------------------------------------------


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("nothing_left")
def test_a_gibibyte_is_cut_to_the_limit(sink: Sink) -> None:
    reader = Reader(sink.other)
    relay = Relay(sink.fd, size=1_000_003, lines=None)
    with plugin(relay, *sh("exec head -c 1G /dev/zero >&2")) as process:
        verdict, rounds = watch(relay, process)
        assert verdict == "output"
        assert process.poll() is None
        # Until it is killed nothing more is read.
        assert settle(relay) == "output"
        assert relay.bytes < 1_000_003 + BUFFER
        process.kill()
        process.wait()
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == bytes(1_000_003)
    assert rounds >= 1_000_003 // BUFFER  # the loop could look after others in between
    assert relay.peaks() == {"output": relay.bytes}


def test_a_gibibyte_that_is_granted_passes_without_growing_us() -> None:
    with subprocess.Popen(["wc", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as counter:
        assert counter.stdin is not None and counter.stdout is not None
        relay = Relay(counter.stdin.fileno(), size=1 << 30, lines=None)
        with plugin(relay, *sh("exec head -c 1G /dev/zero >&2")) as process:
            while relay.bytes < 10 << 20:
                turn(relay, wait=60.0)
            before = most = resident()
            rounds = 0
            while relay.bytes < 1 << 30:
                assert turn(relay, wait=60.0)[0] is None
                rounds += 1
                if rounds % 500 == 0:
                    most = max(most, resident())
            assert rounds > 10_000  # so it was looked at
            assert process.wait() == 0
        assert relay.finish(60)
        counter.stdin.close()
        assert int(counter.stdout.read()) == 1 << 30
    assert most - before < 2 << 20
    assert relay.exceeded is None


def test_one_look_does_a_bounded_amount_of_work() -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(null, size=1 << 20, lines=None)
    fcntl.fcntl(relay.end, fcntl.F_SETPIPE_SZ, 1 << 20)  # which a plugin may do
    os.write(relay.end, b"\n" * (1 << 20))
    turn(relay)
    assert relay.bytes == relay.passed == BUFFER
    assert relay.finish(60)
    assert relay.passed == 1 << 20
    os.close(null)


def test_packets_are_read_whole(sink: Sink) -> None:
    """A plugin can switch its end to packet mode, where a short read loses the rest."""
    relay = Relay(sink.fd, size=1 << 20, lines=None)
    fcntl.fcntl(relay.end, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK)
    packets = [bytes([n]) * 4001 for n in range(64)]
    sent = []
    for packet in packets:
        try:
            os.write(relay.end, packet)
        except BlockingIOError:
            settle(relay)
            try:
                os.write(relay.end, packet)
            except BlockingIOError:
                break
        sent.append(packet)
    assert len(sent) > 32  # our buffer has been full to where the next packet does not fit
    reader = Reader(sink.other)
    assert relay.finish(60)
    os.close(sink.fd)
    assert reader.end() == b"".join(sent)


# --- the tail ----------------------------------------------------------------------------------------------


def tail_of(parts: Sequence[bytes], size: int | None = None) -> str:
    null = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(null, size=size, lines=None)
    for part in parts:
        os.write(relay.end, part)
        settle(relay)
    relay.finish(60)
    os.close(null)
    assert len(relay.tail) <= 8192
    text = relay.text_tail()
    assert json.loads(json.dumps(text).encode("utf-8")) == text
    text.encode("utf-8")  # no lone surrogates
    return text


LINE = "0123456789 äöü\n"  # 18 bytes, which do not divide 8192


@pytest.mark.parametrize(
    ("parts", "size", "tail"),
    [
        ([], None, ""),
        ([b"short"], None, "short"),
        ([b"one\n", b"two\n"], None, "one\ntwo\n"),
        ([b"a\0b\xffc\xed\xa0\x80d"], None, "a\0b\ufffdc\ufffd\ufffd\ufffdd"),
        ([LINE.encode()] * 1000, None, LINE * (8192 // 18)),
        ([b"x" * 9000], None, "x" * 8192),
        # One character too many by a byte, at either end.
        (["ä".encode() * 4100 + b"."], None, "ä" * 4095 + "."),
        (["€".encode() * 3000], None, "€" * 2730),
        (["ab€".encode()], 4, "ab"),
        (["𝄞".encode() * 3000], 3000 * 4 - 1, "𝄞" * 2047),
        # A first line that is most of the tail is shown from where it is known.
        ([b"y" * 9000 + b"\nend\n"], None, "y" * (8192 - 5) + "\nend\n"),
        # What looks like the rest of a character, and is not.
        ([b"\x80" * 9000], None, "\ufffd" * 8189),
    ],
)
def test_the_tail_as_text(parts: list[bytes], size: int | None, tail: str) -> None:
    assert tail_of(parts, size) == tail


def test_the_tail_is_not_moved_at_each_read() -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(null, size=None, lines=None)
    relay.conceal(lambda data, *, cut: data, 1000)
    text, moved = b"".join(b"%07d " % number for number in range(8192)), 0
    for start in range(0, len(text), 100):
        before = len(relay._end)
        os.write(relay.end, text[start : start + 100])
        settle(relay)
        moved += len(relay._end) < before
        assert relay.tail == text[: start + 100][-9192:]
        assert len(relay._end) <= 2 * 9192
    relay.finish(60)
    os.close(null)
    assert 0 < moved <= len(text) // 9192


def test_texts_that_the_tail_must_not_show() -> None:
    """They are looked for in more than is shown, so that none is cut at its beginning."""
    null = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(null, size=None, lines=None)
    asked: list[tuple[int, bool]] = []

    def hide(data: bytes, *, cut: bool) -> bytes:
        asked.append((len(data), cut))
        return data.replace(b"secret" * 4, b"[]")[24 if cut else 0 :]

    relay.conceal(hide, 24)
    for part in (b"secret" * 2, b"secret" * 2 + b"." * 8180, b"!\n"):
        os.write(relay.end, part)
        settle(relay)
    assert relay.text_tail() == "[]" + "." * 8180 + "!\n"
    os.write(relay.end, b"x" * 20)
    settle(relay)
    relay.finish(60)
    os.close(null)
    assert relay.text_tail().strip(".!\nx") == "" and asked[-1] == (8192 + 24, True)
