"""`runner call --via SOCKET`: a call that a daemon makes. Imports as little as it can."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from runner.cli.shared.json_option import read_json_option
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.client import Client, NoDaemon
from sandbox.document.diagnostic import printable
from sandbox.units import parse_limit

_OPTIONS = ("--input", "--kind", "--timeout", "--context", "--key")
_SWITCHES = ("--json",)
_MOST_KEY = 255  # as runner/serve/routes.py has it
# Codes of the door for requests that it did not accept, beside those of runner/outcome.py.
_BUSY = ("draining", "ledger", "busy")


def call_via(words: Sequence[str]) -> int:
    try:
        given, names = read_words(words)
        seconds = read_seconds(given.get("--timeout"))
        document = read_document(given, names[1])
    except ValueError as error:
        return _fail(f"runner call: {error}", USAGE_ERROR)
    headers = {"Content-Type": "application/json"}
    if seconds is not None:
        headers["Runner-Deadline"] = f"{seconds:g}"
    if "--key" in given:
        headers["Idempotency-Key"] = given["--key"]
    try:
        with Client(given["--via"]) as client:
            answer = client.request("POST", f"/plugins/{quote(names[0])}/calls", _present(document), headers)
            found = answer.json()
    except NoDaemon as error:
        message = f"runner call: {error}; start one with runner serve --socket {given['--via']}"
        return _fail(message, EXIT["launch_failed"])
    return tell_answer(answer.status, found, as_json="--json" in given)


def tell_answer(status: int, found: Any, *, as_json: bool) -> int:
    """Print the value, or the error. Returns the exit status."""
    if status != 200:
        return tell_error(status, found, as_json=as_json)
    pretty = 2 if sys.stdout.isatty() and not as_json else None
    print(json.dumps(found["value"], ensure_ascii=False, indent=pretty))
    return 0


def tell_error(status: int, found: Any, *, as_json: bool = False) -> int:
    """Print the error that the door answered with. Returns the exit status."""
    error = found.get("error", {}) if isinstance(found, dict) else {}
    code = str(error.get("code", status))
    if as_json:
        print(json.dumps(found), file=sys.stderr)
    else:
        phase = f" in {error['phase']}" if error.get("phase") else ""
        cause = f" ({error['cause']})" if error.get("cause") else ""
        hint = f"; {error['hint']}" if error.get("hint") else ""
        text = f"{code}{phase}{cause}: {error.get('message', '')}{hint}"
        print(f"runner: {printable(text)}", file=sys.stderr)
    if code in EXIT:
        return next(number for name, number in EXIT.items() if name == code)
    if code in _BUSY or status == 429:
        return EXIT["overloaded"]
    if status == 501:  # the door has no such thing, whatever is asked of it: that of a fleet has no logs
        return USAGE_ERROR
    if status in (401, 403):
        return EXIT["policy_denied"]
    return USAGE_ERROR if status < 500 else EXIT["internal"]


def quote(name: str) -> str:
    """A plugin's name as part of a path."""
    safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-~@"
    return "".join(
        char if char in safe else "".join(f"%{byte:02X}" for byte in os.fsencode(char)) for char in name
    )


def name_fault(name: str) -> str:
    """Why this cannot be the name of a plugin of a daemon, or ''."""
    if "/" not in name:
        return ""
    return f"{name!a} is a path, and a daemon knows its plugins by their names; runner ps lists them"


def read_words(
    words: Sequence[str], place: str = "--via SOCKET", switches: Sequence[str] = _SWITCHES
) -> tuple[dict[str, str], list[str]]:
    """The options and the two names. `place`: the option that says where the call goes. Raises ValueError."""
    option = place.partition(" ")[0]
    given: dict[str, str] = {}
    names: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word in switches:
            given[word] = ""
        elif name in (option, *_OPTIONS):
            if not equals and not left:
                raise ValueError(f"{name} takes a value")
            given[name] = value if equals else left.pop(0)
        elif word.startswith("-") and word != "-":
            owner = "the daemon's" if option == "--via" else "the workers'"
            raise ValueError(
                f"{name} does not go with {option}: policy and limits are {owner}; leave one of them out"
            )
        else:
            names.append(word)
    key = given.get("--key", "x")
    # A line break in it would begin another header, or another request.
    if not (0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable()):
        raise ValueError(f"--key takes 1 to {_MOST_KEY} printable ASCII characters")
    if option == "--via" and names and (fault := name_fault(names[0])):
        raise ValueError(fault)
    if len(names) != 2 or not all(names):
        lists = "runner ps" if option == "--via" else "runner ps --fleet"
        raise ValueError(f"write runner call {place} PLUGIN NAME; {lists} lists the plugins")
    return given, names


def read_document(given: dict[str, str], tool: str) -> dict[str, Any]:
    """The body of the call. Raises ValueError."""
    return {
        "tool": tool,
        "input": _json("--input", given.get("--input")),
        "kind": given.get("--kind"),
        "context": _json("--context", given.get("--context")),
    }


def _json(option: str, word: str | None) -> Any:
    if word is None:
        return None
    try:
        return json.loads(word)  # the daemon reads it again, by stricter rules
    except (ValueError, RecursionError):
        pass
    # A file, stdin, or a fault that this names.

    return read_json_option(option, word)


def read_seconds(word: str | None) -> float | None:
    if word is None:
        return None

    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"--timeout {word}: {error}") from None


def _present(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}


def _fail(message: str, status: int) -> int:
    print(printable(message), file=sys.stderr)
    return status
