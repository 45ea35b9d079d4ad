"""The option --socket of the verbs that ask a daemon, and a request to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from runner.cli.serving.via import tell_error
from runner.cli.shared.text import say
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.client import Client, DoorAnswer, NoDaemon, default_socket
from runner.serve.peer import read_token
from sandbox.document.diagnostic import printable


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=default_socket(os.environ),
        help="where the daemon listens (default: %(default)s)",
    )


def add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", metavar="FILE", help="ask as the org whose token is in FILE, in place of the operator"
    )


def connect(args: argparse.Namespace, verb: str) -> Client | int:
    """The connection, or the exit status if nobody answers."""
    try:
        return Client(args.socket)
    except NoDaemon as error:
        say(
            printable(
                f"runner {verb}: {error}; start one with runner serve, or name its socket with --socket"
            )
        )
        return EXIT["launch_failed"]


def ask(
    args: argparse.Namespace,
    verb: str,
    method: str,
    path: str,
    document: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The answer as JSON, or the exit status of a failure, which was printed."""
    given = dict(headers or {})
    if getattr(args, "token_file", None) is not None:
        try:
            given["Authorization"] = f"Bearer {read_token(args.token_file).decode()}"
        except ValueError as error:
            say(printable(f"runner {verb}: --token-file: {error}"))
            return USAGE_ERROR
    client = connect(args, verb)
    if isinstance(client, int):
        return client
    with client:
        try:
            answer: DoorAnswer = client.request(method, path, document, given)
            found = answer.json()
        except NoDaemon as error:
            say(printable(f"runner {verb}: {error}"))
            return EXIT["launch_failed"]
    return found if answer.status < 300 else tell_error(answer.status, found)
