"""`runner ctl`: start, stop, reset and reload a daemon's plugins, list its calls, drain it, open its page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from runner.cli.serving.call_list import add_call_filters, given_filter, list_calls
from runner.cli.serving.fleet_option import HELP as HELP_FLEET
from runner.cli.serving.fleet_option import ask_workers, fleet_verb, with_fleet
from runner.cli.serving.socket_option import add_socket, ask
from runner.cli.serving.via import name_fault, quote
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

NAME = "ctl"
EXAMPLE = "runner ctl reset notes"
MIXES_ARGUMENTS = True  # options may stand between the action and the name
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_OF_PLUGINS = ("start", "stop", "reset", "reload")
_OF_LETTERS = ("dead", "show", "repeat", "close")
_OF_DELIVERIES = ("remove",)
_OF_FLEETS = ("init", "quarantine", "release", "cancel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=(*_OF_PLUGINS, "calls", "drain", "open", *_OF_LETTERS, *_OF_DELIVERIES, *_OF_FLEETS),
        help="start it now; stop it until it is started, across restarts of the daemon; reset forgets its"
        " failures and ends its quarantine; reload reads its manifest again (without a NAME: the whole"
        " configuration); calls lists what was called, the newest first, of one plugin or of all; drain"
        " finishes the calls in flight and ends the daemon; open prints a link to its page that works once,"
        " within a minute, and opens it on a desktop; dead lists dead letters, show prints one of them,"
        " repeat tries it again and close gives it up; remove drops a delivery that waits or is dead. With"
        " --fleet: init makes the streams; reset asks the plugin's workers; dead, show, repeat and close are"
        " about the fleet's own dead letters; quarantine holds a plugin and drain a worker, release lets them"
        " go on; cancel ends a call; remove drops all calls of a submitter that wait",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="the plugin; runner ps lists them. With show, repeat and close: the dead letter; with remove:"
        " the id of a delivery. Of a fleet: the plugin, worker, dead letter, call or submitter",
    )
    parser.add_argument("--fleet", metavar="URL|FILE", help=f"act on a fleet: {HELP_FLEET}")
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        help="with init: servers that have each message (default: as it is, and 1 at first)",
    )
    parser.add_argument(
        "--reason",
        metavar="TEXT",
        default="",
        help="with quarantine and drain of a fleet: what callers read; with close: for the audit of a fleet",
    )
    parser.add_argument("--worker", metavar="NAME", help="with reset of a fleet: only on this worker")
    parser.add_argument("--end", action="store_true", help="with open: end all sessions of the page instead")
    add_call_filters(parser)
    add_socket(parser)


def run(args: argparse.Namespace) -> int:
    if args.fleet is not None:
        return fleet_verb(NAME, lambda: _act_on_fleet(args))
    if args.action in _OF_FLEETS:
        say(f"runner ctl: {args.action} is about a fleet: add --fleet URL")
        return USAGE_ERROR
    if args.action in ("drain", "open") and args.name is not None:
        also = ", or use runner ctl stop NAME" * (args.action == "drain")
        say(f"runner ctl: {args.action} is about the whole daemon: leave NAME out{also}")
        return USAGE_ERROR
    if stray := _stray_option(args):
        say(f"runner ctl: {stray}")
        return USAGE_ERROR
    if args.action in (*_OF_PLUGINS, "calls") and (fault := name_fault(args.name or "")):
        say(printable(f"runner ctl: {fault}"))
        return USAGE_ERROR
    if args.action == "calls":
        return list_calls(args)
    if args.action == "open":
        return _end_sessions(args) if args.end else _open(args)
    if args.name is None and args.action not in ("drain", "reload", "dead"):
        lists = {
            "remove": "GET /deliveries lists them",
            **dict.fromkeys(_OF_LETTERS, "runner ctl dead lists them"),
        }
        listed = lists.get(args.action, "runner ps lists the plugins")
        say(f"runner ctl: write runner ctl {args.action} NAME; {listed}")
        return USAGE_ERROR
    if args.action == "dead" and args.name is not None:
        say("runner ctl: dead lists all dead letters: leave NAME out, or use runner ctl show NAME")
        return USAGE_ERROR
    if args.action in _OF_LETTERS:
        return _act_on_letters(args)
    if args.action == "remove":
        return _remove(args)
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
    """What is wrong about an option that the action does not have, or ''. If it were ignored, `reset NAME
    --worker W` without --fleet would act on a plugin of the daemon here."""
    fleet, action = args.fleet is not None, args.action
    rows = (
        ("--end" * args.end, not fleet and action == "open", "runner ctl open"),
        (given_filter(args), not fleet and action == "calls", "runner ctl calls"),
        ("--worker" * (args.worker is not None), fleet and action == "reset", "reset of a fleet"),
        ("--replicas" * (args.replicas is not None), fleet and action == "init", "init of a fleet"),
        (
            "--reason" * bool(args.reason),
            fleet and action in ("quarantine", "drain", "close"),
            "quarantine, drain and close of a fleet",
        ),
    )
    return next((f"{option} goes with {what}" for option, fits, what in rows if option and not fits), "")


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

    action, name = args.action, args.name
    if action not in (*_OF_FLEETS, *_OF_LETTERS, *_OF_DELIVERIES, "drain", "reset"):
        raise ValueError(f"{action} is about a daemon: leave out --fleet")
    if stray := _stray_option(args):
        raise ValueError(stray)
    if (name is None) != (action in ("init", "dead")):
        raise ValueError(f"write runner ctl {action}{'' if name else ' NAME'} --fleet URL")
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
        with_fleet(args.fleet, operate.hold, action, name, args.reason)
    return 0


def _open(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "POST", "/session/codes")
    if isinstance(found, int):
        return found
    url = found["urls"][0]
    print(url)
    opener = shutil.which("xdg-open")
    if opener is not None and sys.stdout.isatty() and any(map(os.environ.get, _DISPLAYS)):
        null = subprocess.DEVNULL
        try:
            subprocess.Popen([opener, url], stdin=null, stdout=null, stderr=null, start_new_session=True)
        except OSError as error:
            say(f"runner ctl: {opener} does not start: {error.strerror}; open the link in a browser")
    return 0


def _end_sessions(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "DELETE", "/session/codes")
    if isinstance(found, int):
        return found
    print(f"{found['ended']} session{'s' * (found['ended'] != 1)} ended")
    return 0
