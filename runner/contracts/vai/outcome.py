"""How an invocation ended, in the words of the contract: one terminal status, a code, and the record."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, Literal

from runner.contracts.vai.binding import narrow_export, read_binding
from runner.contracts.vai.cage import OptionsFault, reachable_hosts
from runner.contracts.vai.call.context import is_attempt, is_id
from runner.contracts.vai.declared import Declared, DeclaredExport, EffectClass, Permissions, declared_by
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd
from sandbox.spec import Limits
from sandbox.speed.value import NamedTuple

Status = Literal["succeeded", "failed", "cancelled", "retryable_failure"]

# What a plugin can say itself.
_NO_SUCCESS: Mapping[str, Status] = {
    "failed": "failed",
    "cancelled": "cancelled",
    "retryable_failure": "retryable_failure",
}

# Processes at once of an export that declares no max_concurrency: where they are reused, and where each call
# has its own.
MOST_WORKERS = 8
MOST_ISOLATED = 64

# Advice for a caller that repeats an invocation. The runner itself repeats none.
ATTEMPTS = 5
BACKOFF_SECONDS = 10
BACKOFF_FACTOR = 2

# The id that stays the same when an invocation is repeated.
_KEPT_ID = {"hook": "delivery_id", "tool": "tool_execution_id", "compactor": "compaction_id"}

# The last words of codes that the dialect gives as the cause of a violation.
_PROTOCOL_CAUSES = tuple(
    "invalid_frame unsupported_version unexpected_frame identity_mismatch frame_too_large"
    " invalid_response".split()
)
# Repeating the call does not help against these.
_LASTING = ("protocol.identity_mismatch", "protocol.unsupported_version", "protocol.invalid_response")
_REFUSED = ("manifest_invalid", "policy_invalid", "policy_denied")
_NOT_STARTED = ("launch_failed", "sandbox_unavailable", "quarantined")


# Keys of a call's context. A prepared call has all its ids there.
_IDS = tuple(
    (
        "invocation_id trace_id org_id project_id session_id chain_id run_id execution_id tool_execution_id"
        " compaction_id delivery_id binding_id"
    ).split()
)


class InvocationEnd(NamedTuple):
    status: Status
    code: str = ""
    unknown: bool = False  # it is not known whether the export did its work


# --- processes ----------------------------------------------------------------------------------------------


def reuses(plugin: Plugin) -> int:
    """How many processes may serve one call after the other. A scratch folder is a mount of one call's cage:
    it cannot be changed under a process that lives."""
    export = _chosen(declared_by(plugin))
    if export is None or export.execution_class == "isolated" or export.permissions.filesystem == "scratch":
        return 0
    return export.max_concurrency or MOST_WORKERS


def concurrent(plugin: Plugin) -> int:
    """How many processes may live at once where each serves one call."""
    export = _chosen(declared_by(plugin))
    return (export.max_concurrency if export is not None else 0) or MOST_ISOLATED


def _chosen(declared: Declared) -> DeclaredExport | None:
    return declared.effective or declared.find(declared.chosen)


# --- status and code ----------------------------------------------------------------------------------------


def ending(export: DeclaredExport | None, end: CallEnd) -> InvocationEnd:
    """The terminal status of an invocation. `export`: None if the package has none of that name."""
    outcome, refusal = end.outcome, end.refusal
    lost = end.written and not _is_repeatable(export)  # it may have done some of its work
    if outcome.code == "ok":
        return InvocationEnd("succeeded")
    if outcome.code == "invalid_call":
        return InvocationEnd("failed", refusal.code if refusal is not None else outcome.cause)
    if outcome.code == "plugin_error" and refusal is not None:
        said = _NO_SUCCESS.get(refusal.kind)
        if said is not None:
            return InvocationEnd(said, "" if refusal.code == said else refusal.code)
        return _by_effect(refusal.code, end.written, lost)  # ok = false: a protocol error
    if outcome.code == "cancelled":
        return InvocationEnd("cancelled", "runner.cancelled", lost)
    if outcome.code in _REFUSED:
        return InvocationEnd("failed", "runner.refused")
    if outcome.code == "tool_not_exposed":
        return InvocationEnd("failed", "tool.not_found")
    if outcome.code in _NOT_STARTED:
        return InvocationEnd("retryable_failure", "runner.launch_failed")
    if outcome.code == "overloaded":
        return InvocationEnd("retryable_failure", "runner.overloaded")
    if outcome.code == "timeout":
        hello = outcome.phase == "handshake" and outcome.cause == "deadline"
        code = "runner.hello_timeout" if hello else "runner.deadline_exceeded"
        return _by_effect(code, end.written, lost)
    if outcome.code == "crashed":
        if outcome.cause in ("oom", "machine_share", "kernel_memory", *Limits._fields):
            return InvocationEnd("failed", "runner.resource_exhausted", lost)
        return _by_effect("runner.crashed", end.written, lost)
    if outcome.code == "internal":
        return _by_effect("runner.internal", end.written, lost)
    return _violation(outcome.code, outcome.cause, end.written, lost)


def _violation(code: str, cause: str, written: bool, lost: bool) -> InvocationEnd:
    if cause == "invalid_output":
        return InvocationEnd("failed", "tool.invalid_output")
    word = cause if cause in _PROTOCOL_CAUSES else "invalid_frame"
    if code == "protocol_version_mismatch":
        word = "unsupported_version"
    named = f"protocol.{word}"
    return _by_effect(named, written, lost)


def _by_effect(code: str, written: bool, lost: bool) -> InvocationEnd:
    """A retryable failure if the request was not sent or its effect is repeatable; otherwise a failure."""
    if code in _LASTING:
        return InvocationEnd("failed", code, lost)
    if not written and code.startswith("protocol."):
        return InvocationEnd("failed", code)
    return InvocationEnd("failed", code, True) if lost else InvocationEnd("retryable_failure", code)


def effect(plugin: Plugin, name: str) -> EffectClass:
    """`plugin`: by its manifest alone."""
    export = declared_by(plugin).find(name)
    if export is None or export.kind == "harness":
        return "unknown"
    # Deliveries and compactions have an id that stays the same when they are repeated.
    return export.effect_class if export.kind == "tool" else "idempotent_write"


def _is_repeatable(export: DeclaredExport | None) -> bool:
    if export is None or export.kind == "harness":
        return False
    return export.kind != "tool" or export.effect_class in ("read_only", "idempotent_write")


# --- the record ---------------------------------------------------------------------------------------------


def record(plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str]) -> Mapping[str, Any]:
    """`plugin`: by its manifest alone, so that its exports are as declared."""
    export = declared_by(plugin).find(call.name)
    given = {key: options.get(key) for key in ("invocation_id", "delivery_id")} | dict(call.context)
    # What a refused call said about itself was not checked.
    known = {key: given[key] for key in _IDS if is_id(given.get(key))}
    found = ending(export, end)
    attempt = given["attempt"] if is_attempt(given.get("attempt")) else 1
    retry = _retry(export, end, found, known, attempt)
    return {
        "invocation_id": known.get("invocation_id"),
        "export": {"kind": export.kind if export is not None else call.kind, "id": call.name},
        "binding_id": known.get("binding_id") or _binding_id(options),
        "package": {"id": plugin.id, "version": plugin.version},
        "execution_class": export.execution_class if export is not None else None,
        "started_at": _time(end.began),
        "ended_at": _time(end.ended),
        "status": found.status,
        "code": found.code or None,
        "execution_outcome": "unknown" if found.unknown else None,
        "retryable": retry is not None,
        "retry": retry,
        "retry_count": attempt - 1,
        "org_id": known.get("org_id"),
        "project_id": known.get("project_id"),
        "session_id": known.get("session_id"),
        "chain_id": known.get("chain_id"),
        "run_id": known.get("run_id"),
        "trace_id": known.get("trace_id"),
        "execution_id": known.get("execution_id"),
        "tool_execution_id": known.get("tool_execution_id"),
        "compaction_id": known.get("compaction_id"),
        "delivery_id": known.get("delivery_id"),
        "events": end.events,
        "dropped_events": end.dropped_events,
        "permissions": {
            "declared": _permissions(export),
            "effective": _effective(export, plugin, options),
        },
        "checkpoint": _checkpoint(export, end),
        "late": _late(export, end),
    }


def _retry(
    export: DeclaredExport | None, end: CallEnd, found: InvocationEnd, known: Mapping[str, Any], attempt: int
) -> dict[str, Any] | None:
    """The retry advice of a record; None: the invocation must not be repeated automatically."""
    if export is None or found.status != "retryable_failure" or attempt >= ATTEMPTS:
        return None
    if end.written and not _is_repeatable(export):
        return None
    kept = _KEPT_ID.get(export.kind, "invocation_id")
    return {
        "keep": {kept: known.get(kept)},
        "attempt": attempt + 1,
        "attempts": ATTEMPTS,
        "backoff_seconds": BACKOFF_SECONDS * BACKOFF_FACTOR ** (attempt - 1),
        "backoff_factor": BACKOFF_FACTOR,
        "jitter": True,
    }


def _binding_id(options: Mapping[str, str]) -> str | None:
    try:
        found = json.loads(options.get("binding") or "null")
    except (ValueError, RecursionError):
        return None
    known = found.get("binding_id") if isinstance(found, dict) else None
    return known if is_id(known) else None


def _effective(
    export: DeclaredExport | None, plugin: Plugin, options: Mapping[str, str]
) -> dict[str, Any] | None:
    """What the binding leaves of the permissions, and the hosts that this call may reach by them."""
    binding = None
    if export is not None and options.get("binding"):
        text, file = options["binding"], options.get("binding_file", "")
        binding, _ = read_binding(text, file, plugin, export=export.id)
        export = narrow_export(export, binding) if binding is not None else None
    found = _permissions(export)
    if export is None or found is None:
        return None
    hosts = None if binding is None else binding.egress
    try:
        reachable = reachable_hosts(export, hosts, options.get("gateway_url", ""))
    except OptionsFault:  # of the gateway's URL: the call was refused
        reachable = reachable_hosts(export, hosts)
    return {**found, "egress": list(reachable)}


def _permissions(export: DeclaredExport | None) -> dict[str, Any] | None:
    if export is None:
        return None
    asked: Permissions = export.permissions
    return {
        "network": asked.network,
        "filesystem": asked.filesystem,
        "gateway_api_scopes": list(asked.scopes),
        "secret_slots": list(asked.slots),
    }


def _checkpoint(export: DeclaredExport | None, end: CallEnd) -> Any:
    """The checkpoint in a harness's unsuccessful answer. The caller does not get the answer itself."""
    if export is None or export.kind != "harness":
        return None
    for said in (end.late, end.refusal.data if end.refusal is not None else None):
        result = said.get("result", said) if isinstance(said, dict) else None
        if isinstance(result, dict) and result.get("checkpoint") is not None:
            return result["checkpoint"]
    return None


def _late(export: DeclaredExport | None, end: CallEnd) -> Any:
    """The late answer for the record, without its checkpoint, which has its own field."""
    said = end.late
    if not isinstance(said, dict) or export is None or export.kind != "harness":
        return said
    if isinstance(said.get("result"), dict):
        return {**said, "result": _without_checkpoint(said["result"])}
    return _without_checkpoint(said)


def _without_checkpoint(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "checkpoint"}


def _time(seconds: float) -> str:
    """RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
