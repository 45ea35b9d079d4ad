"""The actions of `runner binding` that use bindings: calls, rollouts, records, and events for hooks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from runner.cli.serving.socket_option import ask
from runner.cli.serving.via import quote
from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.table import print_table
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

_VERB = "binding"
_BINDINGS = "/v1/plugin-bindings"
_RECORDS = "/v1/plugin-invocations"
_STATUSES = ("succeeded", "failed", "cancelled", "retryable_failure")
USAGE = {
    "invoke": "invoke ID|KIND/EXPORT --input JSON",
    "select": "select ID --sessions JSON|@FILE|-",
    "records": "records --since 1h",
    "event": "event TYPE --event JSON",
    "cancel": "cancel CALL",
}
HELP = (
    "; invoke: call its export, or by KIND/EXPORT (tools/search) the binding of the project or the org;"
    " select: which sessions its rollout includes; records: of calls; event: for hooks; cancel: a call"
)
_TITLES = ("CALL", "STARTED", "BINDING", "EXPORT", "STATUS", "CODE", "ORG", "SESSION")
_PAGE = 1000


def add_call_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", metavar="JSON|@FILE|-", help="for invoke")
    parser.add_argument(
        "--context", metavar="JSON|@FILE|-", help="for invoke and event: session_id, run_id, …"
    )
    parser.add_argument("--project", metavar="PROJECT", help="for invoke and event: in which project")
    parser.add_argument("--key", metavar="KEY", help="for invoke: the same key makes no second call")
    parser.add_argument("--timeout", metavar="TIME", help="for invoke: 500ms, 20s")
    parser.add_argument("--sessions", metavar="JSON|@FILE|-", help="for select: a list of ids")
    parser.add_argument("--event", metavar="JSON|@FILE|-", help="for event: its subject and summary")
    parser.add_argument("--id", metavar="ID", help="for event: the same id is stored once")
    parser.add_argument(
        "--since", metavar="TIME", help="for records: 2026-01-31T12:00:00Z, or 1h: an hour ago"
    )
    parser.add_argument("--until", metavar="TIME", help="for records: before then")
    parser.add_argument("--binding", metavar="ID", help="for records: only of this binding")
    parser.add_argument("--ended", choices=_STATUSES, help="for records: only with this status")
    parser.add_argument("--limit", metavar="N", type=int, default=_PAGE, help="for records: how many at most")
    parser.add_argument("--format", choices=("text", "jsonl"), default="text", help="for records")


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
        raise ValueError(f"write runner binding {USAGE['select']}, with a list of ids of sessions")
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
    import time

    return f"{time.time() - _seconds(option, word):.3f}"


def _seconds(option: str, word: str) -> float:
    from sandbox.units import parse_limit

    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"{option} {word}: {error}") from None
