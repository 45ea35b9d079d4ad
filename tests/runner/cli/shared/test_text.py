"""Lines for people: wrapped between words on a terminal, and left alone everywhere else."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from runner.cli.shared.text import fit, say, terminal_width

LONG = "runner: policy_denied: " + " ".join(["word"] * 40)


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with open(other, "w") as stream:
        yield stream
    os.close(main)


def test_a_terminal_gets_no_line_longer_than_itself(terminal: TextIO) -> None:
    lines = fit(LONG, terminal).split("\n")
    assert terminal_width(terminal) == 60 and len(lines) > 3
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(line.strip() for line in lines) == LONG
    assert all(line.startswith("    word") for line in lines[1:])


def test_programs_get_the_line_as_it_is() -> None:
    assert fit(LONG, io.StringIO()) == LONG
    read, write = os.pipe()
    with open(write, "w") as stream:
        assert fit(LONG, stream) == LONG
    os.close(read)


def test_words_that_people_copy_stay_whole(terminal: TextIO) -> None:
    path = "/srv/" + "directory-with-hyphens/" * 5
    text = f"it is in {path} and can be changed with --state-dir=/somewhere-else/with-hyphens"
    lines = fit(text, terminal).split("\n")
    assert any(path in line for line in lines)
    assert any("--state-dir=/somewhere-else/with-hyphens" in line for line in lines)


def test_the_last_column_of_a_table_stays_a_column(terminal: TextIO) -> None:
    row = "  memory     256M   cgroup v2   " + "held by the kernel " * 4
    first, *rest = fit(row.rstrip(), terminal).split("\n")
    column = first.index("held")
    assert rest and all(line[:column].isspace() and not line[column].isspace() for line in rest)


def test_several_lines_and_short_ones(terminal: TextIO) -> None:
    assert fit("a\n\n  b", terminal) == "a\n\n  b"
    wrapped = fit(f"short\n  {LONG}\n\nend", terminal).split("\n")
    assert wrapped[0] == "short" and wrapped[-2:] == ["", "end"]
    assert all(line.startswith("      ") for line in wrapped[2:-2])


def test_a_stream_that_is_closed_has_no_width() -> None:
    stream = open(os.devnull)  # noqa: SIM115
    stream.close()
    assert terminal_width(stream) is None


def test_say_prints_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo")
    say("three", sys.stdout)
    assert capsys.readouterr() == ("three\n", "one\ntwo\n")
