"""The request for each kind of call, and what its answer means.

    kind      name                  input                             value of the answer
    tool      a cli namespace       {"argv": ["…"]}, or nothing       {"stdout", "stderr", "exit_code"}
    render    a screen, or ""       {"width": 80, "height": 24}       what buffer.py makes of the answer
    action    an action             base64, integers, {"text": "…"}   {"payload"}

Bytes in a value are text if they are UTF-8, and {"base64": "…"} otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from runner.contracts.ainb import payload
from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.notifications import make_payload
from runner.contracts.ainb.screen import (
    Buffer,
    RenderFault,
    Rendering,
    Size,
    describe_rendering,
    read_rendering,
)
from runner.protocol.dialect import Call, CallRefused, Refusal
from runner.protocol.rpc_dialect import RpcCall, undeclared
from sandbox.document.diagnostic import quoted

CLI_DISPATCH = "plugin/cli_dispatch"
RENDER = "plugin/render"
ACTION_INVOKE = "host/action/invoke"

_MOST_U16, _MOST_U64 = 2**16 - 1, 2**64 - 1
_LEAST_I32, _MOST_I32 = -(2**31), 2**31 - 1
_UNSUPPORTED, _INVALID_PARAMS = "-32601", "-32602"
_LISTS = ("screens", "commands", "snapshots", "subscribes")
_MOST_STATUS = 255
MOST_CELLS = 1_000_000  # of one screen. Its lines are made of them, blanks included


class BadResult(Exception):
    """The answer to a call breaks the contract. The call has failed, and the plugin goes on."""


def entries(name: str, declared: Declared, description: str) -> Iterable[str | dict[str, Any]] | None:
    if name == "tools":
        return [{"name": each, "description": description} for each in declared.cli_namespaces]
    return getattr(declared, name) if name in _LISTS else None


def make_request(token: int, call: Call, declared: Declared, generation: int, seconds: float) -> RpcCall:
    """Raises CallRefused."""
    if call.kind == "tool":
        name = _known(token, "cli namespace", call.name, declared.cli_namespaces, "cli_namespaces")
        return RpcCall(CLI_DISPATCH, {"namespace": name, "argv": _argv(token, call.input)}, about="tool")
    if call.kind == "render":
        return _render(token, call, declared, generation)
    if call.kind == "action":
        name = _known(token, "action", call.name, declared.cli_namespaces, "cli_namespaces")
        try:
            data = make_payload(call.input)
        except payload.BadPayload as fault:
            message = f"the input of an action {fault}"
            raise _refuse(token, _INVALID_PARAMS, message, "invalid_params") from None
        params = {"action": name, "payload": data, "timeout_ms": int(seconds * 1000)}
        return RpcCall(ACTION_INVOKE, params, about="action")
    message = f"a plugin of this contract has no {call.kind}s: it has tools, renders, actions and events"
    raise _refuse(token, _UNSUPPORTED, message, "unsupported")


def _argv(token: int, given: Any) -> list[str]:
    if given is None:
        return []
    argv = given["argv"] if isinstance(given, Mapping) and set(given) == {"argv"} else None
    if not isinstance(argv, list | tuple) or not all(isinstance(each, str) for each in argv):
        message = 'the input of a tool is {"argv": ["…", …]}: what would stand on its command line'
        raise _refuse(token, _INVALID_PARAMS, message, "invalid_arguments")
    return list(argv)


def _render(token: int, call: Call, declared: Declared, generation: int) -> RpcCall:
    if call.name:
        _known(token, "screen", call.name, declared.screens, "screens")
    given = call.input if isinstance(call.input, Mapping) else {}
    size = {}
    for side in ("width", "height"):
        if type(given.get(side)) is not int or not 0 <= given[side] <= _MOST_U16:
            message = f'the input of a render is {{"width": 80, "height": 24}}; each is at most {_MOST_U16}'
            raise _refuse(token, _INVALID_PARAMS, message, "invalid_params")
        size[side] = given[side]
    if size["width"] * size["height"] > MOST_CELLS:
        message = f"a screen of more than {MOST_CELLS} cells is not rendered; ask for a smaller one"
        raise _refuse(token, _INVALID_PARAMS, message, "invalid_params")
    if stray := next((key for key in given if key not in ("width", "height", "generation")), None):
        message = f"the input of a render has {quoted(str(stray))}, which is not sent along"
        raise _refuse(token, _INVALID_PARAMS, message, "invalid_params")
    number = given.get("generation", generation)
    if type(number) is not int or not 0 <= number <= _MOST_U64:
        message = "generation is not an integer from 0 to 2^64-1"
        raise _refuse(token, _INVALID_PARAMS, message, "invalid_params")
    return RpcCall(RENDER, {"viewport": size, "generation": number}, about="render")


def _known(token: int, what: str, name: str, known: Collection[str], key: str) -> str:
    if name not in known:
        remedy = f"declare them under [provides].{key}"
        raise undeclared(token, what, name, known, remedy, " in the plugin's manifest", plural=key)
    return name


def _refuse(token: int, code: str, message: str, kind: str) -> CallRefused:
    return CallRefused(Refusal(token, code, message, kind))


# --- answers ----------------------------------------------------------------------------------------------


def read_dispatch(result: Any) -> dict[str, Any]:
    """The value of a tool. Raises BadResult."""
    if not isinstance(result, dict):
        raise BadResult("it is not an object")
    code = result.get("exit_code")
    if type(code) is not int or not _LEAST_I32 <= code <= _MOST_I32:
        raise BadResult("exit_code is missing or not an integer of 32 bits")
    return {
        "stdout": show_bytes(_bytes(result, "stdout")),
        "stderr": show_bytes(_bytes(result, "stderr")),
        "exit_code": code,
    }


class EarlyRendering(NamedTuple):
    """An answer with a large buffer, read in the thread that read its frame. Then the size that was asked for
    is not known, nor whether it was a render at all."""

    rest: dict[str, Any]  # the answer without its buffer
    rendering: Rendering | None
    fault: str = ""


def draw_early(value: Any) -> Any:
    """The message, with an answer that may be a render's already read."""
    result = value.get("result") if isinstance(value, dict) and value.get("method") is None else None
    if not isinstance(result, dict) or "buffer" not in result:
        return value
    rest = {key: each for key, each in result.items() if key != "buffer"}
    try:
        return {**value, "result": EarlyRendering(rest, read_rendering(result, Size(_MOST_U16, _MOST_U16)))}
    except RenderFault as fault:
        return {**value, "result": EarlyRendering(rest, None, str(fault))}


