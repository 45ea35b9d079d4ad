"""runner call: start a plugin, ask it one thing, say what it answered."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from runner.cli.options import add_invocation, invocation_of
from runner.cli.sink import ReportSink, SinkError
from runner.report import USAGE_ERROR

if TYPE_CHECKING:
    import argparse

    from runner.prepare import Invocation
    from runner.zygote import Errand

NAME = "call"
HELP = "call a plugin's tool in its cage and print the result as JSON"
EXAMPLE = """runner call nexo-plugin.toml demo_echo --input '{"text": "hello"}'"""
PASSES_ARGUMENTS = True

KINDS = ("tool", "hook", "channel", "llm", "memory", "method", "prompt", "resource")
_MOST_CALLS = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    parser.add_argument("name", metavar="NAME", help="of the tool, prompt, method, …; a resource's URI")
    parser.add_argument(
        "--input", metavar="JSON|@FILE|-", help="what it is given: as a word, from a file, from stdin"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="tool", help="what NAME names (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", metavar="TIME", help="for the answer, instead of the contract's own: 500ms, 30, 2m"
    )
    parser.add_argument(
        "--context", metavar="JSON|@FILE", help="what the contract sends along: agent_id, workspace_id, …"
    )
    parser.add_argument(
        "--config", metavar="JSON|@FILE", help="configuration, for plugins that are configured"
    )
    add_talking(parser)
    many = parser.add_argument_group("many calls")
    many.add_argument(
        "--repeat", metavar="N", type=int, help="call N times over warm sessions and print how long it took"
    )
    many.add_argument(
        "--concurrency", metavar="C", type=int, default=1, help="in C sessions at once (default: %(default)s)"
    )
    parser.usage = f"{parser.prog} [options] MANIFEST NAME [-- ARGS]"


def add_talking(parser: argparse.ArgumentParser) -> None:
    """What `tools` has as well."""
    parser.add_argument("--json", action="store_true", help="for programs: one line, failures too")
    parser.add_argument(
        "--events", action="store_true", help="progress and notices on stderr, as lines of JSON"
    )
    parser.add_argument(
        "--report",
        metavar="PATH|FD",
        help="write what happened as one JSON document (runner.report.v1) to a file or an open descriptor",
    )


def run(args: argparse.Namespace) -> int:
    try:
        invocation = invocation_of(args)
        if args.repeat is not None and not 1 <= args.repeat <= _MOST_CALLS:
            raise ValueError(f"--repeat {args.repeat}: from 1 to {_MOST_CALLS}")
        if not 1 <= args.concurrency <= 1000:
            raise ValueError(f"--concurrency {args.concurrency}: from 1 to 1000")
        seconds = _seconds(args.timeout)
        given = _document("--input", args.input)
        context = _document("--context", args.context)
        if context is not None and not isinstance(context, dict):
            raise ValueError('--context: an object is needed, as in \'{"agent_id": "a"}\'')
        config = _document("--config", args.config)
        sink = ReportSink(args.report)
    except (SinkError, ValueError) as error:
        print(f"runner call: {error}", file=sys.stderr)
        return USAGE_ERROR
    # The cage is built while we import what speaks to it.
    sent = ordered(invocation) if args.repeat is None else None
    from runner.cli.talking import Request, Voice, call_many, call_once
    from runner.dialect import Call

    request = Request(
        invocation, Call(args.kind, args.name, given, context or {}), seconds, config, sink, sent
    )
    voice = Voice("call", as_json=args.json, events=args.events)
    if args.repeat is not None:
        return call_many(request, voice, args.repeat, args.concurrency)
    return call_once(request, voice)


def ordered(invocation: Invocation) -> Errand | None:
    """The launch under way, by a copy of this process as it is now. None: then later, and slower."""
    from runner import zygote

    try:
        maker = zygote.by_fork()
        if maker is None:
            return None
        errand = zygote.Errand(invocation, environ=os.environ)
        errand.send(maker)
    except OSError:
        return None  # the second try says why
    return errand


def _seconds(word: str | None) -> float | None:
    if word is None:
        return None
    from sandbox.units import parse_limit

    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"--timeout {word}: {error}") from None


def _document(option: str, word: str | None) -> Any:
    """JSON, by the rules that hold for plugins too. ValueError says what is wrong with it."""
    if word is None:
        return None
    from runner import wire

    if word == "-" or word.startswith("@"):
        try:
            if word == "-":
                raw = sys.stdin.buffer.read()
            else:
                with open(word[1:], "rb") as file:
                    raw = file.read()
        except OSError as error:
            raise ValueError(f"{option} {word}: {error.strerror}") from None
    else:
        raw = os.fsencode(word)
    try:
        return wire.decode(raw)
    except wire.WireFault as fault:
        hint = "" if word == "-" or word.startswith("@") else "; a file is named as @FILE"
        raise ValueError(f"{option}: this is not the JSON it should be: {fault}{hint}") from None
