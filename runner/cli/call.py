"""runner call: start a plugin, ask it one thing, say what it answered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner.cli.options import add_invocation, invocation_of
from runner.cli.report_file import ReportFile, ReportFileError
from runner.contracts.registry import all_kinds, find_contract
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable, quoted

if TYPE_CHECKING:
    import argparse

    from runner.launch.forkserver import LaunchTicket
    from runner.launch.stages import Invocation

NAME = "call"
HELP = "call a plugin's tool in its cage and print the result as JSON"
EXAMPLE = """runner call ./my-plugin demo_echo --input '{"text": "hello"}'"""
PASSES_ARGUMENTS = True

_MOST_CALLS = 10_000_000
_MOST_SESSIONS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    parser.add_argument(
        "name", metavar="NAME", help="of the tool, prompt, method, …; a resource's URI; an event's topic"
    )
    parser.add_argument(
        "--input", metavar="JSON|@FILE|-", help="what it is given: as a word, from a file, from stdin"
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        choices=_Kinds(),
        default="tool",
        help="what NAME names: %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="for the answer, instead of the contract's own: 500ms, 30, 2m; for events in return 5s",
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
    many.add_argument("--concurrency", metavar="C", type=int, help="in C sessions at once (default: 1)")
    parser.usage = f"{parser.prog} [options] MANIFEST NAME [-- ARGS]"


class _Kinds:
    """The kinds of all contracts. Imports the contracts when --kind or the help needs them, not before."""

    def __iter__(self) -> Iterator[str]:
        return iter(all_kinds())

    def __contains__(self, kind: object) -> bool:
        return kind in all_kinds()


def advice(message: str) -> str:
    """What was meant, most likely, by words that argparse does not understand."""
    if message.endswith("required: NAME"):
        return "what is to be called? runner tools MANIFEST lists what there is"
    if message.startswith("unrecognized arguments: ") and _looks_like_json(message.split(": ", 1)[1]):
        return "what it is given goes behind --input"
    return ""


def _looks_like_json(word: str) -> bool:
    return word.lstrip().startswith(("{", "[", '"'))


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
        _check(args)
        seconds = _seconds(args.timeout)
        given = _document("--input", args.input)
        context = _document("--context", args.context)
        if context is not None and not isinstance(context, dict):
            raise ValueError('--context: an object is needed, as in \'{"agent_id": "a"}\'')
        config = _document("--config", args.config)
        _check_contract(args, context or {})
        sink = ReportFile(args.report)
    except (ReportFileError, ValueError) as error:
        print(f"runner call: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    # The cage is built while we import what speaks to it.
    sent = ordered(invocation) if args.repeat is None else None
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest
    from runner.protocol.dialect import Call

    request = SessionRequest(
        invocation, Call(args.kind, args.name, given, context or {}), seconds, config, sink, sent
    )
    output = Output("call", as_json=args.json, events=args.events)
    if args.repeat is not None:
        from runner.cli.live.call_many import call_many

        return call_many(request, output, args.repeat, args.concurrency or 1)
    if args.kind == "event":
        from runner.cli.live.send_event import send_event

        return send_event(request, output)
    from runner.cli.live.call_once import call_once

    return call_once(request, output)


def _check(args: argparse.Namespace) -> None:
    """ValueError: these words do not go together."""
    if not args.name:
        raise ValueError("an empty word names nothing; runner tools MANIFEST lists what there is")
    if _looks_like_json(args.name):
        raise ValueError(
            f"NAME is missing: {quoted(args.name)} looks like what it is given, which goes behind --input"
        )
    if args.repeat is None and args.concurrency is not None:
        raise ValueError("--concurrency: only with --repeat, of whose calls it says how many at once")
    if args.repeat is not None:
        if not 1 <= args.repeat <= _MOST_CALLS:
            raise ValueError(f"--repeat {args.repeat}: from 1 to {_MOST_CALLS}")
        if args.concurrency is not None and not 1 <= args.concurrency <= _MOST_SESSIONS:
            raise ValueError(f"--concurrency {args.concurrency}: from 1 to {_MOST_SESSIONS}")
        if args.kind == "event":
            raise ValueError("--repeat: an event has no answer that could be measured")
        for option, given in (("--report", args.report is not None), ("--events", args.events)):
            if given:
                raise ValueError(f"{option}: is about one call, and not for --repeat")
    if [args.input, args.context, args.config].count("-") > 1:
        raise ValueError("only one of --input, --context and --config can be read from stdin")


def _check_contract(args: argparse.Namespace, context: dict[str, Any]) -> None:
    """ValueError: the plugin's contract does not know such a thing. Said before anything is started."""
    if args.kind == "tool" and not context:
        return  # all of them do
    from runner.manifest.load import contract_at

    name = contract_at(args.manifest, args.contract)
    if name is None:
        return  # the launch says what is wrong with the manifest
    from runner.protocol.dialect import Call, stray_context

    contract = find_contract(name)
    if args.kind not in contract.kinds:
        raise ValueError(f"--kind {args.kind}: the contract {name} has {', '.join(contract.kinds)}")
    if stray := stray_context(Call(args.kind, args.name, None, context), contract.context):
        raise ValueError(f"--context: {stray}")


def ordered(invocation: Invocation) -> LaunchTicket | None:
    """The launch under way, by a copy of this process as it is now. None: then later, and slower."""
    from runner.launch import forkserver

    try:
        maker = forkserver.start_by_fork()
        if maker is None:
            return None
        ticket = forkserver.LaunchTicket(invocation, environ=os.environ)
        ticket.send(maker)
    except OSError:
        return None  # the second try says why
    return ticket


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
    from runner.protocol import wire

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
        what = "this is no JSON" if fault.cause == "bad_json" else "this JSON cannot be used"
        raise ValueError(f"{option}: {what}: {fault.detail}{_meant(option, word)}") from None


def _meant(option: str, word: str) -> str:
    """By a word that is no JSON."""
    if word == "-" or word.startswith("@"):
        return ""
    if len(word) < 4096 and "\0" not in word and os.path.exists(word):
        return f"; there is a file of that name: {option} @{word}"
    if word[:1].isalpha():
        return """; a text is written '"like this"', a file as @FILE"""
    return "; a file is written as @FILE"
