"""The actions of `runner package` that ask a daemon's control plane: import, list, install and others."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from runner.cli.serving.binding import (
    add_binding_options,
    binding_options,
    list_all,
    show_binding,
    show_history,
)
from runner.cli.serving.socket_option import add_socket, add_token, ask
from runner.cli.serving.via import quote
from runner.cli.shared.actions import Actions, argument
from runner.cli.shared.table import print_table
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

PATH = "/v1/plugin-packages"
_TITLES = ("ID", "STATE", "SIGNATURE", "REVIEW", "PUBLISHER", "SOURCE", "REASON")


_ID = argument("folder", "ID", "the package: of the list, or NAME@VERSION")
_PUBLISHER = argument("--publisher", "TEXT", "whose package it is")
_FOR_ORG = argument(
    "--for-org", "ORG", "only this org may install it; may be given several times", action="append"
)
_VERDICT = argument("--verdict", None, "may it be used", choices=("none", "approved", "rejected"))
_STATES = "contract-ready, imported, available, installed or withdrawn"
ACTIONS: Actions = {
    "import": (
        "take a package into a control plane",
        (
            argument("folder", "DIR|TAR|REF", "its folder, an archive, or oci://HOST/NAME:TAG"),
            *(_PUBLISHER, _VERDICT, _FOR_ORG, add_socket),
        ),
    ),
    "list": (
        "list the packages of a control plane",
        (
            argument("--state", "STATE", _STATES),
            argument("--publisher", "TEXT", "only of this one"),
            *(add_socket, add_token),
        ),
    ),
    "show": ("print a package of a control plane", (_ID, add_socket, add_token)),
    "install": (
        "bind an export of a package",
        (
            _ID,
            argument("--export", "EXPORT", "what is bound", required=True),
            argument("--org", "ORG", "whom it is bound for", required=True),
            argument("--id", "ID", "of the binding, if the operator chooses it"),
            argument("--project", "PROJECT", "only for this project of the org"),
            *(add_binding_options, add_socket, add_token),
        ),
    ),
    "review": (
        "change who may use a package, who owns it, and whether it may be used at all",
        (_ID, _PUBLISHER, _VERDICT, _FOR_ORG, add_socket),
    ),
    "withdraw": ("stop calls by the bindings of a package", (_ID, add_socket)),
    "restore": ("end a withdrawal", (_ID, add_socket)),
    "history": ("list what was done with a package", (_ID, add_socket)),
}


def run_control(args: argparse.Namespace, which: str) -> int:
    """`which`: the package. `args.format`: text or json."""
    action, as_json = args.action, args.format == "json"
    try:
        if action == "list":
            return _list(args, as_json)
        if action == "import":
            found = ask(args, "package", "POST", PATH, {"source": _source(which), **_chosen(args)})
            return _show(found, as_json)
        path = f"{PATH}/{quote(which.replace('/', '~'))}"
        if action == "install":
            return _install(args, path, as_json)
        if action == "review":
            return _show(_review(args, path), as_json)
    except ValueError as error:
        say(printable(f"runner package: {error}"))
        return USAGE_ERROR
    if action == "history":
        found = ask(args, "package", "GET", f"{path}/history")
        return found if isinstance(found, int) else show_history(found, as_json=as_json)
    if action == "show":
        return _show(ask(args, "package", "GET", path), as_json)
    return _show(ask(args, "package", "POST", f"{path}:{action}"), as_json)


def _source(word: str) -> str:
    return word if word.startswith("oci://") else os.path.abspath(word)


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    given = {"publisher": args.publisher, "review": args.verdict, "install_policy": args.for_org}
    return {name: value for name, value in given.items() if value is not None}


def _list(args: argparse.Namespace, as_json: bool) -> int:
    filters = {"state": args.state, "publisher": args.publisher}
    query = "".join(f"&{name}={quote(value)}" for name, value in filters.items() if value)
    rows = list_all(args, "package", f"{PATH}?most=1000{query}", "packages")
    if isinstance(rows, int):
        return rows
    if as_json:
        print(json.dumps({"packages": rows}))
        return 0
    print_table(
        _TITLES,
        [
            (
                *(each["id"], each["state"], each["signature"]["state"], each["review"]),
                *(each["publisher"], each["source"], each["reason"]),
            )
            for each in rows
        ],
    )
    return 0


def _review(args: argparse.Namespace, path: str) -> Any:
    change = _chosen(args)
    if not change:
        raise ValueError("write runner package review ID with --verdict, --publisher or --for-org")
    before = ask(args, "package", "GET", path)
    if isinstance(before, int):
        return before
    return ask(args, "package", "PATCH", path, change, {"If-Match": f'"{before["revision"]}"'})


def _install(args: argparse.Namespace, path: str, as_json: bool) -> int:
    if not args.export or not args.org:
        raise ValueError("write runner package install ID --export EXPORT --org ORG")
    scope = {"org_id": args.org, **({"project_id": args.project} if args.project else {})}
    record = {"export_id": args.export, "scope": scope, **binding_options(args, args.org)}
    record |= {"binding_id": args.id} if args.id else {}
    found = ask(args, "package", "POST", f"{path}:install", record)
    return found if isinstance(found, int) else show_binding(found, as_json=as_json)


def _show(found: Any, as_json: bool) -> int:
    if isinstance(found, int):
        return found
    if as_json:
        print(json.dumps(found))
        return 0
    reason = f": {found['reason']}" if found["reason"] else ""
    print(printable(f"{found['id']}: {found['state']}{reason}"))
    return 0
