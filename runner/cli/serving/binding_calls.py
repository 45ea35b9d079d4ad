"""The actions of `runner binding` that use bindings: calls, rollouts, records, and events for hooks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from runner.cli.serving.socket_option import ask
from runner.cli.serving.via import quote
from runner.cli.shared.actions import Actions, argument
from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.table import print_table
from sandbox.document.diagnostic import printable
from sandbox.units import parse_limit

_VERB = "binding"
_BINDINGS = "/v1/plugin-bindings"
_RECORDS = "/v1/plugin-invocations"
_STATUSES = ("succeeded", "failed", "cancelled", "retryable_failure")
_TITLES = ("CALL", "STARTED", "BINDING", "EXPORT", "STATUS", "CODE", "ORG", "SESSION")
_PAGE = 1000


_JSON = "JSON|@FILE|-"
_WHERE = (
    argument("--context", _JSON, "session_id, run_id, …"),
    argument("--org", "ORG", "of this org"),
    argument("--project", "PROJECT", "in which project"),
)
ACTIONS: Actions = {
    "invoke": (
        "call the export of a binding, or of the project's or the org's binding of KIND/EXPORT",
        (
            argument("which", "ID|KIND/EXPORT", "the binding, or what it binds, as tools/search"),
            argument("--input", _JSON, "the input of the call"),
            *_WHERE,
            argument("--key", "KEY", "the same key makes no second call"),
            argument("--timeout", "TIME", "500ms, 20s"),
        ),
    ),
    "select": (
        "say which sessions a binding's rollout includes",
        (
            argument("which", "ID", "the binding; runner binding list lists them"),
            argument("--sessions", _JSON, "a list of ids", required=True),
        ),
    ),
    "records": (
        "list the records of calls",
        (
            argument("--since", "TIME", "2026-01-31T12:00:00Z, or 1h: an hour ago"),
            argument("--until", "TIME", "before then"),
            argument("--binding", "ID", "only of this binding"),
            argument("--ended", None, "only with this status", choices=_STATUSES),
            argument("--org", "ORG", "only of this org"),
            argument("--limit", "N", "how many at most", type=int, default=_PAGE),
            argument("--format", None, "default: text", choices=("text", "jsonl"), default="text"),
        ),
    ),
    "event": (
        "tell the hooks about an event",
        (
            argument("which", "TYPE", "of the event"),
            argument("--event", _JSON, "its subject and summary"),
            *_WHERE,
            argument("--id", "ID", "the same id is stored once"),
        ),
    ),
    "cancel": ("cancel a call", (argument("which", "CALL", "runner binding records lists them"),)),
}


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for wrong usage."""
    found = {"invoke": _invoke, "select": _select, "event": _event, "cancel": _cancel, "records": _records}
    return found[args.action](args)


def _invoke(args: argparse.Namespace) -> int:
    context = _context(args)
    kind, slash, export = args.which.partition("/")
    place = f"/v1/plugin-{quote(kind)}/{quote(export)}" if slash else f"{_BINDINGS}/{quote(args.which)}"
    given = {"input": read_json_option("--input", args.input), "context": context}
    headers = {} if args.key is None else {"Idempotency-Key": args.key}
    if not all(each.isprintable() and each.isascii() for each in headers.values()):
        raise ValueError("--key takes printable ASCII characters")
    if args.timeout is not None:
        headers["Runner-Deadline"] = f"{_seconds('--timeout', args.timeout):g}"
    given = {key: value for key, value in given.items() if value not in (None, {})}
    found = ask(args, _VERB, "POST", f"{place}:invoke", given, headers)
    if isinstance(found, int):
        return found
    print(json.dumps(found if args.json else found["value"], ensure_ascii=args.json))
    return 0


def _context(args: argparse.Namespace) -> dict[str, Any]:
    context = read_json_option("--context", args.context) or {}
    if not isinstance(context, dict):
        raise ValueError("--context takes an object")
    given = {"org_id": args.org, "project_id": args.project}
    return {**context, **{key: value for key, value in given.items() if value is not None}}


def _select(args: argparse.Namespace) -> int:
    sessions = read_json_option("--sessions", args.sessions)
    if not isinstance(sessions, list):
        raise ValueError("--sessions takes a list of ids of sessions")
    path = f"{_BINDINGS}/{quote(args.which)}:select"
    found = ask(args, _VERB, "POST", path, {"session_ids": sessions})
    if isinstance(found, int):
        return found
    if args.json:
        print(json.dumps(found))
        return 0
    for each in found["included"]:
        print(printable(each))
    count = f"{len(found['included'])} of {len(sessions)} sessions"
    print(f"{count} are included, by a rollout to {found['traffic_percent']} percent", file=sys.stderr)
    return 0


def _event(args: argparse.Namespace) -> int:
    event = read_json_option("--event", args.event)
    if not isinstance(event, dict | None):
        raise ValueError("--event takes an object")
    given = {**_context(args), "event": {**(event or {}), "type": args.which}}
    given |= {} if args.id is None else {"id": args.id}
    found = ask(args, _VERB, "POST", "/v1/plugin-events", given)
    if isinstance(found, int):
        return found
    if args.json:
        print(json.dumps(found))
    else:
        rows = [(each["id"], each["binding_id"], each["hook"], each["state"]) for each in found["deliveries"]]
        print_table(("DELIVERY", "BINDING", "HOOK", "STATE"), rows)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    found = ask(args, _VERB, "DELETE", f"{_RECORDS}/{quote(args.which)}")
    return found if isinstance(found, int) else 0


def _records(args: argparse.Namespace) -> int:
    if args.limit < 1:
        raise ValueError("--limit takes a number above 0")
    query = {
        "since": _moment("--since", args.since),
        "until": _moment("--until", args.until),
        "binding": args.binding,
        "status": args.ended,
        "org": args.org,
    }
    words = [f"{key}={quote(value)}" for key, value in query.items() if value is not None]
    rows: list[dict[str, Any]] = []
    after, left = "", args.limit
    while True:
        path = "&".join([f"{_RECORDS}?limit={min(left, _PAGE)}", *words])
        found = ask(args, _VERB, "GET", path + after)
        if isinstance(found, int):
            return found
        left -= len(found["invocations"])
        if args.format == "jsonl" or args.json:
            for each in found["invocations"]:
                print(json.dumps(each))
        else:
            rows += found["invocations"]
        if found["after"] is None or left <= 0:
            break
        after = f"&after={found['after']}"
    if args.format == "text" and not args.json:
        print_table(_TITLES, [_row(each) for each in rows])
    return 0


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    named = ("invocation_id", "started_at", "binding_id", "", "status", "code", "org_id", "session_id")
    return tuple(str(each["export"]["id"] if not key else each[key] or "") for key in named)


def _moment(option: str, word: str | None) -> str | None:
    """A time as the door reads it. A duration is that long ago."""
    if word is None or "T" in word or word.isdecimal():
        return word

    return f"{time.time() - _seconds(option, word):.3f}"


def _seconds(option: str, word: str) -> float:
    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"{option} {word}: {error}") from None
