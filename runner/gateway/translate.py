"""From what plugins of any contract list and answer to what a client of MCP reads."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mcp_types import methods
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from runner.approvals.tools import INVISIBLE
from runner.contracts.contract import CommandOutput
from runner.gateway.names import public_name, public_uri
from sandbox.document.diagnostic import cut

MOST_DESCRIPTION = 8 << 10  # characters
MOST_ENTRY_BYTES = 128 << 10  # of one entry as JSON: clients give all of it to a language model
# Lists, objects and keys of one result, and of one list of one plugin. The SDK and our own check take some
# 20 µs for each, in the loop that serves all clients.
MOST_VALUES = 100_000
_CONTAINERS = (dict, list, tuple)
_MOST_TEXT = 1000  # characters of a progress message
_PROTOCOL = "io.modelcontextprotocol/"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_EFFECTS = {
    "read_only": {"readOnlyHint": True},
    "idempotent_write": {"readOnlyHint": False, "idempotentHint": True},
    "non_idempotent_write": {"readOnlyHint": False, "idempotentHint": False},
}
_HIDDEN = ("Cf", "Cs", "Co", "Cn")  # formats such as reversed text, surrogates, private use, unassigned
# method -> key without which its result is none
_RESULTS = {
    "tools/call": "content",
    "prompts/get": "messages",
    "resources/read": "contents",
    "completion/complete": "completion",
}
_CONTENT = {"text": "text", "image": "data", "audio": "data", "resource_link": "uri", "resource": "resource"}
# name of a list -> method, key of its result, key of an entry's name
LISTS: Mapping[str, tuple[str, str, str]] = {
    "tools": ("tools/list", "tools", "name"),
    "prompts": ("prompts/list", "prompts", "name"),
    "resources": ("resources/list", "resources", "uri"),
    "resource_templates": ("resources/templates/list", "resourceTemplates", "uriTemplate"),
}


class UnfitEntry(Exception):
    """An entry that cannot be shown."""


class Shown(NamedTuple):
    """One entry of a list."""

    plugin: str
    own: str  # the plugin's own name or URI
    public: str
    entry: Mapping[str, Any]  # as a client reads it


def shown(what: str, plugin: str, entry: Mapping[str, Any], *, passes: bool) -> Shown:
    """`passes`: the entry is MCP's own already. Raises UnfitEntry."""
    key = LISTS[what][2]
    own = entry.get(key)
    if not isinstance(own, str) or not own:
        raise UnfitEntry(f"it has no {key}")
    public = public_name(plugin, own) if key == "name" else public_uri(plugin, own)
    made = dict(entry) if passes else _tool(entry)
    if what == "tools":
        made["inputSchema"] = _input_schema(made.get("inputSchema"))
    try:
        size = len(json.dumps(made))
    except (ValueError, TypeError, RecursionError):
        raise UnfitEntry("it is not JSON") from None
    if size > MOST_ENTRY_BYTES:
        raise UnfitEntry(f"its entry has {size} bytes, and {MOST_ENTRY_BYTES} is the most")
    made = _cleaned(made)
    if isinstance(made.get("description"), str):
        made["description"] = cut(made["description"], MOST_DESCRIPTION)
    made[key] = public
    _check(what, made)
    return Shown(plugin, own, public, made)


