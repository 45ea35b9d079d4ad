"""Confirmations of a daemon's gateway that wait for a person: `runner ctl pending`, `approve` and `deny`."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from runner.cli import main
from runner.cli.serving.socket_option import ask
from runner.cli.serving.via import quote
from runner.cli.shared.text import say
from sandbox.document.diagnostic import printable

NAME = "ctl"


def act_on_confirmations(args: argparse.Namespace) -> int:
    if args.action == "pending":
        found = ask(args, NAME, "GET", "/pending")
        if isinstance(found, int):
            return found
        for row in found["pending"]:
            print("\n".join(map(printable, _lines(row))))
        return 0
    path = f"/pending/{quote(args.name)}/{args.action}"
    if args.action == "approve":
        path += f"?remember={args.remember}"
    found = ask(args, NAME, "POST", path)
    if isinstance(found, int):
        return found
    if found["kind"] == "host" and found["allowed"]:
        return _allow_host(args, found)
    print(printable(f"{found['subject']}: {'allowed' if found['allowed'] else 'refused'}"))
    return 0


def _lines(row: dict[str, Any]) -> list[str]:
    if row["kind"] == "host":
        head = f"{row['id']}  {row['plugin']} tried to reach {row['subject']}, and was refused"
    else:
        head = f"{row['id']}  {row['client']} wants to call {row['subject']} ({row['seconds']:.0f} s left)"
    return [head, *(f"    {line}" for line in row["lines"])]


def _allow_host(args: argparse.Namespace, row: dict[str, Any]) -> int:
    """An approval is the person's own, so it is given here, and not by the daemon. It counts from the next
    start of the plugin on."""
    words = shlex.split(row["command"])
    if words[:2] != ["runner", "allow"] or "--yes" in words:
        say(printable(f"runner ctl: type this: {row['command']}"))
        return 1

    say(printable(row["command"]))
    if status := main(words[1:]):
        return status
    found = ask(args, NAME, "POST", f"/plugins/{quote(row['plugin'])}/reload")
    return found if isinstance(found, int) else 0
