"""The plugin's requests and notifications: their parameters, and the errors that several of them share.

An object, or an array with the values in the order of FIELDS: the reference host takes both. Further keys are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runner.contracts.ainb.payload import BadPayload, decode
from runner.protocol.host_services import HostError
from runner.protocol.jsonrpc import INVALID_PARAMS

GET, PUBLISH, SUBSCRIBE = "host/snapshot/get", "host/snapshot/publish", "host/snapshot/subscribe"
INVOKE, LOG = "host/action/invoke", "host/log"
READ_DIR, READ_FILE, FETCH = "host/fs/read_dir", "host/fs/read_file", "host/network/fetch"
STREAM, STREAM_CANCEL = "host/event_stream_subscribe", "host/event_stream_cancel"
DIAL, SEND, CLOSE = "host/unix_socket_dial", "host/unix_socket_send", "host/unix_socket_close"
SPAWN, SECRET = "host/spawn_managed_subprocess", "host/secret_store_get"
WORKSPACES, ACTIVE = "host/workspace_list", "host/workspace_get_active"
SET_ACTIVE, SET_DEFAULT = "host/workspace_set_active", "host/workspace_set_default"
CREATE, DELETE = "host/workspace_create", "host/workspace_delete"

CAPABILITY_DENIED, ACTION_TIMEOUT, MANIFEST_VALIDATION = -32001, -32002, -32003
NOT_IMPLEMENTED, WORKSPACE_CREATION_DISABLED = -32005, -32008

FS_CAPABILITY = "read_paths"  # for every path that no other capability is for

NOTIFICATIONS = frozenset({PUBLISH, LOG, STREAM_CANCEL, SEND, CLOSE})

MOST_HEADERS = 256  # of one fetch
MOST_STRINGS = 1024  # of an array: arguments of a program

_MOST_INTEGER = 2**64 - 1  # u64
_MISSING: Any = object()
_DATA_MOST = 4096  # characters of a plugin's word in an error's data


class Field(NamedTuple):
    name: str
    read: Callable[[Any], Any]  # raises ValueError with half a sentence
    default: Any = _MISSING


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_INTEGER:
        raise ValueError("must be an integer from 0 to 2^64-1")
    return value


def _optional_natural(value: Any) -> int | None:
    return None if value is None else _natural(value)


def _optional_bytes(value: Any) -> bytes | None:
    return None if value is None else decode(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_STRINGS:
        raise ValueError(f"must be an array of at most {MOST_STRINGS} strings")
    return tuple(_text(each) for each in value)


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or len(value) > MOST_HEADERS:
        raise ValueError(f"must be an array of at most {MOST_HEADERS} pairs")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise ValueError("must be an array of pairs of strings")
    return tuple((name, text) for name, text in value)


def _anything(value: Any) -> Any:
    return value


_TOPIC = Field("topic", _text)
_PATH = Field("path", _text)
_STREAM = Field("stream_id", _text)
_WORKSPACE = Field("workspace_id", _text)

FIELDS: Mapping[str, tuple[Field, ...]] = {
    GET: (_TOPIC,),
    PUBLISH: (_TOPIC, Field("payload", decode)),
    SUBSCRIBE: (_TOPIC,),
    INVOKE: (Field("action", _text), Field("payload", decode), Field("timeout_ms", _natural, 0)),
    LOG: (Field("level", _text), Field("message", _text), Field("fields", _anything, None)),
    READ_DIR: (_PATH,),
    READ_FILE: (_PATH,),
    FETCH: (
        Field("url", _text),
        Field("method", _text, ""),
        Field("body", _optional_bytes, None),
        Field("headers", _pairs, ()),
    ),
    STREAM: (_TOPIC, Field("since_version", _optional_natural, None)),
    STREAM_CANCEL: (_STREAM,),
    SPAWN: (
        Field("bin", _text),
        Field("argv", _texts, ()),
        Field("env_allowlist", _texts, ()),
        Field("cwd", _optional_text, None),
    ),
    DIAL: (_PATH,),
    SEND: (_STREAM, Field("bytes", decode)),
    CLOSE: (_STREAM,),
    SECRET: (Field("scope", _text), Field("workspace_id", _optional_text, None), Field("key", _text)),
    WORKSPACES: (),
    ACTIVE: (),
    SET_ACTIVE: (_WORKSPACE,),
    SET_DEFAULT: (_WORKSPACE,),
    CREATE: (Field("slug", _text), Field("name", _text)),
    DELETE: (_WORKSPACE,),
}


def check_params(method: str, params: Any) -> dict[str, Any]:
    """The parameters by name, with defaults. Raises HostError."""
    fields = FIELDS[method]
    if params is None and not fields:
        return {}
    if isinstance(params, list):
        if len(params) > len(fields):
            raise invalid(f"there are {len(params)} parameters, and {method} has {len(fields)}")
        given: Mapping[str, Any] = dict(zip((field.name for field in fields), params, strict=False))
    elif isinstance(params, Mapping):
        given = params
    else:
        raise invalid("they must be an object")
    checked = {}
    for field in fields:
        value = given.get(field.name, field.default)
        if value is _MISSING:
            raise invalid(f"{field.name} is missing")
        try:
            checked[field.name] = value if field.name not in given else field.read(value)
        except (BadPayload, ValueError) as error:
            raise invalid(f"{field.name} {error}") from None
    return checked


def invalid(reason: str) -> HostError:
    return HostError(INVALID_PARAMS, f"invalid params: {reason}")


def denied(capability: str, **data: str) -> HostError:
    cut = {name: text[:_DATA_MOST] for name, text in data.items()}
    return HostError(CAPABILITY_DENIED, f"capability denied: {capability}", cut or None)