def _tool(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of another contract."""
    made: dict[str, Any] = {"name": "", "description": str(entry.get("description") or "")}
    made["inputSchema"] = entry.get("inputSchema", entry.get("input_schema"))
    output = entry.get("output_schema")
    if isinstance(output, dict) and output.get("type") == "object":
        made["outputSchema"] = output
    if entry.get("effect_class") in _EFFECTS:
        made["annotations"] = _EFFECTS[entry["effect_class"]]
    return made


def _input_schema(schema: Any) -> Mapping[str, Any]:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return _ANY_OBJECT
    return {"type": "object", **schema}


def _check(what: str, made: Mapping[str, Any]) -> None:
    """One entry that some version of the protocol refuses would take the whole list away."""
    method, key, _ = LISTS[what]
    surfaces: list[Any] = []
    for version in (*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS):
        surface = methods.SERVER_RESULTS.get((method, version))
        if surface is None or surface in surfaces:
            continue
        surfaces.append(surface)
        try:
            methods.serialize_server_result(method, version, finished({key: [made]}))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(each) for each in first["loc"][1:])
            raise UnfitEntry(f"it does not fit the protocol: {where[-100:]}: {first['msg'][:100]}") from None


def _cleaned(value: Any) -> Any:
    """Without characters that people do not see and language models read."""
    if isinstance(value, str):
        if value.isascii() and value.isprintable():
            return value
        return "".join(char for char in value if char in "\n\t" or _is_seen(char))
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    return value


def _is_seen(char: str) -> bool:
    category = unicodedata.category(char)
    return category != "Cc" and category not in _HIDDEN and not INVISIBLE.match(char)


def finished(result: Mapping[str, Any]) -> dict[str, Any]:
    """A whole result. The newer protocol wants to know how long it may be kept: not at all, because a client
    may not be told that it changes. What a plugin says about the protocol is about its own conversation."""
    kept = {**result, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    meta = kept.pop("_meta", None)
    if isinstance(meta, Mapping):
        kept["_meta"] = {key: each for key, each in meta.items() if not key.startswith(_PROTOCOL)}
    return kept


# --- answers ------------------------------------------------------------------------------------------------


def value_result(value: Any) -> dict[str, Any]:
    """Any JSON value, of a contract that knows nothing of content."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    result: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
    return {**result, "structuredContent": value} if isinstance(value, dict) else result


def command_result(value: Any, output: CommandOutput) -> dict[str, Any]:
    """What a command wrote. `value`: the plugin's own answer."""
    parts = (output.stdout.decode("utf-8", "replace"), output.stderr.decode("utf-8", "replace"))
    content = [{"type": "text", "text": part} for part in parts if part]
    return {"content": content, "structuredContent": value, "isError": output.status != 0}


def is_sound(method: str, version: str, result: Mapping[str, Any]) -> bool:
    """Whether a client of this version can read a result. The SDK would print a traceback, or take a faulty
    result for one of another kind and leave its content out."""
    try:
        return _RESULTS[method] in methods.serialize_server_result(method, version, result)
    except ValidationError:
        return False


def count_values(value: Any, most: int) -> int:
    """How many lists, objects and keys a JSON value has. Stops soon after `most`."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        each = waiting.pop()
        is_object = isinstance(each, dict)
        inner = each.values() if is_object else each
        count += 1 + len(inner) * is_object
        waiting += [value for value in inner if isinstance(value, _CONTAINERS)]
    return count


def content_result(plugin: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a tool. One that says nothing stays without content, and no client can read it."""
    kept = ("structuredContent", "isError", "_meta")
    result = {key: value[key] for key in kept if value.get(key) is not None}
    if "content" not in value and "structuredContent" not in result and not result.get("isError"):
        return result
    return {"content": [_part(plugin, part) for part in value.get("content", ())], **result}


def prompt_result(plugin: str, value: Mapping[str, Any]) -> dict[str, Any]:
    messages = [{**each, "content": _part(plugin, each.get("content"))} for each in value["messages"]]
    return {**value, "messages": messages}


def resource_result(plugin: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, "contents": [_with_uri(plugin, each) for each in value["contents"]]}


def _part(plugin: str, part: Any) -> Any:
    """A part of content. Its URIs lead back to the plugin; what is no content becomes text."""
    kind = part.get("type") if isinstance(part, dict) else None
    need = _CONTENT.get(kind) if isinstance(kind, str) else None
    if need is None or not isinstance(part.get(need), dict if need == "resource" else str):
        return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    if kind == "resource_link":
        return _with_uri(plugin, part)
    if kind == "resource":
        return {**part, "resource": _with_uri(plugin, part["resource"])}
    return part


def _with_uri(plugin: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    uri = entry.get("uri")
    return {**entry, "uri": public_uri(plugin, uri)} if isinstance(uri, str) else dict(entry)


def error_text(error: Mapping[str, Any]) -> str:
    """What went wrong, for people: `error` has code, phase, message and hint."""
    phase = f" ({error['phase']})" if error.get("phase") else ""
    hint = f"\n{error['hint']}" if error.get("hint") else ""
    return f"{error['code']}{phase}: {error['message']}{hint}"


def error_result(error: Mapping[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": error_text(error)}]
    return {"content": content, "isError": True, "_meta": {"runner/error": dict(error)}}


def progress_of(value: Mapping[str, Any], count: int) -> tuple[float, float | None, str | None]:
    """Progress, total and message of news about a call, of any contract. `count`: of the news so far."""
    given, total, message = value.get("progress"), value.get("total"), value.get("message")
    numbers: Sequence[type] = (int, float)
    if type(given) not in numbers:
        return float(count), None, cut(json.dumps(value, ensure_ascii=False), _MOST_TEXT)
    said = cut(message, _MOST_TEXT) if isinstance(message, str) else None
    return float(given or 0), float(total) if type(total) in numbers and total else None, said