def undrawn(result: Any) -> Any:
    """An answer that is not a render's: nothing in it is called buffer."""
    return result.rest if isinstance(result, EarlyRendering) else result


def read_render(result: Any, width: int, height: int) -> dict[str, Any]:
    """The value of a render. Raises BadResult."""
    if not isinstance(result, EarlyRendering):
        try:
            return describe_rendering(read_rendering(result, Size(width, height)))
        except RenderFault as fault:
            raise BadResult(str(fault)) from None
    if result.rendering is None:
        raise BadResult(result.fault)
    return describe_rendering(_clip(result.rendering, width, height))


def _clip(rendering: Rendering, width: int, height: int) -> Rendering:
    buffer = rendering.buffer
    size = Size(min(buffer.size.width, width), min(buffer.size.height, height))
    if size == buffer.size:
        return rendering
    kept = {
        place: cell
        for place, cell in buffer.cells.items()
        if place[0] < size.height and place[1] < size.width
    }
    clipped = rendering.clipped + len(buffer.cells) - len(kept)
    return rendering._replace(buffer=Buffer(size, kept), clipped=clipped)


def read_action(result: Any) -> dict[str, Any]:
    """The value of an action. Raises BadResult."""
    if not isinstance(result, dict):
        raise BadResult("it is not an object")
    return {"payload": show_bytes(_bytes(result, "payload"))}


def _bytes(result: Mapping[str, Any], key: str) -> bytes:
    try:
        return payload.decode(result.get(key))
    except payload.BadPayload as fault:
        raise BadResult(f"{key} {fault}") from None


def show_bytes(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": payload.encode(data)}


def take_bytes(value: Any) -> bytes:
    """The inverse of show_bytes."""
    return value.encode() if isinstance(value, str) else payload.decode(value["base64"])


def exit_status(code: int) -> int:
    """The exit status of a shell for this code. A code outside of 0 to 255 is never 0 there."""
    return code if 0 <= code <= _MOST_STATUS else (code & _MOST_STATUS) or 1
