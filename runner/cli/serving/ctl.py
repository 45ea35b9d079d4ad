"""`runner ctl`: start, stop, reset and reload a daemon's plugins, list its calls, drain it, open its page."""

from __future__ import annotations

import argparse
import json
from typing import Any

from runner.cli.serving.call_list import add_call_filters, list_calls
from runner.cli.serving.confirmations import act_on_confirmations
from runner.cli.serving.fleet_option import HELP as HELP_FLEET
from runner.cli.serving.fleet_option import ask_workers, fleet_verb, with_fleet
from runner.cli.serving.socket_option import add_socket, ask
from runner.cli.serving.via import name_fault, quote
from runner.cli.shared.actions import add_actions, argument
from runner.cli.shared.browser import open_in_browser
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

NAME = "ctl"
EXAMPLE = "runner ctl reset notes"

_NAME = argument("name", "NAME", "the plugin; runner ps lists them")
_ANY_NAME = argument("name", "NAME", "the plugin; runner ps lists them", nargs="?")
_CONFIRMATION = argument("name", "ID", "what waits; runner ctl pending lists them")
_LETTER = argument("name", "NAME", "the dead letter; runner ctl dead lists them")
_FLEET = argument("--fleet", "URL|FILE", f"act on a fleet: {HELP_FLEET}")
_OF_FLEET = argument("--fleet", "URL|FILE", HELP_FLEET, required=True)
_REASON = argument("--reason", "TEXT", "with --fleet: what callers read", default="")
ACTIONS = {
    "start": ("start a plugin now", (_NAME, add_socket)),
    "stop": ("stop a plugin until it is started, across restarts of the daemon", (_NAME, add_socket)),
    "reset": (
        "forget a plugin's failures and end its quarantine",
        (
            _NAME,
            _FLEET,
            argument("--worker", "NAME", "with --fleet: only on this worker"),
            add_socket,
        ),
    ),
    "reload": (
        "read a plugin's manifest again; without NAME the whole configuration",
        (_ANY_NAME, add_socket),
    ),
    "calls": (
        "list what was called, the newest first, of one plugin or of all",
        (_ANY_NAME, add_call_filters, add_socket),
    ),
    "drain": (
        "finish the calls in flight and end the daemon; with --fleet: hold a worker",
        (argument("name", "NAME", "with --fleet: the worker", nargs="?"), _FLEET, _REASON, add_socket),
    ),
    "open": (
        "print a link to the daemon's page that works once, and open it on a desktop",
        (
            lambda parser: parser.add_argument(
                "--end", action="store_true", help="end all sessions of the page instead"
            ),
            add_socket,
        ),
    ),
    "pending": ("list the calls at a gateway that wait for your yes, and refused hosts", (add_socket,)),
    "approve": (
        "say yes to one: the call is made; of a host, runner allow asks you",
        (
            _CONFIRMATION,
            argument(
                "--remember",
                "HOW",
                "once, session (of the client) or always (for this tool) (default: once)",
                choices=("once", "session", "always"),
                default="once",
            ),
            add_socket,
        ),
    ),
    "deny": ("say no to one", (_CONFIRMATION, add_socket)),
    "dead": ("list dead letters", (_FLEET, add_socket)),
    "show": ("print a dead letter", (_LETTER, _FLEET, add_socket)),
    "repeat": ("try a dead letter again", (_LETTER, _FLEET, add_socket)),
    "close": (
        "give a dead letter up",
        (
            _LETTER,
            _FLEET,
            argument("--reason", "TEXT", "with --fleet: for its audit", default=""),
            add_socket,
        ),
    ),
    "remove": (
        "drop a delivery that waits or is dead; with --fleet: all waiting calls of a submitter",
        (
            argument("name", "ID", "the delivery; GET /deliveries lists them. With --fleet: the submitter"),
            _FLEET,
            add_socket,
        ),
    ),
    "init": (
        "make the streams of a fleet",
        (
            _OF_FLEET,
            argument(
                "--replicas",
                "N",
                "servers that have each message (default: as it is, and 1 at first)",
                type=int,
            ),
        ),
    ),
    "quarantine": (
        "hold a plugin of a fleet",
        (
            argument("name", "NAME", "the plugin"),
            _OF_FLEET,
            argument("--reason", "TEXT", "what callers read", default=""),
        ),
    ),
    "release": (
        "let a plugin or a worker of a fleet go on",
        (argument("name", "NAME", "the plugin or worker that is held"), _OF_FLEET),
    ),
    "cancel": ("end a call of a fleet", (argument("name", "ID", "the call"), _OF_FLEET)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_actions(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    if getattr(args, "fleet", None) is not None:
        return fleet_verb(NAME, lambda: _act_on_fleet(args))
    if stray := _stray_option(args):
        say(f"runner ctl: {stray}")
        return USAGE_ERROR
    if args.action == "open":
        return _end_sessions(args) if args.end else _open(args)
    if args.action in ("dead", "show", "repeat", "close"):
        return _act_on_letters(args)
    if args.action in ("pending", "approve", "deny"):
        return act_on_confirmations(args)
    if args.action == "remove":
        return _remove(args)
    if args.action == "drain" and args.name is not None:
        say("runner ctl: drain is about the whole daemon: leave NAME out, or use runner ctl stop NAME")
        return USAGE_ERROR
    if fault := name_fault(args.name or ""):
        say(printable(f"runner ctl: {fault}"))
        return USAGE_ERROR
    if args.action == "calls":
        return list_calls(args)
    path = f"/{args.action}" if args.name is None else f"/plugins/{quote(args.name)}/{args.action}"
    found = ask(args, NAME, "POST", path)
    if isinstance(found, int):
        return found
    if args.name is not None:
        print(printable(f"{found['name']}: {found['state']}"))
    elif args.action == "reload":
        for fault in found["configuration"]:
            print(printable(f"{fault['path']}: {fault['message']}"))
        return 1 if found["configuration"] else 0
    return 0


def _stray_option(args: argparse.Namespace) -> str:
    """What is wrong about an option that only a fleet has, or ''. If it were ignored, `reset NAME --worker W`
    without --fleet would act on a plugin of the daemon here."""
    if getattr(args, "worker", None) is not None:
        return "--worker goes with --fleet"
    return "--reason goes with --fleet" if getattr(args, "reason", "") else ""


def _remove(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "DELETE", f"/deliveries/{quote(args.name)}")
    if isinstance(found, int):
        return found
    print(printable(f"{found['id']}: removed, for {found['hook']} of {found['plugin']}"))
    return 0


def _act_on_letters(args: argparse.Namespace) -> int:
    """Dead deliveries of a daemon, in the form of a fleet's dead letters."""
    if args.action == "dead":
        return _list_deliveries(args)
    path = f"/deliveries/{quote(args.name)}"
    method, path = {
        "show": ("GET", path),
        "repeat": ("POST", f"{path}/repeat"),
        "close": ("DELETE", f"{path}?state=dead"),
    }[args.action]
    found = ask(args, NAME, method, path)
    if isinstance(found, int):
        return found
    if args.action == "show":
        print(json.dumps(_letter(found), indent=2))
    elif args.action == "repeat":
        print(printable(found["id"]))
    return 0


def _list_deliveries(args: argparse.Namespace) -> int:
    after = ""
    while True:
        found = ask(args, NAME, "GET", f"/deliveries?state=dead{after}")
        if isinstance(found, int):
            return found
        for row in found["deliveries"]:
            _print_letter(_letter(row))
        if found["next"] is None:
            return 0
        after = f"&after={quote(found['next'])}"


def _letter(row: dict[str, Any]) -> dict[str, Any]:
    """A delivery as a dead letter."""
    call = {"kind": "hook", "input": json.loads(row["event"]), "context": json.loads(row["context"])}
    told = {key: row.get(key) for key in ("plugin", "code", "attempt", "state")}
    who = {"user": row.get("poster", ""), "letter": row["id"], "at": row.get("ended")}
    return {"id": row["id"], **who, "reason": row.get("reason"), **told, "tool": row["hook"], "call": call}


def _print_letter(letter: dict[str, Any]) -> None:
    print(printable(f"{letter['letter']}  {letter.get('plugin')} {letter['tool']}: {letter.get('reason')}"))


def _act_on_fleet(args: argparse.Namespace) -> int:
    """Raises ValueError, Refused and NoFleet."""
    from runner.fleet import operate

    action, name = args.action, getattr(args, "name", None)
    if action == "drain" and name is None:
        raise ValueError("write runner ctl drain NAME --fleet URL")
    if action == "init":
        from runner.fleet.streams import FleetSizes, make_streams

        if args.replicas not in (None, 1, 3, 5):
            raise ValueError(f"--replicas {args.replicas}: 1, 3 or 5, and as many servers")
        for line in with_fleet(args.fleet, lambda it: make_streams(it.nc, FleetSizes(args.replicas))):
            print(line)
    elif action == "dead":
        for letter in with_fleet(args.fleet, operate.dead_letters):
            _print_letter(letter)
    elif action == "show":
        print(json.dumps(with_fleet(args.fleet, operate.dead_letter, name), indent=2))
    elif action == "repeat":
        print(printable(with_fleet(args.fleet, operate.repeat, name)))
    elif action == "close":
        with_fleet(args.fleet, operate.close, name, args.reason)
    elif action == "reset":
        return ask_workers(NAME, args, lambda worker, state: print(printable(f"{worker}: {state}")))
    elif action == "remove":
        with_fleet(args.fleet, operate.remove_waiting, name)
    elif action == "cancel":
        with_fleet(args.fleet, lambda it: it.cancel(name))
    else:
        with_fleet(args.fleet, operate.hold, action, name, getattr(args, "reason", ""))
    return 0


def _open(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "POST", "/session/codes")
    if isinstance(found, int):
        return found
    url = found["urls"][0]
    print(url)
    open_in_browser(url, NAME)
    return 0


def _end_sessions(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "DELETE", "/session/codes")
    if isinstance(found, int):
        return found
    print(f"{found['ended']} session{'s' * (found['ended'] != 1)} ended")
    return 0
