"""What a plugin says to its host by itself, judged in a trial by its manifest: runner/conformance/rules.py.

Each judge returns what is wrong with a message, '' if nothing is, or None if it is not about such messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.conformance.rules import Judge
from runner.contracts.ainb.declared import READ_ROOTS, Declared
from runner.contracts.ainb.host.params import FIELDS, FS_CAPABILITY, LOG, PUBLISH, READ_DIR, READ_FILE
from runner.contracts.ainb.host.services import LEVELS, NEEDED
from runner.contracts.ainb.host.snapshots import EVENT_BUS, covers, stored_topic
from runner.contracts.ainb.payload import BadPayload, decode
from sandbox.paths.denied_paths import lexical_fault
from sandbox.paths.mounts import contains
from sandbox.speed.value import NamedTuple

_SHOWN = 100  # characters of a word of the plugin's
_MOST_TOPICS = 1024  # whose chunks are followed


def _params(message: Mapping[str, Any]) -> Mapping[str, Any]:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _capability(message: Mapping[str, Any], facts: Mapping[str, Any], memory: dict[Any, Any]) -> str | None:
    method, declared = str(message.get("method")), facts.get("$declared")
    if not isinstance(declared, Declared) or method not in FIELDS:
        return None
    needed = [NEEDED[method]] if method in NEEDED else []
    if method in (READ_DIR, READ_FILE):
        needed = [*READ_ROOTS, FS_CAPABILITY]
    if not needed or any(map(declared.allows, needed)):
        return ""
    return f"it sent {method}, and its manifest has no {' or '.join(needed)}"


def _path(message: Mapping[str, Any], facts: Mapping[str, Any], memory: dict[Any, Any]) -> str | None:
    declared, path = facts.get("$declared"), _params(message).get("path")
    if not isinstance(declared, Declared) or message.get("method") not in (READ_DIR, READ_FILE):
        return None
    if not isinstance(path, str):
        return "it names no path"
    if fault := lexical_fault(path):
        return f"the path {fault}"
    inside = any(contains(root, path) for root in declared.fs_roots)
    return "" if inside else f"{path[:_SHOWN]} is in no folder that its manifest names"


def _publication(message: Mapping[str, Any], facts: Mapping[str, Any], memory: dict[Any, Any]) -> str | None:
    if message.get("method") != PUBLISH:
        return None
    topic, payload = (_params(message).get(key) for key in ("topic", "payload"))
    if not isinstance(topic, str) or not topic:
        return "it has no topic"
    try:
        decode(payload if isinstance(payload, str) else None)
    except BadPayload as fault:
        return f"the payload {fault}" if isinstance(payload, str) else "the payload is not base64"
    declared = facts.get("$declared")
    if not isinstance(declared, Declared) or not declared.allows(EVENT_BUS):
        return ""
    if covers(declared.lists.get(EVENT_BUS), topic) and stored_topic(topic, facts["$id"]) is not None:
        return ""
    return f"its event_bus does not cover the topic {topic[:_SHOWN]}"


def _log(message: Mapping[str, Any], facts: Mapping[str, Any], memory: dict[Any, Any]) -> str | None:
    if message.get("method") != LOG:
        return None
    if _params(message).get("level") not in LEVELS:
        return f"its level is none of {', '.join(LEVELS)}"
    return "" if isinstance(_params(message).get("message"), str) else "it has no message"


# --- publications in chunks ---------------------------------------------------------------------------------


class SnapshotChunk(NamedTuple):
    batch: int
    number: int
    is_final: bool = False


def _chunks(message: Mapping[str, Any], facts: Mapping[str, Any], memory: dict[Any, Any]) -> str | None:
    """Each follows the one before, from 0 on. After the final one, or instead of the next, 0 may come."""
    topic, payload = (_params(message).get(key) for key in ("topic", "payload"))
    if message.get("method") != PUBLISH or not isinstance(payload, str):
        return None
    try:
        chunk = read_chunk(decode(payload))
    except BadPayload:
        return None
    if chunk is None:
        return None
    key = "chunk", str(topic)[:_SHOWN]
    before: SnapshotChunk | None = memory.get(key)
    if key in memory or len(memory) < _MOST_TOPICS:
        memory[key] = None if chunk.is_final else chunk
    if chunk.number == 0 or (before is not None and chunk[:2] == (before.batch, before.number + 1)):
        return ""
    last = "none of this publication" if before is None else f"chunk {before.number}"
    return f"chunk {chunk.number} came on {key[1]}, and before it {last}"


def make_chunk(chunk: SnapshotChunk) -> bytes:
    """A chunk without data, in MessagePack."""
    values = {
        "version": b"\x03",
        "published_ns": b"\xcf" + chunk.batch.to_bytes(8, "big"),
        "partial": b"\xc2",
        "chunk_index": bytes((chunk.number,)),
        "is_final": b"\xc3" if chunk.is_final else b"\xc2",
        "data": b"\x80",
    }
    fields = (bytes((0xA0 | len(name),)) + name.encode() + value for name, value in values.items())
    return bytes((0x80 | len(values),)) + b"".join(fields)


def read_chunk(payload: bytes) -> SnapshotChunk | None:
    """None: it is no chunk. `data`, the last field, is not read."""
    found: dict[str, int] = {}
    try:
        at = 1
        for _ in range(payload[0] & 0x0F if payload[0] & 0xF0 == 0x80 else 0):
            end = at + 1 + (payload[at] & 0x1F)
            key = payload[at + 1 : end].decode()
            if payload[at] & 0xE0 != 0xA0 or key == "data":
                break
            found[key], at = _read_scalar(payload, end)
        return SnapshotChunk(found["published_ns"], found["chunk_index"], bool(found["is_final"]))
    except (LookupError, UnicodeDecodeError):
        return None


def _read_scalar(payload: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer, true or false, and where the next value begins. Raises LookupError."""
    first = payload[at]
    if first < 0x80 or first in (0xC2, 0xC3):
        return first if first < 0x80 else first - 0xC2, at + 1
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[first]
    return int.from_bytes(payload[at + 1 : at + 1 + size], "big"), at + 1 + size


WATCHES: Mapping[str, Judge] = {
    "capability": _capability,
    "path": _path,
    "publication": _publication,
    "chunks": _chunks,
    "log": _log,
}
