"""`runner doctor`: what this machine can and cannot enforce, and what to do about it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from runner.build import build_version
from runner.cli import verb_parser
from runner.cli.attacking.attack import CannotAttack, attack_other, attack_own, print_document
from runner.cli.shared.text import failure, say, terminal_width, wrap
from runner.outcome import EXIT, USAGE_ERROR, Failure
from sandbox.doctor.finding import Finding, Status
from sandbox.doctor.probes import examine, unmet
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.document.read import read_bounded
from sandbox.policy.load import load_policy
from sandbox.policy.policy import Policy

NAME = "doctor"
EXAMPLE = "runner doctor --format json"

SCHEMA = "runner.doctor.v1"

_MARKS: dict[Status, tuple[str, str, str]] = {  # for a UTF-8 terminal, for any other, colour
    "ok": ("✓", "ok", "32"),
    "degraded": ("!", "!", "33"),
    "missing": ("✗", "NO", "31"),
    "info": ("·", "-", "2"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("text", "json", "html"),
        default="text",
        help="default: text; html, one page to keep, only with --attack",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="judge by this policy; default: the one in force, as for runner exec",
    )
    parser.add_argument(
        "--attack",
        action="store_true",
        help="attack a cage of this policy from inside, and say which attacks were held: docs/attacks.md",
    )
    parser.add_argument(
        "--against",
        metavar="COMMAND ...",
        help="with --attack, last: attack another sandbox, as in --against bwrap --ro-bind / /; {probe} in it"
        " stands for the file of the probe, without it `python3 -I -S -` is added",
    )


def read_usual(words: list[str]) -> argparse.Namespace | None:
    """Split at --against: all that follows is a command, even if it looks like an option of ours."""
    if "--against" not in words:
        return None

    at = words.index("--against")
    args = verb_parser(NAME).parse_args(words[:at])
    args.against = words[at + 1 :]
    return args


def run(args: argparse.Namespace) -> int:
    if args.policy == "":
        say("runner doctor: --policy: its value is empty; is a variable unset?")
        return USAGE_ERROR
    if fault := _fault(args):
        say(f"runner doctor: {fault}")
        return USAGE_ERROR
    try:
        policy = load_policy(args.policy, os.environ)
    except DocumentError as error:
        for diagnostic in error.diagnostics:
            say(f"runner doctor: {diagnostic.text()}")
            if diagnostic.hint:
                say(f"    {printable(diagnostic.hint)}")
        return EXIT["policy_invalid"]
    if args.attack:
        return _attack(args, policy)
    findings = examine(
        os.environ,
        uid_range=policy.uids,
        limits=policy.limits,
        move_host=policy.move_host,
        share=policy.machine_share,
    )
    lacking = unmet(findings, (name for name, mode in policy.layers if mode == "prefer"))
    if args.format == "json":
        print(json.dumps(document(findings, lacking, policy), indent=2))
    else:
        told = text(
            findings,
            lacking,
            policy.name,
            _unicode(sys.stdout),
            _colour(sys.stdout),
            terminal_width(sys.stdout),
        )
        print(told)
    return EXIT["sandbox_unavailable" if lacking else "ok"]


def _fault(args: argparse.Namespace) -> str:
    """What is wrong with the options, or ''."""
    if args.against is not None and not (args.attack and args.against):
        return "--against: it goes with --attack, and a command follows it"
    if args.against is not None and args.policy is not None:
        return "--policy: another sandbox has none of ours; leave --policy or --against out"
    if args.format == "html" and not args.attack:
        return "--format html: it goes with --attack"
    return ""


def _attack(args: argparse.Namespace, policy: Policy) -> int:
    try:
        found = attack_own(policy) if args.against is None else attack_other(args.against)
    except Failure as failed:
        failure(failed.stage, failed.outcome)
        return EXIT[failed.outcome.code]
    except CannotAttack as error:
        say(f"runner doctor: nothing could be attacked: {error}")
        return EXIT["sandbox_unavailable"]
    return print_document(found, args.format)


def document(findings: Sequence[Finding], lacking: Sequence[Finding], policy: Policy) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "ok": not lacking,
        "version": build_version(),
        "policy": policy.name,
        "policy_file": policy.file,
        "policy_digest": f"sha256:{hashlib.sha256(read_bounded(policy.file)).hexdigest()}",
        "unmet": [finding.layer for finding in lacking],
        "findings": [finding._asdict() for finding in findings],
    }


def text(
    findings: Sequence[Finding],
    lacking: Sequence[Finding],
    policy: str,
    unicode: bool,
    colour: bool,
    columns: int | None = None,
) -> str:
    """A line for each finding, the remedy below those that need one, the verdict last. `columns`: of the
    terminal, at which lines are wrapped."""

    def fitted(line: str) -> str:
        return line if columns is None else wrap(line, columns)

    marks = {status: mark[0 if unicode else 1] for status, mark in _MARKS.items()}
    mark_width = max(map(len, marks.values()))
    width = max(len(finding.layer) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        mark = f"{marks[finding.status]:{mark_width}}"
        line = fitted(f"{mark} {finding.layer.replace('_', ' '):{width}}  {finding.summary}")
        if colour:  # after wrapping, which counts characters
            line = f"\033[{_MARKS[finding.status][2]}m{mark}\033[0m{line[len(mark) :]}"
        lines.append(line)
        if finding.status in ("degraded", "missing"):
            indent = " " * (mark_width + width + 3)
            if finding.detail:
                lines.append(fitted(textwrap.indent(finding.detail, indent)))
            if finding.remedy:
                lines.append(fitted(textwrap.indent(f"-> {finding.remedy}", indent)))
    joined = "\n".join([*lines, "", fitted(verdict(findings, lacking, policy))])
    # The sentences contain typographic characters too.
    return joined if unicode else joined.replace("…", "...").encode("ascii", "replace").decode()


def verdict(findings: Sequence[Finding], lacking: Sequence[Finding], policy: str) -> str:
    name = f"the {policy} policy" if policy.isalnum() else f"the policy {printable(policy)}"
    if lacking:
        names = ", ".join(finding.layer.replace("_", " ") for finding in lacking)
        return f"T{name[1:]} cannot be enforced here, so no plugin will be started. Missing: {names}."
    warnings = sum(finding.status in ("degraded", "missing") for finding in findings)
    also = f" {warnings} warning{'s' if warnings > 1 else ''} above." if warnings else ""
    return f"Every layer that {name} requires can be enforced here.{also}"


def _unicode(stream: TextIO) -> bool:
    try:
        "✓✗·…".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
