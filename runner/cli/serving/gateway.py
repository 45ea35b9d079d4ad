"""`runner gateway`: the tools of many plugins as one MCP server on stdin and stdout."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.cli.shared.text import print_diagnostics, say
from runner.extras import missing
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import DocumentError, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from runner.gateway.options import StdioOptions

NAME = "gateway"
EXAMPLE = "runner gateway --config ./plugins --config ~/.cursor/mcp.json"
PATH = "/mcp"  # of a daemon's door


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these plugins (default: all)")
    parser.add_argument(
        "--config",
        metavar="DIR|FILE",
        action="append",
        required=True,
        help="a manifest, a host's configuration, or a folder of them; may be given several times",
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="the policy for all plugins")
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="what each client sees and how often it may call, and servers elsewhere (streamable HTTP;"
        " with a token, without OAuth)",
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
    parser.add_argument("--audit", metavar="FILE", help="add a line of JSON for each call to this file")
    parser.add_argument(
        "--bodies", action="store_true", help="inputs and results in the audit too, without secrets"
    )


def run(args: argparse.Namespace) -> int:
    from runner.approvals.record import ApprovalsUnusable

    def tell(text: str) -> None:
        say(printable(f"runner gateway: {text}"))

    try:
        options = _options(args)
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


def _options(args: argparse.Namespace) -> StdioOptions:
    """Raises ValueError and DocumentError."""
    from runner.gateway.audit import AuditFile
    from runner.gateway.options import StdioOptions
    from runner.gateway.settings import DEFAULT_CLIENT, GatewaySettings
    from sandbox.units import parse_limit

    for name in ("policy", "settings", "client", "audit"):
        if getattr(args, name) == "":
            raise ValueError(f"--{name}: its value is empty; is a variable unset?")
    if args.bodies and args.audit is None:
        raise ValueError("--bodies: there is no audit to put them in; give --audit FILE")
    try:
        seconds = float(parse_limit("call", args.list_wait))
    except ValueError as error:
        raise ValueError(f"--list-wait {args.list_wait}: {error}") from None
    settings = GatewaySettings()
    if args.settings is not None:
        from runner.gateway.settings_file import read_settings

        settings = read_settings(args.settings)
    if args.client != DEFAULT_CLIENT and args.client not in settings.clients:
        known = ", ".join(settings.clients) or "none"
        raise ValueError(f"--client {args.client}: the settings have no such client; they have {known}")
    for path in args.config:
        if not os.path.exists(path):
            raise ValueError(f"--config {path}: there is no such file or folder")
    return StdioOptions(
        config=tuple(args.config),
        names=tuple(args.names),
        policy=args.policy,
        settings=settings,
        client=args.client,
        list_seconds=seconds,
        audit=None if args.audit is None else AuditFile(args.audit),
        bodies=args.bodies,
        remarks=tuple(_remarks(args.config)),
    )


def _remarks(paths: list[str]) -> Iterator[str]:
    from runner.contracts.registry import all_contracts

    for hosts in (each.configurations for each in all_contracts()):
        if hosts is not None:
            yield from filter(None, map(hosts.gateway_remark, paths))
