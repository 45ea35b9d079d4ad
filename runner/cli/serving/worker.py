"""`runner worker`: take calls for plugins from a fleet's NATS servers."""

from __future__ import annotations

import argparse
import os

from runner.cli.serving.fleet_option import fleet_verb
from runner.cli.shared.text import say
from runner.fleet.names import is_token
from sandbox.document.diagnostic import printable
from sandbox.units import parse_limit

NAME = "worker"
EXAMPLE = "runner worker --nats nats://127.0.0.1:4222 --config ./plugins"
_MOST_SLOTS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        metavar="URL|FILE",
        required=True,
        help="the servers, with commas between them, or a file with servers, user and keys: docs/fleet.md",
    )
    parser.add_argument(
        "--config",
        metavar="DIR|FILE",
        action="append",
        required=True,
        help="a manifest, a host's configuration, or a folder of them; may be given several times",
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=int,
        default=os.cpu_count() or 1,
        help="calls at once (default: %(default)s)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of this worker (default: the machine's name and the process's number)"
    )
    parser.add_argument("--policy", metavar="NAME|FILE", help="the policy for all plugins")
    parser.add_argument("--settings", metavar="FILE", help="as for runner serve")
    parser.add_argument(
        "--drain", metavar="TIME", default="30s", help="for calls that run at the end (default: 30s)"
    )


def run(args: argparse.Namespace) -> int:
    return fleet_verb(NAME, lambda: _work(args))


def _work(args: argparse.Namespace) -> int:
    from runner.fleet import node
    from runner.fleet.connection import read_address

    for name in ("nats", "name", "policy", "settings"):
        if getattr(args, name) == "":
            raise ValueError(f"--{name}: its value is empty; is a variable unset?")
    if not 0 < args.slots <= _MOST_SLOTS:
        raise ValueError(f"--slots {args.slots}: it has to be a number from 1 to {_MOST_SLOTS}")
    worker = args.name or node.default_name()
    if not is_token(worker):
        raise ValueError(f"--name {worker!a}: it has letters, digits, _, -, ~ and @, and no dots")
    for path in args.config:
        if not os.path.exists(path):
            raise ValueError(f"--config {path}: there is no such file or folder")
    if args.settings is not None and not os.path.isfile(args.settings):
        raise ValueError(f"--settings {args.settings}: there is no such file")
    try:
        drain = float(parse_limit("call", args.drain))
    except ValueError as error:
        raise ValueError(f"--drain {args.drain}: {error}") from None
    options = node.NodeOptions(
        address=read_address(args.nats),
        name=worker,
        config=tuple(args.config),
        slots=args.slots,
        policy=args.policy,
        settings=None if args.settings is None else os.path.abspath(args.settings),
        drain_seconds=drain,
    )
    node.run(options, dict(os.environ), lambda text: say(printable(f"runner worker: {text}")))
    return 0
