from __future__ import annotations

import gc

from sandbox.speed.libc import addressof, memory_at, open_libc, writable


def test_memory_is_changed_where_it_is() -> None:
    """The gate removes the environment of the process it was forked from, where the kernel put it."""
    memory = writable(8)
    memory.raw = b"12345678"
    memory_at(addressof(memory) + 2, 4).raw = bytes(4)
    assert memory.raw == b"12\0\0\0\x0078"


def test_it_leaves_nothing_to_the_collector() -> None:
    """Some of those who call it run with the garbage collector off."""
    open_libc().getpid()
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            open_libc().getpid()
        assert gc.collect() < 100
    finally:
        gc.enable()
