"""What hosts of vai packages have to keep: the stand-in package that they start, and the rules."""

from __future__ import annotations

import re
from typing import Any, Final

from runner.conformance import host_checks as check
from runner.conformance.rules import not_blank

_MANIFEST: Final = """\
api_version = "vai.plugin.v1"
package_id = "runner/stand-in"
version = "0.1.0"
name = "Stand-in"

[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["./bin/plugin", "--stand-in"]

[[exports]]
id = "echo"
kind = "tool"

[exports.permissions]
network = "none"
filesystem = "none"

[exports.tool]
effect_class = "read_only"
input_schema = "schemas/input.json"
"""
_HOST: Final = {"role": "host", "host": {"name": not_blank, "version": not_blank}}
_INVOKED: Final = {"export_id": "echo", "tool_execution_id": not_blank, "input": object}
_INVOKE: Final = {"id": not_blank, "op": "tool.invoke", "body": _INVOKED}


def _utc(value: Any) -> str:
    fits = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value)
    return "" if fits else "it has to be a time in UTC (RFC 3339)"


_CONTEXT: Final = {
    "invocation_id": not_blank,
    "trace_id": not_blank,
    "deadline_at": _utc,
    "scratch_dir?": check.absent,
    "gateway?": check.absent,  # the export has neither scratch nor scopes
}


def _frame(kind: str, **fields: Any) -> Any:
    return {"protocol": "vai.rpc.v1", "type": kind, **fields}


def _hello(package: str) -> Any:
    return _frame("hello", role="plugin", plugin={"package_id": package, "version": "0.1.0"})


def _response(**body: Any) -> Any:
    return _frame("response", id="$id", ok=True, body=body)


_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(
        wire="Runtime Protocol", large="Runtime Protocol", unknown="Event", start="Hello", end="Shutdown"
    ),
    ("Each frame names the protocol.", "Protocol Frames", check.fields("*", {"protocol": "vai.rpc.v1"})),
    (
        "Only frames of a host are sent.",
        "Protocol Frames",
        check.only("hello", "request", "cancel", "shutdown"),
    ),
    ("The first frame is the host's hello.", "Hello", check.first("hello")),
    ("The hello has the host's name and version.", "Hello", check.fields("hello", _HOST)),
    ("A package with another id gets no request.", "Hello", check.refuses("request")),
    ("A request names the tool, its execution and input.", "Tool Contract", check.fields("request", _INVOKE)),
    (
        "The context has invocation, trace and deadline, and nothing that the export may not have.",
        "Invocation Context",
        check.fields("request", {"body": {"context": _CONTEXT}}),
    ),
    ("An isolated process gets one request.", "Execution Classes", check.at_most_one("request")),
    ("A cancel names a running request.", "Cancel", check.cancels("cancel", "request_id")),
    ("A cancel has a reason.", "Cancel", check.fields("cancel", {"reason": not_blank})),
    ("A failed invocation ends with shutdown too.", "Response", check.says_goodbye("shutdown", "error")),
    (
        "The program starts in the package, with its own words.",
        "Package Manifest",
        check.started("--stand-in", up=1),
    ),
    ("shutdown is the last frame.", "Shutdown", check.says_goodbye("shutdown")),
    ("A package that does not exit is ended.", "Shutdown", check.ends_it()),
)

STAND_IN: Final = check.StandIn(
    framing="length",
    files={"vai-plugin.toml": _MANIFEST, "schemas/input.json": '{"type": "object"}\n'},
    program="bin/plugin",
    about="It is the package runner/stand-in 0.1.0 with one export: the tool echo, which takes any object.",
    replies={
        "hello": check.StandInReply(
            _hello("runner/stand-in"), opening=True, other={"impostor": _hello("some/other")}
        ),
        "request": check.StandInReply(
            _response(status="succeeded", result={"content": [{"type": "text", "text": "$large"}]}),
            call=True,
            other={"error": _response(status="failed", error={"code": "tool.refused", "message": "refused"})},
        ),
        "shutdown": check.StandInReply(exits=True),
    },
    rules=check.number_rules("vai", "Plugin System", _ROWS),
    extra=(
        _frame("event", request_id="$id", event={"type": "progress", "message": "working"}),
        _frame("event", request_id="$id", event={"type": "unheard_of", "data": {}}),
    ),
)
