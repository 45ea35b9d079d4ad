"""What the observer notes, in bounded memory, and how it reads the arguments of a call."""

from __future__ import annotations

import json
import os
import socket
import struct

import pytest

from sandbox.cell import notifier
from sandbox.cell.notifier import (
    CONNECTED,
    LISTED,
    LOOKED,
    READ,
    WRITTEN,
    Notes,
    SeenCall,
    read_address,
    use_of,
)


def test_repetitions_are_counted() -> None:
    notes = Notes()
    for use in (LOOKED, READ, READ):
        notes.add_path(b"/a", use)
    notes.add_path(b"/b", WRITTEN)
    notes.add_connection("192.0.2.1", 80)
    notes.add_connection("192.0.2.1", 80)
    found = json.loads(notes.document())
    assert found["paths"] == [["/a", LOOKED | READ, 3], ["/b", WRITTEN, 1]]
    assert found["connections"] == [["192.0.2.1", 80, 2]]
    assert (found["missed"], found["unread"]) == (0, 0)


def test_the_plugin_does_not_decide_how_much_is_noted() -> None:
    notes = Notes()
    for number in range(100_000):
        notes.add_path(b"/%d" % number, READ)
        notes.add_connection("192.0.2.1", number)
    assert len(notes.paths) == notifier.MOST_PATHS
    assert len(notes.connections) == notifier.MOST_CONNECTIONS
    assert notes.missed == 200_000 - notifier.MOST_PATHS - notifier.MOST_CONNECTIONS
    notes.add_path(b"/1", WRITTEN)  # a known path is still counted
    assert notes.paths[b"/1"] == [READ | WRITTEN, 2]


def test_long_paths_are_bounded_together() -> None:
    notes = Notes()
    for number in range(1000):
        notes.add_path(b"/%04d" % number + b"x" * 4000, READ)
    assert sum(map(len, notes.paths)) <= notifier.MOST_PATH_BYTES
    assert notes.missed == 1000 - len(notes.paths) > 0


def test_bytes_that_are_not_text_come_back() -> None:
    notes = Notes()
    notes.add_path(b"/\xff\n\x1b[2J", READ)
    [[path, _, _]] = json.loads(notes.document())["paths"]
    assert os.fsencode(path) == b"/\xff\n\x1b[2J"


USES = {
    "read": (os.O_RDONLY | os.O_CLOEXEC, READ),
    "list": (os.O_RDONLY | os.O_DIRECTORY, LISTED),
    "write": (os.O_WRONLY, WRITTEN),
    "both": (os.O_RDWR, WRITTEN),
    "create": (os.O_RDONLY | os.O_CREAT, WRITTEN),
    "truncate": (os.O_RDONLY | os.O_TRUNC, WRITTEN),
    "only a name": (os.O_PATH | os.O_DIRECTORY, LOOKED),
}


@pytest.mark.parametrize(("flags", "expected"), USES.values(), ids=USES)
def test_what_a_file_is_opened_for(flags: int, expected: int) -> None:
    assert use_of(flags) == expected


def _inet(family: int, port: int, rest: bytes) -> bytes:
    return struct.pack("=H", family) + struct.pack(">H", port) + rest


V4, V6 = socket.inet_aton("192.0.2.7"), socket.inet_pton(socket.AF_INET6, "2001:db8::7")
ADDRESSES = {
    "IPv4": (_inet(2, 443, V4 + bytes(8)), SeenCall(address="192.0.2.7", port=443)),
    "IPv6": (_inet(10, 443, bytes(4) + V6 + bytes(4)), SeenCall(address="2001:db8::7", port=443)),
    "IPv4 as IPv6": (
        _inet(10, 80, bytes(4) + bytes(10) + b"\xff\xff" + V4),
        SeenCall(address="192.0.2.7", port=80),
    ),
    "a socket": (struct.pack("=H", 1) + b"/run/docker.sock\0rest", SeenCall(b"/run/docker.sock", CONNECTED)),
    "an abstract socket": (struct.pack("=H", 1) + b"\0name", SeenCall()),
    "netlink": (struct.pack("=H", 16) + bytes(10), SeenCall()),
    "too short": (_inet(2, 443, b"\0"), SeenCall()),
    "too short for IPv6": (_inet(10, 443, bytes(8)), SeenCall()),
    "nothing": (b"", SeenCall()),
}


@pytest.mark.parametrize(("raw", "expected"), ADDRESSES.values(), ids=ADDRESSES)
def test_an_address_is_read(raw: bytes, expected: SeenCall) -> None:
    assert read_address(raw) == expected
