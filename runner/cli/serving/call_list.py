"""`runner ctl calls`: the calls that a daemon has in its ledger."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from runner.cli.serving.socket_option import ask
from runner.cli.serving.via import quote
from runner.cli.shared.table import print_table
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable
from sandbox.units import parse_duration

_TITLES = ("ACCEPTED", "ID", "PLUGIN", "CALLED", "OUTCOME", "SECONDS", "CALLER")
_MOST = 100
_MOST_OF_PAGE = 1000  # of runner/ledger/file.py


def add_call_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--code", metavar="CODE", help="only with this outcome, such as timeout")
    for option, which in (("--since", "then or later"), ("--until", "before")):
        parser.add_argument(
            option,
            metavar="TIME",
            help=f"only those accepted {which}: 2026-01-31T12:00:00Z, or 10m for ten minutes ago",
        )
    parser.add_argument("--most", metavar="N", type=int, help=f"how many (default: {_MOST})")
    parser.add_argument("--after", metavar="ID", help="those that follow this call in the list")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")


def list_calls(args: argparse.Namespace) -> int:
    wanted = _MOST if args.most is None else args.most
    try:
        if wanted < 1:
            raise ValueError(f"--most {args.most}: write a number of calls from 1 on")
        query = {"plugin": args.name, "code": args.code}
        query |= {name: _moment(f"--{name}", getattr(args, name)) for name in ("since", "until")}
    except ValueError as error:
        say(printable(f"runner ctl: {error}"))
        return USAGE_ERROR
    rows: list[tuple[str, ...]] = []
    after = args.after
    while True:
        # Page by page: the daemon answers with a bounded number of rows.
        page = {**query, "most": str(min(wanted, _MOST_OF_PAGE)), "after": after}
        words = "&".join(f"{name}={quote(word)}" for name, word in page.items() if word is not None)
        found = ask(args, "ctl", "GET", f"/calls?{words}")
        if isinstance(found, int):
            return found
        calls, after = found["calls"], found["next"]
        wanted -= len(calls)
        for each in calls:
            if args.json:
                print(json.dumps(each))
            else:
                rows.append(_row(each))
        if after is None or wanted <= 0:
            break
    if not args.json:
        print_table(_TITLES, rows)
    if after is not None:
        say(printable(f"runner ctl: there may be more: add --after {after}, or --most N"))
    return 0


def _moment(option: str, word: str | None) -> str | None:
    """The time as the daemon takes it. Raises ValueError."""
    if word is None or "T" in word or len(word.partition(".")[0]) > 9:  # seconds since 1970 are longer
        return word
    try:
        return f"{max(0.0, time.time() - parse_duration(word)):.6f}"
    except ValueError:
        way = "write 2026-01-31T12:00:00Z, or how long ago it was, as 10m or 2h"
        raise ValueError(f"{option} {word}: it is not a time; {way}") from None


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    accepted, ended = each["accepted"], each["ended"]
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(accepted))
    seconds = "" if ended is None else f"{ended - accepted:.3f}"
    return (
        *(when, each["id"], each["plugin"], each["tool"]),
        *(each["code"] or "in flight", seconds, each["caller"]),
    )
