"""Writing every byte, also to a slow reader."""

from __future__ import annotations

import os
import threading

import pytest

from sandbox import files


def test_a_slow_reader_of_a_descriptor_that_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = os.urandom(1 << 20)  # a pipe takes 64 KiB at once
    taken = bytearray()

    def reader() -> None:
        while piece := os.read(read, 50_000):
            taken.extend(piece)

    thread = threading.Thread(target=reader)
    thread.start()
    files.write_all(write, data)
    os.close(write)
    thread.join()
    os.close(read)
    assert taken == data


def test_a_reader_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READER_SECONDS", 0.01)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        files.write_all(write, bytes(1 << 20))
    os.close(read)
    os.close(write)
