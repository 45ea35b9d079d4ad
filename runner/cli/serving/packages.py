"""The actions of `runner package` that ask a daemon's control plane: import, list, install and others."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from runner.cli.serving.binding import (
    add_binding_options,
    binding_options,
    list_all,
    show_binding,
    show_history,
)
from runner.cli.serving.socket_option import add_socket, add_token, ask
from runner.cli.serving.via import quote
from runner.cli.shared.table import print_table
from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    import argparse

PATH = "/v1/plugin-packages"
USAGE = {
    "import": "import DIR|TAR|REF",
    "list": "list",
    "show": "show ID",
    "install": "install ID --export EXPORT --org ORG",
    "review": "review ID --verdict approved",
    "withdraw": "withdraw ID",
    "restore": "restore ID",
    "history": "history ID",
}
HELP = (
    "with a daemon's control plane, import: take a package in; list; show; install: bind an export of it;"
    " review: say whether it may be used, by whom and whose it is; withdraw: stop calls by its bindings;"
    " restore; history"
)
_TITLES = ("ID", "STATE", "SIGNATURE", "REVIEW", "PUBLISHER", "SOURCE", "REASON")


def add_control_options(parser: argparse.ArgumentParser) -> None:
    group: Any = parser.add_argument_group("at a control plane (ID: of the list, or NAME@VERSION)")
    group.add_argument(
        "--publisher", metavar="TEXT", help="for import and review; for list: only of this one"
    )
    group.add_argument("--verdict", choices=("none", "approved", "rejected"), help="for import and review")
    group.add_argument(
        "--for-org",
        metavar="ORG",
        action="append",
        help="for import and review: only this org may install it; may be given several times",
    )
    group.add_argument(
        "--state", help="for list: contract-ready, imported, available, installed or withdrawn"
    )
    group.add_argument("--export", metavar="EXPORT", help="for install: what is bound")
    group.add_argument("--org", metavar="ORG", help="for install: whom it is bound for")
    group.add_argument("--id", metavar="ID", help="for install: of the binding, if the operator chooses it")
    group.add_argument("--project", metavar="PROJECT", help="for install: only for this project of the org")
    add_binding_options(group)
    add_socket(group)
    add_token(group)


def given_control(args: argparse.Namespace) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Our options: whether each was given, and the actions that it belongs to."""
    install = dict.fromkeys(
        ("export", "org", "id", "project", "percent", "config", "policy", "secret"), ("install",)
    )
    decided = dict.fromkeys(("verdict", "for_org"), ("import", "review"))
    owners = {"publisher": ("import", "review", "list"), "state": ("list",), **decided, **install}
    owners["token_file"] = ("list", "show", "install")
    return [
        (f"--{name.replace('_', '-')}", getattr(args, name) not in (None, []), actions)
        for name, actions in owners.items()
    ]


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
        raise ValueError(f"write runner package {USAGE['install']}")
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
