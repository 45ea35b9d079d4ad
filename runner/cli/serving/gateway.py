"""`runner gateway`: the tools of many plugins as one MCP server on stdin and stdout."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from runner.approvals.record import ApprovalsUnusable
from runner.cli import verb_parser
from runner.cli.serving.hub_entry import IDLE
from runner.cli.shared.browser import open_in_browser
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.registry import all_contracts
from runner.exceptions import PluginFailure
from runner.extras import missing
from runner.gateway.logins import LoginRecord
from runner.gateway.settings import DEFAULT_CLIENT, GatewaySettings
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.listen import CannotListen
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.policy.load import load_policy
from sandbox.units import parse_limit

if TYPE_CHECKING:
    from runner.gateway.options import StdioOptions

NAME = "gateway"
EXAMPLE = "runner gateway --config ./plugins --config ~/.cursor/mcp.json"
PATH = "/mcp"  # of a daemon's door


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="only these plugins (default: all); without --config: login NAME or logout NAME, for a server"
        " elsewhere in the settings",
    )
    parser.add_argument(
        "--config",
        metavar="DIR|FILE",
        action="append",
        default=[],
        help="a manifest, a host's configuration, or a folder of them; may be given several times",
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="the policy for all plugins")
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="what each client sees and how often it may call, and servers elsewhere (streamable HTTP;"
        " with a token or a sign-in)",
    )
    parser.add_argument(
        "--client", metavar="NAME", default="default", help="whose table of the settings counts"
    )
    parser.add_argument(
        "--list-wait",
        metavar="TIME",
        default="5s",
        help="how long a list waits for plugins of which none is recorded yet; those that are late follow"
        " (default: 5s)",
    )
    parser.add_argument(
        "--scope", metavar="SCOPE", help="of login: rights beside those that the server asks for first"
    )
    parser.add_argument("--audit", metavar="FILE", help="add a line of JSON for each call to this file")
    parser.add_argument(
        "--bodies", action="store_true", help="inputs and results in the audit too, without secrets"
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="be a thin client of the hub, one process for all your hosts, which is started if there is none",
    )
    parser.add_argument("--via", metavar="SOCKET", help="as --shared, with a hub that listens at this path")
    parser.add_argument("--listen", metavar="SOCKET", help="be the hub, for clients with --via")
    parser.add_argument(
        "--idle",
        metavar="TIME",
        help=f"of the hub: how long a plugin stays without a call, and it without a client (default: {IDLE})",
    )


def run(args: argparse.Namespace) -> int:
    def tell(text: str) -> None:
        say(printable(f"runner gateway: {text}"))

    try:
        if args.listen is not None:
            return _listen(args, tell)
        if not args.config:
            return _sign(args, tell)
        if args.idle is not None:
            raise ValueError("--idle is of a hub; give --shared, --via or --listen too")
        options = _options(args, "")
        from runner.gateway import stdio

        stdio.run(options, dict(os.environ), tell)
    except ModuleNotFoundError as error:
        tell(missing("gateway", error))
        return EXIT["launch_failed"]
    except DocumentError as error:
        import sys

        print_diagnostics(error.diagnostics, sys.stderr)
        return USAGE_ERROR
    except ValueError as error:
        tell(str(error))
        return USAGE_ERROR
    except ApprovalsUnusable as unusable:
        tell(f"{unusable}; {unusable.hint}")
        return EXIT["launch_failed"]
    return 0


def _sign(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Sign in or out at a server elsewhere. Raises ValueError, DocumentError and ApprovalsUnusable."""
    action, name = (*args.names, "", "")[:2]
    if action not in ("login", "logout") or len(args.names) > 2:
        raise ValueError("--config is missing; or write login NAME or logout NAME, with --settings FILE")
    if not name or not args.settings:
        raise ValueError(f"{action}: name a server of the settings: {action} NAME --settings FILE")
    from runner.gateway.settings_file import read_settings
    from runner.gateway.sign_in import SignIn, is_scope, run_sign_in

    settings = read_settings(args.settings)
    _require_client(args.client, settings)
    remotes = {each.name: each for each in settings.remotes}
    if name not in remotes:
        raise ValueError(f"{action} {name}: the settings have no [remotes.{name}]")
    remote = remotes[name]
    if args.scope is not None and (action == "logout" or not is_scope(args.scope)):
        raise ValueError("--scope: it goes with login, and is words of ASCII, with blanks between them")
    if remote.token_file or remote.token_command:
        raise ValueError(f"{action} {name}: the settings give it a token; there is nothing to sign in for")
    record = LoginRecord(remote.name, remote.url, os.environ)
    if action == "logout":
        removed = record.remove()
        say(f"{name}: {'signed out here; the server was not told' if removed else 'nobody was signed in'}")
        return 0

    def show(url: str) -> None:
        tell(f"to sign in at {name}, open this in a browser on this machine:")
        print(printable(url), flush=True)
        open_in_browser(url, NAME)

    # That of the gateway that will use the sign-in.
    policy = args.policy or settings.client(args.client).policy
    rule = load_policy(policy, os.environ).network
    try:
        run_sign_in(SignIn(remote, rule, record), show, args.scope or "")
    except PluginFailure as failure:
        tell(f"{failure.outcome.message}" + f"; {failure.outcome.hint}" * bool(failure.outcome.hint))
        return EXIT[failure.outcome.code]
    except OSError as error:
        tell(f"127.0.0.1:{remote.callback_port} cannot be listened on: {error.strerror}; see callback_port")
        return EXIT["launch_failed"]
    tell(f"signed in at {name}")
    return 0


