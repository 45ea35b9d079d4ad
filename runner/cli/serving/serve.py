"""`runner serve`: keep plugins alive, and serve calls to them at a door."""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING, Any

from runner.cli.serving.fleet_option import fleet_verb
from runner.cli.serving.gateway import PATH
from runner.cli.shared.text import say
from runner.extras import install_command, missing
from runner.gateway.settings import GatewaySettings
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.client import default_socket
from runner.serve.listen import listen_tcp, listen_unix
from runner.serve.peer import LOCAL_NAMES, Rules, read_token
from runner.serve.refusal import ControlUnusable
from runner.serve.service_manager import take_sockets
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.units import parse_limit, parse_size

if TYPE_CHECKING:
    from runner.serve.daemon import DoorBackend, ServeOptions
    from runner.serve.mounted import DoorMount
    from runner.serve.tls import DoorTls

NAME = "serve"
EXAMPLE = "runner serve --config ./plugins --config ./my-plugin"
_LEAST_LEDGER, _MOST_LEDGER = 64 << 20, 1 << 40  # calls in flight alone may take 20 MiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="DIR|FILE",
        action="append",
        default=[],
        help="a manifest, a host's configuration, or a folder of them; may be given several times",
    )
    parser.add_argument(
        "--fleet",
        metavar="URL|FILE",
        help="in place of --config: the door of a fleet, whose workers run the plugins: docs/fleet.md",
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"where to listen, for this user and root (default: {default_socket(os.environ)}, or the sockets"
        " of the service manager)",
    )
    parser.add_argument(
        "--http",
        metavar="ADDRESS:PORT",
        help="listen on TCP too, for those who have the token or a certificate. GET /health is 503 while no"
        " call is taken (ready?), GET /live never is (alive?)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the token for --http; only its owner may read it"
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="serve --http by TLS with this certificate and its chain (PEM)"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="the key of --tls-cert; only its owner may read it")
    parser.add_argument(
        "--client-ca",
        metavar="FILE",
        help="clients by TLS need a certificate of one of these authorities (PEM), in place of the token",
    )
    parser.add_argument(
        "--http-anywhere", action="store_true", help="allow an address that other machines can reach"
    )
    parser.add_argument(
        "--http-name",
        metavar="NAME",
        action="append",
        default=[],
        help="a further name that requests may use for this machine (Host header)",
    )
    parser.add_argument(
        "--ledger",
        metavar="FILE",
        help="the database of calls and deliveries (default: in the state folder). FILE.holds has the plugins"
        " that are stopped or in quarantine, also for the next daemon",
    )
    parser.add_argument(
        "--ledger-size",
        metavar="SIZE",
        default="1G",
        help="how large it may become (default: 1G). Half of it is for idempotency keys, which are known"
        " for 24 hours at least; further calls with keys are refused",
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="the policy for all plugins")
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="a TOML file with a table for each plugin that needs one: folder (whose name that is), config,"
        " secrets, limits, state_dir, env, args, parked, eager, numbers, and what its contract"
        " has as options (binding, project, …)",
    )
    parser.add_argument(
        "--gateway-settings",
        metavar="FILE",
        help=f"what clients of {PATH} see and how often they may call: docs/gateway.md",
    )
    parser.add_argument(
        "--control",
        metavar="FILE",
        help="be a control plane too, with packages and bindings: its settings, docs/control.md",
    )
    parser.add_argument(
        "--drain", metavar="TIME", default="30s", help="for calls in flight at the end (default: 30s)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        from runner.serve import daemon
        from runner.serve.listen import CannotListen
    except ModuleNotFoundError as error:
        say(f"runner serve: {missing('serve', error)}")
        return EXIT["launch_failed"]
    from runner.ledger.sqlite_file import DatabaseUnusable

    listeners: list[socket.socket] = []
    args.unlink = None
    try:
        options = _options(args, listeners)
    except (ValueError, CannotListen) as error:
        say(printable(f"runner serve: {error}"))
        for each in listeners:
            each.close()
        _remove(args.unlink)
        return USAGE_ERROR

    def tell(text: str) -> None:
        say(printable(f"runner serve: {text}"))

    def serve() -> int:
        daemon.run(options, dict(os.environ), tell)
        return 0

    try:
        return serve() if options.backend is None else fleet_verb(NAME, serve)
    except DatabaseUnusable as unusable:
        tell(f"{unusable}; {unusable.hint}")
        return EXIT["launch_failed"]
    except ControlUnusable as unusable:
        for line in str(unusable).split("\n"):
            tell(line)
        return USAGE_ERROR
    finally:
        _remove(args.unlink)


def _remove(made: tuple[str, os.stat_result] | None) -> None:
    """Remove the socket that this process has made, and not that of a daemon that came after it."""
    try:
        if made is not None and os.path.samestat(os.lstat(made[0]), made[1]):
            os.unlink(made[0])
    except OSError:
        pass


def _tls(args: argparse.Namespace) -> DoorTls | None:
    """Raises ValueError."""
    from runner.serve.tls import DoorTls

    if args.tls_cert is None or args.tls_key is None:
        if args.tls_cert or args.tls_key or args.client_ca:
            raise ValueError("--tls-cert, --tls-key: TLS needs both of them")
        return None
    if args.client_ca is not None and args.token_file is not None:
        raise ValueError("--client-ca: certificates replace the token; leave out --token-file")
    return DoorTls(args.tls_cert, args.tls_key, args.client_ca)


def _gateway(settings_file: str | None) -> DoorMount:
    """The gateway. Its imports take most of a second, and wait for the first request. Raises ValueError."""
    from runner.serve.mounted import CannotMount, DoorMount

    settings = GatewaySettings()
    try:
        if settings_file is not None:
            from runner.gateway.settings_file import read_settings

            settings = read_settings(settings_file)
    except DocumentError as error:
        raise ValueError("\n".join(each.text() for each in error.diagnostics)) from None
    if settings.plugins:
        name = next(iter(settings.plugins))
        raise ValueError(
            f"--gateway-settings {settings_file}: [plugins.{name}] is for runner gateway; a daemon has"
            f" --settings for this: write folder and limits under [{name}] there"
        )

    def load() -> Any:
        try:
            from runner.gateway.http import open_gateway
        except ModuleNotFoundError as error:
            raise CannotMount(f"{error.name} is missing", install_command("gateway")) from None
        return open_gateway(settings, dict(os.environ))

    return DoorMount(PATH, load)


def _backend(args: argparse.Namespace) -> DoorBackend | None:
    """Raises ValueError."""
    if args.fleet is None:
        return None
    if args.config or args.settings or args.policy:
        raise ValueError("--fleet: plugins, policy and settings are the workers'; leave the others out")
    if args.control is not None:
        raise ValueError("--fleet, --control: bindings run plugins of this machine; start a daemon for each")
    try:
        from runner.fleet.connection import read_address
        from runner.fleet.door import FleetBackend
    except ModuleNotFoundError as error:
        raise ValueError(missing("fleet", error)) from None
    return FleetBackend(read_address(args.fleet))


def _options(args: argparse.Namespace, listeners: list[socket.socket]) -> ServeOptions:
    """Raises ValueError and CannotListen. `listeners`: gets the sockets, also if it raises."""
    from runner.ledger.file import LedgerBounds
    from runner.serve.daemon import ServeOptions
    from runner.serve.roster import default_ledger

    files = (
        "token_file",
        "tls_cert",
        "tls_key",
        "client_ca",
        "ledger",
        "policy",
        "settings",
        "gateway_settings",
        "control",
        "fleet",
    )
    for name in ("socket", "http", *files):
        if getattr(args, name) == "":
            raise ValueError(f"--{name.replace('_', '-')}: its value is empty; is a variable unset?")
    if not args.config and args.control is None and args.fleet is None:
        raise ValueError("write runner serve --config DIR|FILE, --control FILE, or both; or --fleet URL|FILE")
    backend = _backend(args)
    try:
        drain = float(parse_limit("call", args.drain))
    except ValueError as error:
        raise ValueError(f"--drain {args.drain}: {error}") from None
    for name in ("settings", "control"):
        path = getattr(args, name)
        if path is not None and not os.path.isfile(path):
            raise ValueError(f"--{name} {path}: there is no such file")
    try:
        size = parse_size(args.ledger_size)
    except ValueError as error:
        raise ValueError(f"--ledger-size {args.ledger_size}: {error}") from None
    if not _LEAST_LEDGER <= size <= _MOST_LEDGER:
        raise ValueError(f"--ledger-size {args.ledger_size}: write a size from 64M to 1T")
    token = b"" if args.token_file is None else read_token(args.token_file)
    tls = _tls(args)
    listeners += take_sockets(os.environ)
    if args.socket is not None or not listeners:
        path = args.socket or default_socket(os.environ)
        listeners.append(listen_unix(path))
        args.unlink = path, os.lstat(path)
    if args.http is not None:
        listeners.append(listen_tcp(args.http, anywhere=args.http_anywhere))
    by_tcp = any(each.family != socket.AF_UNIX for each in listeners)
    if by_tcp and not token and args.client_ca is None and args.control is None:
        raise ValueError(
            "--http: requests by TCP need a token or a certificate; give --token-file FILE, or --tls-cert,"
            " --tls-key and --client-ca"
        )
    if tls is not None and not by_tcp:
        raise ValueError("--tls-cert: there is no TCP socket; add --http ADDRESS:PORT")
    names = (*LOCAL_NAMES, *(name.lower() for name in args.http_name))
    for each in listeners:
        if each.family != socket.AF_UNIX:
            host = each.getsockname()[0]
            names = (*names, f"[{host}]" if ":" in host else host)
    return ServeOptions(
        config=tuple(args.config),
        ledger=args.ledger or default_ledger(os.environ),
        listeners=tuple(listeners),
        rules=Rules(os.geteuid(), token, names),
        tls=tls,
        policy=args.policy,
        settings=None if args.settings is None else os.path.abspath(args.settings),
        drain_seconds=drain,
        bounds=LedgerBounds(size=size),
        mount=_gateway(args.gateway_settings),
        backend=backend,
        control=None if args.control is None else os.path.abspath(args.control),
    )
