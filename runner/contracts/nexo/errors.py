"""The meaning of a plugin's error: the contract's error codes, by the method that was called.

The reference host looks for the code in the text of its own log line, where there is none. Here the code is
read from the error object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.protocol.dialect import Refusal
from sandbox.speed.value import NamedTuple

TOOL_NOT_FOUND, TOOL_ARGUMENT_INVALID = -33401, -33402


class Meaning(NamedTuple):
    kind: str
    # The fields of `data` that the contract promises, with the value for a missing one. MESSAGE stands for
    # the message of the error.
    fields: tuple[tuple[str, Any], ...] = ()


MESSAGE = object()

_CHANNEL = {
    -32601: Meaning("unsupported", (("feature", MESSAGE),)),
    -33001: Meaning("connection"),
    -33002: Meaning("authentication"),
    -33003: Meaning("recipient", (("recipient", ""), ("reason", MESSAGE))),
    -33004: Meaning("rate_limited", (("retry_after_secs", 0),)),
    -33005: Meaning("unsupported", (("feature", MESSAGE),)),
}
_LLM = {
    -33101: Meaning("connection"),
    -33102: Meaning("authentication"),
    -33103: Meaning("rate_limited", (("retry_after_secs", 0),)),
    -33104: Meaning("model_not_found"),
    -33105: Meaning("context_overflow"),
}
_MEMORY = {
    -33301: Meaning("collection_not_found", (("collection", ""),)),
    -33302: Meaning("dimension_mismatch", (("expected", None), ("got", None))),
    -33303: Meaning("rate_limited", (("retry_after_secs", 0),)),
    -33304: Meaning("write_failed"),
}
_TOOL = {
    TOOL_NOT_FOUND: Meaning("tool_not_found"),
    TOOL_ARGUMENT_INVALID: Meaning("invalid_arguments", (("details", None),)),
    -33403: Meaning("execution_failed"),
    -33404: Meaning("unavailable", (("retry_after_ms", None),)),
    -33405: Meaning("denied"),
}
_ANY = {
    -32700: Meaning("parse_error"),
    -32600: Meaning("invalid_request"),
    -32601: Meaning("unsupported"),
    -32602: Meaning("invalid_params"),
    -32603: Meaning("internal"),
    -32000: Meaning("shutdown_failed"),
}

# By the first word of the method. Outbound tools, which the manifest describes, use the codes of channels
# too.
_FAMILIES: Mapping[str, Mapping[int, Meaning]] = {
    "channel": _CHANNEL,
    "llm": _LLM,
    "memory": _MEMORY,
    "tool": _TOOL,
    "outbound_tool": {**_CHANNEL, **_TOOL},
}


def make_refusal(call: int, family: str, code: int, message: str, data: Any) -> Refusal:
    """The answer to a call that a plugin refused, with all fields of `data` that the contract promises."""
    text = message or f"the plugin answered with error {code}"
    meaning = _FAMILIES.get(family, {}).get(code) or _ANY.get(code) or Meaning("other")
    if meaning.fields:
        given = data if isinstance(data, dict) else {}
        data = {name: text if value is MESSAGE else value for name, value in meaning.fields} | given
    return Refusal(call, str(code), text, meaning.kind, data)
