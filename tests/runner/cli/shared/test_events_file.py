"""Where --events writes: no reader is waited for, lines are whole, and nobody leads them elsewhere."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from runner.cli.shared import events_file
from runner.cli.shared.events_file import WAITING_MOST_BYTES, EventsFile
from runner.cli.shared.report_file import ReportFileError

PIPE_BYTES = 64 << 10


@pytest.fixture
def pipe() -> Any:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass  # the test closed it


def read(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = b""
    try:
        while piece := os.read(fd, 1 << 20):
            data += piece
    except BlockingIOError:
        pass
    return data


def test_a_slow_reader_gets_whole_lines_and_learns_what_it_missed(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    events = EventsFile(str(writer))
    lines = 2 * WAITING_MOST_BYTES // 1000
    for number in range(lines):
        events.write("log", [number, "x" * 1000])  # nobody reads, and this does not wait
    got = b""
    for _ in range(lines):
        got += read(reader)
        events.write("log", ["later", ""])
        if not events._lines:
            break
    events.close()
    os.close(writer)
    told = [json.loads(line) for line in (got + read(reader)).splitlines()]
    numbers = [each["value"][0] for each in told if each["event"] == "log" and each["value"][0] != "later"]
    lost = [each["value"]["lines"] for each in told if each["event"] == "lost"]
    assert numbers == list(range(len(numbers))) and 1000 < len(numbers) < lines
    assert lost == [lines - len(numbers)]


def test_a_line_that_is_longer_than_a_pipe_is_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    events = EventsFile(f"/dev/fd/{writer}")
    events.write("log", "x" * (WAITING_MOST_BYTES + 1))
    got = read(reader)
    assert len(got) <= PIPE_BYTES
    while len(got) < WAITING_MOST_BYTES:
        events.write("log", "next")
        got += read(reader)
    events.close()
    got += read(reader)
    long, *others = [json.loads(line)["value"] for line in got.splitlines()]
    assert len(long) == WAITING_MOST_BYTES + 1 and set(map(str, others)) <= {"next", "{'lines': 1}"}


def test_nobody_reads_to_the_end(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_file, "_LAST_SECONDS", 0.01)
    reader, writer = pipe
    events = EventsFile(str(writer))
    for _ in range(100):
        events.write("log", "x" * 1000)
    events.close()
    *whole, _ = read(reader).split(b"\n")
    assert all(json.loads(line) for line in whole) and len(whole) >= 40
    gone = EventsFile(str(writer))
    os.close(reader)
    for _ in range(3):
        gone.write("log", "x")
    gone.close()


def test_several_runners_may_share_a_pipe(pipe: tuple[int, int]) -> None:
    """A short line is written at once: no other writer gets between its parts."""
    reader, writer = pipe
    one, other = EventsFile(str(writer)), EventsFile(str(writer))
    while True:
        one.write("one", "x" * 700)
        other.write("other", "y" * 900)
        if one._lines and other._lines:
            break
    got = read(reader)
    one.write("one", "")
    other.write("other", "")
    got += read(reader)
    assert {json.loads(line)["event"] for line in got.splitlines()} == {"one", "other"}
    for each in (one, other):
        each.close()


def test_a_path_is_a_new_file_for_its_owner_alone(tmp_path: Path) -> None:
    place = tmp_path / "events"
    place.write_text("old")
    place.chmod(0o666)
    (tmp_path / "kept").hardlink_to(place)
    events = EventsFile(str(place))
    events.write("log", "é")
    assert place.read_text() == '{"event":"log","value":"\\u00e9"}\n'  # while it runs
    assert place.stat().st_mode & 0o7777 == 0o600
    assert (tmp_path / "kept").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["events", "kept"]
    os.unlink(place)
    place.symlink_to("/etc/passwd")  # a plugin that can write there leads no line elsewhere
    events.write("log", "more")
    events.drain()
    assert not events._over  # `tools` of several plugins goes on
    events.close()


def test_a_socket(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        events = EventsFile(str(ours.fileno()))
        events.write("log", 1)
        assert theirs.recv(100) == b'{"event":"log","value":1}\n'
        events.close()


@pytest.mark.parametrize("target", ["0", "1", "/dev/stdin", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/0"])
def test_the_plugin_has_stdin_and_stdout(target: str) -> None:
    with pytest.raises(
        ReportFileError, match=f"^--events {target}: the plugin has descriptors 0 and 1; use 2"
    ):
        EventsFile(target)


@pytest.mark.needs("root")
def test_events_that_cannot_be_written(tmp_path: Path, pipe: tuple[int, int]) -> None:
    reader, _ = pipe
    unused = os.dup(0)
    os.close(unused)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.chown(tmp_path, 12345, 12345)  # whoever owns the folder could change the link
    for target, reason in (
        (str(reader), "is open for reading only"),
        (str(unused), "is not open (a file: ./"),
        ("9" * 12, "no descriptor with that number"),
        ("/proc/1/fd/1", "is on procfs; for a descriptor, write its number: --events N"),
        (str(tmp_path), "is a directory"),
        (f"{tmp_path}/missing/x", "does not exist; create it"),
        (f"{tmp_path}/fifo", "No such device or address"),
        (f"{tmp_path}/link", "use the path it leads to"),
    ):
        with pytest.raises(ReportFileError) as refused:
            EventsFile(target)
        assert str(refused.value).startswith(f"--events {target}: ") and reason in str(refused.value)
    for target in ("2", "/dev/stderr"):
        events = EventsFile(target)
        assert events.is_stderr
        events.close()
