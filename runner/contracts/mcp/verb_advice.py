"""runner advice: what the runner told about the last starts of a host's servers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import identity_in, identity_of
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.wrapping import run_name, split_wrapped
from runner.contracts.mcp.wrap.config_file import FileRefused, open_config
from runner.contracts.mcp.wrap.configuration import Configuration, read_configuration
from runner.launch.advice.file import AdviceFile, ToldStart
from runner.launch.command import environ_of_places
from runner.outcome import EXIT, USAGE_ERROR
from runner.serve.sources import scan
from sandbox.document.diagnostic import DocumentError, printable, quoted
from sandbox.paths.homes import own_home

NAME = "advice"
EXAMPLE = "runner advice ~/.cursor/mcp.json --server github"
SCHEMA = "runner.advice.v1"

_UNREADABLE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a host's configuration, or what a gateway has as its --config"
    )
    parser.add_argument("--server", metavar="NAME", help="only this server")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


class _Server(NamedTuple):
    name: str
    file: AdviceFile


def run(args: argparse.Namespace) -> int:
    try:
        config, servers = _servers(args.file)
    except DocumentError as error:
        print_diagnostics(error.diagnostics)
        return EXIT["manifest_invalid"]
    except FileRefused as refused:
        say(f"runner advice: {printable(args.file)}: {printable(str(refused))}")
        return _UNREADABLE
    if args.server is not None:
        known = ", ".join(dict.fromkeys(quoted(each.name) for each in servers[:20])) or "none"
        servers = [each for each in servers if each.name == args.server]
        if not servers:
            told = f"there is no such server; there are {known}"
            say(f"runner advice: --server {printable(args.server)}: {told}")
            return USAGE_ERROR
    found: list[tuple[str, tuple[ToldStart, ...]]] = []
    faults: list[str] = []
    for each in servers:
        try:
            found.append((each.name, each.file.read()))
        except ApprovalsUnusable as unusable:
            faults.append(f"{each.name}: {unusable}; {unusable.hint}")
    host = "" if config is None else config.host_name
    log = "" if config is None or config.host is None else config.host.log
    if args.json:
        _print_json(args.file, host, log, found)
    else:
        _print(found)
        if not servers:
            say("There are no servers.", sys.stdout)
        if config is not None:
            say(log_sentence(host, log), sys.stdout)
            place = next((path for each in config.servers for path in _gateway_paths(each)), args.file)
            again = printable(shlex.join(("runner", "call", place, "--server", "NAME", "TOOL")))
            say(
                f"What a server answers to its host is not read. To see advice about an error there: {again}",
                sys.stdout,
            )
    for fault in faults:
        say(printable(f"runner advice: {fault}"))
    return _UNREADABLE if faults else EXIT["ok"]


def log_sentence(host: str, log: str) -> str:
    """Where a host keeps what servers write to stderr."""
    place = f"{log} of {host}" if log else "the host's own log"
    return f"What servers and the runner write to stderr is in {place}."


def _servers(path: str) -> tuple[Configuration | None, list[_Server]]:
    """The servers of a file, and those of a gateway that it starts. Raises FileRefused and DocumentError."""
    config = None
    if not os.path.isdir(path):
        with open_config(path) as file:
            config = read_configuration(file.path, file.read()[0], file.given)
    if config is None or not config.servers:
        return config, _scanned(path)
    found: list[_Server] = []
    for server in config.servers:
        paths = _gateway_paths(server)
        found += [each for path in paths for each in _scanned(path)] if paths else [_own(config, server)]
    return config, found


def _own(config: Configuration, server: HostServer) -> _Server:
    """A server of the file itself."""
    places: Mapping[str, str] = os.environ
    if split_wrapped(server.argv) is not None:  # its start takes no variable's word for it
        places = {"HOME": own_home() or os.environ.get("HOME", "")}
    identity = identity_in(config.path, "mcp", run_name(server.name), server.scope)
    return _Server(server.label, AdviceFile(identity, places))


def _gateway_paths(server: HostServer) -> list[str]:
    """What an entry that starts a gateway has as --config."""
    argv = server.argv
    if argv[1:2] != ("gateway",) or os.path.basename(argv[0]) != "runner":
        return []
    return [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == "--config"]


def _scanned(path: str) -> list[_Server]:
    found = scan((path,))
    for fault in () if found.sources else found.faults:
        say(printable(f"runner advice: {fault.path}: {fault.message}"))
    return [
        _Server(
            each.server or each.name,
            AdviceFile(identity_of(each.plugin), environ_of_places(each.plugin, os.environ)),
        )
        for each in found.sources
    ]


def _print(found: list[tuple[str, tuple[ToldStart, ...]]]) -> None:
    for name, starts in found:
        for start in starts:
            say(f"{printable(name)}, {_when(start.time)}", sys.stdout)
            for line in start.lines:
                say(f"  {printable(line)}", sys.stdout)
    if silent := [printable(name) for name, starts in found if not starts]:
        told = "no start was seen to lack anything, and none failed"
        say(f"Nothing is kept about {', '.join(silent)}: {told}, or none was made yet.", sys.stdout)


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"


def _print_json(path: str, host: str, log: str, found: list[tuple[str, tuple[ToldStart, ...]]]) -> None:
    servers = [
        {"name": name, "starts": [{"time": each.time, "lines": list(each.lines)} for each in starts]}
        for name, starts in found
    ]
    document = {"schema": SCHEMA, "file": path, "host": host, "log": log, "servers": servers}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
