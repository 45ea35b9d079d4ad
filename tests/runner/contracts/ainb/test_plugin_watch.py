"""What a plugin says by itself in a trial, held against its manifest."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.plugin_watch import WATCHES, SnapshotChunk, make_chunk, read_chunk

DECLARED = Declared(
    ("event_bus", "read_claude_logs"), {"event_bus": ("notes.*",)}, fs_roots=("/home/.claude/projects",)
)
FACTS = {"$declared": DECLARED, "$id": "notes"}
HELLO = base64.b64encode(b"hello").decode()


def judged(watch: str, method: str, facts: Any = None, **params: Any) -> str | None:
    return WATCHES[watch]({"method": method, "params": params}, FACTS if facts is None else facts, {})


@pytest.mark.parametrize(
    ("watch", "method", "params", "fault"),
    [
        ("capability", "host/log", {}, ""),
        ("capability", "host/snapshot/get", {}, ""),
        ("capability", "host/fs/read_dir", {}, ""),
        ("capability", "host/network/fetch", {}, "its manifest has no network"),
        ("capability", "host/secret_store_get", {}, "no secrets:read"),
        ("capability", "host/unheard_of", {}, None),
        ("path", "host/fs/read_file", {"path": "/home/.claude/projects/a"}, ""),
        ("path", "host/fs/read_file", {"path": "/home/.claude/projects/../a"}, "contains '..'"),
        ("path", "host/fs/read_dir", {"path": "/home/.claude/projects-evil"}, "in no folder"),
        ("path", "host/fs/read_dir", {"path": 5}, "no path"),
        ("path", "host/log", {}, None),
        ("publication", "host/snapshot/publish", {"topic": "notes.a", "payload": HELLO}, ""),
        ("publication", "host/snapshot/publish", {"topic": "other", "payload": HELLO}, "does not cover"),
        ("publication", "host/snapshot/publish", {"topic": "", "payload": HELLO}, "no topic"),
        ("publication", "host/snapshot/publish", {"topic": "notes.a", "payload": "***"}, "base64"),
        ("publication", "host/snapshot/publish", {"topic": "notes.a", "payload": [1]}, "not base64"),
        ("log", "host/log", {"level": "warn", "message": "x"}, ""),
        ("log", "host/log", {"level": "WARN", "message": "x"}, "its level is none of"),
        ("log", "host/log", {"level": "warn"}, "no message"),
        ("chunks", "host/snapshot/publish", {"topic": "notes.a", "payload": HELLO}, None),
        ("chunks", "host/snapshot/publish", {"topic": "notes.a", "payload": "***"}, None),
    ],
)
def test_a_message(watch: str, method: str, params: dict[str, Any], fault: str | None) -> None:
    found = judged(watch, method, **params)
    assert found == fault or (fault and found and fault in found), found
    if watch in ("capability", "path"):
        assert judged(watch, method, {}, **params) is None  # a command has no manifest


def test_params_that_are_no_object() -> None:
    methods: tuple[Any, ...] = ("host/fs/read_file", "host/snapshot/publish", "host/log", None, [], {})
    strange: tuple[Any, ...] = (None, [], 5, "x")
    for judge in WATCHES.values():
        for method in methods:
            for params in strange:
                judge({"method": method, "params": params}, FACTS, {})
    assert judged("publication", "host/snapshot/publish", {}, topic="any", payload=HELLO) == ""


@pytest.mark.parametrize(
    ("chunks", "wrong"),
    [
        ([(1, 0, True)], None),
        ([(1, 0), (1, 1), (1, 2, True), (2, 0), (2, 1, True)], None),
        ([(1, 0), (2, 0), (2, 1)], None),  # a new publication takes the place of one that is not complete
        ([(1, 1)], 0),
        ([(1, 0), (1, 2)], 1),
        ([(1, 0), (2, 1)], 1),
        ([(1, 0), (1, 1, True), (1, 2)], 2),
    ],
)
def test_chunks_follow_each_other(chunks: list[tuple[Any, ...]], wrong: int | None) -> None:
    memory: dict[Any, Any] = {}
    found = []
    for row in chunks:
        payload = base64.b64encode(make_chunk(SnapshotChunk(*row))).decode()
        message = {"method": "host/snapshot/publish", "params": {"topic": "notes.a", "payload": payload}}
        found.append(WATCHES["chunks"](message, FACTS, memory))
    assert [place for place, fault in enumerate(found) if fault] == ([] if wrong is None else [wrong])


def test_a_chunk_survives_and_other_bytes_are_none() -> None:
    chunk = SnapshotChunk(2**64 - 1, 7, True)
    raw = make_chunk(chunk)
    assert read_chunk(raw) == chunk and read_chunk(raw + b"more") == chunk
    named = raw.replace(b"\xcf" + b"\xff" * 8, b"\xcd\x01\x02")
    assert read_chunk(named) == chunk._replace(batch=0x0102)
    for other in (b"", b"\x80", b"\xc1", b"{}", raw[:20], b"\x86" + b"\xa1" * 9, b"\x81\xa1\xff\x01"):
        assert read_chunk(other) is None