def _listen(args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Raises ValueError."""
    from runner.gateway import hub

    if args.config or args.names or args.settings or args.policy or args.audit:
        raise ValueError(
            "--listen: each client says what it serves; leave the other options out, but for --idle"
        )
    try:
        idle = float(parse_limit("idle", IDLE if args.idle is None else args.idle))
    except ValueError as error:
        raise ValueError(f"--idle {args.idle}: {error}") from None
    try:
        hub.run(args.listen, idle, read_options, tell)
    except CannotListen as cannot:
        tell(str(cannot))
        return EXIT["launch_failed"]
    return 0


def read_options(words: Sequence[str], folder: str) -> StdioOptions:
    """Of a client of a hub, which was started in this folder. Raises ValueError and DocumentError."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message or "only runner gateway --help shows the options")

    args = verb_parser(NAME, refuse=refuse).parse_args(list(words))
    if args.listen is not None:
        raise ValueError("--listen does not go with --via and --shared: it is the other end")
    return _options(args, folder)


def _options(args: argparse.Namespace, folder: str) -> StdioOptions:
    """`folder`: what relative paths are in; empty: the working one. Raises ValueError and DocumentError."""
    from runner.gateway.audit import AuditFile
    from runner.gateway.options import StdioOptions

    for name in ("policy", "settings", "client", "audit"):
        if getattr(args, name) == "":
            raise ValueError(f"--{name}: its value is empty; is a variable unset?")
    if args.scope is not None:
        raise ValueError("--scope: it goes with login NAME, without --config")
    if args.bodies and args.audit is None:
        raise ValueError("--bodies: there is no audit to put them in; give --audit FILE")
    try:
        seconds = float(parse_limit("call", args.list_wait))
    except ValueError as error:
        raise ValueError(f"--list-wait {args.list_wait}: {error}") from None
    settings = GatewaySettings()
    if args.settings is not None:
        from runner.gateway.settings_file import read_settings

        settings = read_settings(os.path.join(folder, args.settings))
    _require_client(args.client, settings)
    if not args.config:
        raise ValueError("--config: name a manifest, a host's configuration, or a folder of them")
    config = [os.path.join(folder, path) for path in args.config]
    policy = args.policy
    if policy is not None and ("/" in policy or "." in policy):  # else it is a name
        policy = os.path.join(folder, policy)
    for path in config:
        if not os.path.exists(path):
            raise ValueError(f"--config {path}: there is no such file or folder")
    remarks = tuple(_remarks(config))
    return StdioOptions(
        config=tuple(config),
        names=tuple(args.names),
        policy=policy,
        settings=settings,
        client=args.client,
        list_seconds=seconds,
        audit=None if args.audit is None else AuditFile(os.path.join(folder, args.audit)),
        bodies=args.bodies,
        remarks=remarks,
    )


def _require_client(name: str, settings: GatewaySettings) -> None:
    """Raises ValueError."""
    if name != DEFAULT_CLIENT and name not in settings.clients:
        known = ", ".join(settings.clients) or "none"
        raise ValueError(f"--client {name}: the settings have no such client; they have {known}")


def _remarks(paths: list[str]) -> Iterator[str]:
    for hosts in (each.configurations for each in all_contracts()):
        if hosts is not None:
            yield from filter(None, map(hosts.gateway_remark, paths))
