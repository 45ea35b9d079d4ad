"""`runner binding`: bind exports of packages to orgs and projects, at a daemon's control plane."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from runner.cli.serving import binding_calls as calls
from runner.cli.serving.socket_option import add_socket, add_token, ask
from runner.cli.serving.via import quote
from runner.cli.shared.actions import Actions, add_actions, argument
from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.table import print_table
from runner.cli.shared.text import say
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import printable

NAME = "binding"
EXAMPLE = "runner binding set bind_1 --percent 25"

PATH = "/v1/plugin-bindings"
_TITLES = ("ID", "ORG", "PROJECT", "PACKAGE", "EXPORT", "KIND", "PERCENT", "REVISION", "INACTIVE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_actions(parser, ACTIONS)


def add_binding_options(parser: argparse.ArgumentParser) -> None:
    """What says how an export is bound."""
    parser.add_argument("--percent", metavar="N", type=int, help="share of the sessions that it serves")
    parser.add_argument("--config", metavar="JSON|@FILE|-", help="the configuration of the export")
    parser.add_argument("--policy", metavar="JSON|@FILE|-", help="narrower permissions and times")
    parser.add_argument(
        "--secret",
        metavar="SLOT=NAME",
        action="append",
        default=[],
        help="a secret of the org in a slot of the export; SLOT= leaves it empty; may be given several times",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    add_token(parser)


_ID = argument("which", "ID", "the binding; runner binding list lists them")
_IF_MATCH = argument("--if-match", "N", "only if N is the binding's revision by now")
_SET = (
    argument("--version", "VERSION", "of the package"),
    lambda parser: parser.add_argument("--status", choices=("active", "disabled")),
)
ACTIONS: Actions = {
    "create": (
        "create a binding",
        (argument("which", "FILE", "the record of the binding; - is stdin"), _add_common),
    ),
    "list": ("list bindings", (argument("--org", "ORG", "only of this org"), _add_common)),
    "show": ("print a binding", (_ID, _add_common)),
    "set": (
        "replace what the options name",
        (_ID, add_binding_options, *_SET, _IF_MATCH, _add_common),
    ),
    "validate": (
        "list the faults of a binding, or of a record",
        (argument("which", "ID|FILE", "the binding, or a file with a record; - is stdin"), _add_common),
    ),
    "history": ("list the versions of a binding", (_ID, _add_common)),
    "rollback": (
        "go back to an earlier version",
        (
            _ID,
            argument("revision", "REVISION", "its number; runner binding history lists them"),
            _IF_MATCH,
            _add_common,
        ),
    ),
    **{name: (line, (*arguments, _add_common)) for name, (line, arguments) in calls.ACTIONS.items()},
}


def run(args: argparse.Namespace) -> int:
    try:
        if args.action in calls.ACTIONS:
            return calls.run(args)
        if args.action == "set" or args.action == "rollback":
            return _change(args)
        if args.action == "create":
            record = read_json_option("FILE", args.which if args.which == "-" else f"@{args.which}")
            return _show(args, ask(args, NAME, "POST", PATH, record))
        if args.action == "validate":
            return _validate(args)
    except ValueError as error:
        say(printable(f"runner binding: {error}"))
        return USAGE_ERROR
    if args.action == "list":
        return _list(args)
    tail = "/history" if args.action == "history" else ""
    found = ask(args, NAME, "GET", f"{PATH}/{quote(args.which)}{tail}")
    if isinstance(found, int) or args.action == "show":
        return _show(args, found)
    return show_history(found, as_json=args.json)


def binding_options(args: argparse.Namespace, org: str) -> dict[str, Any]:
    """The keys of a binding record that the options give. `org`: whose secrets are meant. Raises
    ValueError."""
    found: dict[str, Any] = {}
    for name in ("config", "policy"):
        value = read_json_option(f"--{name}", getattr(args, name))
        if value is not None:
            found[name] = value
    if args.percent is not None:
        found["rollout"] = {"traffic_percent": args.percent}
    slots: dict[str, str | None] = {}
    for word in args.secret:
        slot, equals, name = word.partition("=")
        if not slot or not equals:
            raise ValueError(f"--secret {word}: write SLOT=NAME, with the name of a secret of the org")
        slots[slot] = f"secret://{org}/{name}" if name else None
    return {**found, "secrets": slots} if slots else found


def _change(args: argparse.Namespace) -> int:
    before = ask(args, NAME, "GET", f"{PATH}/{quote(args.which)}")
    if isinstance(before, int):
        return before
    if args.action == "rollback":
        if not args.revision.isdecimal():
            raise ValueError("REVISION takes a number; runner binding history lists them")
        change: dict[str, Any] = {"revision": int(args.revision)}
    else:
        change = binding_options(args, before["scope"]["org_id"])
        if "secrets" in change:
            change["secrets"] = {**before.get("secrets", {}), **change["secrets"]}
        change |= {"status": args.status} if args.status else {}
        change |= {"package_version": args.version} if args.version else {}
        if not change:
            raise ValueError("there is nothing to change: runner binding set --help lists what can be")
    seen = before["revision"] if args.if_match is None else args.if_match
    headers = {"If-Match": f'"{seen}"'}
    if not headers["If-Match"].isprintable():
        raise ValueError("--if-match takes the number of a revision")
    return _show(args, ask(args, NAME, "PATCH", f"{PATH}/{quote(args.which)}", change, headers))


def _validate(args: argparse.Namespace) -> int:
    if args.which == "-" or os.path.isfile(args.which):
        record = read_json_option("FILE", args.which if args.which == "-" else f"@{args.which}")
        found = ask(args, NAME, "POST", f"{PATH}:validate", record)
    else:
        found = ask(args, NAME, "POST", f"{PATH}/{quote(args.which)}:validate")
    if isinstance(found, int):
        return found
    if args.json:
        print(json.dumps(found))
    else:
        for fault in found["faults"]:
            hint = f" ({fault['hint']})" if fault["hint"] else ""
            text = f"{fault['place']}: {fault['severity']}: {fault['rule']}: {fault['message']}{hint}"
            print(printable(text))
        print(printable(f"{args.which}: {'ok' if found['valid'] else 'NOT ok'}"))
    return EXIT["ok"] if found["valid"] else EXIT["manifest_invalid"]


def _list(args: argparse.Namespace) -> int:
    query = f"&org_id={quote(args.org)}" if args.org else ""
    rows = list_all(args, NAME, f"{PATH}?most=1000{query}", "bindings")
    if isinstance(rows, int):
        return rows
    if args.json:
        print(json.dumps({"bindings": rows}))
    else:
        print_table(_TITLES, [_row(each) for each in rows])
    return 0


def list_all(args: argparse.Namespace, verb: str, path: str, key: str) -> list[dict[str, Any]] | int:
    """All pages of a list, or the exit status of a failure."""
    rows: list[dict[str, Any]] = []
    after = ""
    while True:
        found = ask(args, verb, "GET", path + after)
        if isinstance(found, int):
            return found
        rows += found[key]
        if found["next"] is None:
            return rows
        after = f"&after={quote(found['next'])}"


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    scope, rollout = each["scope"], each.get("rollout", {})
    return (
        *(each["binding_id"], scope["org_id"], scope.get("project_id", "")),
        *(each["package"], each["export_id"], each["kind"], str(rollout.get("traffic_percent", 100))),
        *(str(each["revision"]), each["inactive"]),
    )


def _show(args: argparse.Namespace, found: Any) -> int:
    return found if isinstance(found, int) else show_binding(found, as_json=args.json)


def show_binding(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0
    for name, value in sorted(found.items()):
        if name not in ("created", "changed"):
            print(printable(f"{name:16} {value if isinstance(value, str | int) else json.dumps(value)}"))
    return 0


def show_history(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0

    rows = [
        (
            *(str(each["revision"]), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each["at"]))),
            *(each["caller"], each["change"]),
            json.dumps(each["document"], sort_keys=True),
        )
        for each in found["history"]
    ]
    print_table(("REVISION", "AT", "CALLER", "CHANGE", "DOCUMENT"), rows)
    return 0
