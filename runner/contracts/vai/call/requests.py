"""The bodies of the four requests: tool.invoke, hook.handle, compactor.compact, harness.run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from runner.contracts.vai.call.context import (
    TOO_LARGE,
    invalid_input,
    is_id,
    is_timestamp,
    refused,
    timestamp,
)
from runner.contracts.vai.declared import DeclaredExport, Kind
from runner.contracts.vai.package.schemas import PackageSchema
from runner.protocol.dialect import Call, CallRefused
from runner.protocol.wire import encode
from sandbox.document.diagnostic import did_you_mean, printable, quoted
from sandbox.speed.value import NamedTuple

MOST_INLINE_BYTES = 4 << 20  # of a projection; a larger one becomes a file, if the export has scratch
MOST_ARTIFACT_BYTES = 64 << 20  # of that file: it is in memory
MOST_BODY_BYTES = (16 << 20) - 1024  # a frame has 16 MiB; the rest is for what is around the body

ARTIFACT = "projection.json"  # the name of that file in the scratch folder

# The key of a prepared call's context with the pinned items that the plugin did not get.
PINNED = "pinned_items"

_BYTES_PER_TOKEN = 4  # of the input, for a projection whose caller made no estimate
_MOST_ADDED_BYTES = 4096  # that a request has beside its input, configuration and context
_MOST_EXAMPLE = 300  # characters of a message
_SHOWN_FAULTS = 3  # in a message

_EXAMPLES: Mapping[Kind, Any] = {
    "hook": {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": {"task": "…"}},
    "compactor": {
        "source": {"chain_id": "ch_1", "projection": {"blocks": [{"kind": "input", "content": []}]}},
        "target": {"max_input_tokens": 32000, "target_model": "…"},
    },
    "harness": {"trigger": {"type": "user_request", "input": [{"type": "text", "text": "…"}]}},
}
# Defaults: no child harness, and nothing of a chain is lost.
_HARNESS_POLICY = {"max_depth": 1, "max_child_runs": 0, "allow_compaction": False}
_COMPACTOR_POLICY = {"retain_system": True, "retain_open_tasks": True}


class RequestBody(NamedTuple):
    body: dict[str, Any]  # as it is sent
    artifact: str = ""  # the path in the cage of a projection that is not in the body; empty: there is none
    content: bytes = b""  # of that file
    pinned: tuple[Any, ...] = ()  # items that the export does not support, for `with_pinned`


class RequestInput(NamedTuple):
    """The parts of a request."""

    export: DeclaredExport  # as narrowed
    input: Any
    ids: Mapping[str, Any]
    context: Mapping[str, Any]
    config: Mapping[str, Any] | None  # None: it is not sent
    schema: PackageSchema | None  # of a tool's input
    now: float  # seconds since 1970


def ids_in(kind: Kind, given: Any) -> dict[str, str]:
    """Ids that an input names and the context may lack: of its session, its chain, its execution."""
    part = {"harness": "target", "compactor": "source"}.get(kind)
    keys = ("session_id", "chain_id", "execution_id") if kind == "harness" else ("chain_id",)
    named = given.get(part) if part and isinstance(given, Mapping) else None
    if not isinstance(named, Mapping):
        return {}
    return {key: named[key] for key in keys if is_id(named.get(key))}


def make_request(asked: RequestInput) -> RequestBody:
    """Raises CallRefused."""
    kind = asked.export.kind
    makers: Mapping[Kind, Callable[[RequestInput], RequestBody]] = {
        "tool": _invoke,
        "hook": _handle,
        "compactor": lambda asked: _compact(asked, size),
        "harness": _run,
    }
    size = _measure(kind, asked.input, MOST_ARTIFACT_BYTES)
    made = makers[kind](asked)
    # Encoding takes a third of a second for 16 MiB, so what is small enough is not measured twice.
    if size + _measure(kind, _head(asked), MOST_BODY_BYTES) + _MOST_ADDED_BYTES > MOST_BODY_BYTES:
        way_out = "send less"
        if kind == "compactor" and "scratch_dir" not in asked.context:
            way_out = 'send less, or give the export filesystem = "scratch": then the projection is a file'
        _measure(kind, made.body, MOST_BODY_BYTES, way_out)
    return made


def with_pinned(call: Call, result: Any) -> Any:
    """A compactor's result. Pinned items that the plugin did not get stand before its seed blocks."""
    pinned = call.context.get(PINNED)
    if not pinned or not _is_object(result) or not isinstance(result.get("seed_blocks"), list):
        return result
    return {**result, "seed_blocks": [*pinned, *result["seed_blocks"]]}


