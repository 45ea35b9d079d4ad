"""A rune plugin's handshake and response: read as its first host reads them, and checked in its order.

The JSON is Go's. null is the empty value of whatever was expected, a known field of another type spoils the
whole line, and an unknown field is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from runner.contracts.rune.terms import PROTOCOL
from runner.outcome import Code
from runner.plugin import Plugin
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import Message, Violation
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

# The characters that the first host (Go's strings.TrimSpace) takes for blank. str.strip() takes four more.
BLANKS: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


# The keys of a handshake and of a response that are read.
WORDS: Final = frozenset(
    (
        "type manifest plugin_id plugin_version protocol_version exposed_tools capabilities request_id"
        " status output error code message metadata"
    ).split()
)


class Handshake(NamedTuple):
    type: str
    plugin_id: str
    plugin_version: str
    protocol_version: str
    exposed_tools: tuple[str, ...]
    capabilities: tuple[str, ...]


class Response(NamedTuple):
    type: str
    request_id: str
    status: str
    output: Any
    error: tuple[str, str] | None  # code, message


class BrokenContract(Exception):
    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.message)
        self.violation = violation


class WrongType(Exception):
    def __init__(self, where: str, wanted: str) -> None:
        super().__init__(f"{where} has to be {wanted}")


def message_value(message: Message, what: str, plugin_id: str | None) -> Any:
    if not message.fault:
        return message.value
    shown = f" in {quoted(message.raw.decode('utf-8', 'replace'))}" if message.raw else ""
    raise BrokenContract(
        Violation(
            "malformed_response",
            f"its {what} cannot be read: {message.detail}{shown}",
            message.fault,
            "only the protocol may go to stdout; write everything else to stderr",
            plugin_id=plugin_id,
        )
    )


def read_handshake(value: Any) -> Handshake:
    try:
        top = _object(value, "the handshake")
        said = _object(top.get("manifest"), "manifest")
        return Handshake(
            _text(top, "type"),
            _text(said, "plugin_id", "manifest."),
            _text(said, "plugin_version", "manifest."),
            _text(said, "protocol_version", "manifest."),
            _texts(said, "exposed_tools", "manifest."),
            _texts(said, "capabilities", "manifest."),
        )
    except WrongType as wrong:
        _violated("malformed_response", f"its handshake has a wrong shape: {wrong}", "bad_type")


def read_response(value: Any, plugin_id: str) -> Response:
    try:
        top = _object(value, "the response")
        _object(top.get("metadata"), "metadata")
        error = None
        if top.get("error") is not None:
            said = _object(top["error"], "error")
            error = _text(said, "code", "error."), _text(said, "message", "error.")
        return Response(
            _text(top, "type"), _text(top, "request_id"), _text(top, "status"), top.get("output", {}), error
        )
    except WrongType as wrong:
        message = f"its response has a wrong shape: {wrong}"
        _violated("malformed_response", message, "bad_type", plugin_id=plugin_id)


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WrongType(where, "an object")
    return value


def _text(table: dict[str, Any], key: str, prefix: str = "") -> str:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise WrongType(prefix + key, "a string")
    return value or ""


def _texts(table: dict[str, Any], key: str, prefix: str) -> tuple[str, ...]:
    value = table.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(item is None or isinstance(item, str) for item in value):
        raise WrongType(prefix + key, "an array of strings")
    return tuple(item or "" for item in value)


def check_handshake(said: Handshake, plugin: Plugin, tool: str | None, allowed: frozenset[str]) -> None:
    """The checks are in the contract's order. Raises BrokenContract."""
    if said.type != "handshake":
        message = f"its first message is of type {quoted(said.type)} and not a handshake"
        _violated("handshake_failed", message, "message_type")
    own = said.plugin_id
    if said.protocol_version.strip(BLANKS) != PROTOCOL:
        message = f"it speaks {quoted(said.protocol_version)}; the runner speaks {PROTOCOL}"
        _violated("protocol_version_mismatch", message, "protocol_version", plugin_id=own)
    if is_blank(own):
        _violated("handshake_failed", "its handshake has no plugin_id", "plugin_id_missing")
    if is_blank(said.plugin_version):
        message = "its handshake has no plugin_version"
        _violated("handshake_failed", message, "plugin_version_missing", plugin_id=own)
    if not said.exposed_tools:
        message = "its handshake has no exposed_tools"
        _violated("handshake_failed", message, "exposed_tools_missing", plugin_id=own)
    if own != plugin.id:
        message = f"it calls itself {quoted(own)}, the bundle calls it {quoted(plugin.id)}"
        hint = "use the same plugin_id in the handshake and in the manifest"
        _violated("handshake_failed", message, "plugin_id_mismatch", hint, own)
    if tool is not None and tool not in said.exposed_tools:
        raise BrokenContract(not_exposed(tool, said.exposed_tools, own))
    _check_capabilities(said, plugin, allowed)


