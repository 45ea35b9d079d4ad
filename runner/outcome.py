"""What happened, in one vocabulary.

Every failure of a plugin has a code (what), a phase (when), a cause (why exactly) and a hint (what to do):

    launch_failed              launch     the program never ran: bubblewrap or exec failed
    handshake_failed           handshake  it spoke, but its handshake is wrong
    timeout                    any        a clock ran out; the phase names which
    crashed                    any        it ended before it was done; cause exit:N, signal:N, seccomp
    malformed_response         any        bytes that are not the protocol
    tool_not_exposed           handshake  the tool asked for is not offered
    protocol_version_mismatch  handshake  no common protocol version
    capability_not_declared    handshake  a capability that must be declared is not
    capability_not_allowed     handshake  a capability that nobody granted
    manifest_invalid           manifest   the manifest has faults, listed with file:line:column
    policy_invalid             policy     the operator's policy has faults, listed with file:line:column
    policy_denied              policy     the manifest asks what policy or denylist refuse
    sandbox_unavailable        plan       this machine cannot enforce what is required
    quarantined                launch     it failed too often and is not started for now
    cancelled                  any        the caller changed its mind
    overloaded                 launch     no room for another one now
    internal                   any        a fault of the runner

A plugin that answers "no" is no failure of this kind: that is plugin_error. A call that the runner refused,
so that the plugin was never asked, is invalid_call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from sandbox.document.diagnostic import Diagnostic
from sandbox.spec import Denial
from sandbox.value import NamedTuple

SCHEMA: Final = "runner.report.v1"

Code = Literal[
    "ok",
    "plugin_error",
    "invalid_call",
    "launch_failed",
    "handshake_failed",
    "timeout",
    "crashed",
    "malformed_response",
    "tool_not_exposed",
    "protocol_version_mismatch",
    "capability_not_declared",
    "capability_not_allowed",
    "manifest_invalid",
    "policy_denied",
    "sandbox_unavailable",
    "quarantined",
    "cancelled",
    "overloaded",
    "policy_invalid",
    "internal",
]
Phase = Literal[
    "manifest", "policy", "plan", "launch", "handshake", "call", "idle", "run", "teardown", "invocation"
]

# Exit status of the verbs that speak for themselves (check, explain, doctor, call).
EXIT: Final[Mapping[Code, int]] = {
    "ok": 0,
    "plugin_error": 1,
    "invalid_call": 2,
    "launch_failed": 10,
    "handshake_failed": 11,
    "timeout": 12,
    "crashed": 13,
    "malformed_response": 14,
    "tool_not_exposed": 15,
    "protocol_version_mismatch": 16,
    "capability_not_declared": 17,
    "capability_not_allowed": 18,
    "manifest_invalid": 20,
    "policy_denied": 21,
    "sandbox_unavailable": 22,
    "quarantined": 23,
    "cancelled": 24,
    "overloaded": 25,
    "policy_invalid": 26,
    "internal": 70,
}
USAGE_ERROR: Final = 2

# Exit status of `runner exec`, after env(1), timeout(1) and docker: everything below is the plugin's own.
EXEC_DEADLINE: Final = 124
EXEC_NO_CAGE: Final = 125
EXEC_REFUSED: Final = 126
EXEC_NOT_FOUND: Final = 127


class Outcome(NamedTuple):
    code: Code
    phase: Phase
    message: str
    cause: str = ""
    hint: str = ""
    denials: tuple[Denial, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


class Failure(Exception):
    """A launch that ended before there was a plugin to wait for."""

    def __init__(self, outcome: Outcome, exec_status: int, stage: Any = None) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.exec_status = exec_status
        # The last stage that was reached (runner/launch/stages.py). None: the manifest was not read.
        self.stage = stage


def outcome_document(outcome: Outcome) -> dict[str, str]:
    """As it stands in a report."""
    return {
        "code": outcome.code,
        "phase": outcome.phase,
        "cause": outcome.cause,
        "message": outcome.message,
        "hint": outcome.hint,
    }


def with_outcome(report: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The report of who knows better what happened: a call can fail although its plugin ended well."""
    changed = {**report, "outcome": outcome_document(outcome)}
    if isinstance(report.get("exit"), dict):
        changed["exit"] = {**report["exit"], "status": EXIT[outcome.code]}
    return changed


def schema() -> dict[str, Any]:
    """The JSON Schema of a report, as shipped in the package."""
    import json
    import os

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report.v1.schema.json")
    with open(path, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document
