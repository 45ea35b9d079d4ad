"""The outcomes of launches and calls.

Every failure has a code (what happened), a phase (when), a cause (why exactly), a message and a hint (what to
change). The tree of failures: each code with the phases it can occur in, and the sentence the operator reads.

Nothing was started
  manifest_invalid           manifest, handshake     "MANIFEST has 2 faults", each with file:line:column
  policy_invalid             policy                  "POLICY has 2 faults", each with file:line:column
  policy_denied              policy, plan            "the manifest asks for 2 things it may not have"
  sandbox_unavailable        plan, launch            "the memory limit cannot be enforced: REASON". Also in
                             run: "limits of the plugin were lifted from outside while it ran: NAMES"
  launch_failed              manifest, plan, launch  "the program is not in the cage: REASON"
  overloaded                 launch                  "all 4 processes that may serve this call at once are
                                                     busy": where a contract limits them (session/pool.py)
  quarantined                call                    "the plugin NAME is quarantined: REASON": it failed too
                                                     often, where a supervisor keeps it (a daemon, a fleet)
The plugin broke its contract (in a session, or with `exec --inspect`)
  handshake_failed           handshake               what is wrong with its answer to the handshake
  protocol_version_mismatch  handshake               which versions it speaks, and which the contract has
  capability_not_declared    handshake, run          which capability it uses and has not declared
  capability_not_allowed     handshake, call, run    which capability manifest or policy do not allow
  tool_not_exposed           handshake, call         "the plugin does not offer the tool NAME"
  malformed_response         handshake, call, run    what is wrong with the bytes
The plugin ended, or was ended
  timeout                    launch, handshake,      "there was no answer within TIME", "the deadline
                             call, idle, invocation  passed", "there was no answer to health.check within
                                                     TIME". The phase names the clock
  crashed                    handshake, call, idle,  "the plugin ended with status N", "the plugin exceeded
                             run, teardown           its NAME limit of AMOUNT"
  cancelled                  launch, handshake,      "ended by signal N", "the process that started the
                             call, idle, run,        runner has ended", "the session is closed"
                             teardown
A bug in the runner, or its own surroundings (stdout cannot be written, the monitor does not answer)
  internal                   any                     "ExceptionName: text", or what could not be done

`ok` is no failure. Neither are `plugin_error` (call: the plugin returned an error) and `invalid_call` (call:
the runner refused the call and did not ask the plugin).
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Final, Iterable, Literal, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.spec import Denial

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

# The exit status of every verb but `exec`.
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

# The exit status of `runner exec`, as of env(1), timeout(1) and docker. Lower ones are the plugin's own.
EXEC_DEADLINE: Final = 124
EXEC_NO_CAGE: Final = 125
EXEC_REFUSED: Final = 126
EXEC_NOT_FOUND: Final = 127

# The cause of a launch whose cage was killed while it was built. A launch that is diagnosed names the layers.
KILLED_BY_FILTER: Final = "outer_seccomp"

LAUNCH_HINT: Final = "raise the launch limit (--limit launch=TIME), or find out what keeps the machine busy"


class Outcome(NamedTuple):
    code: Code
    phase: Phase
    message: str
    cause: str = ""
    hint: str = ""
    denials: tuple[Denial, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


# A plugin that ran and failed by itself.
_FAILED: Final[tuple[Code, ...]] = (
    "crashed",
    "timeout",
    "handshake_failed",
    "protocol_version_mismatch",
    "malformed_response",
    "capability_not_declared",
    "capability_not_allowed",
)
# The message says which limit it was, and how to raise it.
_BY_LIMIT: Final = "oom cpu_time file_size pids disk output seccomp machine_share kernel_memory".split()


GOOD: Final = Outcome("ok", "run", "the plugin ended with status 0")


def has_failed(outcome: Outcome) -> bool:
    """Whether the plugin itself failed, perhaps because it lacked access to something."""
    return outcome.code in _FAILED and outcome.cause not in _BY_LIMIT


AdviceKind = Literal["host", "read", "write", "variable", "limit", "user"]
_PURPOSE: Final[Mapping[AdviceKind, str]] = {
    "host": "to let it reach that host",
    "read": "to show it",
    "write": "to let it write there",
    "variable": "to pass it on",
}


ITS_ANSWER = "its answer"  # advice about what the plugin answered a call with begins so


class Advice(NamedTuple):
    """One thing that a failed plugin named and had no access to (runner/launch/advice)."""

    kind: AdviceKind
    what: str  # a sentence
    option: str = ""  # the option that grants it; empty: `what` says why no option does
    command: str = ""  # a whole command to type; empty: add the option to the same command line

    @property
    def text(self) -> str:
        """The line for people."""
        from sandbox.document.diagnostic import printable

        granted = f"; {_PURPOSE[self.kind]}: {self.command or self.option}" if self.option else ""
        return printable(self.what + granted)


class Failure(Exception):
    """A launch that ended before there was a plugin to wait for."""

    def __init__(self, outcome: Outcome, exec_status: int, stage: Any = None) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.exec_status = exec_status
        # The last stage that was reached (runner/launch/stages.py). None: the manifest was not read.
        self.stage = stage


def outcome_document(outcome: Outcome) -> dict[str, str]:
    """The `outcome` of a report."""
    return {
        "code": outcome.code,
        "phase": outcome.phase,
        "cause": outcome.cause,
        "message": outcome.message,
        "hint": outcome.hint,
    }


def with_outcome(report: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """A report with another outcome: a call can fail although its plugin ended well."""
    changed = {**report, "outcome": outcome_document(outcome)}
    if isinstance(report.get("exit"), dict):
        changed["exit"] = {**report["exit"], "status": EXIT[outcome.code]}
    if report.get("advice"):
        changed["advice"] = due_advice(report["advice"], outcome)
    return changed


def due_advice(advice: Iterable[dict[str, Any]], outcome: Outcome) -> list[dict[str, Any]]:
    """Returns the advice in a report that applies to this outcome."""
    if has_failed(outcome):
        return list(advice)
    return [each for each in advice if outcome.code == "plugin_error" and _is_of_call(Advice(**each))]


def advice_of_calls(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """What applies to a plugin that answered a call with an error: hosts that it could not reach, and files
    that the error names."""
    return tuple(filter(_is_of_call, advice))


def _is_of_call(advice: Advice) -> bool:
    return advice.kind == "host" or advice.what.startswith(f"{ITS_ANSWER} ")


def schema() -> dict[str, Any]:
    """The JSON Schema of a report, as shipped in the package."""
    import json
    import os

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report.v1.schema.json")
    with open(path, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document