def _measure(kind: Kind, value: Any, most: int, way_out: str = "send less") -> int:
    """The number of bytes of a value as JSON. Raises CallRefused."""
    try:
        raw = encode(value)
    except ValueError as error:
        message = f"the input is not JSON: {printable(str(error))}"
        raise refused(invalid_input(kind), message[:_MOST_EXAMPLE]) from None
    if len(raw) > most:
        raise refused(TOO_LARGE, f"the request has {len(raw)} bytes, and {most} are the most: {way_out}")
    return len(raw)


def _head(asked: RequestInput) -> dict[str, Any]:
    head: dict[str, Any] = {"export_id": asked.export.id, "context": dict(asked.context)}
    if asked.config is not None:
        head["config"] = dict(asked.config)
    return head


# --- tool ---------------------------------------------------------------------------------------------------


def _invoke(asked: RequestInput) -> RequestBody:
    given = {} if asked.input is None else asked.input
    faults = asked.schema.faults(given) if asked.schema is not None else ()
    if faults and asked.schema is not None:
        said = "; ".join(faults[:_SHOWN_FAULTS])
        message = f"the input of {asked.export.id} does not fit {printable(asked.schema.name)}: {said}"
        if asked.input is None:
            message += _shown(asked.schema.example())
        raise refused(invalid_input("tool"), message, {"faults": list(faults)})
    ids = {"tool_execution_id": asked.ids["tool_execution_id"]}
    return RequestBody({**_head(asked), **ids, "input": given})


# --- hook ---------------------------------------------------------------------------------------------------


def _handle(asked: RequestInput) -> RequestBody:
    event = dict(_object(asked, asked.input, "the input"))
    known = asked.export.subscribes_to
    if not isinstance(event.get("type"), str):
        raise _wrong(asked, "the event has no type")
    if event["type"] not in known:
        near = did_you_mean(event["type"], known) or f"it subscribes to {', '.join(known[:10])}"
        raise _wrong(asked, f"{asked.export.id} does not subscribe to {quoted(event['type'])}: {near}")
    subject = _object(asked, event.get("subject"), "the event's subject")
    if not all(isinstance(subject.get(key), str) and subject[key] for key in ("kind", "id")):
        raise _wrong(asked, "the event's subject needs a kind and an id")
    occurred = event.get("occurred_at")
    if occurred is None:
        event["occurred_at"] = timestamp(asked.now)
    elif not is_timestamp(occurred):
        raise _wrong(asked, "occurred_at is not a time of RFC 3339, such as 2026-03-12T19:00:00Z")
    event["summary"] = _object(asked, event.get("summary", {}), "the event's summary")
    ids = {"delivery_id": asked.ids["delivery_id"], "attempt": asked.ids["attempt"]}
    return RequestBody({**_head(asked), **ids, "event": event})


# --- compactor ----------------------------------------------------------------------------------------------


