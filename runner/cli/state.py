"""`runner state`: list and remove the state directories of plugins."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TypedDict

from runner.cli.shared.measure import measured
from runner.cli.shared.text import day, say
from runner.cli.staging.select import waiting_changesets
from runner.launch.own_folders import state_name
from runner.manifest.load import find, load_all
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.identity.all_states import State, StateInUse, StateNotRemoved, list_states, remove_state
from sandbox.identity.host_side import host_side
from sandbox.identity.state import last_used
from sandbox.units import format_size

NAME = "state"
EXAMPLE = "runner state remove ./my-plugin"
MIXES_ARGUMENTS = True  # options may stand between the action and the names

SCHEMA = "runner.state.v1"

_NOT_REMOVED = 1
_COUNTING_SECONDS = 1.0  # for one state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("list", "remove"), help="list: show all; remove: delete them with their content"
    )
    parser.add_argument(
        "states",
        nargs="*",
        metavar="NAME|MANIFEST",
        help="for remove: a name that list shows, a manifest or its folder, or the directory's path",
    )
    parser.add_argument(
        "--orphaned", action="store_true", help="only states whose manifest is gone; for remove: all of them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def advice(message: str) -> str:
    return "use runner state list, or runner state remove NAME" if "action" in message else ""


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        if args.states:
            return _usage("list takes no names: it shows all states")
        _print_list([state for state in list_states(os.environ) if state.orphaned or not args.orphaned], args)
        return EXIT["ok"]
    if args.orphaned == bool(args.states):
        return _usage("remove needs a name or a manifest, or --orphaned without names")
    known = list_states(os.environ)
    chosen: dict[str, State] = {state.path: state for state in known if args.orphaned and state.orphaned}
    for word in args.states:
        meant = _find_states(word, known)
        if not meant:
            return _usage(f"{word} has no state; runner state list shows all states")
        if len(meant) > 1:
            names = ", ".join(state.name for state in meant)
            return _usage(f"{word} has several states: {names}; name one of them")
        chosen[meant[0].path] = meant[0]
    return _remove(list(chosen.values()), args)


def _usage(message: str) -> int:
    say(f"runner state: {printable(message)}")
    return USAGE_ERROR


def _find_states(word: str, known: Sequence[State]) -> list[State]:
    """The states that a word names: a name, else a directory, else a manifest, which may be deleted."""
    path = os.path.realpath(word)
    for named in (
        [state for state in known if state.name == word],
        [state for state in known if state.path in (path, os.path.abspath(word))],
    ):
        if named:
            return named
    try:
        manifest = os.path.realpath(find(word).path)
    except DocumentError:
        manifest = path
    # A manifest in a deleted folder is found by its path.
    recorded = [
        state for state in known if state.manifest and state.manifest in (manifest, os.path.abspath(word))
    ]
    return recorded or _find_unrecorded(manifest, known)


def _find_unrecorded(manifest: str, known: Sequence[State]) -> list[State]:
    """States of an older version, which recorded no manifest: found by the name that version gave them."""
    names = {state_name(each.plugin) for each in load_all(manifest) if each.plugin is not None}
    return [state for state in known if not state.manifest and state.name in names]


def _remove(states: Sequence[State], args: argparse.Namespace) -> int:
    """Remove as many as possible. Returns the exit status of the worst failure."""
    removed: list[State] = []
    kept: list[tuple[State, str]] = []
    status = EXIT["ok"]
    for state in states:
        try:
            remove_state(state)
            removed.append(state)
        except StateInUse:
            kept.append((state, "the plugin is running; stop it first"))
            status = EXIT["policy_denied"]
        except StateNotRemoved as fault:
            kept.append((state, str(fault)))
            status = status or _NOT_REMOVED
    if args.json:
        failures = [{**_entry(state), "reason": reason} for state, reason in kept]
        document = {"schema": SCHEMA, "removed": [_entry(state) for state in removed], "kept": failures}
        print(json.dumps(document, indent=2))
    else:
        for state in removed:
            print(f"removed {printable(state.path)}{_uid(state)}")
        if not states:
            print("no state is orphaned")
    for state, reason in kept:
        say(f"runner state: {printable(state.name)}: {printable(reason)}")
    return status


def _uid(state: State) -> str:
    return f"; uid {state.uid} is free again" if os.geteuid() == 0 and state.uid != 0 else ""


def _print_list(states: Sequence[State], args: argparse.Namespace) -> None:
    changesets = waiting_changesets(os.environ)
    waiting = len(changesets)
    staged_bytes = sum((measured(each.path) or (0, False))[0] for each in changesets)
    if args.json:
        listed = [{**_entry(state), **_measured(state)} for state in states]
        staged = {"changesets": waiting, "bytes": staged_bytes}
        print(json.dumps({"schema": SCHEMA, "states": listed, "staged": staged}, indent=2))
        return
    if waiting and not args.orphaned:
        told = f"{waiting} runs with staged writes have changes that wait, {format_size(staged_bytes)}"
        print(f"{told}: runner changes")
    if not states:
        print("no state is orphaned" if args.orphaned else "no plugin has state on this machine")
        return
    rows = [("NAME", "UID", "PLUGIN", "SIZE", "USED", "MANIFEST")]
    rows += [
        (
            printable(state.name),
            str(state.uid),
            _condition(state),
            *_columns(**_measured(state)),
            printable(state.manifest) or "unknown",
        )
        for state in states
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        say("  ".join([*cells, row[5]]), sys.stdout)


class _Measured(TypedDict):
    bytes: int | None  # None: there is no directory, or it cannot be read
    complete: bool  # whether all of it was counted
    used: float | None  # when it was last used, in seconds since 1970


def _measured(state: State) -> _Measured:
    """The size of a state, with what is kept beside it, and when it was last used. A plugin may have made any
    number of files, so the count ends after a while."""
    until = time.monotonic() + _COUNTING_SECONDS
    found = measured(state.path, until)
    if found is None:
        return {"bytes": None, "complete": False, "used": None}
    beside = measured(host_side(state.path), until) or (0, not os.path.lexists(host_side(state.path)))
    used = last_used(state.path) or None
    return {"bytes": found[0] + beside[0], "complete": found[1] and beside[1], "used": used}


def _columns(bytes: int | None, complete: bool, used: float | None) -> tuple[str, str]:  # noqa: A002
    shown = "-" if bytes is None else format_size(bytes)
    return shown if complete or bytes is None else f">{shown}", "-" if used is None else day(used)


def _condition(state: State) -> str:
    return "running" if state.running else "gone" if state.orphaned else "-"


def _entry(state: State) -> dict[str, object]:
    return {
        "name": state.name,
        "path": state.path,
        "uid": state.uid,
        "manifest": state.manifest or None,
        "orphaned": state.orphaned,
        "running": state.running,
        "write_paths": list(state.left),
    }
