from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from sandbox.gate.audit import AuditPipe, ReaderGone, encode_line
from sandbox.gate.loop import Loop
from sandbox.network.egress import AuditLine

LINE = AuditLine("connect", "api.example.com", 443, "refused", reason="is not in its list")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


def _read(fd: int) -> list[dict[str, object]]:
    text = b""
    while True:
        try:
            text += os.read(fd, 65536)
        except BlockingIOError:
            return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_one_line_of_json(pipe: tuple[int, int]) -> None:
    AuditPipe(Loop(), pipe[1]).write(LINE._replace(name="a\nb\x1b[0m\u2028", seconds=0.12345678))
    (line,) = _read(pipe[0])
    assert line == LINE._asdict() | {"name": "a\nb\x1b[0m\u2028", "seconds": 0.123457}


def test_the_longest_line_fits_at_once(pipe: tuple[int, int]) -> None:
    text = "\U0001f600" * 100000
    AuditPipe(Loop(), pipe[1]).write(LINE._replace(name="a" * 9999, reason="\x00" * 9999, rule="b" * 9999))
    assert len(_read(pipe[0])) == 1
    AuditPipe(Loop(), pipe[1]).write(LINE._replace(name=text, reason=text, rule=text))
    assert _read(pipe[0]) == []  # too long even so: counted as dropped


def test_what_does_not_fit_is_counted_and_told_when_there_is_room(pipe: tuple[int, int]) -> None:
    loop = Loop()
    audit = AuditPipe(loop, pipe[1])
    for _ in range(5000):
        audit.write(LINE)
    kept = _read(pipe[0])
    loop.run_once(0)  # there is room now
    kept += _read(pipe[0])
    dropped = [int(str(line["count"])) for line in kept if line["kind"] == "dropped"]
    assert kept[-1]["kind"] == "dropped" and dropped[-1] > 1000
    assert len(kept) - len(dropped) + sum(dropped) == 5000
    audit.write(LINE)
    loop.run_once(0)
    assert _read(pipe[0]) == [LINE._asdict()]


def test_the_last_lines_wait_to_be_read(pipe: tuple[int, int]) -> None:
    audit = AuditPipe(Loop(), pipe[1])
    for _ in range(1000):
        audit.write(LINE)
    found: list[bytes] = []

    def read() -> None:
        os.set_blocking(pipe[0], True)
        while data := os.read(pipe[0], 4096):
            found.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    audit.wait_for_room()
    for _ in range(1000):
        audit.write(LINE)
    os.close(pipe[1])
    reader.join()
    lines = [json.loads(line) for line in b"".join(found).splitlines()]
    dropped = [line["count"] for line in lines if line["kind"] == "dropped"]
    assert dropped and len(lines) - len(dropped) + sum(dropped) == 2000


def test_repetitions_double(pipe: tuple[int, int]) -> None:
    audit = AuditPipe(Loop(), pipe[1])
    for _ in range(100):
        audit.write_repeated(LINE)
        audit.write_repeated(LINE._replace(port=80))
    assert [line["times"] for line in _read(pipe[0]) if line["port"] == 443] == [1, 2, 4, 8, 16, 32, 64]


def test_remembered_lines_are_bounded(pipe: tuple[int, int]) -> None:
    audit = AuditPipe(Loop(), pipe[1])
    for number in range(5000):
        audit.write_repeated(LINE._replace(name=f"n{number}.example"))
    assert len(audit._repeated) == 1024


def test_without_a_reader_there_is_nothing_to_serve_for(pipe: tuple[int, int]) -> None:
    audit = AuditPipe(Loop(), pipe[1])
    os.close(pipe[0])
    with pytest.raises(ReaderGone):
        audit.write(LINE)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dropped", "count": 3},
        {"kind": 'a"b\\c/\n\r\t\x00\x1b\x7f\u2028\u00e9\U0001f600\udcff', "seconds": 0.1, "rest": -1e-07},
        {"a": 1e300, "b": 10**18, "c": 0.0, "d": ""},
        {},
    ],
)
def test_a_line_is_what_json_would_write(fields: dict[str, str | float]) -> None:
    assert encode_line(fields) == json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def test_totals_of_nothing_are_not_told(pipe: tuple[int, int]) -> None:
    """Who reads them would load a reader of JSON for that."""
    audit = AuditPipe(Loop(), pipe[1])
    audit.write_totals()
    assert _read(pipe[0]) == []
    audit.write(LINE)
    audit.write_totals()
    assert _read(pipe[0])[-1] == {"kind": "totals", "connect refused": 1}