def _compact(asked: RequestInput, size: int) -> RequestBody:
    """`size`: bytes of the input."""
    given = _object(asked, asked.input, "the input")
    _refuse_unknown(asked, given, ("source", "target", "policy"))
    source = dict(_object(asked, given.get("source"), "source"))
    projection = dict(_object(asked, source.get("projection"), "the projection of source"))
    if projection.pop("transport", "inline") != "inline":
        raise _wrong(asked, "the runner chooses the transport of a projection: leave `transport` out")
    for key in ("blocks", "pinned_items"):
        projection.setdefault(key, [])
        if not isinstance(projection[key], list) or not all(map(_is_object, projection[key])):
            raise _wrong(asked, f"{key} of the projection is not a list of objects")
    pinned: tuple[Any, ...] = ()
    if not asked.export.supports_pinned_items:
        pinned, projection["pinned_items"] = tuple(projection["pinned_items"]), []
    if "chain_id" in asked.ids:
        source.setdefault("chain_id", asked.ids["chain_id"])
    if projection.get("token_estimate") is None:
        projection["token_estimate"] = size // _BYTES_PER_TOKEN
    content, path = b"", ""
    if size > MOST_INLINE_BYTES - _MOST_ADDED_BYTES and "scratch_dir" in asked.context:
        content = encode(projection)
    if len(content) > MOST_INLINE_BYTES:
        path = f"{asked.context['scratch_dir']}/{ARTIFACT}"
        sha256 = hashlib.sha256(content).hexdigest()
        projection = {"transport": "artifact", "path": path, "sha256": sha256, "bytes": len(content)}
    else:
        projection = {"transport": "inline", **projection}
    source["projection"] = projection
    body = {
        **_head(asked),
        "compaction_id": asked.ids["compaction_id"],
        "source": source,
        "target": _object(asked, given.get("target", {}), "target"),
        "policy": {**_COMPACTOR_POLICY, **_object(asked, given.get("policy", {}), "policy")},
    }
    return RequestBody(body, path, content if path else b"", pinned)


# --- harness ------------------------------------------------------------------------------------------------


def _run(asked: RequestInput) -> RequestBody:
    given = _object(asked, {} if asked.input is None else asked.input, "the input")
    _refuse_unknown(asked, given, ("mode", "target", "trigger", "policy", "checkpoint"))
    mode, supports = given.get("mode", "start"), asked.export.supports
    if not isinstance(mode, str) or (mode != "start" and mode not in supports):
        known = ", ".join(("start", *supports))
        raise _wrong(
            asked, f"{asked.export.id} does not support the mode {quoted(str(mode))}: it has {known}"
        )
    ids = {key: asked.ids[key] for key in ("session_id", "chain_id", "execution_id") if key in asked.ids}
    trigger = {"type": "user_request", **_object(asked, given.get("trigger", {}), "trigger")}
    trigger.setdefault("input", [])
    if not isinstance(trigger["input"], list) or not all(map(_is_object, trigger["input"])):
        raise _wrong(asked, "the input of the trigger is not a list of blocks")
    body = {
        **_head(asked),
        "mode": mode,
        "target": {**ids, **_object(asked, given.get("target", {}), "target")},
        "trigger": trigger,
        "policy": {**_HARNESS_POLICY, **_object(asked, given.get("policy", {}), "policy")},
    }
    if "checkpoint" in given:
        body["checkpoint"] = given["checkpoint"]
    return RequestBody(body)


# --- faults -------------------------------------------------------------------------------------------------


def _object(asked: RequestInput, value: Any, what: str) -> Mapping[str, Any]:
    if not _is_object(value):
        raise _wrong(asked, f"{what} is {'missing' if value is None else 'not an object'}")
    found: Mapping[str, Any] = value
    return found


def _refuse_unknown(asked: RequestInput, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            near = did_you_mean(str(key), known) or f"known are {', '.join(known)}"
            raise _wrong(asked, f"the input has the unknown key {quoted(str(key))}: {near}")


def _wrong(asked: RequestInput, message: str) -> CallRefused:
    kind = asked.export.kind
    example = _EXAMPLES[kind]
    if kind == "hook" and asked.export.subscribes_to:
        example = {**example, "type": asked.export.subscribes_to[0]}
    return refused(invalid_input(kind), message + _shown(example))


def _shown(example: Any) -> str:
    text = printable(json.dumps(example, ensure_ascii=False))
    return f"; an example: --input '{text}'" if len(text) <= _MOST_EXAMPLE else ""


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)