def _check_capabilities(said: Handshake, plugin: Plugin, allowed: frozenset[str]) -> None:
    own = said.plugin_id
    if allowed and not said.capabilities:
        message = "it declares no capabilities, although its bundle lists some"
        hint = "declare in the handshake the capabilities it uses, or list none in the manifest"
        _violated("capability_not_declared", message, "capabilities_missing", hint, own)
    seen: set[str] = set()
    for name in said.capabilities:
        if not is_canonical(name):
            message = f"the capability {quoted(name)} it declares is empty or has blanks around it"
            _violated("capability_not_declared", message, "capability_blank", plugin_id=own)
        if name in seen:
            message = f"it declares the capability {quoted(name)} twice"
            _violated("capability_not_declared", message, "capability_repeated", plugin_id=own)
        seen.add(name)
        if name not in allowed:
            listed = name in plugin.capabilities
            message = f"it declares the capability {quoted(name)}, which " + (
                "the policy does not let plugins declare" if listed else "its bundle does not list"
            )
            hint = (
                "allow it in the policy: declare under [capabilities]"
                if listed
                else "list it in the manifest"
            )
            cause = "policy" if listed else "bundle"
            _violated("capability_not_allowed", message, cause, hint, own)


def check_response(said: Response, request_id: str | None, plugin_id: str) -> None:
    """The checks are in the contract's order. Raises BrokenContract."""
    fault: tuple[str, str] | None = None
    if said.type != "response":
        fault = f"a message of type {quoted(said.type)} where the response should be", "message_type"
    elif request_id is None:
        fault = "a response before the request", "request_id"
    elif said.request_id != request_id:
        fault = f"a response to {quoted(said.request_id)}, asked was {quoted(request_id)}", "request_id"
    elif said.status not in ("ok", "error"):
        fault = f"a response whose status is {quoted(said.status)}, neither 'ok' nor 'error'", "status"
    elif said.status == "ok" and said.error is not None:
        fault = "a response that is 'ok' and has an error", "error_with_ok"
    elif said.status == "error" and (said.error is None or is_blank(said.error[1])):
        fault = "an error without a message", "error_missing"
    if fault is not None:
        _violated("malformed_response", f"it sent {fault[0]}", fault[1], plugin_id=plugin_id)


def check_keys(value: Any, part: str, plugin_id: str) -> None:
    """Whether the first host, which ignores case in keys, reads the message as we do. Raises
    BrokenContract."""
    inner = value.get(part) if isinstance(value, dict) else None
    if odd := odd_key(value, WORDS) or odd_key(inner, WORDS):
        _violated("malformed_response", f"it sent {odd}", "ambiguous", plugin_id=plugin_id)


def not_exposed(tool: str, exposed: Sequence[str], plugin_id: str, token: int | None = None) -> Violation:
    message = f"it does not expose the tool {quoted(tool)}"
    shown = ", ".join(quoted(name) for name in exposed[:8]) + (", …" if len(exposed) > 8 else "")
    return Violation("tool_not_exposed", message, "exposed_tools", f"exposed: {shown}", token, plugin_id)


def _violated(code: Code, message: str, cause: str, hint: str = "", plugin_id: str | None = None) -> NoReturn:
    raise BrokenContract(Violation(code, message, cause, hint, plugin_id=plugin_id))


def is_blank(text: str) -> bool:
    return not text.strip(BLANKS)


def is_canonical(name: str) -> bool:
    return bool(name) and name == name.strip(BLANKS)
