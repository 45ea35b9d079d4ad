"""runner call: start a plugin, make one call, print the answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.options import (
    add_invocation,
    contract_at_args,
    invocation_of,
    is_command,
    open_events,
    secrets_of,
)
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.cli.shared.text import say
from runner.contracts.registry import all_kinds, find_contract
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable, quoted
from sandbox.speed.bundle import load
from sandbox.speed.plain import read_plain_call

if TYPE_CHECKING:
    import argparse

    from runner.contracts.contract import Contract
    from runner.launch.remote.forkserver import LaunchTicket
    from runner.launch.stages import Invocation
    from runner.protocol.secrets import Secrets
    from sandbox.cell.contents import Contents

NAME = "call"
EXAMPLE = """runner call ./my-plugin demo_echo --input '{"text": "hello"}'"""
PASSES_ARGUMENTS = True


def read_usual(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse a common command line without argparse. None: argparse has to read it."""
    return None if "--" in words else read_plain_call(words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    _add_call(parser)
    parser.usage = f"{parser.prog} [options] MANIFEST NAME [-- ARGS]"
    parser.usage += f"\n       {parser.prog} [options] NAME -- COMMAND"


def add_command_arguments(parser: argparse.ArgumentParser) -> None:
    from runner.cli.shared.options import add_command_invocation

    add_command_invocation(parser)
    _add_call(parser)


def _add_call(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="what to call: the name of a tool, of a method, the topic of an event, …"
    )
    parser.add_argument(
        "--input", metavar="JSON|@FILE|-", help="the input: as JSON, from a file (@FILE), or from stdin (-)"
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        choices=_Kinds(),
        help="what NAME names: %(choices)s (default: the first that the contract has, mostly tool)",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="time limit of the call, instead of the contract's: 500ms, 30, 2m; for an event, the wait"
        " for events in return (default: 5s)",
    )
    parser.add_argument(
        "--context",
        metavar="JSON|@FILE",
        help="an object with what the contract sends along: agent_id, workspace_id, …",
    )
    parser.add_argument(
        "--via",
        metavar="SOCKET",
        help="have the daemon at this socket (runner serve) make the call: MANIFEST is then the plugin's name"
        " there, and policy and limits are the daemon's. Goes with --input, --kind, --timeout, --context,"
        " --json and --key",
    )
    parser.add_argument(
        "--key",
        metavar="KEY",
        help="with --via or --fleet: the same key gets the same answer, and no second call",
    )
    parser.add_argument(
        "--fleet",
        metavar="URL|FILE",
        help="let a worker of a fleet call it, by the plugin's name there: docs/fleet.md; goes with the same"
        " options as --via",
    )
    parser.add_argument(
        "--durable",
        action="store_true",
        help="with --fleet: the call survives the end of workers and servers",
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="with --fleet and --durable: print the call's id, say how to ask for its answer, and go",
    )
    add_talking(parser)


class _Kinds:
    """The kinds of all contracts. They are imported when --kind or the help needs them, not before."""

    def __iter__(self) -> Iterator[str]:
        return iter(all_kinds())

    def __contains__(self, kind: object) -> bool:
        return kind in all_kinds()


def advice(message: str) -> str:
    """A hint for a command line that argparse refuses."""
    if message.endswith("required: NAME"):
        return "NAME says what to call; runner tools MANIFEST lists what can be called"
    words = message.removeprefix("unrecognized arguments: ")
    if words != message and _looks_like_json(words):
        return "the input goes behind --input"
    if words != message and not words.startswith("-") and "=" in words:
        return """the input goes behind --input, as JSON: --input '{"KEY": "VALUE"}'"""
    return ""


def _looks_like_json(word: str) -> bool:
    return word.lstrip().startswith(("{", "[", '"'))


def add_talking(parser: argparse.ArgumentParser) -> None:
    """The options that call and tools share."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON, for failures too")
    parser.add_argument(
        "--events",
        metavar="PATH|FD",
        help="write progress, notices and connections as lines of JSON to a file or an open descriptor, in"
        " place of the lines on stderr",
    )
    parser.add_argument(
        "--report",
        metavar="PATH|FD",
        help="write what happened as one JSON document (runner.report.v1) to a file or an open descriptor",
    )
    add_sent_secrets(parser)


def add_sent_secrets(parser: argparse.ArgumentParser) -> None:
    """For verbs that talk to a plugin. Its value is read by `read_secrets`."""
    parser.add_argument(
        "--secrets",
        metavar="FILE|-",
        help="a JSON object with the operator's secrets, for plugins whose contract sends them. The runner"
        " shows and reports none of them. Where the plugin repeats one, texts and numbers of 8 characters or"
        " more are replaced by [secret], also in base64, hex and percent signs. Shorter ones are"
        " shown as the plugin wrote them, and so is the result of a call",
    )


def run(args: argparse.Namespace) -> int:
    try:
        args.kind = args.kind or _default_kind(args)
        _check(args)
        invocation = invocation_of(args)
        seconds = _seconds(args.timeout)
        given = read_json_option("--input", args.input)
        context = read_json_option("--context", args.context)
        if context is not None and not isinstance(context, dict):
            raise ValueError('--context: it has to be a JSON object, as in \'{"agent_id": "a"}\'')
        _check_contract(args, context or {})
        if args.arguments and not is_command(args) and _takes_arguments(args):
            if given is not None:
                raise ValueError("--input: what follows -- is the input of this call; leave one of them out")
            given = {"argv": list(args.arguments)}
            invocation = invocation._replace(args=())
        invocation, config = configured(invocation)
        secrets = read_secrets(args)
        contents = None if _prepares(args) else contents_of(args, secrets)
        sink = ReportFile(args.report)
        args.events = open_events(args.events)
    except (ReportFileError, ValueError) as error:
        say(f"runner call: {printable(str(error))}")
        return USAGE_ERROR
    if _prepares(args):
        return _run_prepared(args, invocation, (given, context or {}), seconds, config, secrets, sink)
    # The cage is built while this process imports the session.
    sent = request_launch(invocation, contents)
    import_session()
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest
    from runner.protocol.dialect import Call

    request = SessionRequest(
        invocation,
        Call(args.kind, args.name, given, context or {}),
        seconds,
        config,
        secrets,
        sink,
        sent,
        contents,
    )
    output = Output("call", as_json=args.json, events=args.events)
    if args.kind == "event":
        from runner.cli.live.call_once import send_event

        return send_event(request, output)
    from runner.cli.live.call_once import call_once

    return call_once(request, output)


def _run_prepared(
    args: argparse.Namespace,
    invocation: Invocation,
    said: tuple[Any, dict[str, Any]],
    seconds: float | None,
    config: Any,
    secrets: Secrets | None,
    sink: ReportFile,
) -> int:
    """Prepare a call before anything is started, then make it. `said`: its input and its context."""
    from runner.exceptions import PluginError, PluginFailure
    from runner.protocol.dialect import Call
    from runner.session.prepared import cage_contents, complete_call

    call = Call(args.kind, args.name, *said)
    try:
        prepared = complete_call(invocation, call, seconds=seconds, secrets=secrets, config=config)
        contents = cage_contents(prepared)
    except (PluginError, PluginFailure) as error:
        from runner.cli.live.output import Output
        from runner.cli.live.session import tell_refused

        output = Output("call", as_json=args.json, events=args.events)
        return tell_refused(error, output, sink)
    sent = request_launch(prepared.invocation, contents)
    import_session()
    from runner.cli.live.call_once import call_once
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest

    request = SessionRequest(
        prepared.invocation, prepared.call, seconds, config, prepared.secrets, sink, sent, contents, prepared
    )
    return call_once(request, Output("call", as_json=args.json, events=args.events))


def _default_kind(args: argparse.Namespace) -> str:
    contract = _contract(args)
    return "tool" if contract is None else next(iter(contract.calls))


def _prepares(args: argparse.Namespace) -> bool:
    contract = _contract(args)
    return contract is not None and contract.prepared_calls is not None


def _contract(args: argparse.Namespace) -> Contract | None:
    """The contract of the manifest. None: the launch reports the fault of the manifest."""
    known: tuple[str, Contract | None] | None = getattr(args, "known_contract", None)
    if known is None or known[0] != args.manifest:  # it is looked for once, and `tools` has several manifests
        name = contract_at_args(args)
        known = args.known_contract = args.manifest, None if name is None else find_contract(name)
    return known[1]


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError if the options contradict each other."""
    if not args.name:
        raise ValueError("NAME is empty; runner tools MANIFEST lists what can be called")
    if is_command(args) and "/" in args.name and os.path.exists(args.name):
        raise ValueError(f"NAME is missing: write runner call {args.name} NAME -- ARGS")
    if _looks_like_json(args.name):
        raise ValueError(f"NAME is missing: {quoted(args.name)} looks like input, which goes behind --input")
    if args.durable or args.no_wait:
        raise ValueError("--durable, --no-wait: they are for a call to a fleet; add --fleet URL")
    if [args.input, args.context, args.config, args.secrets].count("-") > 1:
        raise ValueError("only one of --input, --context, --config and --secrets can be read from stdin")


def _check_contract(args: argparse.Namespace, context: dict[str, Any]) -> None:
    """Raises ValueError if the plugin's contract has no such kind or context."""
    if args.kind == "tool" and not context:
        return  # every contract has tools
    contract = _contract(args)
    if contract is None:
        return
    from runner.protocol.dialect import Call, stray_context

    if args.kind not in contract.calls:
        raise ValueError(f"--kind {args.kind}: the contract {contract.name} has {', '.join(contract.calls)}")
    flags = {option.name: option.flag for option in contract.options if NAME in option.verbs}
    if stray := stray_context(Call(args.kind, args.name, None, context), contract.calls, flags):
        raise ValueError(f"--context: {stray}")


def _takes_arguments(args: argparse.Namespace) -> bool:
    """Whether what follows -- is for the call, and not for the plugin's program."""
    contract = _contract(args) if args.kind == "tool" else None
    return contract is not None and contract.commands


def configured(invocation: Invocation) -> tuple[Invocation, Any]:
    """The invocation, with its configuration only if the cage depends on it; and the configuration to
    send."""
    if not invocation.config:
        return invocation, None
    import json

    from runner.launch.read import with_config

    config = json.loads(invocation.config)
    return with_config(invocation, config), config


def read_secrets(args: argparse.Namespace) -> Secrets | None:
    """The secrets of --secrets and --secret. Raises ValueError, whose text has no secret."""
    given = secrets_of(args)
    if args.secrets is None and not given:
        return None
    from runner.protocol.secrets import Secrets

    if args.secrets is None:
        return Secrets({name: _as_text(value) for name, value in given.items()})
    word = args.secrets if args.secrets == "-" else f"@{args.secrets}"
    try:
        value = read_json_option("--secrets", word)
    except ValueError as error:
        cause = error.__context__
        why = cause.strerror if isinstance(cause, OSError) else "this is not JSON that can be used"
        raise ValueError(f"--secrets {args.secrets}: {why}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--secrets {args.secrets}: it has to be a JSON object: a value for each name")
    contract = _contract(args)
    if contract is not None and "secrets" not in contract.takes:
        raise ValueError(
            f"--secrets: the contract {contract.name} sends its plugins no secrets; use --env NAME"
        )
    return Secrets({**value, **{name: _as_text(secret) for name, secret in given.items()}})


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def contents_of(args: argparse.Namespace, secrets: Secrets | None) -> Contents | None:
    """The secrets that the cage delivers as files."""
    contract = None if secrets is None else _contract(args)
    if contract is None:
        return None
    from runner.launch.read import secret_contents

    return secret_contents(contract, secrets)


def request_launch(invocation: Invocation, contents: Contents | None = None) -> LaunchTicket | None:
    """Have a fork of this process launch the plugin while this one imports the rest. None: the session will
    launch it later, which is slower. `contents`: of the cage's files in memory."""
    from runner.launch.remote import forkserver

    try:
        maker = forkserver.start_by_fork()
        if maker is None:
            return None
        ticket = forkserver.LaunchTicket(invocation, environ=os.environ, contents=contents)
        ticket.send(maker)
    except OSError:
        return None  # the session tries again and reports why
    return ticket


def import_session() -> None:
    """Import what a session needs, with the garbage collector off: modules stay, so it would free nothing and
    take a tenth of the time. `run_on_trio` freezes these objects and switches the collector on again."""
    import ctypes.util

    search = ctypes.util.find_library
    # trio looks for the function that names its threads, and so runs ldconfig: 5 ms. It is in the C library.
    ctypes.util.find_library = lambda name: "libc.so.6"
    gc.disable()
    try:
        load("session")
        import runner.cli.live.session  # noqa: F401 -- to have it imported
    finally:
        ctypes.util.find_library = search


def _seconds(word: str | None) -> float | None:
    if word is None:
        return None
    from sandbox.units import parse_limit

    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"--timeout {word}: {error}") from None
